"""The data source `headwater`: `spark.read`, `spark.readStream`, `df.write` and `df.writeStream` with that format."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import and_
from typing import Any

import pyarrow as pa
from pyspark.sql import datasource as ds
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming import datasource as streaming
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from headwater.broker.subscribe import check_subscription_id
from headwater.errors import InvalidOptionError, SubscriptionError
from headwater.formats import TIME_MS_MAX, time_ms
from headwater.pipeline.columns import TABLE_SCHEMAS, spark_schema
from headwater.pipeline.logs import (
    EVERY_SEQ,
    PARTITIONS_MAX,
    Condition,
    Range,
    backend_of,
    log_path,
    open_reader,
    read_range,
    read_table,
    seq_after,
    seq_of_nth,
    split,
    topics_condition,
)
from headwater.pipeline.options import SEQ_MAX, Options, flag, one_of, whole
from headwater.pipeline.position import Position, position_name
from headwater.ports.records import Gap
from headwater.ports.store import Reader
from headwater.topics import Pattern, parse_pattern

IN_VALUES_MAX = 500
RUNS_SHOWN_MAX = 5
_FILTERS_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"

logger = logging.getLogger("headwater.pipeline")


class HeadwaterDataSource(ds.DataSource):
    """A log as tables. Options: `SourceOptions` for reading, `SinkOptions` for writing."""

    @classmethod
    def name(cls) -> str:
        return "headwater"

    def schema(self) -> StructType:
        """Spark asks for that of a sink too, which has other options."""
        return spark_schema(TABLE_SCHEMAS[Options(self.options).get("table", one_of(*TABLE_SCHEMAS), "messages")])

    def reader(self, schema: StructType) -> DataSourceReader:
        options = SourceOptions(self.options)
        columns = chosen_columns(options.table, schema)
        if options.table != "messages":
            return TableReader(options, columns)
        takes_filters = options.filter_pushdown and _spark_offers_filters()
        return FilteredMessagesReader(options, columns) if takes_filters else MessagesReader(options, columns)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = SourceOptions(self.options)
        if options.table != "messages":
            raise InvalidOptionError(
                f"the table {options.table} changes in place, so it cannot be streamed",
                where="table",
                next="Read it with spark.read; only the table messages can be streamed",
            )
        if options.ending_seq is not None:
            raise InvalidOptionError("a stream has no end", where="endingSeq", next="Use trigger(availableNow=True)")
        return MessagesStreamReader(options, chosen_columns(options.table, schema))

    def writer(self, schema: StructType, overwrite: bool) -> ds.DataSourceWriter:
        from headwater.pipeline.sink import BatchWriter  # not needed for reading

        return BatchWriter(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> ds.DataSourceStreamWriter:
        from headwater.pipeline.sink import StreamWriter

        return StreamWriter(self.options, schema, overwrite)


def chosen_columns(table: str, asked: StructType) -> tuple[str, ...]:
    """The names of the columns in a user's schema, which may leave out and reorder them, but not change their types."""
    types = {each.name: each.dataType for each in spark_schema(TABLE_SCHEMAS[table])}
    for name, found in ((each.name, each.dataType) for each in asked):
        if name not in types:
            next = f"Choose from {', '.join(types)}"
            raise InvalidOptionError(f"there is no column {name!r} in {table}", where="schema", next=next)
        if found != types[name]:
            why = f"{name} is {types[name].simpleString()}, not {found.simpleString()}"
            next = f"Read it as it is and convert it then, with col({name!r}).cast(…)"
            raise InvalidOptionError(why, where="schema", next=next)
    return tuple(asked.names)


def _spark_offers_filters() -> bool:
    """Whether Spark pushes filters down in this process, which it starts for that if
    `spark.sql.python.filterPushdown.enabled` is set. Everywhere else it refuses a reader that takes filters."""
    main_spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _FILTERS_WORKER in sys.modules or getattr(main_spec, "name", None) == _FILTERS_WORKER


# --- options ----------------------------------------------------------------------------------------------------------


class SourceOptions:
    def __init__(self, given: Mapping[str, str]) -> None:
        options = Options(given)
        self.path = log_path(options.get("path", str, ""))  # may hold a password
        self.table = options.get("table", one_of(*TABLE_SCHEMAS), "messages")
        self.patterns: tuple[Pattern, ...] = options.get("topics", _patterns, ())  # none are all topics
        self.starting_seq = options.get("startingSeq", _starting_seq, 0)
        self.starting_ms = options.get("startingTimestamp", _starting_ms, None)
        self.ending_seq = options.get("endingSeq", whole(0), None)
        self.messages_per_trigger = options.get("maxMessagesPerTrigger", whole(1), None)
        self.partitions_min = options.get("minPartitions", whole(1, PARTITIONS_MAX), None)
        self.filter_pushdown = options.get("filterPushdown", flag, False)
        self.fail_on_data_loss = options.get("failOnDataLoss", flag, True)
        self.subscription = options.get("subscription", check_subscription_id, None)
        options.check_unknown()
        if "startingSeq" in options and "startingTimestamp" in options:
            why = "startingSeq is given as well, and may say something else"
            raise InvalidOptionError(why, where="startingTimestamp", next="Give one of them")


def _patterns(text: str) -> tuple[Pattern, ...]:
    texts = dict.fromkeys(each.strip() for each in text.split(",")) if text else ()
    return tuple(map(parse_pattern, texts))


def _starting_seq(text: str) -> int | None:
    """The first seq wanted; None for those to come."""
    match text.lower():
        case "earliest":
            return 0
        case "latest":
            return None
    try:
        return whole(0)(text)
    except InvalidOptionError as exc:
        why = f"this is earliest, latest or a seq, not {text!r}"
        raise InvalidOptionError(
            why, next="Give the first seq that is wanted; for a time use startingTimestamp"
        ) from exc


def _starting_ms(text: str) -> int:
    if text.isdecimal():
        return whole(0, TIME_MS_MAX)(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError as exc:
        next = "Write 2026-01-31T12:00:00Z, or milliseconds since 1970"
        raise InvalidOptionError(f"this is no time: {text!r}", next=next) from exc
    if at.tzinfo is None:
        raise InvalidOptionError(f"{text!r} has no time zone", next=f"Write {at.isoformat()}Z if UTC is meant")
    return time_ms(at, "startingTimestamp")


# --- reading once -----------------------------------------------------------------------------------------------------


class TableReader(DataSourceReader):
    """A table other than `messages`, in one partition."""

    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(self._options.table)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        for batch in read_table(self._options.path, self._options.table):
            yield batch.select(list(self._columns))


def _partitions(whole: Range, options: SourceOptions) -> list[InputPartition]:
    """About as many as run at once: what a cluster has cannot be asked from here, so `minPartitions` can say it."""
    return [InputPartition(part) for part in split(whole, options.partitions_min or os.cpu_count() or 1)]


class MessagesReader(DataSourceReader):
    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns
        self._condition = topics_condition(options.patterns)

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        with backend_of(options.path).snapshot() as snapshot:
            last = snapshot.reader.last_seq()
            upto = last if options.ending_seq is None else min(options.ending_seq, last)
            asked = Range(starting_after(snapshot.reader, options), upto).overlap(self._condition.seqs)
            first = seq_after(snapshot, asked.after)  # retention may have deleted much before it
        return [] if first is None else _partitions(asked.overlap(Range(first - 1, asked.upto)), options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:  # Spark makes one up where there are none
            return iter(())
        return read_range(self._options.path, *partition.value, condition=self._condition, columns=self._columns)


class FilteredMessagesReader(MessagesReader):
    """Takes filters from Spark, only on request (`filterPushdown`): Spark 4.3 keeps what a filtered query planned in
    the DataFrame it came from, and the next query over the same DataFrame, or a second branch of the same query, then
    gets the rows of the first. Safe is a DataFrame that one query uses once."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        pushed, unhandled = push(filters)
        self._condition &= pushed
        return unhandled


def starting_after(reader: Reader, options: SourceOptions) -> int:
    """The seq after which the first wanted message comes."""
    if options.starting_ms is not None:
        return reader.seq_before(options.starting_ms)
    first = options.starting_seq
    if first is None:
        return reader.last_seq()
    runs = reader.pruned(first, reader.last_seq()) if first and options.fail_on_data_loss else []
    if runs:
        raise InvalidOptionError(
            f"of what startingSeq asks for, retention has deleted {_messages(runs)}",
            where=backend_of(options.path).name,
            next="Start at what is there with startingSeq=earliest, or read on without them with failOnDataLoss=false",
        )
    return max(0, first - 1)


def _messages(runs: Sequence[tuple[int, int]], count: int | None = None) -> str:
    """How many messages were in these runs of seqs, and the first runs."""
    shown = [f"{first}" if first == last else f"{first} to {last}" for first, last in runs[:RUNS_SHOWN_MAX]]
    more = f" and {len(runs) - RUNS_SHOWN_MAX} more runs" if len(runs) > RUNS_SHOWN_MAX else ""
    count = sum(last - first + 1 for first, last in runs) if count is None else count
    return f"{count} messages: {', '.join(shown)}{more}"


# --- filters ----------------------------------------------------------------------------------------------------------
# Spark trusts a filter that is taken here and does not filter again, so it is taken only where SQL means exactly the
# same: on `seq`, `topic` and `published_at`, which are never NULL.

_NEVER_NULL = ("seq", "id", "topic", "priority", "published_at", "data", "size")
_NOT_PLAIN = ("\ufffd", "\0")  # stands for bytes that SQL sees and Spark does not; is no text to PostgreSQL
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# As `logs.timestamps` shows it, in rows inserted by hand too.
_PUBLISHED = (
    f"CASE WHEN published_at < 0 THEN 0 WHEN published_at > {TIME_MS_MAX} THEN {TIME_MS_MAX} ELSE published_at END"
)


_BOUNDS: dict[type[Filter], Callable[[int], Range]] = {
    ds.EqualTo: lambda value: Range(value - 1, value),
    ds.EqualNullSafe: lambda value: Range(value - 1, value),
    ds.GreaterThan: lambda value: Range(value, SEQ_MAX),
    ds.GreaterThanOrEqual: lambda value: Range(value - 1, SEQ_MAX),
    ds.LessThan: lambda value: Range(EVERY_SEQ.after, value - 1),
    ds.LessThanOrEqual: lambda value: Range(EVERY_SEQ.after, value),
}
"""The whole numbers that a comparison lets through."""


def push(filters: Iterable[Filter]) -> tuple[Condition, list[Filter]]:
    """What the filters that are taken leave, and those left to Spark."""
    found = [(each, _pushed(each)) for each in filters]
    taken = (condition for _, condition in found if condition is not None)
    return reduce(and_, taken, Condition()), [each for each, condition in found if condition is None]


def _pushed(filter: Filter) -> Condition | None:
    column, *nested = getattr(filter, "attribute", ("",))
    value: Any = getattr(filter, "value", None)
    bounds = _BOUNDS.get(type(filter))
    match "" if nested else column, filter:
        case _, ds.IsNotNull():
            return Condition() if column in _NEVER_NULL and not nested else None
        case "seq" | "topic", ds.In():
            return _pushed_in(column, [each for each in value if each is not None])  # NULL equals nothing
        case "topic", ds.EqualTo() | ds.EqualNullSafe() if _is_plain(value):
            return Condition("topic = ?", (value,))
        case "topic", ds.StringStartsWith() if _is_plain(value):
            return Condition("substr(topic, 1, length(?)) = ?", (value, value))
        case "seq", _ if bounds is not None and _is_seq(value):
            return Condition(seqs=bounds(value))
        case "published_at", _ if bounds is not None and isinstance(value, datetime) and value.tzinfo is not None:
            after, upto = bounds((value - _EPOCH) // timedelta(microseconds=1))
            # The log has milliseconds, Spark microseconds.
            return Condition(f"{_PUBLISHED} > ? AND {_PUBLISHED} <= ?", (after // 1000, upto // 1000))
    return None


def _pushed_in(column: str, values: list[Any]) -> Condition | None:
    if len(values) > IN_VALUES_MAX or not all(map(_is_seq if column == "seq" else _is_plain, values)):
        return None
    if not values:
        return Condition("FALSE")
    seqs = Range(min(values) - 1, max(values)) if column == "seq" else EVERY_SEQ
    return Condition(f"{column} IN ({', '.join('?' * len(values))})", tuple(values), seqs=seqs)


def _is_seq(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < SEQ_MAX


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) and not any(char in value for char in _NOT_PLAIN)


# --- streaming --------------------------------------------------------------------------------------------------------

Offset = dict[str, Any]
"""{"seq": n}: every message at or below n has been read."""


class MessagesStreamReader(DataSourceStreamReader, streaming.SupportsTriggerAvailableNow):
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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_position": None}

    def initialOffset(self) -> Offset:
        """Only a query without a checkpoint asks; what an earlier query of this name lost does not concern it."""
        with open_reader(self._options.path) as reader:
            start = starting_after(reader, self._options)
        position = self._open(start)
        position.commit(start)
        position.mark_gaps_reported()
        return {"seq": start}

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self._options.messages_per_trigger
        return streaming.ReadAllAvailable() if limit is None else streaming.ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        with open_reader(self._options.path) as reader:
            self._target = reader.last_seq()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Spark asks when the batch before is done, down to its commit log: the position may move on to its end."""
        after = int(start["seq"])
        position = self._resumed(after)
        position.commit(after)
        with position.read() as reader:
            self._latest = reader.last_seq()
        self._report_gaps(position)
        upto = self._latest if self._target is None else min(self._target, self._latest)
        if upto > after:
            rows = limit.max_rows if isinstance(limit, streaming.ReadMaxRows) else SEQ_MAX
            end = seq_of_nth(self._options.path, Range(after, upto), self._condition, rows) if rows < SEQ_MAX else None
            return {"seq": upto if end is None else end}
        if self._target is not None:  # the query is at its end, and Spark may kill this process without notice
            self.stop()
        return start

    def reportLatestOffset(self) -> Offset | None:
        return {"seq": self._latest} if self._latest else None

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        asked = Range(int(start["seq"]), int(end["seq"]))
        position = self._resumed(asked.after)
        position.begin(*asked)
        self._report_gaps(position)
        return _partitions(asked, self._options)

    def commit(self, end: Offset) -> None:
        if self._position is not None:
            self._position.commit(int(end["seq"]))

    def stop(self) -> None:
        if self._position is not None:
            self._position.release()
            self._position = None

    def _open(self, start: int) -> Position:
        if self._position is None:
            self._position = Position.open(self._options.path, self._name, self._options.patterns, start=start)
        return self._position

    def _resumed(self, start: int) -> Position:
        """The position of a query that resumes at `start`, which is in its checkpoint."""
        if self._position is not None:
            return self._position
        position = self._open(start)
        with position.read() as reader:
            last = reader.last_seq()
            # No gaps were recorded for the stream while it had no position, nor below a position that now moves back.
            unwatched = last if position.found_at is None else position.found_at
            runs = reader.pruned(start + 1, unwatched) if unwatched > start else []
        if start > last and self._options.fail_on_data_loss:
            raise SubscriptionError(
                f"the checkpoint stands at seq {start}, and the log ends at {last}: it may be another log",
                where=f"stream {self._name}",
                next="Name the log that the checkpoint belongs to; failOnDataLoss=false waits until it gets there",
            )
        if runs:
            self._report_loss(_messages(runs))
        return position

    def _report_gaps(self, position: Position) -> None:
        gaps = position.gaps()
        if gaps:
            self._report_loss(_gap_messages(gaps))
            position.mark_gaps_reported()

    def _report_loss(self, what: str) -> None:
        why = f"retention deleted, before they were read, {what}"
        if self._options.fail_on_data_loss:
            raise SubscriptionError(
                why,
                where=f"stream {self._name}",
                next="To go on without them, restart once with failOnDataLoss=false; to keep it from happening, give "
                "a retention policy with keep_unacked, or larger limits",
            )
        logger.warning("stream %s: %s", self._name, why)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition; runs in the tasks."""
        if partition.value is None:
            return
        path, (after, upto) = self._options.path, partition.value
        yield from read_range(path, after, upto, condition=self._condition, columns=self._columns)
        if self._options.fail_on_data_loss:
            with open_reader(path) as reader:
                gaps = [gap for gap in reader.gaps(self._name) if gap.to_seq > after and gap.from_seq <= upto]
            if gaps:
                self._report_loss(_gap_messages(gaps))


def _gap_messages(gaps: Sequence[Gap]) -> str:
    return _messages([(gap.from_seq, gap.to_seq) for gap in gaps], count=sum(gap.count for gap in gaps))
