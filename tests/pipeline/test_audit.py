"""The audit finds and names what is missing, twice, altered or lost; a check that was not made is never ok."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lake_world import World
from pyspark.sql import SparkSession
from small_logs import prune

from headwater.delivery.retention import merged
from headwater.errors import ReadOnlyError
from headwater.pipeline.audit import BUCKET_SEQS, SeqRange, audit, count_of, in_both, spans_held, without
from headwater.pipeline.columns import MESSAGE_SCHEMA
from headwater.pipeline.delta import LOG
from headwater.pipeline.lake import BRONZE, QUARANTINE, SILVER, Lake
from headwater.pipeline.storage import DataFile, TableWriter

MESSAGES = 30
NAMES = [
    "log entries",
    "files",
    "every seq is there",
    "no seq is there twice",
    "rows",
    "position",
    "the log is not behind the lake",
    "content",
    "derived tables",
]


class Audited(World):
    """A log of 30 messages in three runs, and its lake; what a test does to the lake, the audit has to find."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        super().__init__(folder)
        self.spark, self.path = spark, folder / "lake"

    def audit(self) -> dict[str, Any]:
        """The document; it must be the one that the lake keeps."""
        document = audit(self.spark, self.lake, self.log)
        kept = self.lake.last_audit()
        assert kept is not None
        assert document["recorded"]
        assert (kept["whole"], kept["checks"]) == (document["whole"], document["checks"])
        return document

    def failed(self) -> dict[str, str]:
        return failures(self.audit())

    def file(self, number: int) -> Path:
        return self.path / BRONZE / self.lake.table(BRONZE).files[number].path

    def entry(self, version: int) -> Path:
        return self.path / BRONZE / LOG / f"{version:020d}.json"

    def rewrite(self, number: int, change: Callable[[pa.Table], pa.Table]) -> DataFile:
        """A file with other rows in its place, whose name and statistics say what it holds."""
        bronze = self.lake.table(BRONZE)
        old = bronze.files[number]
        (new,) = self.write(change(bronze.read_file(old, MESSAGE_SCHEMA)))
        counters = {"rows": bronze.transaction("rows")}
        bronze.commit([new], remove=[old], transaction=bronze.transaction(), counters=counters)
        return new

    def write(self, rows: pa.Table) -> list[DataFile]:
        with TableWriter(self.lake.storage, BRONZE, by_day=True) as writer:
            writer.write(rows)
            return writer.finish()


def failures(document: dict[str, Any]) -> dict[str, str]:
    assert not document["whole"]
    return {check["name"]: check["what"] for check in document["checks"] if check["status"] == "failed"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Audited:
    found = Audited(spark, tmp_path_factory.mktemp("audited"))
    for run in range(3):
        with found.open() as log:
            log.publish_many([("orders.x", {"n": run * 10 + n}, {"headers": {"x": n}}) for n in range(10)])
        found.run()
    return found


@pytest.fixture
def audited(made: Audited, tmp_path: Path) -> Audited:
    """A copy."""
    shutil.copytree(made.path, tmp_path / "lake")
    shutil.copy(made.log, tmp_path / "events.db")
    return Audited(made.spark, tmp_path)


def test_a_whole_lake(audited: Audited) -> None:
    document = audited.audit()
    assert document["whole"], document["checks"]
    assert [check["name"] for check in document["checks"]] == NAMES
    assert {check["status"] for check in document["checks"]} == {"ok"}
    assert (document["rows"], document["compared"], document["lake_seq"], document["not_yet"]) == (30, 30, 30, 0)
    assert document["missing_total"] == {"runs": 0, "messages": 0}


def test_the_audit_of_a_lake_that_may_not_be_written(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ReadOnlyError("the lake cannot be written")

    monkeypatch.setattr(Lake, "add_audit", refuse)
    document = audit(audited.spark, audited.lake, audited.log)
    assert (document["whole"], document["recorded"], audited.lake.last_audit()) == (True, False, None)


def test_a_file_that_is_gone(audited: Audited) -> None:
    path = audited.file(1)
    path.unlink()
    document = audited.audit()
    failed = failures(document)
    assert path.name in failed["files"]
    assert "11 to 20" in failed["every seq is there"]
    assert "20 were counted" in failed["rows"]
    assert document["missing"] == [(11, 20)]


@pytest.mark.parametrize("change", [lambda raw: raw[:-20], lambda raw: raw[:60] + bytes([raw[60] ^ 1]) + raw[61:]])
def test_a_file_that_was_cut_off_or_altered(audited: Audited, change: Callable[[bytes], bytes]) -> None:
    path = audited.file(0)
    path.write_bytes(change(path.read_bytes()))
    document = audited.audit()
    assert document["files_changed"] == [path.relative_to(audited.path).as_posix()]
    assert path.name in next(check["what"] for check in document["checks"] if check["name"] == "files")
    assert document["missing"] == [(1, 10)]
    assert not document["whole"]


def test_a_file_of_a_derived_table_that_is_gone(audited: Audited) -> None:
    path = audited.path / SILVER / audited.lake.table(SILVER).files[0].path
    path.unlink()
    assert path.name in audited.failed()["files"]


def test_a_file_that_is_there_twice(audited: Audited) -> None:
    bronze = audited.lake.table(BRONZE)
    old = bronze.files[1]
    copies = audited.write(bronze.read_file(old, MESSAGE_SCHEMA))
    counters = {"rows": bronze.transaction("rows")}
    bronze.commit(copies, transaction=bronze.transaction(), counters=counters)
    document = audited.audit()
    assert (document["repeated"], document["repeated_total"]) == ([(11, 20)], {"runs": 1, "messages": 10})
    assert set(document["files_repeated"]) == {f"{BRONZE}/{file.path}" for file in (old, *copies)}
    failed = failures(document)
    assert set(failed) == {"no seq is there twice", "rows", "derived tables"}
    assert "11 to 20" in failed["no seq is there twice"]
    assert old.path in failed["no seq is there twice"]


def test_a_row_that_was_altered(audited: Audited) -> None:
    """With the right digest in the file's name: only the log knows better."""

    def alter(rows: pa.Table) -> pa.Table:
        texts = [text.replace("15", "99") for text in rows["data"].to_pylist()]
        return rows.set_column(rows.schema.get_field_index("data"), "data", pa.array(texts))

    audited.rewrite(1, alter)
    document = audited.audit()
    assert (document["different"], document["different_total"]["messages"]) == ([(16, 16)], 1)
    failed = failures(document)
    assert failed.keys() == {"content"}
    assert "(16)" in failed["content"]


def test_headers_and_nulls_count_as_content(audited: Audited) -> None:
    def alter(rows: pa.Table) -> pa.Table:
        none = pa.nulls(rows.num_rows, MESSAGE_SCHEMA.field("headers").type)
        return rows.set_column(rows.schema.get_field_index("headers"), "headers", none)

    audited.rewrite(0, alter)
    assert audited.audit()["different"] == [(1, 10)]


def test_a_row_that_is_missing(audited: Audited) -> None:
    audited.rewrite(2, lambda rows: rows.filter(pa.array([seq != 25 for seq in rows["seq"].to_pylist()])))
    document = audited.audit()
    failed = failures(document)
    assert set(failed) == {"every seq is there", "rows", "derived tables"}
    assert "1 missing (25)" in failed["every seq is there"]
    assert document["compared"] == 29


def test_a_row_that_is_missing_is_not_excused_by_later_retention(audited: Audited) -> None:
    audited.rewrite(2, lambda rows: rows.slice(0, 4))
    with audited.open() as log:
        prune(log, "orders.>", max_count=0)
    document = audited.audit()
    status = {check["name"]: check["status"] for check in document["checks"]}
    assert status["rows"] == status["derived tables"] == "failed"
    assert status["content"] == "skipped"  # nothing is left to compare with
    assert document["gaps_total"] == {"runs": 1, "messages": 6}


def test_a_log_entry_that_is_gone_from_the_middle(audited: Audited) -> None:
    entry = audited.entry(3)
    entry.unlink()
    document = audited.audit()
    assert not document["whole"]
    first, *others = document["checks"]
    assert (first["name"], first["status"]) == ("log entries", "failed")
    assert f"{BRONZE}/{LOG}/{entry.name} is gone" in first["what"]
    assert {check["status"] for check in others} == {"skipped"}


def test_the_last_log_entry_that_is_gone(audited: Audited) -> None:
    """delta-rs loads the version before it as if nothing were: the log's position tells."""
    entry = audited.entry(audited.lake.table(BRONZE).version)
    entry.unlink()
    failed = audited.failed()
    assert set(failed) == {"position", "derived tables"}
    assert f"{entry.name} is gone" in failed["position"]
    assert "position in the log is 30, and bronze goes only up to 20" in failed["position"]


@pytest.mark.parametrize("left", [b"", b'{"commitInfo":{"time'])
def test_a_last_log_entry_that_is_empty_or_torn(audited: Audited, left: bytes) -> None:
    entry = audited.entry(audited.lake.table(BRONZE).version)
    entry.write_bytes(left)
    failed = audited.failed()
    assert f"{entry.name} is {'not whole' if left else 'empty'}" in failed["log entries"]
    with audited.lake.lock(), audited.new_run() as run:  # the lock renames it
        run.rebuild()  # silver is ahead of bronze, which no power loss can make
        run.ingest(MESSAGES)
    assert audited.audit()["whole"]


def test_a_checkpoint_that_is_gone(audited: Audited) -> None:
    bronze = audited.lake.table(BRONZE)
    bronze.delta.create_checkpoint()
    audited.entry(2).unlink()  # a reader begins with the checkpoint
    assert audited.audit()["whole"]
    checkpoint = f"{bronze.version:020d}.checkpoint.parquet"
    (audited.path / BRONZE / LOG / checkpoint).unlink()
    assert f"{checkpoint} is gone" in audited.failed()["log entries"]


def test_a_derived_table_that_cannot_be_read(audited: Audited) -> None:
    entry = audited.path / "gold/volume" / LOG / f"{1:020d}.json"
    entry.unlink()
    failed = audited.failed()
    assert failed.keys() == {"log entries"}
    assert f"gold/volume/{LOG}/{entry.name} is gone" in failed["log entries"]


def test_a_log_that_was_put_back(audited: Audited, made: Audited, tmp_path: Path) -> None:
    with audited.open() as log:
        log.publish("orders.x", {"n": 31})
    audited.run()
    shutil.copy(made.log, audited.log)
    assert audited.failed().keys() == {"the log is not behind the lake"}


def test_deletions_before_and_after_ingestion_are_distinguished(audited: Audited) -> None:
    with audited.open() as log:
        log.publish_many([("logs.x", {"n": n}) for n in range(20)])
        prune(log, "logs.>", max_count=5)
    audited.run()
    with audited.open() as log:
        prune(log, "orders.>", max_count=7)
    document = audited.audit()
    assert document["whole"], document["checks"]
    assert document["gaps"] == [{"from": 31, "to": 45, "why": "retention"}]
    assert document["gaps_total"] == {"runs": 1, "messages": 15}
    assert (document["rows"], document["compared"]) == (35, 12)


def test_tables_that_do_not_add_up(audited: Audited) -> None:
    """A table ahead of silver counts up to silver's end only."""
    with audited.open() as log:
        log.publish("orders.x", {"n": 31})
    with audited.new_run() as run:
        run.ingest(run._last_seq, derive=False)
    quarantined = pa.table({"seq": [31]}, schema=pa.schema([("seq", pa.int64())]))
    audited.lake.table(QUARANTINE).append(quarantined, transaction=31)
    assert audited.audit()["whole"]
    quarantined = pa.table({"seq": [30]}, schema=quarantined.schema)
    audited.lake.table(QUARANTINE).append(quarantined, transaction=31)
    assert "bronze has 30 rows; silver 30, the quarantine 1" in audited.failed()["derived tables"]


def test_an_empty_lake_skips_what_it_has_nothing_for(tmp_path: Path, spark: SparkSession) -> None:
    empty = Audited(spark, tmp_path)
    empty.run()
    document = empty.audit()
    status = {check["name"]: check["status"] for check in document["checks"]}
    assert document["whole"]
    assert {name for name in NAMES if status[name] == "skipped"} == {"content", "derived tables"}


def test_lists_are_bounded_and_totals_are_not(audited: Audited) -> None:
    with audited.open() as log:
        log.publish_many([("orders.x", {"n": n}) for n in range(1_000)])
    audited.run()
    last = len(audited.lake.table(BRONZE).files) - 1
    audited.rewrite(last, lambda rows: rows.filter(pa.array([seq % 2 == 0 for seq in rows["seq"].to_pylist()])))
    document = audited.audit()
    assert (len(document["missing"]), document["missing_total"]) == (100, {"runs": 500, "messages": 500})
    assert "and 497 more" in next(check["what"] for check in document["checks"] if check["status"] == "failed")


# --- spans of seqs ----------------------------------------------------------------------------------------------------

UPTO = 200
spans = st.lists(
    st.tuples(st.integers(1, UPTO), st.integers(0, 30)).map(lambda span: (span[0], min(UPTO, span[0] + span[1]))),
    max_size=12,
)


def seqs_of(found: list[SeqRange]) -> set[int]:
    return {seq for low, high in found for seq in range(low, high + 1)}


@given(spans, spans)
def test_spans_are_subtracted_as_sets_are(some: list[SeqRange], others: list[SeqRange]) -> None:
    one, other = merged(some), merged(others)
    assert seqs_of(without(one, other)) == seqs_of(some) - seqs_of(others)
    assert seqs_of(in_both(one, other)) == seqs_of(some) & seqs_of(others)
    assert all(high + 1 < low for (_, high), (low, _) in pairwise(one))
    assert count_of(one) == len(seqs_of(some))


@given(st.sets(st.integers(1, 3 * BUCKET_SEQS), max_size=50))
def test_bitmaps_become_spans(seqs: set[int]) -> None:
    bitmaps: dict[int, bytes] = {}
    for bucket in {(seq - 1) // BUCKET_SEQS + 1 for seq in seqs}:
        bits = np.zeros(BUCKET_SEQS, dtype=np.uint8)
        bits[[seq - 1 - (bucket - 1) * BUCKET_SEQS for seq in seqs if (seq - 1) // BUCKET_SEQS + 1 == bucket]] = 1
        bitmaps[bucket] = np.packbits(bits, bitorder="little").tobytes()
    assert seqs_of(spans_held(bitmaps)) == seqs


def test_seqs_that_are_far_apart_cost_nothing() -> None:
    assert without([(1, 10**15)], [(5, 10**15 - 5)]) == [(1, 4), (10**15 - 4, 10**15)]
