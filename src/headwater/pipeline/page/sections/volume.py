"""How much was published, when and on which topics."""

from __future__ import annotations

from headwater.pipeline.page.charts import Series, legend, share_bar, stacked_bars
from headwater.pipeline.page.facts import Report, Row, name, number, ranked, second, summed
from headwater.pipeline.page.layout import Column, behind, caption, command, empty, named, panel, table
from headwater.pipeline.page.markup import Html, join
from headwater.pipeline.page.scales import TimeGrid, count_axis, time_grid
from headwater.pipeline.page.words import count, day_and_year, from_epoch, share, short, size, some

TOPICS_DRAWN = 7  # as layers of the chart, one colour each
TOPICS_SHOWN = 15  # in the table
COLUMNS_MAX = 120
OTHER = "other"


def volume_section(report: Report) -> Html:
    rows = [row for row in report.rows("volume") if second(row.get("hour")) is not None]
    if not rows:
        why = empty("No message has reached the lake yet.", "Publish one, then", command("headwater pipeline run"))
        return panel("volume", "Volume over time", why)
    seconds = [second(row["hour"]) or 0 for row in rows]
    grid = time_grid(min(seconds), max(seconds), COLUMNS_MAX)
    series = _layers(rows, seconds, grid)
    sums = [sum(one.values[column] or 0 for one in series) for column in range(grid.columns)]
    high = max(sums)
    fullest = sums.index(high)
    about = f"Messages per {grid.says_step()} by topic, from {grid.label(0)} to {grid.label(grid.columns - 1)}."
    chart = stacked_bars("Volume over time", about, grid, series, count_axis(high), short)
    return panel(
        "volume",
        "Volume over time",
        legend(series),
        chart,
        caption(f"The fullest {grid.says_step()} began {grid.label(fullest)} with {some(round(high), 'message')}."),
        behind("The numbers of this chart", _numbers(grid, series)),
        note=f"messages per {grid.says_step()}, UTC",
    )


def _layers(rows: list[Row] | list[dict[str, object]], seconds: list[int], grid: TimeGrid) -> list[Series]:
    totals = summed((name(row.get("topic")), number(row.get("messages"))) for row in rows)
    drawn = ranked(totals, TOPICS_DRAWN)
    values = {topic: [0.0] * grid.columns for topic in drawn}
    rest = [0.0] * grid.columns
    for row, at in zip(rows, seconds, strict=True):
        values.get(name(row.get("topic")), rest)[grid.column(at)] += number(row.get("messages"))
    layers = [Series(topic, values[topic], f"s{index + 1}") for index, topic in enumerate(drawn)]
    if len(totals) > len(drawn):
        layers.append(Series(some(len(totals) - len(drawn), f"{OTHER} topic"), rest, OTHER))
    return layers


def _numbers(grid: TimeGrid, series: list[Series]) -> Html:
    columns = [Column("from"), *(Column(named(one.name, 32), number=True) for one in series)]
    rows = [
        [grid.label(column), *(count(one.values[column] or 0) for one in series)]
        for column in range(grid.columns)
        if any(one.values[column] for one in series)
    ]
    return table("Messages by time and topic", columns, rows, kind="plain")


def topics_section(report: Report) -> Html:
    rows = report.rows("volume")
    if not rows:
        return panel("topics", "Topics", empty("No topics yet: they come with the first messages."), half=True)
    messages = summed((name(row.get("topic")), number(row.get("messages"))) for row in rows)
    sizes = summed((name(row.get("topic")), number(row.get("bytes"))) for row in rows)
    total, high = sum(messages.values()), max(messages.values())
    shown = ranked(messages, TOPICS_SHOWN)
    cells = [
        [
            named(topic),
            join([share_bar(messages[topic], high)]),
            count(messages[topic]),
            share(messages[topic], total),
            size(sizes[topic]),
            size(sizes[topic] / messages[topic]) if messages[topic] else "–",
        ]
        for topic in shown
    ]
    rest = len(messages) - len(shown)
    if rest:
        left = total - sum(messages[topic] for topic in shown)
        left_bytes = sum(sizes.values()) - sum(sizes[topic] for topic in shown)
        other = some(rest, f"{OTHER} topic")
        each = size(left_bytes / left) if left else "–"
        bar = share_bar(left, high, colour=OTHER)
        cells.append([other, bar, count(left), share(left, total), size(left_bytes), each])
    columns = [
        Column("Topic", kind="name"),
        Column("", kind="bar-cell"),
        Column("Messages", number=True),
        Column("Share", number=True),
        Column("Size", number=True),
        Column("Each", number=True),
    ]
    return panel("topics", "Topics", table("Topics by messages", columns, cells), note=_since(rows), half=True)


def _since(rows: list[dict[str, object]]) -> str:
    found = [at for row in rows if (at := second(row.get("hour"))) is not None]
    return f"since {day_and_year(from_epoch(min(found)))}" if found else ""
