"""The fixed columns of messages, and of the tables beside them, for Spark and for Arrow."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.types import (
    BooleanType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

ARROW_TIME = pa.timestamp("us", tz="UTC")
ARROW_HEADERS = pa.map_(pa.string(), pa.string())

_ARROW_TYPES: dict[type[DataType], pa.DataType] = {
    LongType: pa.int64(),
    StringType: pa.string(),
    BooleanType: pa.bool_(),
    TimestampType: ARROW_TIME,
    MapType: ARROW_HEADERS,
}
_TYPES: dict[str, DataType] = {
    "string": StringType(),
    "long": LongType(),
    "boolean": BooleanType(),
    "timestamp": TimestampType(),
    "headers": MapType(StringType(), StringType()),
}


def _struct(columns: str) -> StructType:
    """`seq long, topic` and so on; what has no type is text. Everything may be NULL, as Spark has it for files."""
    words = [column.split() for column in columns.split(",")]
    return StructType([StructField(name, _TYPES[kind[0] if kind else "string"], True) for name, *kind in words])


def arrow_schema(struct: StructType) -> pa.Schema:
    return pa.schema([pa.field(field.name, _ARROW_TYPES[type(field.dataType)], True) for field in struct])


MESSAGE_SCHEMA = _struct(
    "seq long, id, topic, type, version long, from, to, reply_to, correlation_id, content_type, traceparent, "
    "priority long, published_at timestamp, deliver_at timestamp, expires_at timestamp, headers headers, data, "
    "size long"
)
"""`data` is the JSON text as it was stored; header values that are not text are their JSON."""

ARROW_SCHEMA = arrow_schema(MESSAGE_SCHEMA)

COLUMNS: tuple[str, ...] = tuple(ARROW_SCHEMA.names)

TABLE_SCHEMAS: dict[str, StructType] = {
    "messages": MESSAGE_SCHEMA,
    "subscriptions": _struct(
        "observed_at timestamp, id, pattern, mode, position long, lag long, lag_is_least boolean, in_flight long, "
        "waiting long, oldest_unacked_ms long, acked long, redelivered long, dead long, gaps long, holder, "
        "created_at timestamp, active_at timestamp"
    ),
    "deliveries": _struct(
        "subscription, seq long, attempts long, due_at timestamp, token long, priority long, key, dead_letter long"
    ),
    "dead_letters": _struct(
        "id long, subscription, seq long, topic, type, reason, attempts long, died_at timestamp, error, stack, "
        "handler, redrives long, redriving boolean, redrive_error, message"
    ),
    "gaps": _struct(
        "number long, subscription, from_seq long, to_seq long, count long, why, at timestamp, told boolean"
    ),
    "timings": _struct("observed_at timestamp, subscription, hour timestamp, stage, bucket long, count long"),
    "retention": _struct(
        "observed_at timestamp, pattern, dialect, max_age_ms long, max_count long, max_bytes long, keep_unacked boolean"
    ),
    "topics": _struct(
        "observed_at timestamp, topic, count long, bytes long, last_seq long, last_published_at timestamp"
    ),
}
"""`observed_at` is when it was so, for what changes in place."""
