"""Charts as inline SVG, drawn by Altair without a browser. Rows in, markup out.

Colours are CSS variables of the page, so that one drawing serves light and dark. Text from messages is data in a
chart, never a part of its specification, and the SVG is rebuilt from a list of known elements and attributes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from math import cos, radians
from typing import Any
from xml.etree import ElementTree

import altair as alt
import vl_convert
from markupsafe import Markup

from headwater.formats import format_seconds

SERIES = tuple(f"var(--s{number})" for number in range(1, 8))
OTHER, HELD, BAD = "var(--other)", "var(--held)", "var(--bad)"
WIDTH, HALF_WIDTH, RECEIVER_WIDTH = 1180, 570, 110
TIMES = {
    "milliseconds": "%H:%M:%S", "seconds": "%H:%M:%S", "minutes": "%H:%M", "hours": "%H:%M", "date": "%-d %b",
    "day": "%-d %b", "week": "%-d %b", "month": "%b %Y", "quarter": "%b %Y", "year": "%Y",
}  # fmt: skip
_CONFIG: dict[str, Any] = {
    "background": "transparent",
    "padding": {"left": 24, "right": 12, "top": 5, "bottom": 5},  # the page's font may be wider
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--quiet)", "labelFontSize": 12, "gridColor": "var(--line)", "domainColor": "var(--line)",
        "tickColor": "var(--line)", "labelPadding": 6, "labelLimit": 240,
    },
    "axisBand": {"ticks": False, "domain": False, "grid": False},
    "header": {"labelColor": "var(--ink)", "labelFontSize": 12, "labelFontWeight": 600, "labelAnchor": "start"},
    "line": {"strokeWidth": 1.75, "strokeCap": "round"},  # with round ends a line of one point is a dot
}  # fmt: skip
_ELEMENTS = frozenset({"svg", "g", "path", "line", "rect", "circle", "text", "tspan"})
_ATTRIBUTES = frozenset({
    "transform", "d", "fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-linecap", "opacity",
    "x", "y", "x1", "x2", "y1", "y2", "width", "height", "viewBox", "text-anchor", "font-size", "font-weight",
})  # fmt: skip
_LONG_FRACTION = re.compile(r"(\d+\.\d\d)\d+")
_COUNTS = alt.Axis(labelExpr="datum.value % 1 ? '' : format(datum.value, '~s')", tickCount=5, domain=False, ticks=False)
_SECONDS = (0.001, 0.01, 0.1, 1, 10, 60, 600, 3_600, 36_000, 86_400, 864_000, 8_640_000)
_COLOUR = alt.Color("colour:N", scale=None)  # each row's own, a variable of the page

Rows = Iterable[dict[str, Any]]


def bars_over_time(title: str, rows: Rows) -> Markup:
    """Rows: at, until, low, high, colour, tip."""
    y = alt.Y("low:Q", axis=_COUNTS, title=None)
    return _svg(
        title, rows, _chart(240).mark_bar().encode(_time(), y, _COLOUR, x2="until", y2="high", description="tip:N")
    )


def lines_over_time(title: str, rows: Rows) -> Markup:
    """A line with points for each colour. Rows: at, value, colour, tip."""
    base = _chart(220).encode(_time(), alt.Y("value:Q", axis=_COUNTS, title=None), _COLOUR, detail="colour:N")
    return _svg(title, rows, base.mark_line() + base.mark_circle(size=22, opacity=1).encode(description="tip:N"))


def latency_panels(title: str, rows: Rows, panels: Sequence[str]) -> Markup:
    """Small multiples with one logarithmic scale. Rows: panel, at, value (seconds), colour, run (of a line)."""
    texts = json.dumps({str(value): format_seconds(value) for value in _SECONDS})
    axis = alt.Axis(values=list(_SECONDS), labelSeparation=10, labelExpr=f"{texts}[toString(datum.value)]")
    y = alt.Y("value:Q", title=None, scale=alt.Scale(type="log", nice=True), axis=axis)
    lines = alt.Chart().mark_line().encode(_time(ticks=5), y, _COLOUR, detail=["colour:N", "run:N"])
    facet = alt.Facet("panel:N", title=None, sort=list(panels))
    sized = lines.properties(width=(WIDTH - 150) // 2, height=110)
    return _svg(title, rows, sized.facet(facet=facet, columns=2, data=alt.NamedData("rows")))


def timeline(title: str, rows: Rows, lanes: Sequence[str], begin: datetime, end: datetime) -> Markup:
    """A lane for each name. Rows: lane, at, until, strength (0..1), tip."""
    y = alt.Y("lane:N", sort=list(lanes), title=None, axis=alt.Axis(grid=True))
    strength = alt.FillOpacity("strength:Q", scale=alt.Scale(domain=[0, 1], range=[0.2, 1]), legend=None)
    bars = _chart(34 * len(lanes) + 30).mark_bar(color=BAD, height=14, cornerRadius=3)
    return _svg(title, rows, bars.encode(_time(domain=[begin, end]), y, strength, x2="until", description="tip:N"))


def heat_map(title: str, rows: Rows, senders: Sequence[str], receivers: Sequence[str]) -> Markup:
    """Rows: sender, receiver, warmth (0..1), text, tip."""
    top = alt.Axis(orient="top", labelAngle=-40, labelLimit=RECEIVER_WIDTH)
    x = alt.X("receiver:N", sort=list(receivers), title=None, axis=top)
    y = alt.Y("sender:N", sort=list(senders), title=None, axis=alt.Axis(labelLimit=150))
    warmth = alt.FillOpacity("warmth:Q", scale=alt.Scale(domain=[0, 1], range=[0.06, 0.7]), legend=None)
    base = _chart(28 * len(senders) + 110, HALF_WIDTH).encode(x, y)
    cells = base.mark_rect(color="var(--heat)", cornerRadius=3, stroke="var(--surface)", strokeWidth=3)
    numbers = base.mark_text(color="var(--ink)", fontSize=12).encode(text="text:N")
    # Vega does not make room for a slanted label that reaches beyond its column, the last one.
    reach = min(RECEIVER_WIDTH, 7 * len(receivers[-1])) * cos(radians(40)) - (HALF_WIDTH - 200) / len(receivers) / 2
    padding = _CONFIG["padding"] | {"right": max(_CONFIG["padding"]["right"], round(reach))}
    return _svg(title, rows, (cells.encode(warmth, description="tip:N") + numbers).properties(padding=padding))


def strip(title: str, rows: Rows, last: int) -> Markup:
    """Seq 1 to the last in one line. Rows: low, high, colour, tip; later ones over earlier ones."""
    x = alt.X("low:Q", title=None, scale=alt.Scale(domain=[1, last + 1], nice=False), axis=_COUNTS)
    return _svg(title, rows, _chart(70).mark_bar(height=36).encode(x, _COLOUR, x2="high", description="tip:N"))


def _chart(height: int, width: int = WIDTH) -> alt.Chart:
    return alt.Chart(alt.NamedData("rows")).properties(width=width, height=height)


def _time(*, ticks: int = 10, domain: Sequence[datetime] = ()) -> alt.X:
    scale = alt.Scale(type="utc", domain=[_ms(at) for at in domain] or alt.Undefined)
    axis = alt.Axis(format=TIMES, tickCount=ticks, grid=False, labelFlush=True, labelOverlap=True)
    return alt.X("at:T", title=None, scale=scale, axis=axis)


def _ms(value: Any) -> Any:
    return value.timestamp() * 1000 if isinstance(value, datetime) else value


def _svg(title: str, rows: Rows, chart: Any) -> Markup:
    # The rows are not checked against Vega-Lite's schema with the rest: that takes longer than to draw them.
    data = [{key: _ms(value) for key, value in row.items()} for row in rows]
    spec = chart.to_dict() | {"config": _CONFIG, "datasets": {"rows": data}}
    if "facet" not in spec:  # the width is of the whole drawing, with its axes
        spec["autosize"] = {"type": "fit", "contains": "padding"}
    (root,) = _rebuilt(ElementTree.fromstring(vl_convert.vegalite_to_svg(spec)))
    root.attrib |= {"class": "chart", "role": "img", "aria-label": title}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _rebuilt(old: ElementTree.Element) -> list[ElementTree.Element]:
    """The same drawing of known elements and attributes only; the description of a mark becomes its tooltip."""
    tag = old.tag.rpartition("}")[2]
    is_frame = "background" in old.get("class", "") and old.get("stroke") is None and old.get("fill") is None
    if tag not in _ELEMENTS or old.get("display") == "none" or is_frame:
        return []
    kept = {key: value for key, value in old.attrib.items() if key in _ATTRIBUTES and (key, value) != ("opacity", "1")}
    new = ElementTree.Element(tag, {key: _LONG_FRACTION.sub(r"\1", value) for key, value in kept.items()})
    new.text = old.text
    if tag == "path" and old.get("role") == "graphics-symbol" and (tip := old.get("aria-label")):
        ElementTree.SubElement(new, "title").text = tip
    new.extend(child for each in old for child in _rebuilt(each))
    return [] if tag == "g" and not len(new) else [new]
