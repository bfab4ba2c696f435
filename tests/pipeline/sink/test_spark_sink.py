"""The sink through Spark: batch and stream, repeats after a lost commit, errors as a user sees them."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, lit, struct, to_json

import headwater
from headwater.delivery.dedupe import DedupeWindow
from headwater.message import Message
from headwater.stores.sqlite import SqliteStore

MessagesIn = Callable[[Path], list[Message]]

ROWS = 200_000


def save(frame: DataFrame, path: Path, **options: str) -> None:
    frame.write.format("headwater").mode("append").options(path=str(path), **options).save()


def run_stream(frame: DataFrame, path: Path, checkpoint: Path, **options: str) -> None:
    query = (
        frame.writeStream.format("headwater")
        .options(path=str(path), checkpointLocation=str(checkpoint), **options)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def forget_ids(path: Path) -> None:
    store = SqliteStore(path)
    with store.write() as writer:
        writer.forget_ids(DedupeWindow(span_ms=0, count=0), 2**50, 10_000)
    store.close()


def numbers_from(spark: SparkSession, folder: Path) -> DataFrame:
    """A stream of the lines in the folder's files, one file a batch."""
    return spark.readStream.option("maxFilesPerTrigger", "1").text(str(folder)).select(col("value").alias("data"))


def test_a_batch_write_is_whole_and_in_order(spark: SparkSession, tmp_path: Path, messages_in: MessagesIn) -> None:
    path = tmp_path / "events.db"
    frame = spark.range(ROWS, numPartitions=2).select(to_json(struct(col("id").alias("n"))).alias("data"))
    save(frame, path, topic="numbers.all")
    found = messages_in(path)
    assert [message.data["n"] for message in found] == list(range(ROWS))
    assert {message.topic for message in found} == {"numbers.all"}
    assert len({message.id for message in found}) == ROWS
    assert not os.path.exists(f"{path}-staging")


def test_every_column_of_a_message_arrives(spark: SparkSession, tmp_path: Path, messages_in: MessagesIn) -> None:
    path = tmp_path / "events.db"
    later = datetime(2099, 1, 2, 3, 4, 5, 678_000, UTC)
    schema = (
        "seq long, id string, topic string, type string, version long, `from` string, to string, reply_to string,"
        "correlation_id string, content_type string, traceparent string, priority long, published_at timestamp,"
        "deliver_at timestamp, expires_at timestamp, headers map<string,string>, data string, size long"
    )
    full: tuple[Any, ...] = (
        7, "id-1", "a.b", "order", 3, "alice", "bob", "replies.alice", "c-1", "application/json", "00-ab-cd-01", 9,
        later, later, later, {"é": "1", "x": "y"}, '{"a": [1, null]}', 99,
    )  # fmt: skip
    plain = (8, None, "a.c", *[None] * 13, "null", None)
    save(spark.createDataFrame([full, plain], schema).coalesce(1), path)
    first, second = messages_in(path)
    named = ("id", "topic", "type", "version", "from_", "to", "reply_to", "correlation_id", "content_type")
    assert tuple(getattr(first, name) for name in named) == (
        "id-1", "a.b", "order", 3, "alice", "bob", "replies.alice", "c-1", "application/json"
    )  # fmt: skip
    assert (first.traceparent, first.priority, first.headers) == ("00-ab-cd-01", 9, {"é": "1", "x": "y"})
    assert (first.deliver_at, first.expires_at, first.data_json) == (later, later, '{"a": [1, null]}')
    assert (first.seq, second.seq) == (1, 2)
    assert first.published_at < later
    assert (second.topic, second.data, second.type, second.headers, second.priority) == ("a.c", None, None, {}, 0)


def test_what_is_streamed_from_one_log_into_another_is_the_same(
    spark: SparkSession, tmp_path: Path, messages_in: MessagesIn
) -> None:
    origin, copy = tmp_path / "origin.db", tmp_path / "copy.db"
    with headwater.open(origin) as log:
        log.publish("a.b", {"n": [1, None, "ü"]}, type="order", version=2, from_="alice", to="bob", priority=5,
                    reply_to="r", correlation_id="c", content_type="x/y", traceparent="t", headers={"h": "1"},
                    deliver_at=4_000_000_000.25, expires_at=4_000_000_001, id="given")  # fmt: skip
        log.publish_many([("a.c", number) for number in range(500)])
    frame = spark.readStream.format("headwater").option("path", str(origin)).load()
    run_stream(frame, copy, tmp_path / "checkpoint")
    assert [_told(message) for message in messages_in(copy)] == [_told(message) for message in messages_in(origin)]
    save(spark.read.format("headwater").option("path", str(origin)).load(), copy)
    assert len(messages_in(copy)) == 501  # the ids came along, so a second copy adds nothing


def _told(message: Message) -> dict[str, Any]:
    """All but when it was published."""
    return {**message.to_json(), "published_at": None}


def test_a_stream_publishes_each_batch_once_even_when_spark_forgot_the_last(
    spark: SparkSession, tmp_path: Path, messages_in: MessagesIn
) -> None:
    path, source, checkpoint = tmp_path / "events.db", tmp_path / "source", tmp_path / "check point"
    source.mkdir()
    for file in range(3):
        (source / f"{file}.txt").write_text("\n".join(str(file * 10 + line) for line in range(10)))
    frame = numbers_from(spark, source)
    run_stream(frame, path, checkpoint, topic="numbers")
    assert sorted(message.data for message in messages_in(path)) == list(range(30))
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda file: int(file.name))
    for file in (last, last.with_name(f".{last.name}.crc")):
        file.unlink(missing_ok=True)
    forget_ids(path)  # so that the guard stands alone
    run_stream(frame, path, checkpoint, topic="numbers")
    assert last.exists()  # Spark did run that batch again
    assert sorted(message.data for message in messages_in(path)) == list(range(30))
    (source / "3.txt").write_text("30\n31")
    run_stream(frame, path, checkpoint, topic="numbers")
    assert sorted(message.data for message in messages_in(path)) == list(range(32))
    assert not os.path.exists(f"{path}-staging")


def test_one_bad_row_stops_the_query_with_its_reason_and_publishes_nothing(
    spark: SparkSession, tmp_path: Path, messages_in: MessagesIn
) -> None:
    path = tmp_path / "events.db"
    data = [("1",), ("2",), ("{oops",), ("4",)]
    with pytest.raises(PySparkException) as raised:
        save(spark.createDataFrame(data, "data string").repartition(2), path, topic="t")
    told = str(raised.value)
    assert "data is not JSON" in told
    assert "'{oops'" in told
    assert 'option("dataFormat", "text")' in told
    assert messages_in(path) == []
    assert not os.path.exists(f"{path}-staging")


@pytest.mark.parametrize(
    ("change", "mode", "words"),
    [
        (lambda frame: frame.withColumn("colour", lit("red")), "append", "column colour: a message has no such column"),
        (lambda frame: frame.withColumn("data", struct("data")), "append", 'to_json(col("data"))'),
        (lambda frame: frame, "overwrite", '.mode("append")'),
    ],
)
def test_what_cannot_be_published_is_refused_before_anything_is_written(
    spark: SparkSession, tmp_path: Path, change: Callable[[DataFrame], DataFrame], mode: str, words: str
) -> None:
    path = tmp_path / "events.db"
    frame = change(spark.createDataFrame([("1",)], "data string"))
    with pytest.raises(PySparkException) as raised:
        frame.write.format("headwater").mode(mode).options(path=str(path), topic="t").save()
    assert words in str(raised.value)
    assert os.listdir(tmp_path) == []
