"""`headwater pipeline` on the Spark of these tests: a command gets that session instead of starting one."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lake_world import spark_of
from pyspark.sql import SparkSession

import headwater
from headwater.cli import demo as story
from headwater.cli import main, pipeline

Call = Callable[..., tuple[int, str, str]]
TIMES = "select count(*) n, max(published_at) as last, timestamp'2026-01-02 03:04:05' as then, map('a', 1) m from live"
VOLUME = "select topic, count(*) as messages from messages group by topic order by topic"


@pytest.fixture
def call(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    @contextmanager
    def running(*arguments: Any, **options: Any) -> Iterator[Any]:
        yield spark_of(spark)

    monkeypatch.setattr(pipeline, "running_spark", running)
    monkeypatch.setattr("headwater.pipeline.run.Run._spark_for", lambda self, seqs: spark_of(spark))

    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["pipeline", *map(str, words)])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def both(tmp_path: Path) -> tuple[object, ...]:
    with headwater.open(tmp_path / "events.db", maintenance_interval=None) as log:
        for number in (1, 2, 3):
            log.publish("orders.new", {"order": number}, from_="shop", type="order")
        log.publish("notes.made", "hello")
    return "--log", tmp_path / "events.db", "--lake", tmp_path / "lake"


def test_run_query_replay_audit(call: Call, both: tuple[object, ...], tmp_path: Path) -> None:
    lake = both[2:]
    code, out, err = call("run", *both, "--json")
    ran = json.loads(out)
    assert (code, err, ran["messages"], ran["last_seq"]) == (0, "", 4, 4)
    assert (ran["tables"]["bronze/messages"], ran["tables"]["silver/messages"]) == (4, 4)
    assert call("run", *both)[1].startswith("0 messages ingested, up to seq 4, in ")

    code, out, _ = call("sql", VOLUME, *lake)
    assert [line.split() for line in out.splitlines()] == [
        ["topic", "messages"],
        ["notes.made", "1"],
        ["orders.new", "3"],
    ]
    code, out, err = call("sql", VOLUME, *lake, "--csv", "--limit", 1)
    assert (code, out) == (0, "topic,messages\nnotes.made,1\n")
    assert "more than 1 rows" in err
    [times] = json.loads(call("sql", TIMES, *both[:2], "--json")[1])["items"]
    assert abs(datetime.now(UTC) - datetime.fromisoformat(times["last"])) < timedelta(minutes=30)
    assert (times["n"], times["then"], times["m"]) == (4, "2026-01-02T03:04:05Z", {"a": 1})
    then = call("sql", "select count(*) n from messages", *lake, "--at", 1, "--json")[1]
    assert json.loads(then) == {"items": [{"n": 0}]}
    code, out, err = call("sql", "select nothing from nowhere", *lake)
    assert (code, out) == (2, "")
    assert err.splitlines()[0] == "error: QUERY: there is no table `nowhere` (line 1, column 21)"
    assert "bronze_messages" in err.splitlines()[1]

    replay = ("replay", *lake, "--to", tmp_path / "other.db", "--where")
    code, _, err = call(*replay, "topic ~ 1")
    assert (code, "no condition" in err, (tmp_path / "other.db").exists()) == (2, True, False)
    assert call(*replay, "topic = 'orders.new'", "--dry-run")[1].startswith("3 messages would be published\n")
    assert json.loads(call(*replay, "topic = 'orders.new'", "--json")[1])["published"] == 3
    assert call(*replay, "topic = 'orders.new'")[1].startswith("0 messages published")
    with headwater.open(tmp_path / "other.db", maintenance_interval=None) as other:
        assert {topic.topic: topic.count for topic in other.topics()} == {"orders.new": 3}

    code, out, _ = call("audit", *both, "--out", tmp_path / "audit.html")
    assert code == 0
    assert {line.split()[0] for line in out.splitlines()[1:-2]} <= {"ok", "skipped"}
    assert out.splitlines()[-2].startswith("whole up to seq 4")
    assert "</html>" in (tmp_path / "audit.html").read_text()
    next((tmp_path / "lake").glob("bronze/**/*.parquet")).unlink()
    code, out, _ = call("audit", *both, "--json")
    broken = json.loads(out)
    assert (code, broken["whole"], len(broken["files_missing"])) == (1, False, 1)
    assert broken["missing"]
    assert broken["page"] == str(tmp_path / "lake" / "audit.html")


DEMO_PARTS = 8


def test_the_demo_with_the_lake_leaves_all_of_it_to_look_at(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lake of two days instead of two weeks. That the demo runs commands as processes is tested where it runs
    without Spark, with what the other parts show."""
    for name in ["kill_and_resume", "dead_letter_and_redrive", "insert_with_sql", "serve_and_kill", "restore_replica"]:
        monkeypatch.setattr(story, name, lambda narrator, folder: narrator.check(True, "something"))
    monkeypatch.setattr(story, "publish_traffic", partial(story.publish_traffic, messages=2_000, days=4))

    def command_here(narrator: story.Narrator, folder: Path, *arguments: str) -> str:
        monkeypatch.chdir(folder)
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()):
            assert main([*arguments, "--json"]) == 0
        return out.getvalue()

    monkeypatch.setattr(story, "command", command_here)
    here = tmp_path / "here"
    assert main(["demo", "--dir", str(here)]) == 0
    shown, errors = capsys.readouterr()
    assert errors == ""
    assert re.search("✓ the lake is whole", shown)
    assert f"{DEMO_PARTS}/{DEMO_PARTS}" in shown
    assert len(re.findall(r"^     \d+\.\d s$", shown, re.M)) == DEMO_PARTS
    assert "✗" not in shown
    for name in ("events.db", "returns.jsonl", "lake/report.html", "lake/audit.html"):
        assert (here / name).is_file(), name
    assert main(["subscriptions", str(here / "events.db")]) == 0
    assert str(here / "events.db") in (here / "next-steps.txt").read_text()
