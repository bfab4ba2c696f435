"""A run takes in what there is, once, whatever the log looks like; the audit agrees, or says what is wrong."""

from __future__ import annotations

import datetime as dt
import os
import shutil
from pathlib import Path

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from lake_world import World
from pyspark.sql import SparkSession

from headwater.errors import InvalidOption
from headwater.pipeline.jobs.silver import forget_silver
from headwater.pipeline.lake.layout import BRONZE
from headwater.pipeline.lake.sealing import seal
from headwater.pipeline.source.reading import read_range


def test_a_run_is_whole_incremental_and_repeatable(world: World) -> None:
    with world.log() as log:
        log.publish_many([(f"orders.{n % 3}", {"n": n}) for n in range(1_000)])
        log.publish(
            "mails.new", {"to": "a"}, id="given", type="mail", version=2, from_="shop", to="post", headers={"x": 1}
        )
        assert world.run().messages == 1_001
        assert world.run().messages == 0
        log.publish_many([("orders.late", {"n": n}) for n in range(10)])
        log.publish("mails.new", {"to": "b"})
        assert world.run().messages == 11
        info = log.subscriptions()[0]
    assert world.seqs() == list(range(1, 1_013))
    assert world.seqs("silver.messages") == list(range(1, 1_013))
    document = world.audit()
    assert document["whole"], document["checks"]
    assert (document["rows"], document["compared"], document["not_yet"]) == (1_012, 1_012, 0)
    assert (info.id.split(":")[0], info.lag, info.position) == ("lake", 0, 1_012)
    volume = {(row["topic"], row["type"]): row["messages"] for row in world.lake.rows("gold.volume")}
    assert volume[("orders.late", None)] == 10
    assert volume[("mails.new", "mail")] == 1
    assert [(row["from"], row["to"], row["messages"]) for row in world.lake.rows("gold.traffic") if row["from"]] == [
        ("shop", "post", 1)
    ]


def test_an_empty_log_makes_an_empty_lake(world: World) -> None:
    with world.log():
        pass
    assert world.run() == (0, 0)
    document = world.audit()
    assert document["whole"]
    assert document["rows"] == 0


def test_what_is_corrupt_is_quarantined_and_late_rows_find_their_day(world: World) -> None:
    world.register({"order@1": {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}})
    with world.log() as log:
        log.publish("orders.new", {"n": 1}, type="order", version=1)
        log.publish("orders.new", {"n": "one"}, type="order", version=1)
        log.publish("orders.late", {"n": 2}, id="twice")
    world.insert_by_hand("orders.bad", "{not json")
    world.run()
    long_ago = int(dt.datetime(2001, 2, 3, tzinfo=dt.UTC).timestamp() * 1000)
    world.insert_by_hand("orders.late", '{"n": 3}', published_at=long_ago, id="twice")
    world.insert_by_hand("orders.late", '{"n": 4}', published_at=long_ago)
    world.run()
    assert world.seqs() == [1, 2, 3, 4, 5, 6]
    assert world.seqs("silver.messages") == [1, 3, 6]
    problems = {row["seq"]: row["problem"] for row in world.lake.rows("silver.quarantine")}
    assert set(problems) == {2, 4}
    assert "JSON" in problems[4]
    days = {row["day"]: row["messages"] for row in world.lake.rows("gold.volume")}
    assert days[dt.date(2001, 2, 3)] == 2  # what was published, repeated or not
    assert [row["n"] for row in world.lake.rows("typed.order")] == [1]
    assert world.audit()["whole"]


def test_a_new_version_of_a_type_adds_its_columns_after_a_rebuild(world: World) -> None:
    one = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    two = {"type": "object", "properties": {"n": {"type": "integer"}, "note": {"type": "string"}}, "required": ["note"]}
    world.register({"order@1": one})
    with world.log() as log:
        log.publish("orders.new", {"n": 1}, type="order", version=1)
        log.publish("orders.new", {"n": 2, "note": "x"}, type="order", version=2)
    world.take_in()
    world.make_silver()
    assert [row["seq"] for row in world.lake.rows("silver.quarantine")] == [2]
    world.register({"order@1": one, "order@2": two})
    forget_silver(world.lake)
    world.make_silver()
    assert world.seqs("silver.quarantine") == []
    typed = sorted((row["version"], row["n"], row["note"]) for row in world.lake.rows("typed.order"))
    assert typed == [(1, 1, None), (2, 2, "x")]


def test_what_retention_took_before_and_after_is_told_apart(world: World) -> None:
    with world.log() as log:
        log.retain("logs.>", max_count=5)
        log.publish_many([("logs.x", {"n": n}) for n in range(20)])
        log.housekeep()  # 1 to 15 are gone before anybody took them in
        world.take_in()
        log.publish_many([("orders.x", {"n": n}) for n in range(3)] + [("logs.x", {"n": n}) for n in range(10)])
        world.take_in()
        log.housekeep()  # and these are gone after
    document = world.audit()
    assert document["whole"], document["checks"]
    assert document["gaps"] == [{"from": 1, "to": 15, "why": "retention"}]
    assert world.seqs() == list(range(16, 34))
    assert document["compared"] == 8


def test_the_audit_finds_what_is_missing_twice_or_changed(world: World, spark: SparkSession) -> None:
    with world.log() as log:
        log.publish_many([("orders.x", {"n": n}) for n in range(30)])
    world.take_in()
    manifest, lake = world.lake.manifest, world.lake.path
    whole = manifest.files(BRONZE)
    path = lake / whole[0].path
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :])
    found = world.audit()
    assert (found["files_changed"], found["whole"]) == ([whole[0].path], False)
    path.write_bytes(content)

    batch = next(iter(read_range(world.log_path, 0, 30)))

    def with_rows(rows: object) -> dict[str, object]:
        files = seal([rows], lake, BRONZE, 0, 30)  # type: ignore[list-item]
        manifest.swap(manifest.files(BRONZE), files, 1)
        found = world.audit()
        assert not found["whole"]
        return found

    assert with_rows(batch.slice(0, 20))["missing"] == [(21, 30)]
    twice = batch.take([*range(30), 4])  # type: ignore[arg-type]
    assert with_rows(twice)["repeated"] == [(5, 5)]
    changed = batch.set_column(16, "data", [text.as_py().replace("7", "8") for text in batch.column("data")])
    assert with_rows(changed)["different"] == [(8, 8), (18, 18), (28, 28)]
    path.unlink()
    manifest.swap(manifest.files(BRONZE), whole, 2)
    assert world.audit()["files_missing"] == [whole[0].path]


def test_a_lake_refuses_another_log(world: World, tmp_path: Path) -> None:
    with world.log() as log:
        log.publish("orders.x", {"n": 1})
    world.take_in()
    os.rename(world.log_path, tmp_path / "other.db")
    for suffix in ("-wal", "-shm"):
        (tmp_path / f"events.db{suffix}").unlink(missing_ok=True)
    with world.log() as log:
        log.publish("orders.x", {"n": 1})
    with pytest.raises(InvalidOption, match="another log"):
        world.run()


def test_bronze_can_be_read_without_spark(world: World) -> None:
    with world.log() as log:
        log.publish_many([("a.x", {"n": 1}), ("ü/ö.x", {"n": 2}), ("123.y", {"n": 3})])
    world.take_in()
    files = [str(world.lake.path / file.path) for file in world.lake.manifest.files(BRONZE)]
    with_arrow = ds.dataset(files, format="parquet", partitioning="hive").to_table().to_pylist()
    with_spark = world.lake.bronze(world.spark).collect()
    for rows in (with_arrow, with_spark):
        found = {row["seq"]: (row["topic"], row["topic_prefix"]) for row in rows}
        assert found == {1: ("a.x", "a"), 2: ("ü/ö.x", "ü/ö"), 3: ("123.y", "123")}


def test_what_was_taken_in_once_is_not_excused_by_later_retention(world: World) -> None:
    with world.log() as log:
        log.publish_many([("orders.x", {"n": n}) for n in range(100)])
        world.take_in()
        files = world.lake.manifest.files(BRONZE)
        rows = pq.ParquetFile(world.lake.path / files[0].path).read().slice(0, 40).combine_chunks()
        part = seal(rows.to_batches(), world.lake.path, BRONZE, 0, 40)
        world.lake.manifest.swap(files, part, 1)
        log.retain("orders.>", max_count=0)
        log.housekeep()
    document = world.audit()
    assert not document["whole"]
    assert [check["name"] for check in document["checks"] if not check["ok"]] == ["as many rows as were taken in"]


def test_a_log_from_a_backup_is_refused(world: World, tmp_path: Path) -> None:
    with world.log() as log:
        log.publish_many([("orders.x", {"n": n}) for n in range(10)])
    shutil.copy(world.log_path, tmp_path / "backup.db")
    with world.log() as log:
        log.publish_many([("orders.x", {"n": n}) for n in range(10)])
    world.take_in()
    for suffix in ("-wal", "-shm"):
        Path(world.log_path + suffix).unlink(missing_ok=True)
    shutil.copy(tmp_path / "backup.db", world.log_path)
    with pytest.raises(InvalidOption, match="ends at seq 10"):
        world.run()
    assert not world.audit()["whole"]


def test_a_seq_far_away_does_not_stall_a_run(world: World) -> None:
    with world.log() as log:
        log.publish("orders.x", {"n": 1})
    world.insert_by_hand("orders.x", "2", seq=10**12)
    world.take_in()
    world.make_silver()
    assert world.seqs("silver.messages") == [1, 10**12]
    assert world.audit()["missing"] == [(2, 10**12 - 1)]
