"""The shell of a page and the parts all pages share: panels, tiles, tables. Pure but for its own style sheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from headwater.pipeline.page.markup import Html, join, tag, trusted
from headwater.pipeline.page.words import NAME_CHARS_MAX, cut

# Even if something got past the escaping, a browser would run and load nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True)
class Column:
    label: str
    number: bool = False
    kind: str = ""  # a class for its cells


@dataclass(frozen=True)
class Tile:
    label: str
    value: str
    below: str = ""
    alarm: bool = False


@cache
def style_sheet() -> Html:
    return trusted(resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8"))


def page(title: str, subject: str, made: str, sections: Sequence[tuple[str, str, Html]], foot: str) -> str:
    """A whole document. `sections` are (id, short name for the links, markup); those without a name get no link."""
    links = [tag("a", short, href=f"#{anchor}") for anchor, short, _ in sections if short]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"{title} · {cut(subject)}"),
        tag("link", rel="icon", href="data:,"),
        tag("style", style_sheet()),
    )
    top = tag(
        "header",
        tag("h1", _mark(), "Headwater"),
        tag("p", tag("strong", title), " ", tag("bdi", cut(subject)), class_="log"),
        tag("p", made, class_="made"),
        class_="top",
    )
    body = tag(
        "body",
        top,
        tag("nav", *links, aria_label="Parts of this page") if links else "",
        tag("main", *(markup for _, _, markup in sections)),
        tag("footer", foot),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _mark() -> Html:
    """The console's mark, drawn here: a page stands alone."""
    return tag(
        "svg",
        tag("rect", width=32, height=32, rx=9, class_="mark-ground"),
        tag("path", d="M8 7c0 7 8 6.5 8 13v6M24 7c0 7-8 6.5-8 13M16 6v8", class_="mark-lines"),
        class_="logo",
        viewBox="0 0 32 32",
        width=28,
        height=28,
        aria_hidden="true",
    )


def panel(anchor: str, heading: str, *body: str, note: str = "", half: bool = False) -> Html:
    return tag(
        "section",
        tag(
            "div",
            tag("h2", heading, id=f"{anchor}-heading"),
            tag("p", note, class_="quiet") if note else "",
            class_="head",
        ),
        *body,
        id=anchor,
        class_="panel half" if half else "panel",
        aria_labelledby=f"{anchor}-heading",
    )


def empty(why: str, *what_next: str) -> Html:
    return tag("p", join([why, *what_next], " "), class_="empty")


def command(line: str) -> Html:
    return tag("code", line, class_="command")


def tiles(shown: Sequence[Tile]) -> Html:
    return tag(
        "dl",
        *(
            tag(
                "div",
                tag("dt", tile.label),
                tag("dd", tile.value),
                tag("dd", tile.below, class_="sub"),
                class_="alarm" if tile.alarm else None,
            )
            for tile in shown
        ),
        class_="tiles",
    )


def table(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[str]], *, kind: str = "") -> Html:
    """Each cell carries the name of its column, which a phone shows in place of the head."""
    head = tag("tr", *(tag("th", column.label, scope="col", class_=_classes(column)) for column in columns))
    body = (
        tag(
            "tr",
            *(
                tag("td", cell, data_label=column.label, class_=_classes(column))
                for column, cell in zip(columns, row, strict=True)
            ),
        )
        for row in rows
    )
    made = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body), class_=kind or None)
    return tag("div", made, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _classes(column: Column) -> str | None:
    return " ".join(filter(None, ["number" if column.number else "", column.kind])) or None


def behind(summary: str, *body: str) -> Html:
    """What only some readers want: the numbers of a chart, the rest of a list."""
    return tag("details", tag("summary", summary), *body)


def named(name: str, chars_max: int = NAME_CHARS_MAX) -> Html:
    """A name from the data: cut, and kept from turning the text around it."""
    return tag("bdi", cut(name, chars_max))


def left_out(shown: int, of: int, noun: str) -> str:
    """Says what is not shown; nothing if all of it is."""
    return f"the first {shown:,} of {of:,} {noun}" if of > shown else ""


def caption(*parts: str) -> Html:
    """Small print below a chart; empty parts are left out."""
    said = [part for part in parts if part]
    return tag("p", join(said, " "), class_="caption") if said else join([])
