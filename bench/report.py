"""One line per measurement: Headwater's result, the other result, the ratio, and the wanted ratio."""

from __future__ import annotations

from typing import NamedTuple

from rich.console import Console
from rich.table import Table


class Line(NamedTuple):
    what: str
    ours: str
    other: str
    ratio: float | None = None
    wanted: str = ""
    met: bool | None = None


def against(what: str, ours: float, name: str, other: float | None, at_least: float | None = None) -> Line:
    """`other` is None where the other system failed."""
    if other is None:
        return Line(what, f"{ours:,.0f}/s", f"{name} failed")
    ratio = ours / other
    met = None if at_least is None else ratio >= at_least
    wanted = "" if at_least is None else f"≥ {at_least:g} ×"
    return Line(what, f"{ours:,.0f}/s", f"{name} {other:,.0f}/s", ratio, wanted, met)


def at_most(what: str, ours: str, other: str, ratio: float, most: float) -> Line:
    """For what is the better the less it is."""
    return Line(what, ours, other, ratio, f"≤ {most:g} ×", ratio <= most)


def show(title: str, lines: list[Line]) -> None:
    table = Table(title=title, title_justify="left")
    for heading in ("measured", "Headwater", "beside it", "ratio", "wanted", ""):
        table.add_column(heading, justify="right" if heading in ("Headwater", "ratio") else "left")
    for line in lines:
        mark = "" if line.met is None else "[green]yes[/]" if line.met else "[red]no[/]"
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
        table.add_row(line.what, line.ours, line.other, ratio, line.wanted, mark)
    Console(width=130).print(table)
