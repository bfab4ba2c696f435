"""The tables beside the messages: subscriptions, dead letters and so on. Each is one partition.

What changes in place is looked at through the store, as it is at one moment; what grows is read through ADBC, page by
page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from headwater.broker.statistics import describe
from headwater.message.times import datetime_of
from headwater.pipeline.schema import TABLE_SCHEMAS, arrow_schema
from headwater.pipeline.source.columns import readable, times
from headwater.pipeline.source.log import reading
from headwater.pipeline.source.options import SourceOptions
from headwater.pipeline.source.place import log_at
from headwater.ports.store import Reader

PAGE_ROWS = 256  # a dead letter may be a megabyte and more

Row = dict[str, Any]

# Tables that are read as they are stored, page by page along these columns.
_KEYS: dict[str, tuple[str, ...]] = {
    "deliveries": ("subscription", "seq"),
    "dead_letters": ("id",),
    "gaps": ("number",),
}
_AS_TEXT = {"message": 'CAST(message AS TEXT) AS "message"'}  # PostgreSQL has it as JSON


class TableReader(DataSourceReader):
    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(self._options.table)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        for batch in read_table(self._options.path, self._options.table):
            yield batch.select(list(self._columns))


def read_table(path: str, table: str, now_ms: int | None = None) -> Iterator[pa.RecordBatch]:
    """A table other than `messages`, with all its columns."""
    if table in _KEYS:
        yield from _stored(path, table)
        return
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    if table == "topics":
        yield _topics(path, now_ms)
        return
    with reading(path) as reader:
        rows = [{"observed_at": datetime_of(now_ms), **row} for row in _OBSERVED[table](reader, now_ms)]
    yield pa.RecordBatch.from_pylist(rows, schema=arrow_schema(TABLE_SCHEMAS[table]))


def _topics(path: str, now_ms: int) -> pa.RecordBatch:
    """Stored counts and the uncounted tail together."""
    found = [
        {
            "observed_at": datetime_of(now_ms),
            "topic": counted.topic,
            "count": counted.count,
            "bytes": counted.bytes,
            "last_seq": counted.last_seq,
            "last_published_at": datetime_of(counted.last_published_ms),
        }
        for counted in log_at(path).topic_counts()
    ]
    return pa.RecordBatch.from_pylist(found, schema=arrow_schema(TABLE_SCHEMAS["topics"]))


def _stored(path: str, table: str) -> Iterator[pa.RecordBatch]:
    schema, keys = arrow_schema(TABLE_SCHEMAS[table]), _KEYS[table]
    names = ", ".join(_AS_TEXT.get(name, f'"{name}"') for name in schema.names)
    position = ", ".join(keys)
    sql = (
        f"SELECT {names} FROM {table} "
        f"WHERE ({position}) > ({', '.join('?' * len(keys))}) ORDER BY {position} LIMIT {PAGE_ROWS}"
    )
    after: list[Any] = ["" if pa.types.is_string(schema.field(key).type) else -1 for key in keys]
    with log_at(path).rows() as rows:
        while True:
            page = rows.table(sql, after, like=schema)
            yield from _batches(page, schema)
            if page.num_rows < PAGE_ROWS:
                return
            after = [page[key][-1].as_py() for key in keys]


def _batches(table: pa.Table, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for batch in table.combine_chunks().to_batches():
        arrays = [_as(field.type, batch[field.name]) for field in schema]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _as(kind: pa.DataType, column: pa.Array) -> pa.Array:
    if pa.types.is_timestamp(kind):
        return times(column)
    return readable(column) if pa.types.is_string(kind) else column.cast(kind)


def _subscriptions(reader: Reader, now_ms: int) -> Iterator[Row]:
    for record in reader.subscriptions():
        info = describe(reader, record, now_ms)
        yield {
            **{name: getattr(info, name) for name in info.__struct_fields__},
            "created_at": datetime_of(info.created_ms),
            "active_at": datetime_of(info.active_ms),
        }


def _timings(reader: Reader, now_ms: int) -> Iterator[Row]:
    for timing in reader.timings():
        yield {
            "subscription": timing.subscription,
            "hour": datetime_of(timing.hour_ms),
            "stage": timing.stage,
            "bucket": timing.bucket,
            "count": timing.count,
        }


def _retention(reader: Reader, now_ms: int) -> Iterator[Row]:
    for policy in reader.retention():
        limits = policy.limits
        yield {
            "pattern": policy.pattern,
            "dialect": policy.dialect,
            "max_age_ms": limits.max_age_ms,
            "max_count": limits.max_count,
            "max_bytes": limits.max_bytes,
            "keep_unacked": limits.keep_unacked,
        }


_OBSERVED: dict[str, Callable[[Reader, int], Iterator[Row]]] = {
    "subscriptions": _subscriptions,
    "timings": _timings,
    "retention": _retention,
}
