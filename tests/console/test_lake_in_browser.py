"""The lake in the console: what the pipeline's runs and audits leave in its folder, or what is wrong with it."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from browser import Page
from served import ServerOnThread
from steps import go, look

import headwater

HOUR_MS = 3_600_000
MARKUP = "<img src=x onerror='window.hacked = 1'>"


def status(**changes: Any) -> dict[str, Any]:
    """As the pipeline writes it; tests/pipeline/test_status_file.py holds that it does."""
    series = [{"name": "orders.new", "values": [10, 0, 30]}, {"name": MARKUP, "values": [1, 2, None]}]
    chart = {"unit": "count", "from_ms": 1_700_000_000_000, "step_ms": HOUR_MS, "series": series, "more": 0}
    return {
        "version": 1,
        "ran_at": "2023-11-14T22:13:20.000Z",
        "log": 7,
        "last_seq": 2,
        "derived_to": 2,
        "messages": 1_234,
        "quarantined": 5,
        "bytes": 3 * 2**20,
        "tables": 14,
        "audit": None,
        "charts": [{"title": "Messages by topic", **chart}],
        **changes,
    }


VERDICT = {
    "whole": True,
    "checked_at": "2023-11-14T22:15:20.000Z",
    "seconds": 4.2,
    "lake_seq": 2,
    "checks": 9,
    "failed": [],
}


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    (tmp_path / "lake").mkdir()
    return tmp_path / "lake"


@pytest.fixture
def page(lake: Path, serve: Callable[..., ServerOnThread], open_page: Callable[[str], Page]) -> Page:
    with headwater.open(lake.parent / "events.db") as log:
        log.publish_many([("orders.new", number) for number in range(5)])
    with closing(sqlite3.connect(lake.parent / "events.db")) as database, database:
        database.execute("UPDATE headwater SET value = 7 WHERE name = 'salt'")
    opened = open_page(serve(lake=str(lake)).page)
    opened.until("main.dataset.sight === 'all'")
    return opened


def write(lake: Path, document: dict[str, Any]) -> None:
    (lake / "status.json").write_text(json.dumps(document))


def open_lake(page: Page) -> None:
    go(page, "lake")
    page.until("['lake', 'no-lake', 'lake-problem'].some((id) => !document.getElementById(id).hidden)")
    page.until("document.getElementById('lake-loading').hidden")


def test_a_run_is_shown_with_how_far_the_lake_is_behind_the_log(page: Page, lake: Path) -> None:
    write(lake, status())
    open_lake(page)
    assert page.text("#lake-ran").endswith(" d ago")
    assert (page.text("#lake-behind"), page.text("#lake-upto")) == ("3", "up to seq 2 of 5")
    assert (page.text("#lake-messages"), page.text("#lake-bytes")) == ("1,234", "3 MiB in 14 tables")
    assert page.text("#lake-quarantined") == "5"
    assert page.text("#lake-audit") == "none"
    assert "headwater pipeline audit" in page.text("#lake-verdict code")


def test_the_lake_of_another_log_is_refused(page: Page, lake: Path) -> None:
    write(lake, status(log=8))
    open_lake(page)
    assert "This is the lake of another log" in page.text("#lake-problem")


def test_the_gold_charts_are_drawn_and_their_names_are_text(page: Page, lake: Path) -> None:
    write(lake, status())
    open_lake(page)
    page.until("document.querySelectorAll('#lake-charts polyline').length === 2")
    assert page.text("#lake-charts h2") == "Messages by topic"
    names = "[...document.querySelectorAll('#lake-charts .legend span')].map((each) => each.textContent)"
    assert page.evaluate(names) == ["orders.new", MARKUP]
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("is_whole", [True, False])
def test_the_verdict_of_the_last_audit_is_shown(page: Page, lake: Path, is_whole: bool) -> None:
    failed = [] if is_whole else ["messages: seq 2 is missing"]
    write(lake, status(last_seq=4, audit=VERDICT | {"whole": is_whole, "failed": failed}))
    open_lake(page)
    assert page.text("#lake-audit") == ("whole" if is_whole else "broken")
    assert page.evaluate("document.getElementById('lake-audit-tile').classList.contains('alarm')") is not is_whole
    verdict = page.text("#lake-verdict")
    assert ("exactly once" in verdict) is is_whole
    assert ("seq 2 is missing" in verdict) is not is_whole
    assert "2 seqs that a later run added" in verdict


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No run has finished in this lake yet"),
        ("{nonsense", "The file is damaged"),
        ("[]", "The file is damaged"),
        ('{"version": 2}', "another version"),
    ],
)
def test_a_broken_lake_is_named_with_what_to_do(page: Page, lake: Path, text: str | None, why: str) -> None:
    if text is not None:
        (lake / "status.json").write_text(text)
    open_lake(page)
    problem = page.text("#lake-problem")
    assert why in problem
    assert "headwater pipeline run" in problem
    assert page.evaluate("[document.getElementById('lake').hidden, document.getElementById('no-lake').hidden]") == [
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("folder", "why"), [("gone", "There is no such folder"), ("gs://bucket/lake", "in a folder or on S3")]
)
def test_a_lake_that_is_not_there_is_named(
    serve: Callable[..., ServerOnThread], open_page: Callable[[str], Page], folder: str, why: str
) -> None:
    page = open_page(serve(lake=folder).page)
    page.until("main.dataset.sight === 'all'")
    open_lake(page)
    assert why in page.text("#lake-problem")
    assert folder in page.text("#lake-problem")


def test_an_axis_of_bytes_has_round_numbers_of_bytes(page: Page, lake: Path) -> None:
    chart = status()["charts"][0]
    size = {"unit": "bytes", "series": [{"name": "log", "values": [50 * 2**20, 97 * 2**20]}]}
    write(lake, status(charts=[{**chart, **size}]))
    open_lake(page)
    page.until("document.querySelector('#lake-charts text')")
    ticks = page.evaluate("[...document.querySelectorAll('#lake-charts text')].map((each) => each.textContent)")
    assert {"0 B", "64 MiB", "128 MiB"} <= {*ticks}


def test_without_a_lake_the_page_says_how_to_get_one(
    serve: Callable[..., ServerOnThread], open_page: Callable[[str], Page]
) -> None:
    page = open_page(serve().page)
    page.until("main.dataset.sight === 'all'")
    open_lake(page)
    commands = page.evaluate("[...document.querySelectorAll('#lake-commands code')].map((each) => each.textContent)")
    assert commands == ["headwater pipeline run events.db --lake ./lake", "headwater serve events.db --lake ./lake"]
    look(page)


SERVE = """
import headwater, sys
headwater.serve("memory:", port=0)
print([name for name in sys.modules if name.split(".")[0] in ("pyarrow", "pyspark") or ".pipeline" in name])
"""


def test_a_server_imports_nothing_of_the_pipeline() -> None:
    done = subprocess.run([sys.executable, "-c", SERVE], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"
