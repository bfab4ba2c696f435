"""Filters that Spark offers, as a range of seqs and SQL. Pure.

Spark trusts what is taken here and does not filter again, so a filter is taken only where SQL means exactly the same:
on `seq`, `topic` and `published_at`, which are never NULL.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from headwater.message.times import TIME_MS_MAX
from headwater.pipeline.source.conditions import both
from headwater.pipeline.source.place import Condition, Range
from headwater.pipeline.source.ranges import overlap

SEQ_MAX = 2**63 - 1
EVERY_SEQ = Range(-(2**63), SEQ_MAX)
IN_VALUES_MAX = 500

_NEVER_NULL = ("seq", "id", "topic", "priority", "published_at", "data", "size")
_NOT_PLAIN = ("\ufffd", "\0")  # stands for bytes that SQL sees and Spark does not; is no text to PostgreSQL
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NOTHING = Condition("FALSE")
# As `columns.times` shows it, whatever was put in by hand.
_PUBLISHED = (
    f"CASE WHEN published_at < 0 THEN 0 WHEN published_at > {TIME_MS_MAX} THEN {TIME_MS_MAX} ELSE published_at END"
)


class Pushed(NamedTuple):
    """What the source takes over: read these seqs, and of them what the condition lets through."""

    range: Range
    condition: Condition
    unhandled: list[Filter]


class _Taken(NamedTuple):
    range: Range = EVERY_SEQ
    condition: Condition = Condition()


def push(filters: Iterable[Filter]) -> Pushed:
    whole, condition, unhandled = EVERY_SEQ, Condition(), []
    for each in filters:
        taken = _take(each)
        if taken is None:
            unhandled.append(each)
        else:
            whole = overlap(whole, taken.range)
            if taken.condition != Condition():
                condition = taken.condition if condition == Condition() else both(condition, taken.condition)
    return Pushed(whole, condition, unhandled)


def _take(filter: Filter) -> _Taken | None:
    path: tuple[str, ...] = getattr(filter, "attribute", ())
    if len(path) != 1:
        return None
    if isinstance(filter, IsNotNull):
        return _Taken() if path[0] in _NEVER_NULL else None
    value = getattr(filter, "value", None)
    if path[0] == "seq":
        return _take_seq(filter, value)
    if path[0] == "topic":
        return _take_topic(filter, value)
    if path[0] == "published_at" and isinstance(value, datetime) and value.tzinfo is not None:
        return _take_time(filter, (value - _EPOCH) // timedelta(microseconds=1))
    return None


def _take_seq(filter: Filter, value: object) -> _Taken | None:
    if isinstance(filter, In) and isinstance(value, (list, tuple)):
        seqs = [seq for seq in value if seq is not None]  # NULL equals nothing
        if not all(map(_is_whole, seqs)) or len(seqs) > IN_VALUES_MAX:
            return None
        if not seqs:
            return _Taken(condition=_NOTHING)
        return _Taken(Range(min(seqs) - 1, max(seqs)), Condition(f"seq IN ({_marks(seqs)})", tuple(seqs)))
    if not isinstance(value, int) or not _is_whole(value):
        return None
    match filter:
        case EqualTo() | EqualNullSafe():
            return _Taken(Range(value - 1, value))
        case GreaterThan():
            return _Taken(Range(value, SEQ_MAX))
        case GreaterThanOrEqual():
            return _Taken(Range(value - 1, SEQ_MAX))
        case LessThan():
            return _Taken(Range(EVERY_SEQ.after, value - 1))
        case LessThanOrEqual():
            return _Taken(Range(EVERY_SEQ.after, value))
    return None


def _take_topic(filter: Filter, value: object) -> _Taken | None:
    if isinstance(filter, In) and isinstance(value, (list, tuple)):
        topics = [topic for topic in value if topic is not None]
        if not all(map(_is_plain, topics)) or len(topics) > IN_VALUES_MAX:
            return None
        return _Taken(condition=Condition(f"topic IN ({_marks(topics)})", tuple(topics)) if topics else _NOTHING)
    if not isinstance(value, str) or not _is_plain(value):
        return None
    match filter:
        case EqualTo() | EqualNullSafe():
            return _Taken(condition=Condition("topic = ?", (value,)))
        case StringStartsWith():
            return _Taken(condition=Condition("substr(topic, 1, length(?)) = ?", (value, value)))
    return None


def _take_time(filter: Filter, at_us: int) -> _Taken | None:
    """The log has milliseconds, Spark microseconds: a time between two of them is rounded so that the same rows fit."""
    at_ms, rest = divmod(at_us, 1000)
    next_ms = at_ms + 1 if rest else at_ms
    match filter:
        case EqualTo() | EqualNullSafe():
            return _Taken(condition=_NOTHING if rest else Condition(f"{_PUBLISHED} = ?", (at_ms,)))
        case GreaterThan():
            return _Taken(condition=Condition(f"{_PUBLISHED} > ?", (at_ms,)))
        case GreaterThanOrEqual():
            return _Taken(condition=Condition(f"{_PUBLISHED} >= ?", (next_ms,)))
        case LessThan():
            return _Taken(condition=Condition(f"{_PUBLISHED} < ?", (next_ms,)))
        case LessThanOrEqual():
            return _Taken(condition=Condition(f"{_PUBLISHED} <= ?", (at_ms,)))
    return None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < SEQ_MAX


def _is_plain(value: object) -> bool:
    return isinstance(value, str) and not any(char in value for char in _NOT_PLAIN)


def _marks(values: list[int] | list[str]) -> str:
    return ", ".join("?" * len(values))
