"""How long messages took from being published to being delivered and acked, per subscription."""

from __future__ import annotations

import statistics
from typing import Any

from headwater.pipeline.page.charts import Series, legend, lines
from headwater.pipeline.page.facts import Report, maybe_number, name, number, ranked, second, summed
from headwater.pipeline.page.layout import Column, behind, caption, empty, left_out, named, panel, table
from headwater.pipeline.page.markup import Html, tag
from headwater.pipeline.page.scales import Axis, TimeGrid, span_axis, time_grid
from headwater.pipeline.page.words import count, span

SUBSCRIPTIONS_DRAWN = 8
SUBSCRIPTIONS_LISTED = 50
COLUMNS_MAX = 84  # twelve hours of two weeks… narrow charts bear no more
BRIDGE_COLUMNS = 2
STAGES = (("deliver", "published to delivered"), ("ack", "published to acked"))
PERCENTILES = (("p50_ms", "half within", "s1"), ("p90_ms", "90 % within", "s2"), ("p99_ms", "99 % within", "s5"))

Rows = list[dict[str, Any]]


def latency_section(report: Report) -> Html:
    rows = [row for row in report.rows("latency") if second(row.get("hour")) is not None]
    if not rows:
        why = "No subscription has received a message yet, so there are no times to show; they come with the first."
        return panel("latency", "Latency", empty(why))
    weights = summed((name(row.get("subscription")), number(row.get("count"))) for row in rows)
    drawn = ranked(weights, SUBSCRIPTIONS_DRAWN)
    listed = ranked(weights, SUBSCRIPTIONS_LISTED)
    by_key: dict[tuple[str, str], Rows] = {}
    for row in rows:
        by_key.setdefault((name(row.get("subscription")), str(row.get("stage"))), []).append(row)
    seconds = [second(row["hour"]) or 0 for row in rows]
    grid = time_grid(min(seconds), max(seconds), COLUMNS_MAX)
    axis = _shared_axis([row for row in rows if name(row.get("subscription")) in set(drawn)])
    shown = [Series(label, [], colour) for _, label, colour in PERCENTILES]
    cards = [_card(subscription, by_key, grid, axis) for subscription in drawn]
    return panel(
        "latency",
        "Latency",
        legend(shown),
        tag("div", *cards, class_="multiples"),
        caption(
            f"A point covers {_article(grid.says_step())} and shows its worst hour." if grid.step_s > 3600 else "",
            "All charts have the same logarithmic scale.",
            _shown(len(drawn), len(weights)),
        ),
        behind("The numbers of these charts", _numbers(listed, by_key)),
        note=f"per subscription and {grid.says_step()}, UTC",
    )


def _shown(drawn: int, of: int) -> str:
    said = left_out(drawn, of, "subscriptions, by messages")
    return f"Drawn are {said}." if said else ""


def _article(step: str) -> str:
    return step if step[0].isdigit() else f"a {step}"


def _shared_axis(rows: Rows) -> Axis:
    lows = [value for row in rows if (value := maybe_number(row.get("p50_ms"))) is not None]
    highs = [value for row in rows for key, _, _ in PERCENTILES if (value := maybe_number(row.get(key))) is not None]
    return span_axis(min(lows, default=1), max(highs, default=1))


def _card(subscription: str, by_key: dict[tuple[str, str], Rows], grid: TimeGrid, axis: Axis) -> Html:
    stages = [_stage(subscription, said, by_key.get((subscription, stage), []), grid, axis) for stage, said in STAGES]
    return tag("div", tag("h3", named(subscription)), tag("div", *stages, class_="stages"), class_="multiple")


def _stage(subscription: str, said: str, rows: Rows, grid: TimeGrid, axis: Axis) -> Html:
    if not rows:
        return tag("div", tag("p", said, class_="stage"), empty("Nothing measured."))
    series = [Series(label, _worst(rows, key, grid), colour) for key, label, colour in PERCENTILES]
    facts = _facts(rows)
    about = f"Usual p50 {facts[1]}, worst p99 {facts[2]}, slowest {facts[3]}."
    chart = lines(f"{subscription}: {said}", about, grid, series, axis, span, small=True, bridge_columns=BRIDGE_COLUMNS)
    head = tag("p", tag("strong", said), f"usually {facts[1]}, worst 99 % {facts[2]}", class_="stage")
    return tag("div", head, chart)


def _worst(rows: Rows, key: str, grid: TimeGrid) -> list[float | None]:
    """Percentiles of hours cannot be averaged, so the worst hour of a column speaks for it."""
    values: list[float | None] = [None] * grid.columns
    for row in rows:
        value = maybe_number(row.get(key))
        if value is not None:
            column = grid.column(second(row["hour"]) or 0)
            values[column] = max(value, values[column] or 0.0)
    return values


def _facts(rows: Rows) -> list[str]:
    """How many, the median hour's p50, the worst hour's p99, the slowest of all."""
    halves = [value for row in rows if (value := maybe_number(row.get("p50_ms"))) is not None]
    return [
        count(sum(number(row.get("count")) for row in rows)),
        span(statistics.median(halves)) if halves else "–",
        span(max(number(row.get("p99_ms")) for row in rows)),
        span(max(number(row.get("max_ms")) for row in rows)),
    ]


def _numbers(listed: list[str], by_key: dict[tuple[str, str], Rows]) -> Html:
    columns = [
        Column("Subscription", kind="name"),
        Column("Stage"),
        Column("Messages", number=True),
        Column("Usual p50", number=True),
        Column("Worst p99", number=True),
        Column("Slowest", number=True),
    ]
    rows = [
        [named(subscription), said, *_facts(by_key[subscription, stage])]
        for subscription in listed
        for stage, said in STAGES
        if (subscription, stage) in by_key
    ]
    return table("Latency by subscription", columns, rows)
