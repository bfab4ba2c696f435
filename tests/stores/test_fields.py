"""What is written down beside the table of message fields agrees with it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import psycopg

from headwater.message import EXTRA_FIELDS, FIELDS, PublishOptions, Time
from headwater.pipeline.columns import COLUMNS as PIPELINE_COLUMNS
from headwater.protocol.methods import Publish
from headwater.stores.postgres import PostgresStore
from headwater.stores.sqlite import SqliteStore
from headwater.transports.postgres import COLUMNS as ARCHIVE_COLUMNS

NAMES = {field.name for field in FIELDS}
OPTIONS = {field.option for field in EXTRA_FIELDS} | {
    field.rule.span for field in EXTRA_FIELDS if isinstance(field.rule, Time)
}


def test_positions_that_travel_stay() -> None:
    assert [field.attribute for field in FIELDS][:18] == [
        "seq", "topic", "raw", "published_ms", "size", "identity", "priority", "deliver_ms", "expires_ms", "from_",
        "to", "reply_to", "correlation_id", "type", "version", "content_type", "traceparent", "raw_headers",
    ]  # fmt: skip


def test_the_schema_of_sqlite(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "log.db")
    rows = store.connect().execute("SELECT name FROM pragma_table_xinfo('messages')")
    columns = {name for (name,) in rows}
    store.close()
    assert columns == NAMES | {"checked"}


def test_the_schema_and_the_function_of_postgres(postgres_schema_url: str) -> None:
    PostgresStore(postgres_schema_url).close()
    with psycopg.connect(postgres_schema_url) as connection:
        rows = connection.execute("SELECT * FROM headwater.messages LIMIT 0").description
        [arguments] = connection.execute(
            "SELECT proargnames FROM pg_proc WHERE proname = 'publish' AND pronamespace = 'headwater'::regnamespace"
        ).fetchone() or [[]]
    assert {column.name for column in rows or ()} == NAMES | {"checked"}
    assert arguments == ["topic", "data", "id", *(field.name for field in EXTRA_FIELDS)]


def test_the_options_of_a_publish() -> None:
    assert PublishOptions.__annotations__.keys() == {"id", "published_at", *OPTIONS}
    fields = {field.name for field in msgspec.structs.fields(Publish)}
    assert fields == {"topic", "data", "id", "published_at", "number", "confirmed", *OPTIONS}


def test_the_columns_of_archive_and_pipeline_begin_as_they_always_did() -> None:
    headers = ["type", "version", "from", "to", "reply_to", "correlation_id", "content_type", "traceparent"]
    times = ["published_at", "deliver_at", "expires_at"]
    assert [*PIPELINE_COLUMNS][:18] == ["seq", "id", "topic", *headers, "priority", *times, "headers", "data", "size"]
    assert {*PIPELINE_COLUMNS} == NAMES
    headers[2:4] = ["from_entity", "to_entity"]
    plain = ["data", "unreadable", "headers", "priority", "size"]
    assert [*ARCHIVE_COLUMNS][:19] == ["id", "seq", "topic", *headers, *plain, *times]
    assert len(ARCHIVE_COLUMNS) == len(NAMES) + 1
