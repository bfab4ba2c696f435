"""The report as a page: complete in itself, whatever the tables hold."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from headwater.pipeline.page import Report, render_report

SECTIONS = ("volume", "topics", "traffic", "latency", "lag", "letters", "storms", "forecast", "replication")
PAGE_BYTES_MAX = 1_000_000
PAGE_SECONDS_MAX = 2.0
VOID = {"meta", "link", "br", "hr"}
SOURCE = Path(__file__).parents[3] / "src" / "headwater"

Tables = dict[str, list[dict[str, Any]]]
ReportOf = Callable[..., Report]
OneRow = Callable[..., Tables]


class Reading(HTMLParser):
    """Reads a page as a browser would, and keeps what matters to a test."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value or "" for key, value in attrs if key == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def read(page: str) -> Reading:
    """Checks what holds for every page."""
    reading = Reading(page)
    assert reading.open == []
    assert len(reading.ids) == len(set(reading.ids))
    assert not {"script", "img", "iframe", "object", "embed", "base", "form"} & set(reading.tags)
    names = {key for key, _ in reading.attributes}
    assert not {name for name in names if name.startswith("on")} | names & {"src", "srcset", "xlink:href"}
    links = [value or "" for key, value in reading.attributes if key == "href"]
    assert [link for link in links if not link.startswith("#")] == ["data:,"]
    assert {link[1:] for link in links if link.startswith("#")} <= set(reading.ids)
    style = page[page.index("<style>") : page.index("</style>")]
    assert not re.search(r"@import|url\(|https?:", style)
    return reading


def test_a_rich_page_has_every_section_and_chart(
    rich: Tables, report_of: ReportOf, whole_document: dict[str, Any]
) -> None:
    page = render_report(report_of(rich, whole_document, quarantined=12, notes=["late rows"]))
    reading = read(page)
    assert set(SECTIONS) <= set(reading.ids)
    assert 'class="empty"' not in page
    for said in ("The lake is whole", "813,191", "12 rows in quarantine", "late rows", "5 other topics", "orders.paid",
                 "published to acked", "none since", "▲", "nothing acked", "41 days", "backup.eu",
                 "(everybody)"):  # fmt: skip
        assert said in reading.text, said


def test_a_page_names_nothing_from_elsewhere(rich: Tables, report_of: ReportOf) -> None:
    page = render_report(report_of(rich)).replace('http-equiv="Content-Security-Policy"', "")
    for outside in ("http", "src=", "@import", "//", "url("):
        assert outside not in page, outside


def test_the_page_forbids_browsers_to_run_or_load_anything(report_of: ReportOf) -> None:
    assert "default-src &#x27;none&#x27;; style-src" in render_report(report_of({}))


def test_the_same_report_makes_the_same_page(rich: Tables, report_of: ReportOf) -> None:
    shuffled = {name: random.Random(1).sample(rows, len(rows)) for name, rows in rich.items()}
    assert render_report(report_of(rich)) == render_report(report_of(shuffled))


def test_equals_are_ranked_by_name_whatever_order_they_come_in(report_of: ReportOf, one_row: OneRow) -> None:
    names = [f"n{number:02}" for number in range(40)]
    made = [one_row(name) for name in names]
    up = {table: [row for tables in made for row in tables[table]] for table in made[0]}
    down = {table: rows[::-1] for table, rows in up.items()}
    assert render_report(report_of(up)) == render_report(report_of(down))


def test_empty_sections_say_why_and_the_page_how_to_audit(report_of: ReportOf) -> None:
    page = render_report(report_of({}, messages=0, bytes=0, high_water=0, lake="./my lake"))
    reading = read(page)
    assert page.count('class="empty"') == len(SECTIONS)
    assert "Not audited yet" in reading.text
    assert "headwater pipeline audit --log events.db --lake './my lake'" in reading.text


def test_one_row_of_everything_is_drawn(one_row: OneRow, report_of: ReportOf) -> None:
    page = render_report(report_of(one_row(), messages=1, bytes=190, high_water=1))
    assert 'class="empty"' not in page
    reading = read(page)
    assert "The fullest hour began 14 Nov 09:00 with 1 message." in reading.text


@pytest.mark.parametrize("table", ["volume", "latency", "lag", "dead_letters", "retry_storms", "traffic", "forecast",
                                   "replication"])  # fmt: skip
def test_rows_full_of_nulls_cost_a_cell_not_the_page(table: str, one_row: OneRow, report_of: ReportOf) -> None:
    tables = one_row()
    holes: dict[str, Any] = dict.fromkeys(tables[table][0])
    for rows in ([holes], [holes, tables[table][0]], [{**tables[table][0], **{
        key: float("nan") for key, value in tables[table][0].items() if isinstance(value, float)
    }}]):  # fmt: skip
        read(render_report(report_of({**tables, table: rows})))


NASTY = {
    "a script": "<script>alert(1)</script>",
    "quotes": "\"'><img src=x onerror=alert(1)>",
    "an end of style": "</style></title></svg><svg onload=alert(1)>",
    "an entity": "&lt;b&gt; &amp; &#60;",
    "right to left": "\u05d4\u05d6\u05de\u05e0\u05d4 \u202egnp.exe\u2066",
    "control characters": "\x00\x07\x1b[2J\x85\u2028\ufeff\ud800",
    "a comment": "<!-- --><![CDATA[ ]]>",
    "very long": "<" * 100_000,
    "nothing": "",
}


@pytest.mark.parametrize("nasty", NASTY.values(), ids=NASTY.keys())
def test_names_and_errors_stay_text(
    nasty: str, one_row: OneRow, report_of: ReportOf, broken_document: dict[str, Any]
) -> None:
    for check in broken_document["checks"]:
        check |= {"name": nasty, "what": nasty}
    page = render_report(report_of(one_row(nasty, nasty), broken_document, lake=nasty, log=nasty, notes=[nasty]))
    reading = read(page)
    page.encode()
    assert len(page) < 200_000
    plain = read(render_report(report_of(one_row("plain", "plain"), broken_document, notes=["plain"])))
    if nasty:
        assert reading.tags == plain.tags, "the data made or ended an element"
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page)
    if nasty.startswith("<script>"):
        assert nasty in reading.text


def test_a_hundred_thousand_rows_of_hostile_names_make_a_small_page_quickly(report_of: ReportOf) -> None:
    luck = random.Random(7)
    start = datetime(2024, 1, 1, tzinfo=UTC)
    quotes = '"' * 200
    hours = [start + timedelta(hours=luck.randrange(15_000)) for _ in range(100_000)]
    names = [f"{number}{quotes}{number}" for number in range(3000)]
    tables: Tables = {
        "volume": [{"day": at.date(), "hour": at, "topic": luck.choice(names), "type": "t", "messages": 3, "bytes": 600}
                   for at in hours],
        "latency": [{"subscription": luck.choice(names), "hour": at, "stage": stage, "count": 5, "p50_ms": 3.5,
                     "p90_ms": 30.5, "p99_ms": luck.random() * 1e5, "max_ms": 1e6}
                    for at in hours[:10_000] for stage in ("deliver", "ack")],
        "lag": [{"subscription": luck.choice(names[:60]), "observed_at": at, "lag": luck.randrange(10**6),
                 "position": 1, "in_flight": 0, "waiting": 0, "oldest_unacked_ms": 10} for at in hours[:20_000]],
        "dead_letters": [{"day": at.date(), "subscription": luck.choice(names), "reason": quotes, "handler": quotes,
                          "error_signature": quotes * 5, "letters": 1, "first_at": at, "last_at": at,
                          "example_error": quotes * 50, "trend": 1.0} for at in hours[:10_000]],
        "retry_storms": [{"subscription": luck.choice(names), "from_at": at, "to_at": at + timedelta(hours=1),
                          "acked": 1, "redelivered": luck.randrange(99), "ratio": 5.0} for at in hours[:10_000]],
        "traffic": [{"day": at.date(), "from": luck.choice(names), "to": luck.choice(names), "messages": 1, "bytes": 1}
                    for at in hours[:20_000]],
        "forecast": [{"pattern": name, "messages": 1, "bytes": 9, "messages_per_day": 1.0, "bytes_per_day": 9.0,
                      "limit_kind": quotes, "limit": 5, "days_left": 1.0, "bytes_in_30_days": 99.0} for name in names],
        "replication": [{"replica": name, "day": start.date(), "pushes": 1, "bytes": 1, "last_version": 1,
                         "last_at": start} for name in names],
    }  # fmt: skip
    report = report_of(tables, notes=[quotes * 10] * 1000)
    began = time.process_time()
    page = render_report(report)
    took = time.process_time() - began
    assert len(page.encode()) < PAGE_BYTES_MAX
    assert took < PAGE_SECONDS_MAX
    reading = read(page)
    assert "2,993 other topics" in reading.text
    assert "messages per week, UTC" in reading.text


def test_other_topics_are_summed_not_dropped(report_of: ReportOf) -> None:
    at = datetime(2025, 11, 14, 9, tzinfo=UTC)
    rows = [{"day": at.date(), "hour": at, "topic": f"t{number}", "type": None, "messages": 10, "bytes": 100}
            for number in range(20)]  # fmt: skip
    text = read(render_report(report_of({"volume": rows}))).text
    assert "13 other topics" in text  # of the chart
    assert "5 other topics" in text  # of the table
    assert "with 200 messages" in text


def test_an_audit_of_before_the_last_run_says_what_came_since(
    report_of: ReportOf, whole_document: dict[str, Any]
) -> None:
    text = read(render_report(report_of({}, whole_document, high_water=831_300))).text
    assert "grown by 100 seqs since" in text
    assert "grown by" not in read(render_report(report_of({}, whole_document, high_water=831_200))).text


def test_a_broken_lake_is_said_first(report_of: ReportOf, broken_document: dict[str, Any]) -> None:
    text = read(render_report(report_of({}, broken_document))).text
    assert "1,203 messages are missing, 40 messages are there more than once" in text
    assert "each seq once: 1,203 seqs are missing" in text
    assert text.index("The lake is not whole") < text.index("813,191")


def test_the_colours_are_those_of_the_console() -> None:
    def colours(path: Path) -> list[dict[str, str]]:
        text = path.read_text()
        light, dark = text.split("@media (prefers-color-scheme: dark)")[:2]
        dark = dark[: dark.index("\n  }\n")]
        return [dict(re.findall(r"(--[a-z-]+): ([^;]+);", part)) for part in (light, dark)]

    for ours, theirs in zip(
        colours(SOURCE / "pipeline/page/style.css"), colours(SOURCE / "console/console.css"), strict=True
    ):
        both = ours.keys() & theirs.keys()
        assert len(both) >= 14
        assert {name: ours[name] for name in both} == {name: theirs[name] for name in both}
