"""The report and the audit as pages: complete in themselves, whatever the tables hold. No Spark, no network."""

from __future__ import annotations

import base64
import functools
import hashlib
import math
import random
import re
import subprocess
import sys
import time
from datetime import UTC, date, datetime, timedelta, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headwater
from headwater.cli.demo import publish_traffic
from headwater.pipeline.columns import GOLD_SCHEMAS
from headwater.pipeline.report import Report, charts, model, render_audit, render_report

SECTIONS = ("volume", "topics", "traffic", "latency", "lag", "letters", "storms", "forecast", "replication")
CHARTS = 5  # of a rich report: volume, traffic, latency, lag, storms
PAGE_BYTES_MAX = 1_000_000
PAGE_SECONDS_MAX = 20.0  # of processor time, for 250,000 rows; about 3 s
VOID = {"meta", "link"}
SOURCE = Path(__file__).parents[2] / "src" / "headwater"

Tables = dict[str, list[dict[str, Any]]]

MADE_AT = datetime(2025, 11, 15, 11, 20, tzinfo=UTC)
START = datetime(2025, 11, 1, tzinfo=UTC)
TIMES = [START + timedelta(hours=3 * number) for number in range(113)]
TOPICS = [
    "orders.created", "orders.paid", "orders.shipped", "inventory.reserved", "mail.sent", "payments.captured",
    "audit.login", "search.indexed", "carts.abandoned", "reviews.posted", "refunds.asked", "newsletter.joined",
]  # fmt: skip
SUBSCRIPTIONS = ["billing", "mailer", "search-index", "warehouse.eu-west", "fraud-check"]
ENTITIES = ["shop", "billing", "warehouse", "mailer", "search", "crm", "fraud", "partner-api", "mobile-app", None]


def whole_audit() -> dict[str, Any]:
    return {
        "whole": True, "checked_at": "2025-11-15T11:02:00+00:00", "log": "events.db", "lake": "./lake",
        "lake_seq": 831_200, "last_seq": 831_950, "rows": 812_441, "seconds": 3.41, "not_yet": 750,
        "compared": 812_441,
        "checks": [
            {"name": "each seq once", "status": "ok", "what": "812,441 rows hold 812,441 different seqs"},
            {"name": "gaps are explained", "status": "ok", "what": "2 gaps, each recorded by retention"},
            {"name": "checksums agree", "status": "ok", "what": "64 ranges have the log's checksums"},
            {"name": "files are as sealed", "status": "ok", "what": "128 files with the manifest's hashes"},
        ],
        "gaps": [{"from": 1, "to": 18_000, "why": "retention"}, {"from": 40_001, "to": 40_759, "why": "retention"}],
        "gaps_total": {"runs": 2, "messages": 18_759}, "missing": [], "repeated": [], "different": [],
        **{f"{key}_total": {"runs": 0, "messages": 0} for key in ("missing", "repeated", "different")},
        "files_missing": [], "files_changed": [], "files_repeated": [],
    }  # fmt: skip


def broken_audit() -> dict[str, Any]:
    broken = whole_audit()
    broken["whole"] = False
    broken["checks"][0] |= {"status": "failed", "what": "1,203 seqs are missing and 40 are there twice"}
    broken["checks"][2] |= {"status": "failed", "what": "1 of 64 ranges has another checksum than the log"}
    return broken | {
        "missing": [[500_000, 501_199], [600_001, 600_003]], "missing_total": {"runs": 2, "messages": 1_203},
        "repeated": [[700_010, 700_049]], "repeated_total": {"runs": 1, "messages": 40},
        "different": [[777_777, 777_777]], "different_total": {"runs": 1, "messages": 1},
        "files_missing": ["bronze/messages/day=2025-11-07/part-0007.parquet"],
        "files_changed": ["bronze/messages/day=2025-11-09/part-0031.parquet"],
        "files_repeated": ["bronze/messages/day=2025-11-10/part-0032.parquet"],
    }  # fmt: skip


def report_of(tables: Tables, audit: dict[str, Any] | None = None, **more: Any) -> Report:
    """Of rows that the gold tables could hold: their schemas say so."""
    for table, rows in tables.items():
        schema = GOLD_SCHEMAS[table]
        assert all(row.keys() == set(schema.names) for row in rows)
        pa.Table.from_pylist(rows, schema=schema)
    facts: dict[str, Any] = {
        "lake": "./lake", "log": "events.db", "made_at": MADE_AT, "lake_seq": 831_950, "messages": 813_191,
        "bytes": 241_400_000, "quarantined": 0, "notes": [],
    } | more  # fmt: skip
    return Report(tables=tables, audit=audit, **facts)


def rich_tables() -> Tables:
    """Two weeks, in which each section has something to show of every kind that it tells apart."""
    luck = random.Random(4)
    failures = [
        ("mailer", "max_attempts", "mail.send", "ConnectionRefusedError: smtp #:#", TIMES[::8]),
        ("search-index", "expired", None, None, TIMES[:40:8]),
    ]
    storms = [("mailer", 50, 20, 310, 2900), ("warehouse.eu-west", 20, 3, 80, 300), ("billing", 100, 1, 0, 75)]
    limits: list[tuple[str, int, str | None, int | None, float | None]] = [
        (">", 241_000_000, "max_bytes", 1_000_000_000, 41.6), ("orders.>", 122_000_000, "max_count", 500_000, 3.2),
        ("audit.>", 9_000_000, "max_age", 7_776_000_000, 76.0), ("mail.*", 22_000_000, None, None, None),
    ]  # fmt: skip
    return {
        "volume": [
            {"day": at.date(), "hour": at, "topic": topic, "type": topic.rsplit(".", 1)[-1],
             "messages": luck.randint(1, 900), "bytes": luck.randint(900, 400_000)}
            for at in TIMES for topic in TOPICS
        ],
        "latency": [
            {"subscription": name, "hour": at, "stage": stage, "count": luck.randint(50, 900), "p50_ms": half,
             "p90_ms": half * 3.1, "p99_ms": half * luck.uniform(8, 30), "max_ms": half * 60, "day": at.date()}
            for name in SUBSCRIPTIONS for at in TIMES for stage in ("deliver", "ack") for half in [luck.uniform(4, 200)]
        ],
        "lag": [
            {"subscription": name, "observed_at": at, "lag": luck.randint(0, 9_000), "position": 4_000 * number,
             "in_flight": luck.randint(0, 64), "waiting": luck.randint(0, 9), "oldest_unacked_ms": 35 * number,
             "day": at.date()}
            for name in SUBSCRIPTIONS for number, at in enumerate(TIMES)
        ],
        "dead_letters": [
            {"day": at.date(), "subscription": name, "reason": reason, "handler": handler, "error_signature": error,
             "letters": number + 1, "first_at": at, "last_at": at + timedelta(hours=luck.randint(0, 9)),
             "example_error": error and f"{error} (at step 7)", "trend": number - 0.5}
            for name, reason, handler, error, times in failures for number, at in enumerate(times)
        ],
        "retry_storms": [
            {"subscription": name, "from_at": TIMES[begin], "to_at": TIMES[begin] + timedelta(hours=hours),
             "acked": acked, "redelivered": again, "ratio": again / (again + acked)}
            for name, begin, hours, acked, again in storms
        ],
        "traffic": [
            {"day": START.date(), "from": sender, "to": receiver, "messages": round(luck.paretovariate(0.6)),
             "bytes": 1000}
            for sender in ENTITIES for receiver in ENTITIES if sender != receiver
        ],
        "forecast": [
            {"pattern": pattern, "messages": held // 300, "bytes": held, "messages_per_day": 4_000.0,
             "bytes_per_day": 1.2e6, "limit_kind": kind, "limit": limit, "days_left": left,
             "bytes_in_30_days": held + 3.6e7}
            for pattern, held, kind, limit, left in limits
        ],
        "replication": [
            {"replica": replica, "day": at.date(), "pushes": luck.randint(1, 40), "bytes": luck.randint(10**5, 10**7),
             "last_version": number + 1, "last_at": at}
            for replica in ("laptop", "backup.eu", "analytics") for number, at in enumerate(TIMES[::8])
        ],
    }  # fmt: skip


def one_row_each(name: str = "orders.created", output: str = "ValueError: no") -> Tables:
    """One row of every table, with `name` wherever a name can stand and `output` wherever an error can."""
    at, day = datetime(2025, 11, 14, 9, tzinfo=UTC), date(2025, 11, 14)
    return {
        "volume": [{"day": day, "hour": at, "topic": name, "type": name, "messages": 1, "bytes": 190}],
        "latency": [{"subscription": name, "hour": at, "stage": stage, "count": 1, "p50_ms": 3.0, "p90_ms": 3.0,
                     "p99_ms": 3.0, "max_ms": 3.0, "day": day} for stage in ("deliver", "ack")],
        "lag": [{"subscription": name, "observed_at": at, "lag": 1, "position": 1, "in_flight": 0, "waiting": 0,
                 "oldest_unacked_ms": None, "day": day}],
        "dead_letters": [{"day": day, "subscription": name, "reason": name, "handler": name, "error_signature": name,
                          "letters": 1, "first_at": at, "last_at": at, "example_error": output, "trend": 1.0}],
        "retry_storms": [{"subscription": name, "from_at": at, "to_at": at, "acked": 0, "redelivered": 12,
                          "ratio": 1.0}],
        "traffic": [{"day": day, "from": name, "to": name, "messages": 1, "bytes": 190}],
        "forecast": [{"pattern": name, "messages": 1, "bytes": 190, "messages_per_day": 1.0, "bytes_per_day": 190.0,
                      "limit_kind": None, "limit": None, "days_left": None, "bytes_in_30_days": 5890.0}],
        "replication": [{"replica": name, "day": day, "pushes": 1, "bytes": 4096, "last_version": 1, "last_at": at}],
    }  # fmt: skip


def two_hours(*names: str, output: str = "") -> Tables:
    """The same of each name, and an hour later again: with two names every chart is drawn."""
    later = {"hour", "observed_at", "from_at", "to_at"}
    made: Tables = {table: [] for table in GOLD_SCHEMAS}
    for name in names:
        for table, rows in one_row_each(name, output or f"{name}!").items():
            made[table] += rows
            made[table] += [
                {key: value + timedelta(hours=1) if key in later else value for key, value in row.items()}
                for row in rows
            ]
    return made


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
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value or "" for key, value in attrs if key == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data + (" " if self.open[-1] in ("bdi", "span", "dt", "dd", "li", "strong") else "")


def read(page: str) -> Reading:
    """Checks what holds for every page."""
    reading = Reading(page)
    assert reading.open == []
    assert len(reading.ids) == len(set(reading.ids))
    assert not {"script", "img", "image", "iframe", "object", "embed", "base", "form", "use"} & set(reading.tags)
    assert reading.tags.count("style") == 1
    names = {key for key, _ in reading.attributes}
    assert not {name for name in names if name.startswith("on")} | names & {"src", "srcset", "xlink:href", "style"}
    links = [value or "" for key, value in reading.attributes if key == "href"]
    assert [link for link in links if not link.startswith("#")] == ["data:,"]
    assert {link[1:] for link in links if link.startswith("#")} <= set(reading.ids)
    for outside in ("http://", "https://", "@import", "url("):
        assert outside not in page, outside
    style = page[page.index("<style>") + 7 : page.index("</style>")]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    assert ("content", policy) in reading.attributes
    assert "Undefined" not in page
    return reading


def text_of(page: str) -> str:
    return " ".join(read(page).text.split())


# --- the report -----------------------------------------------------------------------------------------------------


@functools.cache
def rich_page() -> str:
    return render_report(report_of(rich_tables(), whole_audit(), quarantined=12, notes=["late rows"]))


@functools.cache
def broken_page() -> str:
    return render_audit(broken_audit())


def test_a_rich_page_has_every_section_and_chart() -> None:
    page = rich_page()
    reading = read(page)
    assert set(SECTIONS) <= set(reading.ids)
    assert 'class="empty"' not in page
    assert page.count('class="chart"') == CHARTS
    for text in ("The lake is whole", "813,191", "12 rows in quarantine", "late rows", "5 other topics", "orders.paid",
                 "published to acked", "none since", "▲", "41.6 d", "backup.eu", "(not named)",
                 "mailer · published to delivered"):  # fmt: skip
        assert text in reading.text, text


def test_empty_sections_say_why_and_the_page_how_to_audit() -> None:
    page = render_report(report_of({}, messages=0, bytes=0, lake_seq=0, lake="./my lake"))
    assert page.count('class="empty"') == len(SECTIONS)
    assert page.count('class="chart"') == 0
    assert 'class="panel half"' not in page
    assert "headwater pipeline audit events.db --lake './my lake'" in text_of(page)
    assert "redriven or purged before the next run is not counted" in text_of(page)


def test_a_chart_of_one_point_is_a_sentence() -> None:
    page = render_report(report_of(one_row_each(), messages=1, bytes=190, lake_seq=1))
    text = text_of(page)
    assert 'class="empty"' not in page
    assert page.count('class="chart"') == 1  # a storm is as long as it was
    assert "1 message, all published in the hour from 14 Nov 09:00 on." in text
    assert "1 message, all from orders.created to orders.created." in text
    assert "No subscription was measured in more than one hour yet" in text
    assert "One snapshot so far" in text


def test_two_snapshots_of_the_lag_are_a_line_even_a_minute_apart() -> None:
    (row,) = one_row_each()["lag"]
    later = row | {"observed_at": row["observed_at"] + timedelta(minutes=1), "lag": 7}
    page = render_report(report_of({"lag": [row, later]}))
    assert page.count('class="chart"') == 1
    assert "14 Nov 09:00: 1 message" in page
    assert "14 Nov 09:01: 7 messages" in page


def test_latency_is_drawn_of_subscriptions_that_were_measured_more_than_once() -> None:
    rows = [*two_hours("mailer")["latency"], *one_row_each("visitor")["latency"]]
    text = text_of(render_report(report_of({"latency": rows})))
    assert "mailer · published to acked" in text
    assert "visitor ·" not in text
    assert "Drawn: 1 of 2 subscriptions" in text
    assert "0.01 s" in text  # an axis has the spelling of the tables


def test_rows_without_values_cost_no_page() -> None:
    nulls: Tables = {table: [dict.fromkeys(schema.names)] for table, schema in GOLD_SCHEMAS.items()}
    assert render_report(report_of(nulls)).count('class="empty"') == len(SECTIONS)
    filled = two_hours("orders", "orders2")
    both = {table: nulls[table] + rows for table, rows in filled.items()}
    assert render_report(report_of(both)) == render_report(report_of(filled))
    spare: Tables = {
        table: [{key: None if key in model.NULLABLE else value for key, value in row.items()} for row in rows]
        for table, rows in filled.items()
    }
    text = text_of(render_report(report_of(spare)))
    assert "no error given" in text
    assert "No message names a sender" in text


def test_the_same_rows_in_another_order_make_the_same_page() -> None:
    tables = rich_tables()
    for table, rows in two_hours(*(f"n{number:02}" for number in range(40))).items():
        tables[table] += rows
    shuffled = {name: random.Random(1).sample(rows, len(rows)) for name, rows in tables.items()}
    assert render_report(report_of(tables)) == render_report(report_of(shuffled))


def test_a_retry_storm_is_the_share_of_deliveries_that_were_redeliveries() -> None:
    storms = [{"subscription": "mailer", "from_at": START, "to_at": START + timedelta(hours=1), "acked": 30,
               "redelivered": 90, "ratio": 0.75}]  # fmt: skip
    page = render_report(report_of({"retry_storms": storms}))
    assert "90 redelivered, 75% of deliveries" in page  # of the bar
    assert re.search(r"mailer 1 Nov 00:00 1 h 90 30 75%", text_of(page))


def test_other_topics_are_summed_not_dropped() -> None:
    at = datetime(2025, 11, 14, 9, tzinfo=UTC)
    rows = [{"day": at.date(), "hour": at + timedelta(hours=number % 2), "topic": f"t{number:02}", "type": None,
             "messages": 10, "bytes": 100} for number in range(30)]  # fmt: skip
    text = text_of(render_report(report_of({"volume": rows})))
    assert "23 other topics" in text
    assert "the first 20 of 30 topics" in text
    assert "with 150 messages" in text


NASTY = {
    "a script": "<script>alert(1)</script>",
    "the end of an element": "</title></bdi></td></table></svg><svg onload=alert(1)>",
    "an attribute": '" onmouseover="alert(1)" x=\'',
    "templates": "{{ 7 * 7 }}{% raw %}${x}",
    "a signal of a chart": '{"signal": "1+1"}',
    "direction": "\u05d4\u05d6\u05de\u05e0\u05d4 \u202egnp.exe\u2066",
    "control characters": "\x00\x07\x1b[2J\x85\u2028\ufeff\ud800\n",
    "a comment": "<!-- --><![CDATA[ ]]>&amp;&#0;",
    "very long": "<" * 100_000,
    "nothing": "",
}


@pytest.mark.parametrize("nasties", [[*NASTY][:5], [*NASTY][5:]], ids=["marks", "characters"])
def test_names_and_errors_stay_text_in_tables_and_charts(nasties: list[str]) -> None:
    audit, texts = broken_audit(), [NASTY[name] for name in nasties]
    audit["checks"] += [{"name": nasty, "what": nasty, "status": "failed"} for nasty in texts]
    assert (
        set(read(render_audit(audit | {"lake": texts[0], "log": texts[1], "files_missing": texts})).tags)
        <= plain_tags()
    )
    page = render_report(report_of_unchecked(two_hours(*texts), audit, lake=texts[0], log=texts[1], notes=texts))
    reading = read(page)
    page.encode()
    assert len(page) < 300_000
    assert page.count('class="chart"') == CHARTS
    assert set(reading.tags) == plain_tags()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page)
    if "a script" in nasties:
        drawings = re.findall(r"<svg[^>]*class=\"chart\".*?</svg>", page, re.S)
        assert any("&lt;script&gt;alert(1)" in drawing for drawing in drawings)
        assert NASTY["a script"] in reading.text


@functools.cache
def plain_tags() -> set[str]:
    page = render_report(report_of_unchecked(two_hours("plain", "also", output="no"), broken_audit(), notes=["plain"]))
    return set(read(page).tags)


def report_of_unchecked(tables: Tables, audit: dict[str, Any] | None = None, **more: Any) -> Report:
    """Half a character is none that Arrow takes."""
    made = report_of({}, audit, **more)
    return Report(**{**vars(made), "tables": tables})


def test_three_years_of_hostile_names_make_a_small_page_quickly() -> None:
    luck = random.Random(7)
    start = datetime(2023, 1, 1, tzinfo=UTC)
    quotes = '"' * 200
    hours = [start + timedelta(hours=luck.randrange(26_000)) for _ in range(100_000)]
    names = [f"{number}{quotes}{number}" for number in range(3000)]
    tables: Tables = {
        "volume": [{"day": at.date(), "hour": at, "topic": luck.choice(names), "type": "t", "messages": 3, "bytes": 600}
                   for at in hours],
        "latency": [{"subscription": luck.choice(names[:9]), "hour": at, "stage": stage, "count": 5, "p50_ms": 3.5,
                     "p90_ms": 30.5, "p99_ms": luck.random() * 1e5, "max_ms": 1e6, "day": at.date()}
                    for at in hours[:10_000] for stage in ("deliver", "ack")],
        "lag": [{"subscription": luck.choice(names[:60]), "observed_at": at, "lag": luck.randrange(10**6),
                 "position": 1, "in_flight": 0, "waiting": 0, "oldest_unacked_ms": 10, "day": at.date()}
                for at in hours[:20_000]],
        "dead_letters": [{"day": at.date(), "subscription": luck.choice(names), "reason": quotes, "handler": quotes,
                          "error_signature": quotes * 5, "letters": 1, "first_at": at, "last_at": at,
                          "example_error": quotes * 50, "trend": 1.0} for at in hours[:10_000]],
        "retry_storms": [{"subscription": luck.choice(names), "from_at": at, "to_at": at + timedelta(hours=1),
                          "acked": 1, "redelivered": luck.randrange(99), "ratio": 0.9} for at in hours[:10_000]],
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
    assert time.process_time() - began < PAGE_SECONDS_MAX
    assert len(page.encode()) < PAGE_BYTES_MAX
    text = text_of(page)
    for output in ("2,993 other topics", "messages per 2 weeks, UTC", "the first 20 of 10,000 storms",
                 "the first 20 of 1,000 notes", "the first 20 of 60 subscriptions"):  # fmt: skip
        assert output in text, output


# --- the audit ------------------------------------------------------------------------------------------------------


def test_a_broken_lake_shows_ranges_and_files() -> None:
    text = text_of(broken_page())
    for output in (
        "The lake is not whole", "2 of 4 checks failed", "missing 500,000 501,199 1,200", "600,001 600,003 3",
        "repeated 700,010 700,049 40", "different 777,777 777,777 1", "gap 1 18,000 18,000 deleted by retention",
        "missing: 1,203 messages; repeated: 40 messages", "part-0007.parquet not in storage",
        "part-0031.parquet not as it was written", "part-0032.parquet holds messages",
        "failed each seq once 1,203 seqs are missing", "ok files are as sealed",
    ):  # fmt: skip
        assert output in text, output
    for tip in ("seq 500,000 to 501,199: in the log, not in the lake", "seq 777,777: not as in the log",
                "seq 700,010 to 700,049: in the lake more than once"):  # fmt: skip
        assert f"<title>{tip}</title>" in broken_page()


def test_a_broken_lakes_report_names_the_wrongs_first_and_the_whole_command() -> None:
    text = text_of(render_report(report_of({}, broken_audit())))
    assert "2 of 4 checks failed" in text
    assert "each seq once : 1,203 seqs are missing and 40 are there twice" in text
    assert text.index("The lake is not whole") < text.index("813,191")
    assert "headwater pipeline audit events.db --lake ./lake --out audit.html" in text


def test_a_whole_lake_has_no_wrongs() -> None:
    text = text_of(render_audit(whole_audit()))
    for output in ("The lake is whole", "Every message up to seq 831,200 is in it exactly once.",
                 "18,759 messages in 2 gaps explained by retention", "750 newer messages not in the lake yet",
                 "checked 15 Nov 2025, 11:02", "No missing or changed files were found."):  # fmt: skip
        assert output in text
    assert "failed" not in text


def test_a_skipped_check_is_neither_ok_nor_failed() -> None:
    audit = whole_audit()
    audit["checks"][1] |= {"status": "skipped", "what": "a run added messages meanwhile"}
    page = render_audit(audit)
    assert re.findall(r'class="state (\w+)"', page) == ["skipped", "ok", "ok", "ok"]
    assert "1 check skipped" in text_of(page)
    assert "1 check skipped" in text_of(render_report(report_of({}, audit)))


def test_counts_are_those_of_the_totals_not_of_the_listed_runs() -> None:
    audit = broken_audit() | {
        "gaps": [{"from": number * 10 + 1, "to": number * 10 + 1, "why": "retention"} for number in range(100)],
        "gaps_total": {"runs": 109, "messages": 584},
        "missing": [[number * 10 + 5, number * 10 + 5] for number in range(100)],
        "missing_total": {"runs": 4_000, "messages": 70_000},
    }
    text = text_of(render_audit(audit))
    assert "missing: 70,000 messages" in text
    assert "the first 202 of 4,111 ranges" in text
    for each in (text, text_of(render_report(report_of({}, audit)))):
        assert "584 messages in 109 gaps explained by retention" in each


def test_an_empty_lake_is_whole() -> None:
    nothing = {"lake_seq": 0, "last_seq": 0, "rows": 0, "not_yet": 0, "compared": 0, "gaps": [],
               "gaps_total": {"runs": 0, "messages": 0}}  # fmt: skip
    text = text_of(render_audit(whole_audit() | nothing))
    assert "It has no messages yet." in text
    assert "no gaps found" in text


def test_a_lake_that_cannot_be_read_makes_a_page() -> None:
    checks = [{"name": "log entries", "status": "failed", "what": "an entry is gone"},
              {"name": "rows", "status": "skipped", "what": "not made"}]  # fmt: skip
    audit = {"whole": False, "checked_at": "2025-11-15T11:02:00Z", "seconds": 0.1, "log": "events.db",
             "lake": "./lake", "lake_seq": 0, "checks": checks}  # fmt: skip
    for page in (render_audit(audit), render_report(report_of({}, audit))):
        assert "log entries : an entry is gone" in text_of(page)


def test_a_hopeless_lake_makes_a_bounded_page() -> None:
    many = [[number * 10 + 1, number * 10 + 5] for number in range(5_000)]
    page = render_audit(
        broken_audit()
        | {
            "missing": many,
            "repeated": many,
            "different": many,
            "gaps": [{"from": low, "to": high, "why": "retention"} for low, high in many],
            "files_missing": ['"' * 5000] * 10_000,
            "files_changed": ["x" * 5000] * 10_000,
            "checks": [{"name": "<i>" * 999, "status": "failed", "what": "<u>" * 9999}] * 1000,
        }
    )
    assert len(page) < PAGE_BYTES_MAX


def test_an_audit_of_before_the_last_run_says_what_came_since() -> None:
    assert "grown by 100 seqs since" in text_of(render_report(report_of({}, whole_audit(), lake_seq=831_300)))
    assert "grown by" not in text_of(render_report(report_of({}, whole_audit(), lake_seq=831_200)))


# --- parts ----------------------------------------------------------------------------------------------------------


def test_the_colours_are_those_of_the_console() -> None:
    def colours(path: Path) -> list[dict[str, str]]:
        light, dark = re.split(r"@media [^{]*\(prefers-color-scheme: dark\)", path.read_text())[:2]
        dark = dark[: dark.index("\n  }\n")]
        return [dict(re.findall(r"(--[a-z-]+): ([^;]+);", part)) for part in (light, dark)]

    for ours, theirs in zip(
        colours(SOURCE / "pipeline/report/style.css"), colours(SOURCE / "console/console.css"), strict=True
    ):
        both = ours.keys() & theirs.keys()
        assert len(both) >= 12
        assert {name: ours[name] for name in both} == {name: theirs[name] for name in both}


def test_every_colour_of_a_chart_is_one_of_the_page() -> None:
    style = (SOURCE / "pipeline/report/style.css").read_text()
    page = rich_page() + broken_page()
    colours = set(re.findall(r'(?:fill|stroke)="([^"]+)"', page)) - {"none", "transparent"}
    assert len(colours) > 10
    assert all(re.fullmatch(r"var\(--[\w-]+\)", colour) for colour in colours), colours
    assert all(f"{colour[4:-1]}:" in style for colour in colours)


def test_a_drawing_keeps_known_elements_and_attributes_only() -> None:
    hostile = (
        '<svg xmlns="http://www.w3.org/2000/svg" onload="x()" width="9"><script>x()</script><style>*{}</style>'
        '<g><a href="javascript:x()"><path d="M0"/></a></g><image href="http://x"/><foreignObject/>'
        '<path d="M0,0.123456" style="fill:red" class="x" aria-label="&lt;b&gt;" role="graphics-symbol"/></svg>'
    )
    (made,) = charts._rebuilt(ElementTree.fromstring(hostile))
    drawn = ElementTree.tostring(made, encoding="unicode")
    assert drawn == '<svg width="9"><path d="M0,0.12"><title>&lt;b&gt;</title></path></svg>'


def test_the_command_does_not_import_charts_before_a_page_is_made() -> None:
    code = "import sys, headwater.cli.pipeline; print({'altair', 'vl_convert', 'pyspark'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


MOMENTS = st.datetimes(datetime(1970, 1, 1), datetime(2300, 1, 1), timezones=st.just(UTC))


@given(MOMENTS, MOMENTS, st.integers(min_value=2, max_value=200))
def test_a_step_puts_both_ends_into_at_most_so_many_columns(one: datetime, other: datetime, columns_max: int) -> None:
    step = model.step_of([one, other], columns_max)
    first, last = (model.column_of(at, step) for at in sorted([one, other]))
    assert first <= min(one, other) < first + step
    assert (last - first) % step == timedelta()
    assert (last - first) // step < columns_max


@pytest.mark.parametrize(
    ("days", "unit"), [(1, "hour"), (14, "3 hours"), (100, "day"), (700, "week"), (1100, "2 weeks")]
)
def test_a_long_history_gets_days_then_weeks_from_mondays(days: int, unit: str) -> None:
    first = datetime(2025, 1, 1, tzinfo=UTC)
    step = model.step_of([first, first + timedelta(days=days, hours=-1)])
    assert model.unit(step) == unit
    assert "week" not in unit or model.column_of(first, step).weekday() == 0


def test_times_are_reported_in_utc_whatever_zone_they_come_in() -> None:
    berlin = timezone(timedelta(hours=1))
    assert model.full(datetime(2025, 11, 15, 0, 30, tzinfo=berlin)) == "14 Nov 2025, 23:30"


@given(st.text(st.characters(codec=None)))
def test_clean_text_can_be_written_and_hides_nothing(text: str) -> None:
    made = model.clean(text)
    made.encode()
    assert all(mark.isprintable() or mark in "\n\u200c\u200d" for mark in made)
    assert model.clean(made) == made


@given(st.text(max_size=2000), st.integers(min_value=8, max_value=100))
def test_a_cut_name_fits_and_keeps_both_ends(text: str, chars_max: int) -> None:
    made = model.cut(text, chars_max)
    assert len(made) <= chars_max
    whole = model.clean(text or "–")
    assert made == whole or (whole.startswith(made.split("…")[0]) and whole.endswith(made[-1]) and "…" in made)


@pytest.mark.parametrize("count", [1, 4, 12])
def test_a_long_name_of_the_last_receiver_is_not_cut_off(count: int) -> None:
    names = [*map(str, range(count - 1)), 40 * "m"]
    rows = [{"sender": name, "receiver": name, "warmth": 1.0, "text": "1", "tip": ""} for name in names]
    drawn = str(charts.heat_map("traffic", rows, names, names))
    width = float(re.findall(r'viewBox="0 0 (\d+)', drawn)[0])
    left = float(re.findall(r"translate\((\d+),", drawn)[0])
    last = max(map(float, re.findall(r'"translate\(([\d.]+),-?\d+\) rotate', drawn)))
    assert left + last + 110 * math.cos(math.radians(40)) <= width  # a longer label is shortened to 110 pixels


def test_names_that_look_alike_when_cut_keep_labels_of_their_own() -> None:
    assert len(set(model.labels(f"{'x' * 40}{number}{'y' * 40}" for number in range(9)).values())) == 9


def test_the_demo_spreads_over_its_days(tmp_path: Path) -> None:
    published = publish_traffic(str(tmp_path / "events.db"), messages=1_000, days=7)
    assert 800 < published < 1_200
    with headwater.open(tmp_path / "events.db", create=False) as log:
        behind = {each.id: each.lag for each in log.subscriptions()}
        with log.subscribe("test", "orders.>") as subscription:
            times = [message.published_at for message in subscription.fetch(1_000)]
        letters = log.dead_letters.list()
    assert len({at.date() for at in times}) >= 7
    assert times == sorted(times)
    assert times[-1] <= datetime.now(UTC)
    assert {letter.subscription for letter in letters} == {"billing", "mailer"}
    assert behind["analytics"] > 0
