"""A log in PostgreSQL on Spark: read, streamed, taken in, audited, published to; and its password kept to itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from lake_world import World
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col

import headwater
from headwater.pipeline.jobs.observing import observe
from headwater.pipeline.jobs.reporting import report_of
from headwater.pipeline.jobs.views import make_views
from headwater.pipeline.page.audit import render_audit
from headwater.pipeline.page.report import render_report
from headwater.pipeline.source.reading import read_range

PASSWORD = "hush-hush"
WAIT_S_MAX = 100


@pytest.fixture
def url(postgres_url: str) -> str:
    """With a password, which the server does not ask for and nobody is to see."""
    return postgres_url.replace("postgres@", f"postgres:{PASSWORD}@")


@pytest.fixture
def log(url: str) -> Iterator[headwater.Log]:
    with headwater.open(url, housekeeping=None, durability="relaxed") as opened:
        yield opened


def load(spark: SparkSession, url: str, **options: str) -> DataFrame:
    return spark.read.format("headwater").option("path", url).options(**options).load()


def files_with_password(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and PASSWORD.encode() in file.read_bytes()]


def test_a_batch_is_the_log_and_no_plan_shows_the_password(spark: SparkSession, url: str, log: headwater.Log) -> None:
    log.publish_many([(f"orders.{n % 3}", {"n": n}) for n in range(11_000)])
    log.publish("日本.a", {"é": [None, "\x00", "\U0001f600"]}, id="given", headers={"x": 1, "ü": "y"}, priority=3)
    log.publish("metrics", None, ttl=60)
    frame = load(spark, url, minPartitions="2")
    found = frame.toArrow().sort_by("seq")
    assert found.to_pylist() == pa.Table.from_batches(read_range(url, 0, 20_000)).to_pylist()
    rows = {row["seq"]: row for row in found.slice(10_990).to_pylist()}
    direct = {message.seq: message for message in log.subscribe("look", ">", mode="ephemeral", start=10_990).fetch(100)}
    assert [(seq, row["id"], json.loads(row["data"])) for seq, row in rows.items()] == [
        (seq, message.id, message.data) for seq, message in direct.items()
    ]
    assert dict(rows[11_001]["headers"]) == {"x": "1", "ü": "y"}
    pushed = load(spark, url, filterPushdown="true").where("seq > 10990 and topic like 'orders.1%'")
    assert pushed.count() == len([row for row in rows.values() if row["topic"] == "orders.1"])
    frame.createOrReplaceTempView("of_postgres")
    told = "\n".join(
        spark.sql(f"EXPLAIN {how} CREATE OR REPLACE TEMPORARY VIEW w AS SELECT * FROM of_postgres").collect()[0][0]
        for how in ("EXTENDED", "FORMATTED")
    )
    assert "postgres:*" in told, "the url is shown, or this would prove nothing"
    assert PASSWORD not in told


def test_a_stream_goes_on_where_it_was_and_its_sink_publishes_once(
    spark: SparkSession, url: str, log: headwater.Log, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"

    def run() -> list[int]:
        stream = spark.readStream.format("headwater").options(path=url, topics="orders.>", subscription="spark-copy")
        copy = stream.load().select(col("data"), col("headers"))
        query = (
            copy.writeStream.format("headwater")
            .options(path=url, topic="copies", checkpointLocation=str(checkpoint), staging=str(tmp_path / "staging"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(WAIT_S_MAX)
        return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]

    def copied() -> list[int]:
        copies = log.subscribe("look", "copies", mode="ephemeral", start="first")
        return [message.data for message in copies.fetch(2_000)]

    log.publish_many([("orders.new" if n % 2 else "other", n) for n in range(1, 1_001)])
    assert run() == [500]
    info = log.subscription("spark-copy")
    assert (info.lag, info.holder) == (0, None)
    assert sorted(copied()) == list(range(1, 1_001, 2))
    for record in ("commits/0", "commits/.0.crc"):  # Spark does not know any more that the last batch is done
        (checkpoint / record).unlink(missing_ok=True)
    log.publish_many([("orders.new", n) for n in range(2_001, 2_011)])
    assert run() == [500, 10]
    assert sorted(copied()) == [*range(1, 1_001, 2), *range(2_001, 2_011)]
    assert files_with_password(tmp_path) == []


def test_a_lake_of_it_is_whole_and_knows_no_password(
    spark: SparkSession, url: str, log: headwater.Log, tmp_path: Path
) -> None:
    world = World(spark, tmp_path, log_path=url)
    log.publish_many([(f"orders.{n % 3}", {"n": n}) for n in range(500)])
    log.publish("mails.new", {"to": "ä"}, id="given", type="mail", version=2, from_="shop", headers={"x": 1})
    log.retain("orders.>", max_count=100)
    log.housekeep()
    world.take_in()
    observe(world.lake, url)  # of what is made from bronze after this, nothing asks the log
    assert len(world.lake.rows("raw.topics")) == 4
    assert world.seqs() == list(range(401, 502))
    document = world.audit()
    assert document["whole"], document["checks"]
    assert (document["rows"], document["compared"], document["gaps"]) == (
        101,
        101,
        [{"from": 1, "to": 400, "why": "retention"}],
    )
    make_views(spark, world.lake, url)
    assert spark.sql("SELECT lag FROM live_subscriptions").collect() == [(0,)]
    pages = [render_audit(document), render_report(report_of(world.lake)), json.dumps(document, default=str)]
    world.lake.close()
    assert all(PASSWORD not in page and "postgres@127.0.0.1" in page for page in pages)
    assert files_with_password(tmp_path) == []
