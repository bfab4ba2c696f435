"""The source inside Spark."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import spark_partition_id

import headwater
from headwater.pipeline.schema import MESSAGE_SCHEMA, TABLE_SCHEMAS
from headwater.pipeline.source.reading import read_range

Put = Callable[[str, list[dict[str, Any]]], None]
MESSAGES = 12_000


def some_messages(count: int, seed: int) -> list[dict[str, Any]]:
    """Messages of all kinds, each seed its own."""
    choose = random.Random(seed)
    alphabet = 'abc "\\\n\x00éß日本\U0001f600'
    text = lambda: "".join(choose.choices(alphabet, k=choose.randrange(12)))  # noqa: E731
    deep: Any = 1
    for _ in range(60):
        deep = [deep] if choose.random() < 0.5 else {text(): deep}
    rows: list[dict[str, Any]] = []
    for n in range(count):
        row: dict[str, Any] = {
            "topic": choose.choice(["orders.new", "orders.paid", "orders.é.x", "metrics", "日本.a"]),
            "data": json.dumps({"n": n, "text": text()}, ensure_ascii=choose.random() < 0.5),
            "published_at": 1_700_000_000_000 + n * 250,
        }
        if choose.random() < 0.02:
            row |= {"id": f"id-{n}", "type": text(), "version": n, "from": text(), "to": text(), "priority": n % 7}
            row |= {"headers": json.dumps({text(): text(), "n": n, "deep": deep}), "deliver_at": n, "expires_at": n}
        rows.append(row)
    rows[7]["data"] = json.dumps(text() + "x" * 1024 * 1024)
    rows[8]["data"] = json.dumps(deep)
    rows[9] |= {"topic": b"bad.\xff", "checked": 2}
    return rows


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, put: Put, make_log: Callable[[Path], str]) -> str:
    path = make_log(tmp_path_factory.mktemp("source") / "events of spark.db")
    put(path, some_messages(MESSAGES, 4))
    return path


def load(spark: SparkSession, path: str, **options: str) -> DataFrame:
    return spark.read.format("headwater").options(**options).load(path)


def test_a_batch_is_the_same_rows_as_reading_the_log(spark: SparkSession, path: str) -> None:
    frame = load(spark, path, minPartitions="2")
    assert frame.schema == MESSAGE_SCHEMA
    found = frame.toArrow().sort_by("seq")
    assert found.num_rows == MESSAGES
    assert found.to_pylist() == pa.Table.from_batches(read_range(path, 0, MESSAGES)).to_pylist()
    assert frame.select(spark_partition_id()).distinct().count() == 2


def test_the_options_choose_what_is_read(spark: SparkSession, path: str) -> None:
    asked = {"topics": "orders.*,日本.>", "startingTimestamp": "1700000001000", "endingSeq": "500"}
    found = load(spark, path, **asked).select("seq", "topic").collect()
    rows = [row for batch in read_range(path, 4, 500) for row in batch.to_pylist()]
    wanted = [row["seq"] for row in rows if row["topic"] in ("orders.new", "orders.paid", "日本.a")]
    assert [row.seq for row in found] == wanted


def test_columns_are_chosen_with_a_schema(spark: SparkSession, path: str) -> None:
    frame = spark.read.format("headwater").schema("topic STRING, seq BIGINT").option("endingSeq", "2").load(path)
    assert [(type(row.topic), row.seq) for row in frame.collect()] == [(str, 1), (str, 2)]
    for schema, said in (
        ("payload STRING", "there is no column 'payload'"),
        ("seq STRING", "seq is bigint, not string"),
    ):
        with pytest.raises(PySparkException, match=said):
            spark.read.format("headwater").schema(schema).load(path).count()


FILTERS = [
    "seq > 100 and seq <= 250 and topic in ('orders.new', 'nothing')",
    "seq in (1, 5, 9000, 99999) and published_at >= timestamp'2023-11-14 22:13:20.250001'",
    "topic like 'orders.é%' and size < 60 and published_at < timestamp'2023-11-14 22:40:00'",
]


def test_filters_keep_the_same_rows_pushed_down_or_not(spark: SparkSession, path: str) -> None:
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "true"
    plain = load(spark, path)
    for condition in FILTERS:
        wanted = [row.seq for row in plain.where(condition).select("seq").collect()]
        pushed = load(spark, path, filterPushdown="true").where(condition)
        assert sorted(row.seq for row in pushed.select("seq").collect()) == sorted(wanted)
        assert wanted, condition


def test_a_frame_used_twice_is_the_whole_log_twice(spark: SparkSession, path: str) -> None:
    """Spark 4.3 keeps what one query pushed down for the next one over the same frame: so nothing is by default."""
    frame = load(spark, path)
    assert frame.where("seq <= 10").count() == 10
    assert frame.count() == MESSAGES
    assert frame.where("seq <= 10").union(frame.where("seq <= 30")).count() == 40


def test_a_session_without_pushdown_reads_too(spark: SparkSession, path: str) -> None:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    try:
        assert load(spark, path, filterPushdown="true").where("seq <= 10").count() == 10
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


def test_the_other_tables_are_read_but_not_streamed(spark: SparkSession, path: str) -> None:
    for table in ("subscriptions", "dead_letters"):
        frame = load(spark, path, table=table)
        assert frame.schema == TABLE_SCHEMAS[table]
        frame.collect()
    assert load(spark, path, table="topics").where("topic = 'metrics'").select("topic").collect() == [("metrics",)]
    stream = spark.readStream.format("headwater").option("table", "topics").load(path).writeStream.format("noop")
    with pytest.raises(StreamingQueryException, match="changes in place"):
        stream.start().awaitTermination(60)


def test_an_explicit_start_that_retention_deleted_fails_loudly(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "log.db")
    with headwater.open(path, housekeeping=None, durability="relaxed") as log:
        log.publish_many([("a", n) for n in range(10)])
        log.retain("a", max_count=4)
        log.housekeep()
    with pytest.raises(PySparkException, match="5 messages from 2 on: 2 to 6"):
        load(spark, path, startingSeq="2").count()
    assert load(spark, path, startingSeq="2", failOnDataLoss="false").count() == 4
    assert load(spark, path).count() == 4


def test_a_stream_goes_on_where_it_was_and_says_what_it_lost(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "log.db")

    def run(**options: str) -> list[int]:
        query = (
            spark.readStream.format("headwater")
            .options(topics="orders.>", maxMessagesPerTrigger="400", subscription="lake", **options)
            .load(path)
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "out"))
        )
        assert query.awaitTermination(100)
        return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]

    def publish(first: int, last: int) -> None:
        with headwater.open(path, housekeeping=None, durability="relaxed") as log:
            log.publish_many([("orders.new" if n % 2 else "other", n) for n in range(first, last + 1)])

    def seqs() -> list[int]:
        return sorted(row.seq for row in spark.read.parquet(str(tmp_path / "out")).select("seq").collect())

    publish(1, 2_000)
    assert run() == [400, 400, 200]
    publish(2_001, 2_100)
    with headwater.open(path, housekeeping=None) as log:
        info = log.subscription("lake")
        assert (info.position, info.lag, info.holder) == (2_000, 50, None)
    assert run() == [50]
    assert seqs() == list(range(1, 2_101, 2))

    publish(2_101, 2_200)
    with headwater.open(path, housekeeping=None) as log:
        log.retain(">", max_count=20)
        log.housekeep()
    with pytest.raises(StreamingQueryException, match="40 messages: 2101 to 2179"):
        run()
    assert run(failOnDataLoss="false") == [10]
    assert seqs() == [*range(1, 2_101, 2), *range(2_181, 2_201, 2)]
    with headwater.open(path, housekeeping=None) as log:
        assert (log.subscription("lake").gaps, log.subscription("lake").lag) == (40, 0)
