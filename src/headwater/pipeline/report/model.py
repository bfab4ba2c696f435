"""What a page is made of: the report's facts, a section as data, and how times and names are written. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from markupsafe import Markup

NAME_CHARS_MAX = 96  # of a topic, handler or subscription in a table
LABEL_CHARS_MAX = 32  # of the same in a chart or its legend
HOUR, DAY, WEEK = timedelta(hours=1), timedelta(days=1), timedelta(weeks=1)
NULLABLE = frozenset({  # columns of gold tables
    "type", "from", "to", "last_version", "oldest_unacked_ms", "handler", "error_signature", "example_error", "trend",
    "limit_kind", "limit", "days_left",
})  # fmt: skip

Row = Mapping[str, Any]

_A_MONDAY = datetime(1970, 1, 5, tzinfo=UTC)
_JOINERS = "\u200c\u200d"  # invisible, but words of some languages and many emoji are spelled with them


@dataclass(frozen=True)
class Report:
    """Everything on the report's page. `tables` are the gold tables by name, rows as dicts; `audit` its document."""

    lake: str
    log: str
    made_at: datetime
    lake_seq: int
    messages: int
    bytes: int
    tables: Mapping[str, list[dict[str, Any]]]
    audit: Mapping[str, Any] | None
    quarantined: int
    notes: list[str]

    def rows(self, table: str) -> list[Row]:
        """The rows that have all values of a gold row: any other was not written by a run."""
        rows = self.tables.get(table, [])
        return [row for row in rows if all(row[key] is not None for key in row.keys() - NULLABLE)]


@dataclass(frozen=True)
class PageTable:
    """Columns begin with `>` for numbers, `~` for names, `=` for bars. The first rows of `total`, if that is more.

    A cell is text, or what the template's macro `cell` draws: a bar, a sparkline, an error, text with a tone.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    total: int = 0
    noun: str = "rows"


@dataclass(frozen=True)
class Section:
    """A panel of a page: a chart, a table, or the reason why there is neither."""

    anchor: str
    heading: str
    half: bool = False
    note: str = ""
    empty: str = ""  # shown if there is nothing else
    text: str = ""  # a sentence in place of a chart that would show one point
    legend: Mapping[str, str] | None = None  # colours by name
    chart: Markup | str = ""
    table: PageTable | None = None
    caption: str = ""


def summed(rows: Iterable[Row], by: str, column: str) -> Counter[Any]:
    totals: Counter[Any] = Counter()
    for row in rows:
        totals[row[by]] += row[column]
    return totals


def grouped(rows: Iterable[Row], *by: str) -> dict[Any, list[Row]]:
    """Rows grouped by the value of a column, or by those of several."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[by[0]] if len(by) == 1 else tuple(row[key] for key in by), []).append(row)
    return groups


def ranked(totals: Mapping[Any, float], shown_max: int) -> list[Any]:
    """The greatest first; equals by name, so that the same data make the same page."""
    return sorted(totals, key=lambda key: (-totals[key], str(key)))[:shown_max]


# --- time: UTC, as the lake writes it -------------------------------------------------------------------------------


def step_of(times: Collection[datetime], columns_max: int = 120) -> timedelta:
    """The finest step of hours, days or weeks that puts all `times` into at most so many columns."""
    span = max(times) - min(times)
    weeks = span // (WEEK * (columns_max - 1)) + 1
    steps = (HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, DAY)
    return next((step for step in steps if span < step * (columns_max - 1)), WEEK * weeks)


def column_of(at: datetime, step: timedelta) -> datetime:
    """When the column that holds `at` begins; weeks do so on Mondays."""
    return at - (at - _A_MONDAY) % step


def unit(step: timedelta) -> str:
    """`hour`, `3 hours`, `week`."""
    noun, length = next(each for each in (("week", WEEK), ("day", DAY), ("hour", HOUR)) if not step % each[1])
    return noun if step == length else f"{step // length} {noun}s"


def day(value: date) -> str:
    return f"{value.day} {value:%b}"


def brief(value: datetime) -> str:
    return f"{day(value)} {value:%H:%M}"


def full(value: datetime) -> str:
    """`14 Nov 2025, 09:00`: the page states once that its times are UTC."""
    value = value.astimezone(UTC)
    return f"{day(value)} {value.year}, {value:%H:%M}"


# --- text from messages ---------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Control characters, direction marks and lone surrogates are shown, not sent: nothing hides in a name."""
    if text.isprintable():
        return text
    return "".join(
        mark if mark.isprintable() or mark == "\n" or mark in _JOINERS else mark.encode("unicode_escape").decode()
        for mark in text
    )


def cut(text: str | None, chars_max: int = NAME_CHARS_MAX, *, otherwise: str = "–") -> str:
    """A long text loses its middle: what tells two of them apart stands at either end."""
    text = clean(text or otherwise)
    if len(text) <= chars_max:
        return text
    head = chars_max // 2
    return f"{text[:head]}…{text[-(chars_max - 1 - head) :]}"


def labels(names: Iterable[str | None], otherwise: str = "–") -> dict[str | None, str]:
    """Short names for a chart, and still different from each other."""
    made: dict[str | None, str] = {}
    for each in names:
        short = cut(each, LABEL_CHARS_MAX, otherwise=otherwise)
        while short in made.values():
            short += "′"
        made[each] = short
    return made
