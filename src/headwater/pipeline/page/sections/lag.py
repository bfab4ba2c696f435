"""How far behind each subscription was, as often as the pipeline looked."""

from __future__ import annotations

from typing import Any

from headwater.pipeline.page.charts import Series, legend, lines
from headwater.pipeline.page.facts import Report, name, number, ranked, second
from headwater.pipeline.page.layout import Column, caption, command, empty, left_out, named, panel, table
from headwater.pipeline.page.markup import Html
from headwater.pipeline.page.scales import count_axis, time_grid
from headwater.pipeline.page.words import brief_moment, count, short, some, span

SUBSCRIPTIONS_DRAWN = 7
SUBSCRIPTIONS_LISTED = 20
COLUMNS_MAX = 120

Rows = list[dict[str, Any]]


def lag_section(report: Report) -> Html:
    rows = [row for row in report.rows("lag") if second(row.get("observed_at")) is not None]
    if not rows:
        why = "No run has seen a subscription of this log yet; each run looks once:"
        return panel("lag", "Lag of subscriptions", empty(why, command("headwater pipeline run")))
    by_subscription: dict[str, Rows] = {}
    for row in rows:
        by_subscription.setdefault(name(row.get("subscription")), []).append(row)
    peaks = {key: max(number(row.get("lag")) for row in found) for key, found in by_subscription.items()}
    seconds = [second(row["observed_at"]) or 0 for row in rows]
    grid = time_grid(min(seconds), max(seconds), COLUMNS_MAX)
    series = []
    for index, subscription in enumerate(ranked(peaks, SUBSCRIPTIONS_DRAWN)):
        values: list[float | None] = [None] * grid.columns
        for row in by_subscription[subscription]:
            column = grid.column(second(row["observed_at"]) or 0)
            values[column] = max(number(row.get("lag")), values[column] or 0.0)
        series.append(Series(subscription, values, f"s{index + 1}"))
    high = max(peaks.values())
    about = f"The greatest lag seen is {some(round(high), 'message')}."
    # Between two looks nothing is known, and a straight line is the best guess.
    chart = lines("Lag over time", about, grid, series, count_axis(high), short, bridge_columns=grid.columns)
    drawn = left_out(len(series), len(peaks), "subscriptions, by their greatest lag")
    looks = len(set(seconds))
    return panel(
        "lag",
        "Lag of subscriptions",
        legend(series),
        chart,
        caption(about, f"Drawn are {drawn}." if drawn else ""),
        _latest(by_subscription, peaks),
        note=f"messages not yet settled, as {some(looks, 'look')} found them, UTC",
    )


def _latest(by_subscription: dict[str, Rows], peaks: dict[str, float]) -> Html:
    columns = [
        Column("Subscription", kind="name"),
        Column("Lag", number=True),
        Column("Greatest", number=True),
        Column("In flight", number=True),
        Column("Waiting", number=True),
        Column("Oldest unsettled", number=True),
        Column("Position", number=True),
        Column("Last look", number=True),
    ]
    rows = []
    for subscription in ranked(peaks, SUBSCRIPTIONS_LISTED):
        last = max(by_subscription[subscription], key=lambda row: second(row["observed_at"]) or 0)
        oldest = number(last.get("oldest_unacked_ms"))
        rows.append(
            [
                named(subscription),
                count(number(last.get("lag"))),
                count(peaks[subscription]),
                count(number(last.get("in_flight"))),
                count(number(last.get("waiting"))),
                span(oldest) if oldest else "–",
                count(number(last.get("position"))),
                brief_moment(last["observed_at"]),
            ]
        )
    caption_text = left_out(len(rows), len(peaks), "subscriptions") or "Subscriptions at the last look"
    return table(caption_text, columns, rows)
