"""A filter that is taken keeps exactly the rows that Spark would keep."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from postgres_server import PostgresServer
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringStartsWith,
)

import headwater
from headwater.message import TIME_MS_MAX
from headwater.pipeline.source.pushdown import push
from headwater.pipeline.source.reading import read_range

BASE = datetime(2026, 1, 1, tzinfo=UTC)
BASE_MS = int(BASE.timestamp() * 1000)
TOPICS: list[str | bytes] = ["a", "a.b", "ab", "é.x", "é", "a\x7fb", b"a\x7f\x80", b"a\xff", "z\U0010ffff", "日本"]

COMPARISONS: dict[type[Filter], Callable[[Any, Any], bool]] = {
    EqualTo: lambda a, b: a == b,
    EqualNullSafe: lambda a, b: a == b,
    GreaterThan: lambda a, b: a > b,
    GreaterThanOrEqual: lambda a, b: a >= b,
    LessThan: lambda a, b: a < b,
    LessThanOrEqual: lambda a, b: a <= b,
    StringStartsWith: lambda a, b: a.startswith(b),
    In: lambda a, b: a in b,
}
ORDERED = [EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual]
TEXTS = st.sampled_from(["", "a", "a.", "ab", "é", "a\x7f", "z", "\U0010ffff", "日", "x' OR 1=1 --"]) | st.text(
    max_size=3
)
MOMENTS = st.integers(-2_500, 6_500).map(lambda us: BASE + timedelta(microseconds=us)) | st.datetimes(
    timezones=st.just(UTC)
)
SEQS = st.integers(-3, 14)
FILTERS = (
    st.builds(lambda kind, value: kind(("seq",), value), st.sampled_from(ORDERED), SEQS)
    | st.builds(lambda value: In(("seq",), value), st.lists(SEQS | st.none(), max_size=4).map(tuple))
    | st.builds(lambda kind, value: kind(("topic",), value), st.sampled_from([EqualTo, StringStartsWith]), TEXTS)
    | st.builds(lambda value: In(("topic",), value), st.lists(TEXTS | st.none(), max_size=4).map(tuple))
    | st.builds(lambda kind, value: kind(("published_at",), value), st.sampled_from(ORDERED), MOMENTS)
    | st.sampled_from([IsNotNull(("seq",)), IsNotNull(("topic",)), IsNotNull(("published_at",))])
)


MixedLog = tuple[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def mixed_log(
    tmp_path_factory: pytest.TempPathFactory, make_log: Callable[[Path], str], put: Callable[..., None]
) -> MixedLog:
    return filled(make_log(tmp_path_factory.mktemp("pushdown") / "log.db"), TOPICS, put)


@pytest.fixture(scope="module")
def mixed_log_in_postgres(postgres: PostgresServer, put: Callable[..., None]) -> MixedLog:
    path = postgres.new_database()
    headwater.open(path, housekeeping=None).close()
    return filled(path, [topic for topic in TOPICS if isinstance(topic, str)], put)  # it has no text that is no UTF-8


def filled(path: str, topics: list[str | bytes], put: Callable[..., None]) -> MixedLog:
    times = [BASE_MS + n for n in range(-2, len(topics) - 4)] + [-5, TIME_MS_MAX + 7]
    rows = [
        {"topic": topic, "data": "1", "published_at": at, "checked": 2} for topic, at in zip(topics, times, strict=True)
    ]
    put(path, rows)
    found = pa.Table.from_batches(read_range(path, 0, 100)).to_pylist()
    assert len(found) == len(topics)
    return path, found


def keeps(filter: Filter, row: dict[str, Any]) -> bool:
    if isinstance(filter, IsNotNull):
        return row[filter.attribute[0]] is not None
    value: Any = filter.value  # type: ignore[attr-defined]
    return COMPARISONS[type(filter)](row[filter.attribute[0]], value)  # type: ignore[attr-defined]


@settings(max_examples=150, deadline=None)
@given(st.lists(FILTERS, min_size=1, max_size=3))
def test_what_is_taken_and_what_is_left_is_what_python_keeps(mixed_log: MixedLog, filters: list[Filter]) -> None:
    check_filters(mixed_log, filters)


@settings(max_examples=20, deadline=None)  # each of them connects anew
@given(st.lists(FILTERS, min_size=2, max_size=5))
def test_in_postgres_too(mixed_log_in_postgres: MixedLog, filters: list[Filter]) -> None:
    check_filters(mixed_log_in_postgres, filters[:1])
    check_filters(mixed_log_in_postgres, filters)


def check_filters(log: MixedLog, filters: list[Filter]) -> None:
    path, rows = log
    pushed = push(filters)
    read = [
        row
        for batch in read_range(
            path, max(0, pushed.range.after), min(100, pushed.range.upto), condition=pushed.condition
        )
        for row in batch.to_pylist()
    ]
    left = [row["seq"] for row in read if all(keeps(filter, row) for filter in pushed.unhandled)]
    assert left == [row["seq"] for row in rows if all(keeps(filter, row) for filter in filters)]


def test_the_filters_of_the_issue_are_taken() -> None:
    filters: list[Filter] = [
        GreaterThan(("seq",), 5),
        LessThanOrEqual(("seq",), 9),
        In(("seq",), (6, 8)),
        EqualTo(("topic",), "a"),
        In(("topic",), ("a", "b")),
        StringStartsWith(("topic",), "a"),
        GreaterThanOrEqual(("published_at",), BASE),
        IsNotNull(("seq",)),
    ]
    pushed = push(filters)
    assert pushed.unhandled == []
    assert pushed.range == (5, 8)


def test_what_sql_does_not_mean_exactly_is_left_to_spark() -> None:
    left: list[Filter] = [
        EqualTo(("topic",), "a\ufffd"),
        EqualTo(("type",), "a"),
        EqualTo(("headers", "a"), "a"),
        EqualTo(("published_at",), datetime(2026, 1, 1)),
        EqualTo(("seq",), None),
        EqualTo(("seq",), True),
        In(("seq",), tuple(range(10_000))),
        IsNotNull(("type",)),
        IsNull(("seq",)),
        Not(EqualTo(("seq",), 1)),
        StringContains(("topic",), "a"),
    ]
    assert push(left).unhandled == left


def test_what_a_user_writes_is_bound_never_part_of_the_sql() -> None:
    evil = "x' OR 1=1 --"
    pushed = push([EqualTo(("topic",), evil), StringStartsWith(("topic",), evil)])
    assert evil not in pushed.condition.sql
    assert set(pushed.condition.params) == {evil}
