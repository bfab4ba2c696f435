"""The writers on a log in PostgreSQL, as Spark calls them; through Spark itself in jobs/test_postgres.py."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pyarrow as pa
import pytest
from postgres_server import PostgresServer
from pyspark.sql.types import StringType, StructField, StructType

import headwater
from headwater.delivery.dedupe import DedupeWindow
from headwater.pipeline.sink import promote as promoting
from headwater.pipeline.sink.options import read_options
from headwater.pipeline.sink.writers import BatchWriter, StreamWriter
from headwater.pipeline.source.place import log_at

COLUMNS = StructType([StructField("topic", StringType()), StructField("data", StringType())])


def rows(*data: object) -> Iterator[pa.RecordBatch]:
    yield pa.record_batch([["t"] * len(data), [str(each) for each in data]], names=["topic", "data"])


def run_batch(url: str, batch: int, *data: object) -> None:
    staged = StreamWriter({"path": url, "sinkId": "s"}, COLUMNS).write(rows(*data))
    StreamWriter({"path": url, "sinkId": "s"}, COLUMNS).commit([staged], batch)


def published(url: str) -> list[object]:
    with headwater.open(url, housekeeping=None) as log:
        return [message.data for message in log.subscribe("look", ">", mode="ephemeral", start="first").fetch(1_000)]


def test_a_batch_that_comes_again_is_published_once_though_its_ids_are_forgotten(postgres_schema_url: str) -> None:
    url = postgres_schema_url
    run_batch(url, 0, 1, 2)
    run_batch(url, 1, 3)
    store, _ = log_at(url).open()
    with store.write() as writer:
        writer.forget_ids(DedupeWindow(span_ms=0, count=0), 2**50, 10_000)
    store.close()
    run_batch(url, 1, 3)
    assert published(url) == [1, 2, 3]
    assert not os.path.exists(read_options({"path": url}).staging)


def test_two_that_commit_the_same_batch_at_once_publish_it_once(
    postgres_schema_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has more rows, as a repeat of a query that is not the same twice may."""
    url, append = postgres_schema_url, promoting._append

    def be_overtaken(*arguments: object) -> None:
        monkeypatch.setattr(promoting, "_append", append)
        run_batch(url, 0, 1, 2)
        append(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(promoting, "_append", be_overtaken)
    run_batch(url, 0, 1, 2, 3)
    assert published(url) == [1, 2]


def test_a_connection_that_breaks_costs_nothing(
    postgres: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = promoting._append

    def cut_once(*arguments: object) -> None:
        monkeypatch.setattr(promoting, "_append", append)
        assert postgres.cut_connections(postgres_url, "headwater writer")
        append(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(promoting, "_append", cut_once)
    run_batch(postgres_url, 0, 1, 2)
    assert published(postgres_url) == [1, 2]


def test_a_batch_write_has_the_databases_time(postgres_schema_url: str) -> None:
    writer = BatchWriter({"path": postgres_schema_url}, COLUMNS)
    writer.commit([writer.write(rows(1))])
    assert published(postgres_schema_url) == [1]
    with log_at(postgres_schema_url).looking() as look:
        sql = "SELECT abs(published_at - (extract(epoch FROM now()) * 1000)::bigint) < 60000 FROM messages"
        assert look.query(sql, ()) == [(True,)]
