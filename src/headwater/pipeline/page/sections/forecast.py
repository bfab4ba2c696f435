"""How the log grows, and when retention begins to delete."""

from __future__ import annotations

from typing import Any

from headwater.pipeline.page.charts import share_bar
from headwater.pipeline.page.facts import Report, maybe_number, name, number, whole
from headwater.pipeline.page.layout import Column, caption, command, empty, left_out, named, panel, table
from headwater.pipeline.page.markup import Html, join, tag
from headwater.pipeline.page.words import LABEL_CHARS_MAX, count, cut, days, share, short, size, span

PATTERNS_SHOWN = 15
SOON_DAYS = 7.0
WHOLE_LOG = ">"


def forecast_section(report: Report) -> Html:
    rows = sorted(report.rows("forecast"), key=_whole_log_first)
    if not rows:
        why = "A forecast needs messages of at least one day in the lake."
        return panel("forecast", "Size and retention", empty(why, "It comes with", command("headwater pipeline run")))
    shown = rows[:PATTERNS_SHOWN]
    high = max(max(number(row.get("bytes")), number(row.get("bytes_in_30_days"))) for row in shown)
    columns = [
        Column("Pattern", kind="name"),
        Column("Messages", number=True),
        Column("A day", number=True),
        Column("Size now and in 30 days", kind="growth"),
        Column("Limit", number=True),
        Column("Used", number=True),
        Column("Deletes in", number=True),
    ]
    left = left_out(len(shown), len(rows), "patterns")
    return panel(
        "forecast",
        "Size and retention",
        table("Size and retention by pattern", columns, [_cells(row, high) for row in shown]),
        caption(
            "Grown at the pace of the last days.",
            "Retention deletes the oldest messages once a limit is reached.",
            f"Shown are {left}." if left else "",
        ),
    )


def _whole_log_first(row: dict[str, Any]) -> tuple[bool, float, str]:
    return row.get("pattern") != WHOLE_LOG, -number(row.get("bytes")), name(row.get("pattern"))


def _cells(row: dict[str, Any], high: float) -> list[str]:
    pattern = name(row.get("pattern"))
    now, later = number(row.get("bytes")), number(row.get("bytes_in_30_days"))
    growth = join(
        [
            share_bar(min(now, later) if later else now, high, more=max(0.0, later - now)),
            tag("span", f"{size(now)} → {size(later)}"),
        ]
    )
    return [
        join([named(pattern), tag("span", " the whole log", class_="quiet") if pattern == WHOLE_LOG else ""]),
        count(whole(row.get("messages"))),
        f"{short(number(row.get('messages_per_day')))} · {size(number(row.get('bytes_per_day')))}",
        growth,
        *_limit(row),
        _days_left(row),
    ]


def _limit(row: dict[str, Any]) -> tuple[str, str]:
    limit = maybe_number(row.get("limit"))
    kind = row.get("limit_kind")
    if limit is None or kind is None:
        return "none", "–"
    if kind == "max_count":
        return f"{short(limit)} messages", share(number(row.get("messages")), limit)
    if kind == "max_bytes":
        return size(limit), share(number(row.get("bytes")), limit)
    return f"{span(limit)} old" if kind == "max_age" else f"{cut(str(kind), LABEL_CHARS_MAX)} {short(limit)}", "–"


def _days_left(row: dict[str, Any]) -> Html:
    left = maybe_number(row.get("days_left"))
    if left is None:
        return tag("span", "never" if row.get("limit_kind") is None else "not at this pace", class_="quiet")
    if left <= 0:
        return tag("span", "now", class_="warn")
    return tag("span", days(left), class_="warn" if left < SOON_DAYS else None)
