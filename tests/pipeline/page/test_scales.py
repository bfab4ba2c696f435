"""Ticks are round, few and inside; scales keep order."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.pipeline.page.scales import (
    DAY_S,
    HOUR_S,
    TICKS_MAX,
    WEEK_S,
    count_axis,
    round_step,
    size_axis,
    span_axis,
    time_grid,
    time_ticks,
)
from headwater.pipeline.page.words import epoch_seconds

# Years 2 to 9990: what a message can say, short of where a grid would leave the calendar.
SECONDS = st.integers(min_value=-62_100_000_000, max_value=253_000_000_000)
AMOUNTS = st.floats(min_value=0, max_value=1e18)


@pytest.mark.parametrize(
    ("high", "labels"),
    [
        (0, ["0", "1"]),
        (1, ["0", "1"]),
        (3, ["0", "1", "2", "3"]),
        (7, ["0", "2", "4", "6", "8"]),
        (18_366, ["0", "5k", "10k", "15k", "20k"]),
        (1_000_000, ["0", "200k", "400k", "600k", "800k", "1M"]),
    ],
)
def test_counts_have_ticks_at_round_numbers(high: int, labels: list[str]) -> None:
    assert [tick.label for tick in count_axis(high).ticks] == labels


def test_sizes_have_ticks_that_are_round_in_their_unit() -> None:
    assert [tick.label for tick in size_axis(230 * 2**20).ticks] == [
        "0 B", "50 MiB", "100 MiB", "150 MiB", "200 MiB", "250 MiB",
    ]  # fmt: skip


@given(AMOUNTS)
def test_a_count_axis_reaches_its_highest_value_in_few_whole_steps(high: float) -> None:
    axis = count_axis(high)
    assert axis.high >= high * (1 - 1e-9)
    assert 2 <= len(axis.ticks) <= TICKS_MAX
    step = axis.high / (len(axis.ticks) - 1)
    assert step >= 1
    assert f"{step:.6e}"[0] in "125"


@given(st.floats(min_value=1e-3, max_value=1e18), st.integers(min_value=2, max_value=12))
def test_a_round_step_is_one_two_or_five(high: float, ticks_max: int) -> None:
    step = round_step(high, ticks_max)
    assert f"{step:.6e}"[0] in "125"
    assert step * (ticks_max - 1) >= high * (1 - 1e-6)


@given(AMOUNTS, AMOUNTS, AMOUNTS)
def test_axes_keep_order_and_stay_inside(high: float, one: float, other: float) -> None:
    for axis in (count_axis(high), size_axis(high), span_axis(min(one, other), high)):
        low_at, high_at = axis.at(min(one, other)), axis.at(max(one, other))
        assert 0 <= low_at <= high_at <= 1


def test_spans_are_labelled_with_usual_spans() -> None:
    assert [tick.label for tick in span_axis(3, 240_000).ticks] == [
        "1 ms", "10 ms", "100 ms", "1 s", "10 s", "1 min", "10 min",
    ]  # fmt: skip


@given(AMOUNTS, AMOUNTS)
def test_span_ticks_ascend_with_room_between_them(low: float, high: float) -> None:
    places = [tick.at for tick in span_axis(min(low, high), max(low, high)).ticks]
    assert places
    assert all(later - earlier >= 0.12 for earlier, later in itertools.pairwise(places))


@given(SECONDS, SECONDS, st.integers(min_value=2, max_value=200))
def test_a_grid_holds_both_ends_in_at_most_its_columns(one: int, other: int, columns_max: int) -> None:
    first, last = min(one, other), max(one, other)
    grid = time_grid(first, last, columns_max)
    assert 1 <= grid.columns <= columns_max
    assert grid.start_s <= first
    assert last < grid.start_s + grid.step_s * grid.columns
    assert 0 <= grid.column(first) <= grid.column(last) == grid.columns - 1
    assert all(grid.label(column) for column in (0, grid.columns - 1))


@given(SECONDS, st.integers(min_value=0, max_value=400 * 366 * DAY_S), st.integers(min_value=2, max_value=12))
def test_time_ticks_are_few_ascending_and_within_the_grid(first: int, length: int, ticks_max: int) -> None:
    places = [tick.at for tick in time_ticks(time_grid(first, first + length, 120), ticks_max)]
    assert len(places) <= ticks_max
    assert places == sorted(set(places))
    assert all(0 <= place < 1 for place in places)


@pytest.mark.parametrize(
    ("days", "step_s", "said"),
    [(1, HOUR_S, "hour"), (14, 3 * HOUR_S, "3 hours"), (100, DAY_S, "day"), (700, WEEK_S, "week")],
)
def test_a_long_history_gets_days_then_weeks(days: int, step_s: int, said: str) -> None:
    first = epoch_seconds(datetime(2025, 1, 1, tzinfo=UTC))
    grid = time_grid(first, first + days * DAY_S - HOUR_S, 120)
    assert (grid.step_s, grid.says_step()) == (step_s, said)


def test_weeks_begin_on_mondays() -> None:
    first = epoch_seconds(datetime(2025, 1, 1, tzinfo=UTC))
    grid = time_grid(first, first + 700 * DAY_S, 120)
    assert grid.starts(0).weekday() == 0


def test_hours_are_told_by_the_clock_and_midnight_by_its_day() -> None:
    first = epoch_seconds(datetime(2025, 11, 14, 20, tzinfo=UTC))
    labels = [tick.label for tick in time_ticks(time_grid(first, first + 11 * HOUR_S, 120))]
    assert labels == ["20:00", "22:00", "15 Nov", "02:00", "04:00", "06:00"]


def test_months_and_years_are_told_by_name() -> None:
    first = epoch_seconds(datetime(2025, 1, 15, tzinfo=UTC))
    months = [tick.label for tick in time_ticks(time_grid(first, first + 200 * DAY_S, 120), 7)]
    assert months == [f"{name} 2025" for name in ("Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug")]
    years = [tick.label for tick in time_ticks(time_grid(first, first + 9 * 365 * DAY_S, 120), 9)]
    assert years == ["2026", "2028", "2030", "2032", "2034"]


def test_columns_of_a_history_of_years_say_their_year() -> None:
    first = epoch_seconds(datetime(2025, 1, 6, tzinfo=UTC))
    assert time_grid(first, first + 700 * DAY_S, 120).label(0) == "6 Jan 2025"
    assert time_grid(first, first + 50 * DAY_S, 120).label(0) == "6 Jan 00:00"
