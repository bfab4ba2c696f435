"""The audit as a page: the verdict, and where to look."""

from __future__ import annotations

import re
from typing import Any

import pytest

from headwater.pipeline.page import render_audit


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page[page.index("<body>") :]))


def test_a_broken_lake_shows_ranges_and_files(broken_document: dict[str, Any]) -> None:
    text = text_of(render_audit(broken_document))
    assert "The lake is not whole" in text
    for said in (
        "500,000 501,199 1,200", "600,001 600,003 3", "700,010 700,049 40", "777,777 777,777 1", "18,000 retention",
        "topic_prefix=orders/part-0007.parquet", "topic_prefix=mail/part-0031.parquet",
        "failed each seq once 1,203 seqs are missing", "passed files are as sealed", "2 of 4 checks passed",
    ):  # fmt: skip
        assert said in text, said


def test_every_wrong_range_is_marked_on_the_strip(broken_document: dict[str, Any]) -> None:
    page = render_audit(broken_document)
    marks = re.findall(r'<rect class="bar (\w+)"[^>]*><title>([^<]+)</title>', page)
    assert ("m1", "seq 500,000 to 501,199: in the log, not in the lake") in marks
    assert ("m2", "seq 700,010 to 700,049: in the lake more than once") in marks
    assert ("m3", "seq 777,777: not as they are in the log") in marks
    assert [kind for kind, _ in marks].count("gap") == 2


def test_a_whole_lake_has_no_panels_of_wrongs(whole_document: dict[str, Any]) -> None:
    page = render_audit(whole_document)
    assert "The lake is whole" in page
    for anchor in ("missing", "repeated", "different", "files_missing", "files_changed"):
        assert f'id="{anchor}"' not in page
    text = text_of(page)
    assert "Every message up to seq 831,200 is in it exactly once." in text
    assert "18,759 messages in 2 gaps explained by retention" in text
    assert "750 newer messages not in the lake yet" in text
    assert "checked 15 Nov 2025, 11:02" in text


def test_an_empty_lake_of_an_empty_log_is_whole(whole_document: dict[str, Any]) -> None:
    document = whole_document | {"high_water": 0, "last_seq": 0, "rows": 0, "not_yet": 0, "compared": 0, "gaps": []}
    text = text_of(render_audit(document))
    assert "It is empty, and so is the log." in text
    assert "no gaps" in text


def test_a_document_without_lists_still_makes_a_page() -> None:
    text = text_of(render_audit({"whole": False}))
    assert "The lake is not whole" in text
    assert "A check failed." in text


def test_a_hopeless_lake_makes_a_bounded_page(broken_document: dict[str, Any]) -> None:
    many = [[number * 10 + 1, number * 10 + 5] for number in range(50_000)]
    broken_document |= {
        "missing": many, "repeated": many, "different": many,
        "gaps": [{"from": low, "to": high, "why": "<b>" * 100} for low, high in many],
        "files_missing": ['"' * 5000] * 10_000, "files_changed": ["x" * 5000] * 10_000,
        "checks": [{"name": "<i>" * 999, "ok": False, "what": "<u>" * 9999}] * 1000,
    }  # fmt: skip
    page = render_audit(broken_document)
    assert len(page) < 1_000_000
    assert "the first 100 of 50,000 ranges" in page
    assert "250,000 messages are missing" in page


@pytest.mark.parametrize("nasty", ["<script>alert(1)</script>", "</title><svg onload=x>", "'\"&\u202e\x00"])
def test_paths_and_reasons_stay_text(nasty: str, broken_document: dict[str, Any]) -> None:
    plain = render_audit(broken_document)
    broken_document |= {"log": nasty, "lake": nasty, "files_missing": [nasty], "files_changed": [nasty]}
    broken_document["gaps"] = [gap | {"why": nasty} for gap in broken_document["gaps"]]
    broken_document["checks"] = [check | {"name": nasty, "what": nasty} for check in broken_document["checks"]]
    page = render_audit(broken_document)
    assert re.findall(r"<[a-z]+", page) == re.findall(r"<[a-z]+", plain)
    assert not re.search("[\x00-\x08\u202e]", page)
