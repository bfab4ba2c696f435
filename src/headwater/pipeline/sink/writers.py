"""The two writers that Spark calls: `write` in the tasks, `commit` and `abort` on the driver.

A stream's `write` is not told its batch, `commit` is: so tasks check and stage, and the commit promotes what they
staged in one transaction of the log, guarded by (sink, batch). Spark makes a new writer for every batch, and another
one for its commit; they share nothing but the options.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from headwater.errors import InvalidOption
from headwater.pipeline.sink.columns import check_columns
from headwater.pipeline.sink.guard import SinkKey
from headwater.pipeline.sink.options import SinkOptions, read_options
from headwater.pipeline.sink.promote import promote, promote_unguarded
from headwater.pipeline.sink.query import sink_key
from headwater.pipeline.sink.rows import RowChecker
from headwater.pipeline.sink.staging import Staged, discard, stage, sweep
from headwater.pipeline.sink.target import open_target
from headwater.ports.clock import SystemClock

Messages = Sequence[WriterCommitMessage | None]


class BatchWriter(DataSourceArrowWriter):
    """`df.write.format("headwater")`: all rows in one transaction. With `sinkId` and `batchId` a repeat is recognised,
    as `foreachBatch` needs it."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool = False) -> None:
        if overwrite:
            raise InvalidOption("a log is never overwritten", where="headwater sink", next='Use .mode("append")')
        self._options = read_options(options)
        self._columns = check_columns(schema, self._options.topic)
        if (self._options.sink_id is None) != (self._options.batch_id is None):
            raise InvalidOption(
                "sinkId and batchId go together in a batch write",
                where="headwater sink",
                next="Set both, so that a repeat of the batch is recognised, or neither",
            )
        self._job = str(uuid.uuid4())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        return _stage(self._options, self._columns, iterator)

    def commit(self, messages: Messages) -> None:
        options, staged = self._options, _whole(messages)
        store, clock = open_target(options.path, options.durability)
        try:
            now_ms = clock.now_ms()
            if options.sink_id is None or options.batch_id is None:
                promote_unguarded(store, options.staging, staged, self._job, now_ms)
            else:
                promote(store, options.staging, staged, SinkKey(options.sink_id), options.batch_id, now_ms)
        finally:
            store.close()
        _clean(options, staged)

    def abort(self, messages: Messages) -> None:
        discard(self._options.staging, cast(Sequence[Staged | None], messages))


class StreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream.format("headwater")`: each micro-batch in one transaction, and once, whatever is killed when."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool = False) -> None:
        if overwrite:
            raise InvalidOption(
                "outputMode complete would publish the whole result again with every batch",
                where="headwater sink",
                next='Use .outputMode("append") or .outputMode("update")',
            )
        self._options = read_options(options)
        if self._options.batch_id is not None:
            raise InvalidOption("a stream has batch ids of its own", where="batchId", next="Leave the option out")
        self._columns = check_columns(schema, self._options.topic)
        self._key = sink_key(self._options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        return _stage(self._options, self._columns, iterator)

    def commit(self, messages: Messages, batchId: int) -> None:
        options, staged = self._options, _whole(messages)
        store, clock = open_target(options.path, options.durability)
        try:
            promote(store, options.staging, staged, self._key, batchId, clock.now_ms())
        finally:
            store.close()
        _clean(options, staged)

    def abort(self, messages: Messages, batchId: int) -> None:
        discard(self._options.staging, cast(Sequence[Staged | None], messages))


def _stage(options: SinkOptions, columns: Sequence[str], iterator: Iterator[pa.RecordBatch]) -> Staged:
    context = TaskContext.get()
    place = "the partition" if context is None else f"partition {context.partitionId()}"
    checker = RowChecker(
        columns,
        topic=options.topic,
        data_format=options.data_format,
        place=place,
        now_ms=SystemClock().now_ms(),
    )
    return stage(options.staging, (piece for batch in iterator for piece in checker.staged(batch)))


def _whole(messages: Messages) -> list[Staged]:
    if not all(isinstance(message, Staged) for message in messages):
        raise InvalidOption("a partition was not staged", where="headwater sink", next="Run the batch again")
    return cast(list[Staged], list(messages))


def _clean(options: SinkOptions, staged: Sequence[Staged]) -> None:
    sweep(options.staging, SystemClock().now_ms())  # as this machine dates its files
    discard(options.staging, staged)
