"""What a page is made of, and the few sums that several of its sections need. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

from headwater.pipeline.page.words import epoch_seconds

SPARK_DAYS_MIN, SPARK_DAYS_MAX = 7, 30

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """Everything on the report's page. `tables` are the gold tables by name, rows as dicts; `audit` its document."""

    lake: str
    log: str
    made_at: datetime
    high_water: int
    messages: int
    bytes: int
    tables: Mapping[str, list[dict[str, Any]]]
    audit: Mapping[str, Any] | None
    quarantined: int
    notes: list[str]

    def rows(self, table: str) -> list[dict[str, Any]]:
        return self.tables.get(table) or []


def number(value: object) -> float:
    """0 for what is missing or no number: a hole in one row must not cost the page."""
    return found if (found := maybe_number(value)) is not None else 0.0


def maybe_number(value: object) -> float | None:
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def whole(value: object) -> int:
    return value if type(value) is int else round(number(value))


def name(value: object, otherwise: str = "–") -> str:
    """Null and the empty name are said, not left blank."""
    return str(value) if value is not None and value != "" else otherwise


def second(value: object) -> int | None:
    """Seconds since 1970 of a timestamp or a day."""
    if isinstance(value, datetime):
        return epoch_seconds(value)
    if isinstance(value, date):
        return epoch_seconds(datetime(value.year, value.month, value.day))
    return None


def ranked(totals: Mapping[str, float], shown_max: int) -> list[str]:
    """The names of the greatest, greatest first; equals by name, so that the same data make the same page."""
    return sorted(totals, key=lambda key: (-totals[key], key))[:shown_max]


def summed(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for key, value in pairs:
        totals[key] = totals.get(key, 0.0) + value
    return totals


def by_day(rows: Iterable[Row], key: str, first: date, last: date) -> list[float]:
    """The sums of `key` for each day from `first` to `last`."""
    values = [0.0] * ((last - first).days + 1)
    for row in rows:
        if row.get("day") and first <= row["day"] <= last:
            values[(row["day"] - first).days] += number(row.get(key))
    return values


def days_drawn(rows: Iterable[Row], last: date) -> date:
    """The first day of a sparkline until `last`: the oldest there is, within the limits."""
    oldest = min((row["day"] for row in rows if row.get("day")), default=last)
    ago = min(SPARK_DAYS_MAX, max(SPARK_DAYS_MIN, (last - oldest).days + 1), last.toordinal())
    return last - timedelta(days=ago - 1)


def newest_day(report: Report) -> date | None:
    """The last day that anything happened on; what is quiet since is measured from here."""
    found = [row["day"] for table in ("volume", "dead_letters") for row in report.rows(table) if row.get("day")]
    return max(found, default=None)
