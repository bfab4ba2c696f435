"""Reading a log as it grows. An offset {"seq": n} says that everything at or below n has been read."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from headwater.errors import SubscriptionError
from headwater.pipeline.source.batch import RangePartition, parallel_tasks
from headwater.pipeline.source.conditions import topics_condition
from headwater.pipeline.source.log import reading, seq_of_nth, starting_after, told
from headwater.pipeline.source.options import SourceOptions
from headwater.pipeline.source.place import Range, log_at
from headwater.pipeline.source.positions import Position, position_name
from headwater.pipeline.source.ranges import split
from headwater.pipeline.source.reading import read_range
from headwater.ports.records import Gap

logger = logging.getLogger("headwater.pipeline")

Offset = dict[str, Any]

_GAP_COLUMNS = pa.schema(
    [("from_seq", pa.int64()), ("to_seq", pa.int64()), ("count", pa.int64()), ("why", pa.string()), ("at", pa.int64())]
)


class MessagesStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Spark makes several of these, in several processes: one decides the offsets of a query, and it alone takes the
    position, when it is first asked something; another is copied to the tasks and only reads."""

    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns
        self._name = options.subscription or position_name(options.patterns)
        self._condition = topics_condition(options.patterns)
        self._position: Position | None = None
        self._target: int | None = None
        self._latest = 0

    # --- what Spark asks the one that decides ---------------------------------------------------------------------

    def initialOffset(self) -> Offset:
        """Only a query without a checkpoint asks. What an earlier query of this name lost is none of its business."""
        with reading(self._options.path) as reader:
            start = starting_after(reader, self._options)
        position = self._open(start)
        position.commit(start)
        if position.gaps():
            position.mark_gaps_told()
        return _offset(start)

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self._options.messages_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        with reading(self._options.path) as reader:
            self._target = reader.last_seq()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Spark asks when the batch before is done, down to its commit log: the position may move on to its end."""
        after = _seq(start)
        position = self._resumed(after)
        position.commit(after)
        self._latest, gaps = position.look()
        self._face_gaps(position, gaps)
        upto = self._latest if self._target is None else min(self._target, self._latest)
        if upto <= after:
            if self._target is not None:  # the query is at its end, and Spark may kill this process without a word
                self.stop()
            return _offset(after)
        return _offset(self._limited(Range(after, upto), limit))

    def _limited(self, asked: Range, limit: ReadLimit) -> int:
        """How far a batch may go that has all of this range to choose from."""
        if isinstance(limit, ReadMaxRows):
            last_allowed = self._seq_of_nth(asked, limit.max_rows)
            return asked.upto if last_allowed is None else last_allowed
        if isinstance(limit, ReadMinRows) and self._target is None:
            return asked.after if self._seq_of_nth(asked, limit.min_rows) is None else asked.upto
        return asked.upto

    def _seq_of_nth(self, asked: Range, n: int) -> int | None:
        return seq_of_nth(self._options.path, asked, self._condition, n)

    def reportLatestOffset(self) -> Offset | None:
        return _offset(self._latest) if self._latest else None

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        asked = Range(_seq(start), _seq(end))
        position = self._resumed(asked.after)
        position.begin(*asked)
        self._face_gaps(position, position.gaps())
        return [RangePartition(part) for part in split(asked, self._options.partitions_min or parallel_tasks())]

    def commit(self, end: Offset) -> None:
        if self._position is not None:
            self._position.commit(_seq(end))

    def stop(self) -> None:
        if self._position is not None:
            self._position.release()
            self._position = None

    def _open(self, start: int) -> Position:
        if self._position is None:
            options = self._options
            self._position = Position.open(options.path, self._name, options.patterns, start=start)
        return self._position

    def _resumed(self, start: int) -> Position:
        """The position of a query that goes on at `start`, which its checkpoint says."""
        if self._position is not None:
            return self._position
        position = self._open(start)
        last, _ = position.look()
        if start > last and self._options.fail_on_data_loss:
            raise SubscriptionError(
                f"the checkpoint stands at seq {start}, and the log ends at {last}: it may be another log",
                where=f"stream {self._name}",
                next="Name the log that the checkpoint belongs to; failOnDataLoss=false waits until it gets there",
            )
        # Nobody noted gaps for the stream while it had no position, nor below a position that now moves back.
        unwatched = Range(start, last if position.is_new else position.found_at)
        runs = position.pruned(unwatched) if unwatched.upto > start else []
        if runs:
            count = sum(last - first + 1 for first, last in runs)
            self._face_loss(f"{count} messages: {told(runs)}")
        return position

    def _face_gaps(self, position: Position, gaps: list[Gap]) -> None:
        if gaps:
            self._face_loss(_gaps_told(gaps))
            position.mark_gaps_told()

    def _face_loss(self, what: str) -> None:
        if self._options.fail_on_data_loss:
            raise data_lost(self._name, what)
        logger.warning("stream %s: retention deleted, before they were read, %s", self._name, what)

    # --- what runs in the tasks -----------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, RangePartition):
            return
        path, part = self._options.path, partition.range
        yield from read_range(path, part.after, part.upto, condition=self._condition, columns=self._columns)
        if self._options.fail_on_data_loss:
            gaps = gaps_in(path, self._name, part)
            if gaps:
                raise data_lost(self._name, _gaps_told(gaps))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_position": None}


def gaps_in(path: str, name: str, part: Range) -> list[Gap]:
    """Gaps of a stream, not told yet, that touch a range. For tasks, which read through ADBC alone."""
    sql = (
        "SELECT from_seq, to_seq, count, why, at FROM gaps "
        "WHERE subscription = ? AND NOT told AND to_seq > ? AND from_seq <= ? ORDER BY number"
    )
    with log_at(path).rows() as rows:
        found = rows.table(sql, (name, part.after, part.upto), like=_GAP_COLUMNS).to_pylist()
    return [Gap(name, row["from_seq"], row["to_seq"], row["count"], row["why"], row["at"]) for row in found]


def data_lost(name: str, what: str) -> SubscriptionError:
    return SubscriptionError(
        f"retention deleted, before they were read, {what}",
        where=f"stream {name}",
        next="To go on without them, restart once with failOnDataLoss=false; to keep it from happening, give the "
        "retention policy keep_unacked or more room",
    )


def _gaps_told(gaps: Sequence[Gap]) -> str:
    return f"{sum(gap.count for gap in gaps)} messages: {told([(gap.from_seq, gap.to_seq) for gap in gaps])}"


def _offset(seq: int) -> Offset:
    return {"seq": seq}


def _seq(offset: Offset) -> int:
    return int(offset["seq"])
