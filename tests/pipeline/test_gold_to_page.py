"""From a log through a real lake to the page: every row that the page shows was made by a run."""

from __future__ import annotations

import html
import re

import pytest
from lake_world import World

from headwater.cli.demo import publish_traffic
from headwater.cli.pipeline import report_of
from headwater.pipeline.columns import GOLD_SCHEMAS
from headwater.pipeline.report import render_report

MESSAGES = 2_000


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("gold"))
    published = publish_traffic(world.log, messages=MESSAGES)
    with world.new_run() as run:
        assert run.once().last_seq == published
    return world


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<(style|svg)\b.*?</\1>|<[^>]+>", " ", page, flags=re.S)))


def test_the_page_shows_what_gold_holds(world: World) -> None:
    report = report_of(world.lake)
    assert {name: set(rows[0]) for name, rows in report.tables.items() if rows} == {
        name: set(GOLD_SCHEMAS[name].names) for name, rows in report.tables.items() if rows
    }
    volume = report.tables["volume"]
    assert sum(row["messages"] for row in volume) == report.messages == world.lake.table("bronze/messages").rows
    assert len({row["day"] for row in volume}) >= 14, "two weeks, so that the charts show something"
    assert report.tables["dead_letters"], "the demo rejects some"
    shown = text_of(render_report(report))
    assert f"{report.messages:,}" in shown
    by_topic: dict[str, int] = {}
    for row in volume:
        by_topic[row["topic"]] = by_topic.get(row["topic"], 0) + row["messages"]
    for topic, messages in by_topic.items():
        assert topic in shown
        assert f"{messages:,}" in shown, topic
    for row in report.tables["dead_letters"]:
        assert row["error_signature"] in shown
