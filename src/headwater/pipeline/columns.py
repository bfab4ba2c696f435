"""The columns of every table that the pipeline reads or writes, as Arrow schemas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from headwater.message import FIELDS, LEADING_HEADERS, Kind

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

TIME = pa.timestamp("us", tz="UTC")
HEADERS = pa.map_(pa.string(), pa.string())
_TYPES = {
    "string": pa.string(),
    "long": pa.int64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp": TIME,
    "date": pa.date32(),
    "headers": HEADERS,
}


def _schema(columns: str) -> pa.Schema:
    """`seq long, topic` and so on; a column without a type is text. Every column may be null, as Spark has it."""
    words = [column.split() for column in columns.split(",")]
    return pa.schema([pa.field(name, _TYPES[kind[0] if kind else "string"]) for name, *kind in words])


_KINDS = {field.name: field.kind for field in FIELDS}
_KIND_TYPES: dict[Kind, pa.DataType] = {"text": pa.string(), "whole": pa.int64(), "time": TIME, "json": pa.string()}
_MESSAGE_COLUMNS = dict.fromkeys([
    "seq", "id", "topic", "type", "version", *LEADING_HEADERS, "priority", "published_at", "deliver_at", "expires_at",
    "headers", "data", "size", *_KINDS,
])  # fmt: skip
MESSAGE_SCHEMA = pa.schema(
    [pa.field(name, HEADERS if name == "headers" else _KIND_TYPES[_KINDS[name]]) for name in _MESSAGE_COLUMNS]
)
"""`data` is the JSON text as the log stores it; a header value that is not text is its JSON."""
COLUMNS: tuple[str, ...] = tuple(MESSAGE_SCHEMA.names)

DAY = pa.field("day", pa.date32())
LAKE_SCHEMA = MESSAGE_SCHEMA.append(DAY)
"""Bronze and silver: messages, partitioned by the UTC day of `published_at`."""

QUARANTINE_SCHEMA = _schema("seq long, id, topic, type, version long, published_at timestamp, problem, data, size long")
EXPLICIT_IDS_SCHEMA = _schema("id, topic, seq long")
TYPED_SCHEMA = _schema("seq long, id, topic, version long, published_at timestamp")
"""What each typed table begins with; its other columns follow from the type."""
AUDITS_SCHEMA = _schema("at timestamp, document")
REPLAYS_SCHEMA = _schema("name")
"""A table without rows: its app transactions are the positions of replays."""

TABLE_SCHEMAS: dict[str, pa.Schema] = {
    "messages": MESSAGE_SCHEMA,
    "subscriptions": _schema(
        "observed_at timestamp, id, pattern, mode, position long, lag long, lag_is_least boolean, in_flight long, "
        "waiting long, oldest_unacked_ms long, acked long, redelivered long, dead long, gaps long, holder, "
        "created_at timestamp, active_at timestamp"
    ),
    "deliveries": _schema(
        "subscription, seq long, attempts long, due_at timestamp, token long, priority long, key, dead_letter long"
    ),
    "dead_letters": _schema(
        "id long, subscription, seq long, topic, type, reason, attempts long, died_at timestamp, error, stack, "
        "handler, redrives long, redriving boolean, redrive_error, message"
    ),
    "gaps": _schema(
        "number long, subscription, from_seq long, to_seq long, count long, why, at timestamp, told boolean"
    ),
    "timings": _schema("observed_at timestamp, subscription, hour timestamp, stage, bucket long, count long"),
    "retention": _schema(
        "observed_at timestamp, pattern, dialect, max_age_ms long, max_count long, max_bytes long, keep_unacked boolean"
    ),
    "topics": _schema(
        "observed_at timestamp, topic, count long, bytes long, last_seq long, last_published_at timestamp"
    ),
}
"""The log's tables, as `spark.read.format("headwater").option("table", …)` shows them. `observed_at` is when it was
so, for what changes in place."""

GOLD_SCHEMAS: dict[str, pa.Schema] = {
    "volume": _schema("day date, hour timestamp, topic, type, messages long, bytes long"),
    "traffic": _schema("day date, from, to, messages long, bytes long"),
    "replication": _schema("replica, day date, pushes long, bytes long, last_version long, last_at timestamp"),
    "latency": _schema(
        "subscription, hour timestamp, stage, count long, p50_ms double, p90_ms double, p99_ms double, max_ms double, "
        "day date"
    ),
    "lag": _schema(
        "subscription, observed_at timestamp, lag long, position long, in_flight long, waiting long, "
        "oldest_unacked_ms long, day date"
    ),
    "dead_letters": _schema(
        "day date, subscription, reason, handler, error_signature, letters long, first_at timestamp, "
        "last_at timestamp, example_error, trend double"
    ),
    "retry_storms": _schema(
        "subscription, from_at timestamp, to_at timestamp, acked long, redelivered long, ratio double"
    ),
    "forecast": _schema(
        "pattern, messages long, bytes long, messages_per_day double, bytes_per_day double, limit_kind, limit long, "
        "days_left double, bytes_in_30_days double"
    ),
}
"""The reports, `gold/<name>`."""


def spark_schema(schema: pa.Schema) -> StructType:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema)
