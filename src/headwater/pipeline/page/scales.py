"""From values to places and round ticks: 1, 2 and 5 for numbers, whole hours, days and months for times. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from headwater.pipeline.page.words import clock, day, day_and_year, epoch_seconds, from_epoch, month, short, size, span

TICKS_MAX = 6
TIME_TICKS_MAX = 9
COLUMNS_MIN = 12
TICKS_APART = 0.12  # of the axis, in a small chart
HOUR_S, DAY_S, WEEK_S = 3600, 86_400, 604_800
YEARLESS_S_MAX = 300 * DAY_S  # a longer history has days of the same name
MONDAY_S = 4 * DAY_S  # 1970 began on a Thursday: the first Monday

_TIME_STEPS_S = (*(HOUR_S * hours for hours in (1, 2, 3, 6, 12)), DAY_S, 2 * DAY_S, WEEK_S, 2 * WEEK_S)
_MONTH_STEPS = (1, 2, 3, 6, 12, 24, 60, 120, 240, 600, 1200, 2400, 6000, 12_000, 24_000, 60_000, 120_000)
_SPAN_TICKS_MS = (1, 10, 100, 1000, 10_000, 60_000, 600_000, 3_600_000, 36_000_000, 86_400_000, 864_000_000)
_GRID_STEPS_S = (HOUR_S, 3 * HOUR_S, 6 * HOUR_S, 12 * HOUR_S, DAY_S, WEEK_S, 4 * WEEK_S)


@dataclass(frozen=True)
class Tick:
    at: float  # 0..1 along the axis
    label: str


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high`, mapped to 0..1; what lies outside is put on the edge."""

    low: float
    high: float
    ticks: list[Tick]
    logarithmic: bool = False

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        return min(1.0, max(0.0, (value - low) / (high - low)))


# --- numbers --------------------------------------------------------------------------------------------------------


def round_step(high: float, ticks_max: int = TICKS_MAX) -> float:
    """The smallest of 1, 2, 5 times a power of ten that reaches `high` in fewer than `ticks_max` steps."""
    rough = high / max(1, ticks_max - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    for factor in (1, 2, 5, 10):
        if factor * power * (1 + 1e-9) >= rough:
            return factor * power
    return 10 * power  # pragma: no cover


def count_axis(high: float, ticks_max: int = TICKS_MAX) -> Axis:
    """From 0 to a round number at or above `high`; whole steps, as nobody publishes half a message."""
    return _linear(max(1.0, round_step(max(high, 1.0), ticks_max)), high, short)


def size_axis(high: float, ticks_max: int = TICKS_MAX) -> Axis:
    """The same for bytes: round in the unit that its labels have."""
    unit = 1024.0 ** max(0, math.floor(math.log(max(high, 1.0), 1024)))
    return _linear(max(1.0, round_step(max(high, 1.0) / unit, ticks_max) * unit), high, size)


def _linear(step: float, high: float, spell: Callable[[float], str]) -> Axis:
    steps = max(1, math.ceil(high / step - 1e-9))
    return Axis(0.0, steps * step, [Tick(index / steps, spell(index * step)) for index in range(steps + 1)])


def span_axis(low_ms: float, high_ms: float) -> Axis:
    """Logarithmic, between the usual spans around the values: `1 ms … 10 s`."""
    low_ms = max(low_ms, _SPAN_TICKS_MS[0])
    low = max(tick for tick in _SPAN_TICKS_MS if tick <= low_ms)
    above = [tick for tick in _SPAN_TICKS_MS if tick >= high_ms and tick > low]
    high = above[0] if above else max(high_ms, low * 10)
    bare = Axis(low, high, [], logarithmic=True)
    ticks = [Tick(bare.at(tick), span(tick)) for tick in _SPAN_TICKS_MS if low <= tick <= high]
    return Axis(low, high, _apart(ticks), logarithmic=True)


def _apart(ticks: list[Tick]) -> list[Tick]:
    """Without those whose labels would stand on each other; the lowest stays."""
    kept: list[Tick] = []
    for tick in ticks:
        if not kept or tick.at - kept[-1].at >= TICKS_APART:
            kept.append(tick)
    return kept


# --- times ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimeGrid:
    """Equal columns of time, from `start_s` on."""

    start_s: int
    step_s: int
    columns: int

    def column(self, at_s: int) -> int:
        return min(self.columns - 1, max(0, (at_s - self.start_s) // self.step_s))

    def at(self, at_s: float) -> float:
        return min(1.0, max(0.0, (at_s - self.start_s) / (self.step_s * self.columns)))

    def starts(self, column: int) -> datetime:
        return from_epoch(self.start_s + column * self.step_s)

    def label(self, column: int) -> str:
        start = self.starts(column)
        if self.step_s % DAY_S:
            return f"{day(start)} {clock(start)}"
        return day_and_year(start) if self.step_s * self.columns > YEARLESS_S_MAX else day(start)

    def says_step(self) -> str:
        if self.step_s % WEEK_S == 0:
            return "week" if self.step_s == WEEK_S else f"{self.step_s // WEEK_S} weeks"
        if self.step_s % DAY_S == 0:
            return "day"
        return "hour" if self.step_s == HOUR_S else f"{self.step_s // HOUR_S} hours"


def time_grid(first_s: int, last_s: int, columns_max: int) -> TimeGrid:
    """The finest grid of at most `columns_max` columns that holds both; hours, then days, then weeks.

    `columns_max` is 2 or more: two moments around the origin share no column of any width. A short history gets
    empty columns before it: one bar as wide as the page says nothing.
    """
    for step in _grid_steps():
        start = _floor(first_s, step)
        columns = (max(first_s, last_s) - start) // step + 1
        if columns <= columns_max:
            spare = max(0, min(COLUMNS_MIN, columns_max) - columns)
            return TimeGrid(start - spare * step, step, columns + spare)
    raise AssertionError("steps grow without end")  # pragma: no cover


def _grid_steps() -> Iterator[int]:
    yield from _GRID_STEPS_S
    for doublings in itertools.count(1):
        yield _GRID_STEPS_S[-1] << doublings


def time_ticks(grid: TimeGrid, ticks_max: int = TIME_TICKS_MAX) -> list[Tick]:
    """Whole hours, days, weeks, months or years within the grid, at most `ticks_max` of them."""
    end = grid.start_s + grid.step_s * grid.columns
    for step in _TIME_STEPS_S:
        first = _floor(grid.start_s + step - 1, step)
        if (end - 1 - first) // step + 1 <= ticks_max:
            return [Tick(grid.at(at), _time_label(at, step)) for at in range(first, end, step)]
    start = from_epoch(grid.start_s)
    month_first = start.year * 12 + start.month - 1
    for months in _MONTH_STEPS:
        found: list[tuple[int, int]] = []
        for index in range(-(-month_first // months) * months, 12 * 9999, months):
            at = epoch_seconds(datetime(index // 12, index % 12 + 1, 1, tzinfo=UTC))
            if at >= end or len(found) > ticks_max:
                break
            if at >= grid.start_s:
                found.append((at, index))
        if len(found) <= ticks_max:
            return [Tick(grid.at(at), str(index // 12) if months >= 12 else _month(index)) for at, index in found]
    return []


def _floor(at_s: int, step_s: int) -> int:
    """Weeks begin on Mondays; everything shorter divides the day."""
    origin = MONDAY_S if step_s % WEEK_S == 0 else 0
    return (at_s - origin) // step_s * step_s + origin


def _time_label(at_s: int, step_s: int) -> str:
    at = from_epoch(at_s)
    return day(at) if step_s >= DAY_S or at_s % DAY_S == 0 else clock(at)


def _month(index: int) -> str:
    return month(datetime(index // 12, index % 12 + 1, 1, tzinfo=UTC))
