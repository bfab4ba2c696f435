"""The report's sections: each takes a gold table's rows and gives a panel. Counts and lengths are bounded here."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from datetime import date, datetime, timedelta
from typing import Any

from headwater.formats import format_count, format_number, format_seconds, format_size, plural
from headwater.pipeline.report import charts
from headwater.pipeline.report import model as m
from headwater.pipeline.report.model import PageTable, Report, Row, Section, cut

PANELS_DRAWN = 6  # subscriptions with charts of their latency
ROWS_SHOWN = 20  # of any table
ENTITIES_SHOWN = 9  # on each side of the heat map; the others are summed
STORMS_DRAWN, LANES_MAX = 400, 8
SNAPSHOTS_DRAWN = 120  # of the lag; of more, the greatest of each hour, day or week
SPARK_DAYS = 14
ERROR_CHARS_MAX, SIGNATURE_CHARS_MAX = 600, 160
STEADY = 0.5  # dead letters a day more or less that are no trend
SOON_DAYS = 7.0
WHOLE_LOG = ">"
STAGES = {"deliver": "published to delivered", "ack": "published to acked"}
PERCENTILES = (("p50_ms", "half within", 0), ("p90_ms", "90% within", 1), ("p99_ms", "99% within", 4))
UNNAMED, REST = "(not named)", "(others)"

Facts = dict[str, Any]  # of a section


def sections_of(report: Report) -> list[Section]:
    letters = "No run found a dead letter. One that was redriven or purged before the next run is not counted."
    storms = "Between two runs, no subscription had as many redeliveries as acks."
    sections = (
        ("volume", "Volume", "volume", _volume, "The lake has no messages yet."),
        ("topics", "Topics", "volume", _topics, "No topics yet."),
        ("traffic", "Traffic", "traffic", _traffic, "No message names a sender or a receiver (from and to)."),
        ("latency", "Latency", "latency", _latency, "No subscription has received a message yet."),
        ("lag", "Lag", "lag", _lag, "No run has seen a subscription of this log yet."),
        ("letters", "Dead letters", "dead_letters", _dead_letters, letters),
        ("storms", "Retry storms", "retry_storms", _storms, storms),
        ("forecast", "Size and retention", "forecast", _forecast, "No run has taken a snapshot of the log yet."),
        ("replication", "Replication", "replication", _replication, "No replica has pushed a version to this log."),
    )  # fmt: skip
    facts = {anchor: of(rows, report) if (rows := report.rows(table)) else {} for anchor, _, table, of, _ in sections}
    halves = ("topics", "traffic") if facts["traffic"] else ()  # beside a list of topics, one sentence is an empty box
    return [
        Section(anchor, heading, anchor in halves, empty=empty, **facts[anchor])
        for anchor, heading, _, _, empty in sections
    ]


def _volume(rows: Sequence[Row], report: Report) -> Facts:
    step = m.step_of([row["hour"] for row in rows])
    unit = m.unit(step)
    totals = m.summed(rows, "topic", "messages")
    labels = m.labels(m.ranked(totals, len(charts.SERIES)))
    legend = dict(zip(labels.values(), charts.SERIES, strict=False))
    rest = plural(len(totals) - len(labels), "other topic")
    if len(totals) > len(labels):
        legend[rest] = charts.OTHER
    columns: dict[datetime, Counter[str]] = {}
    for row in rows:
        column = columns.setdefault(m.column_of(row["hour"], step), Counter())
        column[labels.get(row["topic"], rest)] += row["messages"]
    if len(columns) == 1:
        text = f"{plural(totals.total(), 'message')}, all published in the {unit} from {m.brief(min(columns))} on."
        return {"text": text}
    drawn = []
    for at, column in sorted(columns.items()):
        low = 0
        for label in (each for each in legend if column[each]):
            tip = f"{m.brief(at)}: {format_count(column[label])} {label}"
            ends = {"at": at, "until": at + 0.85 * step, "low": low, "high": low + column[label]}
            drawn.append(ends | {"colour": legend[label], "tip": tip})
            low += column[label]
    peak = max(sorted(columns), key=lambda at: columns[at].total())
    most = f"The busiest {unit} began {m.brief(peak)} with {plural(columns[peak].total(), 'message')}."
    chart = charts.bars_over_time(f"Messages per {unit} by topic. {most}", drawn)
    return {"note": f"messages per {unit}, UTC", "legend": legend, "chart": chart, "caption": most}


def _topics(rows: Sequence[Row], report: Report) -> Facts:
    messages, sizes = m.summed(rows, "topic", "messages"), m.summed(rows, "topic", "bytes")
    total, high, cells = messages.total(), max(messages.values()), []
    for topic in m.ranked(messages, ROWS_SHOWN):
        count, held = messages[topic], sizes[topic]
        figures = [f"{count:,}", f"{count / total:.1%}", format_size(held), format_size(held / count)]
        cells.append([cut(topic), {"bar": count / high, "more": 0}, *figures])
    columns = ["~Topic", "=", ">Messages", ">Share", ">Size", ">Each"]
    return {"table": PageTable(columns, cells, len(messages), "topics, by messages")}


def _traffic(rows: Sequence[Row], report: Report) -> Facts:
    sides = [m.summed(rows, end, "messages") for end in ("from", "to")]
    if not any(itertools.chain(*sides)):
        return {}
    senders, receivers = (m.labels(m.ranked(totals, ENTITIES_SHOWN), UNNAMED) for totals in sides)
    cells: Counter[tuple[str, str]] = Counter()
    for row in rows:
        cells[senders.get(row["from"], REST), receivers.get(row["to"], REST)] += row["messages"]
    if len(cells) == 1:
        ((sender, receiver),) = cells
        return {"text": f"{plural(cells.total(), 'message')}, all from {sender} to {receiver}."}
    high = math.log1p(max(cells.values()))  # or one great pair would leave all others white
    drawn = [
        {"sender": sender, "receiver": receiver, "warmth": math.log1p(messages) / high, "text": format_count(messages),
         "tip": f"{sender} to {receiver}: {plural(messages, 'message')}"}
        for (sender, receiver), messages in sorted(cells.items())
    ]  # fmt: skip
    axes = ([*labels.values(), REST] for labels in (senders, receivers))
    return {
        "note": f"messages of {plural(len(sides[0]), 'sender')} to {plural(len(sides[1]), 'receiver')}",
        "chart": charts.heat_map("Messages by sender and receiver", drawn, *axes),
        "caption": "Senders at the left, receivers at the top. The stronger the colour, the more messages.",
    }


def _latency(rows: Sequence[Row], report: Report) -> Facts:
    weights, stages = m.summed(rows, "subscription", "count"), m.grouped(rows, "subscription", "stage")
    step = m.step_of([row["hour"] for row in rows])
    cells = []
    for key in itertools.product(m.ranked(weights, ROWS_SHOWN // 2), STAGES):
        if found := stages.get(key):
            p50, p99, slowest = ([row[column] for row in found] for column in ("p50_ms", "p99_ms", "max_ms"))
            spans = [format_seconds(ms / 1000) for ms in (statistics.median(p50), max(p99), max(slowest))]
            cells.append([cut(key[0]), STAGES[key[1]], f"{sum(row['count'] for row in found):,}", *spans])
    columns = ["~Subscription", " Stage", ">Messages", ">Half within", ">99% within", ">All within"]
    read = (
        "Half within is of the median hour, 99% and all within are of the worst. The times are bounds of a histogram, "
        "at most 19% above the exact ones; few messages often share one bound."
    )
    table, drawn = PageTable(columns, cells, len(stages), "rows, by messages"), []
    # A subscription that was measured in one column only would be a panel with a dot.
    has_line = {key for key, found in m.grouped(rows, "subscription").items() if len(_columns(found, step)) > 1}
    shown = m.labels(m.ranked({key: weights[key] for key in has_line}, PANELS_DRAWN))
    panels = {
        (subscription, stage): f"{label} · {text}"
        for subscription, label in shown.items()
        for stage, text in STAGES.items()
    }
    for (key, panel), (column, _, colour) in itertools.product(panels.items(), PERCENTILES):
        worst: dict[datetime, float] = {}  # percentiles of hours cannot be averaged: the worst stands for its column
        for row in stages.get(key, []):
            at = m.column_of(row["hour"], step)
            worst[at] = max(row[column] / 1000, worst.get(at, 0.001))
        run = 0
        for at in sorted(worst):
            run += at - step not in worst  # a line breaks where nothing was measured
            point = {"panel": panel, "at": at, "value": worst[at]}
            drawn.append(point | {"colour": charts.SERIES[colour], "run": run})
    if not drawn:
        text = f"No subscription was measured in more than one {m.unit(step)} yet; a chart needs two."
        return {"text": text, "caption": read, "table": table}
    most = f" Drawn: {len(shown)} of {len(weights)} subscriptions, those with the most messages over time."
    return {
        "note": f"worst hour of each {m.unit(step)}, UTC" if step > m.HOUR else "by hour, UTC",
        "legend": {label: charts.SERIES[colour] for _, label, colour in PERCENTILES},
        "chart": charts.latency_panels("Latency by subscription and time", drawn, [*panels.values()]),
        "caption": f"All charts have the same logarithmic scale.{most if len(weights) > len(shown) else ''} {read}",
        "table": table,
    }


def _columns(rows: Sequence[Row], step: timedelta) -> set[datetime]:
    return {m.column_of(row["hour"], step) for row in rows}


def _lag(rows: Sequence[Row], report: Report) -> Facts:
    by_subscription = m.grouped(rows, "subscription")
    peaks = {key: max(row["lag"] for row in found) for key, found in by_subscription.items()}
    cells = []
    for subscription in m.ranked(peaks, ROWS_SHOWN):
        last = max(by_subscription[subscription], key=lambda row: row["observed_at"])
        figures = [f"{last[key]:,}" for key in ("lag", "in_flight", "waiting", "position")]
        oldest = format_seconds(last["oldest_unacked_ms"] / 1000) if last["oldest_unacked_ms"] else "–"
        cells.append([cut(subscription), f"{peaks[subscription]:,}", *figures, oldest, m.brief(last["observed_at"])])
    columns = ["~Subscription", ">Greatest", ">Lag", ">In flight", ">Waiting", ">Position", ">Oldest unacked", ">Seen"]
    table = PageTable(columns, cells, len(peaks), "subscriptions, by their greatest lag")
    times = {row["observed_at"] for row in rows}
    if len(times) == 1:
        return {"text": "One snapshot so far: each run adds one, and the second begins the chart.", "table": table}
    step = m.step_of(times) if len(times) > SNAPSHOTS_DRAWN else None  # else each is drawn as it was seen
    drawn = []
    labels = m.labels(m.ranked(peaks, len(charts.SERIES)))
    legend = dict(zip(labels.values(), charts.SERIES, strict=False))
    for subscription, label in labels.items():
        highest: dict[datetime, tuple[int, datetime]] = {}
        for row in by_subscription[subscription]:
            at, found = row["observed_at"], (row["lag"], row["observed_at"])
            column = at if step is None else m.column_of(at, step)
            highest[column] = max(found, highest.get(column, found))
        for lag, at in sorted(highest.values()):
            tip = f"{m.brief(at)}: {plural(lag, 'message')}, {label}"
            drawn.append({"at": at, "value": lag, "colour": legend[label], "tip": tip})
    greatest = f"The greatest lag is {plural(max(peaks.values()), 'message')}."
    return {
        "note": f"messages not yet acked, in {plural(len(times), 'snapshot')}, UTC",
        "legend": legend,
        "chart": charts.lines_over_time(f"Lag over time. {greatest}", drawn),
        "caption": greatest,
        "table": table,
    }


def _dead_letters(rows: Sequence[Row], report: Report) -> Facts:
    kinds = m.grouped(rows, "subscription", "reason", "handler", "error_signature")
    totals = {key: sum(row["letters"] for row in found) for key, found in kinds.items()}
    last = max(row["day"] for row in itertools.chain(rows, report.rows("volume")))
    cells = []
    for key in m.ranked(totals, ROWS_SHOWN):
        subscription, reason, handler, error = key
        newest = max(kinds[key], key=lambda row: row["day"])
        example = newest["example_error"] if newest["example_error"] != error else None
        what = {"error": cut(error, SIGNATURE_CHARS_MAX, otherwise="no error given"), "of": cut(subscription)}
        what["example"] = cut(example, ERROR_CHARS_MAX, otherwise="")
        cells.append(
            [what, {"text": cut(reason), "tone": "reason"}, cut(handler), f"{totals[key]:,}",
             _spark(kinds[key], "letters", last), _trend(newest, last), m.brief(newest["last_at"])]
        )  # fmt: skip
    columns = ["~Error", " Reason", "~Handler", ">Letters", " By day", " Trend", ">Last"]
    return {
        "note": f"{plural(sum(totals.values()), 'dead letter')} of {plural(len(kinds), 'kind')}",
        "table": PageTable(columns, cells, len(kinds), "kinds, by letters"),
        "caption": "Trend: the last day against the average of the seven days before.",
    }


def _trend(newest: Row, last: date) -> Any:
    change = newest["trend"] or 0.0
    if newest["day"] < last:
        return {"text": f"none since {m.day(newest['day'])}", "tone": "good"}
    if abs(change) < STEADY:
        return {"text": "→ steady", "tone": "quiet"}
    more = change > 0
    return {"text": f"{'▲' if more else '▼'} {format_number(abs(change))} a day", "tone": "bad" if more else "good"}


def _storms(rows: Sequence[Row], report: Report) -> Facts:
    """Gold's `ratio`: redelivered / (redelivered + acked), the share of deliveries that were redeliveries."""
    rows = sorted(rows, key=lambda row: (-row["redelivered"], row["from_at"], row["subscription"]))
    lanes = m.labels(m.ranked(m.summed(rows, "subscription", "redelivered"), LANES_MAX))
    hours = [row["hour"] for row in report.rows("volume")]  # the same time as the volume above
    begin = min([*hours, *(row["from_at"] for row in rows)])
    end = max([*hours, *(row["to_at"] for row in rows)]) + m.HOUR
    drawn, cells = [], []
    for row in rows[:STORMS_DRAWN]:
        at, until, share = row["from_at"], row["to_at"], f"{row['ratio']:.0%}"
        if lane := lanes.get(row["subscription"]):
            wide = max(until, at + (end - begin) * 0.004)  # narrower, and it could not be seen
            tip = f"{m.brief(at)}: {row['redelivered']:,} redelivered, {share} of deliveries"
            drawn.append({"lane": lane, "at": at, "until": wide, "strength": row["ratio"], "tip": tip})
        figures = [format_seconds((until - at).total_seconds()), f"{row['redelivered']:,}", f"{row['acked']:,}", share]
        cells.append([cut(row["subscription"]), m.brief(at), *figures])
    columns = ["~Subscription", ">From", ">For", ">Redelivered", ">Acked", ">Redelivered share"]
    return {
        "note": f"{plural(len(rows), 'storm')}; the share is of all deliveries in that time",
        "chart": charts.timeline("Retry storms over time", drawn, list(lanes.values()), begin, end),
        "table": PageTable(columns, cells[:ROWS_SHOWN], len(rows), "storms, by redeliveries"),
    }


def _forecast(rows: Sequence[Row], report: Report) -> Facts:
    shown = sorted(rows, key=lambda row: (row["pattern"] != WHOLE_LOG, -row["bytes"], str(row)))[:ROWS_SHOWN]
    high = max(row[key] for row in shown for key in ("bytes", "bytes_in_30_days")) or 1
    cells = []
    for row in shown:
        now, later = row["bytes"], row["bytes_in_30_days"]
        is_whole_log = row["pattern"] == WHOLE_LOG and row["limit_kind"] is None
        size = {"bar": min(now, later) / high, "more": max(0.0, later - now) / high}
        size["text"] = f"{format_size(now)} → {format_size(later)}"
        pace = f"{format_count(row['messages_per_day'])} · {format_size(row['bytes_per_day'])}"
        pattern = "whole log" if is_whole_log else cut(row["pattern"])
        cells.append([pattern, f"{row['messages']:,}", pace, size, *_limit(row)])
    columns = ["~Pattern", ">Messages", ">A day", "=Size now and in 30 days", ">Limit", ">Used", ">Deletes in"]
    return {
        "table": PageTable(columns, cells, len(rows), "limits, by size"),
        "caption": "At the pace of the last seven days. Retention deletes the oldest messages once a limit is reached.",
    }


def _limit(row: Row) -> list[Any]:
    kind, limit, left = row["limit_kind"], row["limit"] or 0, row["days_left"]
    if kind is None:
        return ["none", "–", {"text": "never", "tone": "quiet"}]
    deletes: Any = {"text": "by age" if kind == "max_age" else "not at this pace", "tone": "quiet"}
    if left is not None:
        deletes = {"text": format_seconds(left * 86_400) if left else "now", "tone": "warn" if left < SOON_DAYS else ""}
    if kind == "max_age":
        return [format_seconds(limit / 1000), "–", deletes]
    held, text = (
        ("messages", f"{format_count(limit)} messages") if kind == "max_count" else ("bytes", format_size(limit))
    )
    return [text, f"{row[held] / max(limit, 1):.1%}", deletes]


def _replication(rows: Sequence[Row], report: Report) -> Facts:
    pushes, sent = (m.summed(rows, "replica", column) for column in ("pushes", "bytes"))
    by_replica = m.grouped(rows, "replica")
    last = max(row["day"] for row in rows)
    cells = []
    for replica in m.ranked(pushes, ROWS_SHOWN):
        found = by_replica[replica]
        version, ended = max(row["last_version"] or 0 for row in found), max(row["last_at"] for row in found)
        figures = [format_size(sent[replica]), f"{version:,}", m.brief(ended)]
        cells.append([cut(replica), f"{pushes[replica]:,}", _spark(found, "pushes", last), *figures])
    columns = ["~Replica", ">Pushes", " By day", ">Sent", ">Version", ">Last"]
    return {
        "note": plural(len(pushes), "replica"),
        "table": PageTable(columns, cells, len(pushes), "replicas, by pushes"),
    }


def _spark(rows: Sequence[Row], column: str, last: date) -> Any:
    """Sums by day, up to the last day that anything happened on."""
    by_day = m.summed(rows, "day", column)
    values = [by_day[last - timedelta(days=back)] for back in reversed(range(SPARK_DAYS))]
    title = f"{column} a day in the {SPARK_DAYS} days up to {m.day(last)}, at most {max(values):,}"
    return {"spark": values, "high": max(values) or 1, "title": title}
