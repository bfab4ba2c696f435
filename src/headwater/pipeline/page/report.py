"""The report: the verdict, the figures, then a section per gold table. Data in, one HTML page out."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from headwater.pipeline.page.facts import Report, name, second, whole
from headwater.pipeline.page.layout import Tile, page, panel, tiles
from headwater.pipeline.page.markup import Html, join, tag
from headwater.pipeline.page.sections.forecast import forecast_section
from headwater.pipeline.page.sections.lag import lag_section
from headwater.pipeline.page.sections.latency import latency_section
from headwater.pipeline.page.sections.letters import letters_section
from headwater.pipeline.page.sections.replication import replication_section
from headwater.pipeline.page.sections.storms import storms_section
from headwater.pipeline.page.sections.traffic import traffic_section
from headwater.pipeline.page.sections.volume import topics_section, volume_section
from headwater.pipeline.page.verdict import verdict
from headwater.pipeline.page.words import (
    PATH_CHARS_MAX,
    clock,
    count,
    cut,
    cut_end,
    day,
    day_and_year,
    from_epoch,
    moment,
    short,
    size,
    some,
    without_password,
)

NOTES_SHOWN = 20
NOTE_CHARS_MAX = 500
SHORT_FROM = 1_000_000  # headline figures below are written out

_SECTIONS: list[tuple[str, str, Callable[[Report], Html]]] = [
    ("volume", "Volume", volume_section),
    ("topics", "Topics", topics_section),
    ("traffic", "Traffic", traffic_section),
    ("latency", "Latency", latency_section),
    ("lag", "Lag", lag_section),
    ("letters", "Dead letters", letters_section),
    ("storms", "Retry storms", storms_section),
    ("forecast", "Size", forecast_section),
    ("replication", "Replication", replication_section),
]


def render_report(report: Report) -> str:
    """The whole page. The same report makes the same text."""
    judged = verdict(report.audit, log=report.log, lake=report.lake, high_water=report.high_water)
    sections = [("verdict", "", judged), ("figures", "", _figures(report))]
    if report.notes:
        sections.append(("notes", "", _notes(report.notes)))
    sections += [(anchor, short_name, draw(report)) for anchor, short_name, draw in _SECTIONS]
    lake, log = (cut(path, PATH_CHARS_MAX) for path in (report.lake, without_password(report.log)))
    return page(
        "Report",
        report.lake,
        f"made {moment(report.made_at)} UTC",
        sections,
        f"Made by headwater pipeline report from {lake}, of the log {log}, "
        f"up to seq {report.high_water:,}. All times are UTC.",
    )


def _figures(report: Report) -> Html:
    topics = {name(row.get("topic")) for row in report.rows("volume")}
    types = {row["type"] for row in report.rows("volume") if row.get("type")}
    subscriptions = {name(row.get("subscription")) for table in ("lag", "latency") for row in report.rows(table)}
    letters = sum(whole(row.get("letters")) for row in report.rows("dead_letters"))
    span_value, span_below = _oldest_and_newest(report)
    shown = [
        Tile("Messages", _headline(report.messages), f"up to seq {report.high_water:,}"),
        Tile("Size", size(report.bytes), f"{size(report.bytes / report.messages)} each" if report.messages else ""),
        Tile("Topics", _headline(len(topics)), some(len(types), "type") if types else ""),
        Tile("Subscriptions", _headline(len(subscriptions)), _behind(report)),
        Tile("Dead letters", _headline(letters), _quarantined(report), alarm=bool(letters)),
        Tile("Oldest to newest", span_value, span_below),
    ]
    return tag("section", tiles(shown), id="figures", class_="figures", aria_label="Figures")


def _headline(number: int) -> str:
    return count(number) if number < SHORT_FROM else short(number)


def _quarantined(report: Report) -> str:
    return f"{some(report.quarantined, 'row')} in quarantine" if report.quarantined else "nothing in quarantine"


def _behind(report: Report) -> str:
    """The lag of all subscriptions at the last look at each."""
    latest: dict[str, tuple[int, int]] = {}
    for row in report.rows("lag"):
        seen = (second(row.get("observed_at")) or 0, whole(row.get("lag")))
        key = name(row.get("subscription"))
        latest[key] = max(latest.get(key, seen), seen)
    total = sum(lag for _, lag in latest.values())
    return f"{short(total)} behind" if total else "none behind" if latest else ""


def _oldest_and_newest(report: Report) -> tuple[str, str]:
    hours = [at for row in report.rows("volume") if (at := second(row.get("hour"))) is not None]
    if not hours:
        return "–", ""
    first, last = from_epoch(min(hours)), from_epoch(max(hours))
    length = (last.date() - first.date() + timedelta(days=1)).days
    if length == 1:
        return day(first), f"{clock(first)} to {clock(last + timedelta(hours=1))}"
    begun = day(first) if first.year == last.year else day_and_year(first)
    return some(length, "day"), f"{begun} to {day_and_year(last)}"


def _notes(notes: list[str]) -> Html:
    told = [tag("li", cut_end(note, NOTE_CHARS_MAX)) for note in notes[:NOTES_SHOWN]]
    more = len(notes) - len(told)
    more_said = tag("li", f"and {more:,} more") if more else ""
    return panel("notes", "Notes", tag("ul", join(told), more_said, class_="notes"))
