"""Times when a subscription was busier with redeliveries than with new work."""

from __future__ import annotations

from typing import Any

from headwater.pipeline.page.charts import Bar, timeline
from headwater.pipeline.page.facts import Report, maybe_number, name, number, ranked, second, summed
from headwater.pipeline.page.layout import Column, empty, left_out, named, panel, table
from headwater.pipeline.page.markup import Html
from headwater.pipeline.page.scales import time_grid
from headwater.pipeline.page.words import brief_moment, count, short, some, span

LANES_MAX = 8
BARS_MAX = 400  # over all lanes
STORMS_LISTED = 15
COLUMNS_MAX = 1000  # a timeline places by time, not by column
FIERCE_RATIO = 5.0  # redeliveries per ack at which a bar is darkest

Rows = list[dict[str, Any]]


def storms_section(report: Report) -> Html:
    rows = [row for row in report.rows("retry_storms") if second(row.get("from_at")) is not None]
    if not rows:
        why = "No retry storms: at no time did a subscription redeliver more than it settled."
        return panel("storms", "Retry storms", empty(why))
    rows.sort(key=lambda row: (-number(row.get("redelivered")), _begin(row), name(row.get("subscription"))))
    weights = summed((name(row.get("subscription")), number(row.get("redelivered"))) for row in rows)
    ends = [_end(row) for row in rows]
    # The same days as the volume above it, so that a storm is found there too.
    seen = [at for row in report.rows("volume") if (at := second(row.get("hour"))) is not None]
    grid = time_grid(min([_begin(row) for row in rows] + seen), max(ends + seen), COLUMNS_MAX)
    lanes = [
        (subscription, [_bar(row) for row in rows[:BARS_MAX] if name(row.get("subscription")) == subscription])
        for subscription in ranked(weights, LANES_MAX)
    ]
    about = f"{some(len(rows), 'storm')} of {some(len(weights), 'subscription')}."
    listed = left_out(min(len(rows), STORMS_LISTED), len(rows), "storms, by redeliveries")
    return panel(
        "storms",
        "Retry storms",
        timeline("Retry storms over time", about, grid, lanes),
        _list(rows[:STORMS_LISTED]),
        note=listed or about.rstrip("."),
    )


def _begin(row: dict[str, Any]) -> int:
    return second(row["from_at"]) or 0


def _end(row: dict[str, Any]) -> int:
    ended = second(row.get("to_at"))
    return _begin(row) if ended is None else max(_begin(row), ended)


def _ratio(row: dict[str, Any]) -> str:
    found = maybe_number(row.get("ratio"))
    return f"{short(round(found, 2))} ×" if found is not None else "nothing acked"


def _bar(row: dict[str, Any]) -> Bar:
    ratio = maybe_number(row.get("ratio"))
    strength = 1.0 if ratio is None else ratio / FIERCE_RATIO
    redelivered = some(round(number(row.get("redelivered"))), "redelivery", "redeliveries")
    told = f"{brief_moment(row['from_at'])}: {redelivered}, {_ratio(row)}"
    return Bar(_begin(row), _end(row), strength, told)


def _list(rows: Rows) -> Html:
    columns = [
        Column("Subscription", kind="name"),
        Column("From", number=True),
        Column("For", number=True),
        Column("Redelivered", number=True),
        Column("Acked", number=True),
        Column("Ratio", number=True),
    ]
    cells = [
        [
            named(name(row.get("subscription"))),
            brief_moment(row["from_at"]),
            span(1000 * (_end(row) - _begin(row))) if row.get("to_at") else "–",
            count(number(row.get("redelivered"))),
            count(number(row.get("acked"))),
            _ratio(row),
        ]
        for row in rows
    ]
    return table("Retry storms", columns, cells)
