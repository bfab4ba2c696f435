"""Charts as inline SVG that stretch with the page while their text keeps its size. Pure: values in, markup out.

A chart is two SVGs side by side: the labels of the y axis, and the plot. Inside the plot, curves and bars live in a
nested SVG that is stretched (`preserveAspectRatio="none"`), everything with text or a tooltip is placed in percent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwater.pipeline.page.markup import Html, join, tag
from headwater.pipeline.page.scales import Axis, Tick, TimeGrid, time_ticks
from headwater.pipeline.page.words import LABEL_CHARS_MAX, cut

PLOT_WIDTH = 1000  # units of the stretched part
TALL_PX, SMALL_PX = 240, 120
LABELS_PX = 22  # below the plot, for times
TOP_PX = 8  # above it, so that the highest label is not cut
LAST_LABEL_AT, LAST_LABEL_ON_PHONE_AT = 0.95, 0.85  # further right a label would leave the plot
BAR_GAP = 0.18  # of a column
SPARK_WIDTH, SPARK_HEIGHT = 120, 28
HEAT_PERCENT_MAX = 70  # of the colour in a cell: with more, the number in it could not be read


@dataclass(frozen=True)
class Series:
    """One line or one layer; a value per column, None where there is none."""

    name: str
    values: Sequence[float | None]
    colour: str  # a class: `s1` … `s8`, `other`


@dataclass(frozen=True)
class Bar:
    """A stretch of a timeline."""

    from_s: int
    to_s: int
    strength: float  # 0..1
    title: str


# --- over time ------------------------------------------------------------------------------------------------------


def stacked_bars(
    title: str, description: str, grid: TimeGrid, series: Sequence[Series], axis: Axis, spell: Callable[[float], str]
) -> Html:
    """Layers on top of each other; the first stands at the bottom."""
    width = PLOT_WIDTH / grid.columns
    gap = width * BAR_GAP
    bottoms = [0.0] * grid.columns
    layers = []
    for one in series:
        path = []
        for column, value in enumerate(one.values):
            if not value:
                continue
            low, high = axis.at(bottoms[column]) * TALL_PX, axis.at(bottoms[column] + value) * TALL_PX
            bottoms[column] += value
            left = column * width + gap / 2
            path.append(f"M{left:.2f} {TALL_PX - low:.2f}h{width - gap:.2f}V{TALL_PX - high:.2f}h{gap - width:.2f}z")
        layers.append(tag("path", class_=f"bar {one.colour}", d="".join(path)))
    return _plot(title, description, grid, axis, TALL_PX, layers, _tips(grid, series, spell, stacked=True))


def lines(
    title: str,
    description: str,
    grid: TimeGrid,
    series: Sequence[Series],
    axis: Axis,
    spell: Callable[[float], str],
    *,
    small: bool = False,
    bridge_columns: int,
) -> Html:
    """A line per series; it crosses up to `bridge_columns` columns without a value and breaks at longer holes."""
    height = SMALL_PX if small else TALL_PX
    drawn = [_line(one, axis, height, bridge_columns) for one in series]
    return _plot(title, description, grid, axis, height, drawn, _tips(grid, series, spell), small=small)


def _line(one: Series, axis: Axis, height: int, bridge_columns: int) -> Html:
    """The line, and a dot for each value that has no neighbour to be joined to."""
    width = PLOT_WIDTH / max(1, len(one.values))
    runs: list[list[str]] = []
    last = None
    for column, value in enumerate(one.values):
        if value is None:
            continue
        if last is None or column - last - 1 > bridge_columns:
            runs.append([])
        runs[-1].append(f"{(column + 0.5) * width:.2f} {(1 - axis.at(value)) * height:.2f}")
        last = column
    joined = "".join(f"M{'L'.join(run)}" for run in runs if len(run) > 1)
    alone = "".join(f"M{run[0]}h0" for run in runs if len(run) == 1)
    return join(
        tag("path", class_=f"{kind} {one.colour}", d=path) for kind, path in (("line", joined), ("dot", alone)) if path
    )


def _tips(
    grid: TimeGrid, series: Sequence[Series], spell: Callable[[float], str], *, stacked: bool = False
) -> list[str]:
    """What each column says when pointed at; empty where there is nothing to say."""
    names = [cut(one.name, LABEL_CHARS_MAX) for one in series]
    tips = []
    for column in range(grid.columns):
        found = ((name, one.values[column]) for name, one in zip(names, series, strict=True))
        told = [(name, value) for name, value in found if value is not None and (value or not stacked)]
        rows = [f"{spell(value)}  {name}" for name, value in told]
        if stacked and len(told) > 1:
            rows.append(f"{spell(sum(value for _, value in told))}  together")
        tips.append("\n".join([grid.label(column), *rows]) if rows else "")
    return tips


def _plot(
    title: str,
    description: str,
    grid: TimeGrid,
    axis: Axis,
    height: int,
    drawn: Sequence[Html],
    tips: Sequence[str],
    *,
    small: bool = False,
) -> Html:
    title = cut(title)
    ticks = time_ticks(grid, 4 if small else 9)
    below = TOP_PX + height
    levels = [(TOP_PX + (1 - tick.at) * height, tick) for tick in axis.ticks]
    width = 100 / grid.columns
    plot = tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        join(tag("line", class_="grid", x1="0", x2="100%", y1=y, y2=y) for y, _ in levels),
        tag(
            "svg",
            *drawn,
            class_="ink",
            y=TOP_PX,
            width="100%",
            height=height,
            viewBox=f"0 0 {PLOT_WIDTH} {height}",
            preserveAspectRatio="none",
        ),
        join(_time_tick(index, tick, below, small=small) for index, tick in enumerate(ticks)),
        tag(
            "g",
            *(
                tag(
                    "rect",
                    tag("title", tip),
                    x=f"{column * width:.3f}%",
                    y=TOP_PX,
                    width=f"{width:.3f}%",
                    height=height,
                )
                for column, tip in enumerate(tips)
                if tip
            ),
            class_="tips",
        ),
        class_="plot",
        role="img",
        aria_label=f"{title}. {description}",
        width="100%",
        height=below + LABELS_PX,
    )
    scale = tag(
        "svg",
        *(tag("text", tick.label, x="100%", y=y, dy="0.32em", text_anchor="end") for y, tick in levels),
        class_="scale",
        aria_hidden="true",
        height=below + LABELS_PX,
    )
    return tag("div", scale, plot, class_="chart small" if small else "chart")


def _time_tick(index: int, tick: Tick, below: int, *, small: bool = False) -> Html:
    """The label stands right of its mark, where the hour or day that it names begins."""
    at = f"{100 * tick.at:.3f}%"
    mark = tag("line", class_="mark", x1=at, x2=at, y1=below, y2=below + 6)
    if tick.at > (LAST_LABEL_ON_PHONE_AT if small else LAST_LABEL_AT):
        return mark
    hidden = "on-wide" if tick.at > LAST_LABEL_ON_PHONE_AT or (index % 2 and not small) else None
    return join([mark, tag("text", tick.label, x=at, dx=4, y=below + 16, class_=hidden)])


# --- small ones -----------------------------------------------------------------------------------------------------


def sparkline(values: Sequence[float], title: str) -> Html:
    """Bars without axes, for a cell of a table; the highest fills it."""
    high = max(values, default=0) or 1
    width = SPARK_WIDTH / max(1, len(values))
    path = []
    for column, value in enumerate(values):
        if value > 0:
            bar = max(2.0, value / high * SPARK_HEIGHT)
            path.append(f"M{column * width + 0.5:.2f} {SPARK_HEIGHT}h{width - 1:.2f}v{-bar:.2f}h{1 - width:.2f}z")
    return tag(
        "svg",
        tag("title", title),
        tag("path", class_="bar s1", d="".join(path)),
        class_="spark",
        role="img",
        viewBox=f"0 0 {SPARK_WIDTH} {SPARK_HEIGHT}",
        preserveAspectRatio="none",
        aria_label=title,
    )


def share_bar(part: float, whole: float, more: float = 0.0, colour: str = "s1") -> Html:
    """A bar for a cell: `part` of `whole`, lighter what `more` comes to it. It stands beside its number, so hidden."""
    filled = 100 * min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
    grown = min(100 - filled, 100 * max(0.0, more / whole)) if whole > 0 else 0.0
    return tag(
        "svg",
        tag("rect", class_="rail", width="100%", height="100%", rx=3),
        tag("rect", class_=f"bar soft {colour}", width=f"{filled + grown:.2f}%", height="100%", rx=3) if grown else "",
        tag("rect", class_=f"bar {colour}", width=f"{filled:.2f}%", height="100%", rx=3),
        class_="share",
        aria_hidden="true",
    )


def timeline(title: str, description: str, grid: TimeGrid, lanes: Sequence[tuple[str, Sequence[Bar]]]) -> Html:
    """A lane per name, with what happened on it as bars, darker the stronger."""
    lane_px, bar_px = 36, 14
    height = lane_px * len(lanes)
    shapes = []
    for index, (name, bars) in enumerate(lanes):
        y = TOP_PX + index * lane_px
        shapes.append(tag("line", class_="grid", x1="0", x2="100%", y1=y + lane_px, y2=y + lane_px))
        for bar in bars:
            left, right = 100 * grid.at(bar.from_s), 100 * grid.at(bar.to_s)
            shapes.append(
                tag(
                    "rect",
                    tag("title", bar.title),
                    class_="storm",
                    x=f"{left:.3f}%",
                    y=y + lane_px - bar_px - 5,
                    width=f"{max(0.4, right - left):.3f}%",
                    height=bar_px,
                    rx=3,
                    fill_opacity=round(0.35 + 0.65 * min(1.0, max(0.0, bar.strength)), 2),
                )
            )
        # The name over its lane: long names then need no gutter on a phone.
        shapes.append(tag("text", cut(name, LABEL_CHARS_MAX), x="0", y=y + 13, class_="lane"))
    below = TOP_PX + height
    ticks = join(_time_tick(index, tick, below) for index, tick in enumerate(time_ticks(grid)))
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        *shapes,
        ticks,
        class_="plot timeline",
        role="img",
        aria_label=f"{title}. {description}",
        width="100%",
        height=below + LABELS_PX,
    )


def heat(value: float, high: float) -> int:
    """How warm a cell is, in percent: by its logarithm, or one great pair would leave all others white."""
    return max(1, round(HEAT_PERCENT_MAX * math.log1p(value) / math.log1p(high))) if value > 0 and high > 0 else 0


def legend(series: Sequence[Series]) -> Html:
    return tag(
        "ul",
        *(tag("li", tag("i", class_=one.colour), tag("bdi", cut(one.name, LABEL_CHARS_MAX))) for one in series),
        class_="legend",
    )
