"""`headwater pipeline`: what needs no JVM in this process, and one story on Spark in another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater
from headwater.cli.pipeline.stopping import SAME_SIGNAL_S, StopAtOnce
from headwater.cli.pipeline.values import plain_value
from headwater.pipeline.jobs.running import bind
from headwater.pipeline.lake.lake import Lake, now_ms
from headwater.pipeline.lake.layout import BRONZE
from headwater.pipeline.lake.lock import LakeLock
from headwater.pipeline.lake.sealing import seal
from headwater.pipeline.schema import ARROW_SCHEMA

STORY = Path(__file__).with_name("pipeline_story.py")
STORY_S_MAX = 240
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


@pytest.fixture
def lake(log: headwater.Log, path: Path, tmp_path: Path) -> Path:
    """The lake of the log, with its four messages in bronze, in two files of the same folder."""
    folder = tmp_path / "lake"
    with Lake(folder, create=True) as made:
        bind(made, str(path))
        for seqs in ((1, 2), (3, 4)):
            rows = [{"seq": seq, "topic": "orders.new", "data": "{}", "published_at": NOON, "size": 2} for seq in seqs]
            files = seal([pa.RecordBatch.from_pylist(rows, ARROW_SCHEMA)], made.path, BRONZE, seqs[0] - 1, seqs[1])
            assert made.manifest.take_in(BRONZE, seqs[0] - 1, seqs[1], files, now_ms())
    return folder


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts Spark here has not looked first."""

    def start(*arguments: object, **options: object) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr("headwater.pipeline.session", start)


# --- without a JVM --------------------------------------------------------------------------------------------------


def test_status(run, lake: Path):
    result = run("pipeline", "status", "--lake", lake)
    lines = [line.split() for line in result.out.splitlines()]
    assert ["taken", "in", "up", "to", "seq", "4"] in lines
    assert [line[:3] for line in lines if line[0] == BRONZE] == [[BRONZE, "4", "2"]]
    assert "headwater pipeline audit" in result.out
    found = run("pipeline", "status", "--lake", lake, "--json").json
    assert found["high_water"] == 4
    assert found["tables"][0]["rows"] == 4


def test_report_is_a_page_beside_the_lake_or_where_it_is_wanted(run, lake: Path, tmp_path: Path):
    result = run("pipeline", "report", "--lake", lake)
    assert (result.code, result.out, result.err) == (0, f"{lake / 'report.html'}\n", "")
    assert run("pipeline", "report", "--lake", lake, "--out", tmp_path / "page.html").code == 0
    assert "</html>" in (tmp_path / "page.html").read_text()
    refused = run("pipeline", "report", "--lake", lake, "--out", tmp_path / "none" / "page.html")
    assert refused.code == 2
    assert "cannot be written" in refused.err


def test_report_of_a_lake_that_lost_a_file(run, lake: Path):
    with Lake(lake) as opened:
        files = opened.write_arrow("gold.volume", pa.table({"bytes": [1]}))
        opened.publish([("gold.volume", files, None)])
    (lake / files[0].path).unlink()
    result = run("pipeline", "report", "--lake", lake)
    assert result.code == 3
    assert "gone or damaged" in result.err
    assert "--rebuild" in result.err


def test_compact(run, lake: Path):
    assert run("pipeline", "compact", "--lake", lake, "--all").out == "bronze had 2 files and has 1\n"
    again = run("pipeline", "compact", "--lake", lake, "--all", "--json")
    assert again.json == {"files_before": 1, "files_after": 1}


def test_vacuum_says_what_would_go_and_then_removes_it(run, lake: Path):
    run("pipeline", "compact", "--lake", lake, "--all")
    files = sorted(lake.rglob("*.parquet"))
    assert len(files) == 3
    assert run("pipeline", "vacuum", "--lake", lake, "--dry-run").out.startswith("0 files would go")
    assert run("pipeline", "vacuum", "--lake", lake, "--dry-run", "--grace", "0s").out.startswith("2 files would go")
    assert sorted(lake.rglob("*.parquet")) == files
    swept = run("pipeline", "vacuum", "--lake", lake, "--grace", "0s", "--json").json
    assert (swept["files"], swept["removed"]) == (2, True)
    assert len(list(lake.rglob("*.parquet"))) == 1


def test_warm_says_where_the_archive_is(run, monkeypatch: pytest.MonkeyPatch):
    from headwater.pipeline.starting import archive

    def train(on_step: Any) -> Any:
        on_step("training")
        return type("Trained", (), {"file": "/cache/spark.jsa"})

    monkeypatch.setattr(archive, "train_archive", train)
    assert run("pipeline", "warm").out == "made /cache/spark.jsa\n"


@pytest.mark.parametrize("command", ["warm", "status --lake x", "run --log {log} --lake x", "sql x --log {log}"])
def test_without_the_extra_there_is_a_word_on_how_to_get_it(run, log, path, command: str, monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pyspark", None)  # an import of it fails now
    result = run("pipeline", *command.format(log=path).split())
    assert result.code == 2
    assert "next: pip install 'headwater[spark]'" in result.err
    assert not (tmp_path / "x").exists()


# --- what cannot be done is told before Spark is started ------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("run --log none.db --lake new", 2, "there is no log none.db"),
        ("run --log ws://host:1 --lake new", 2, "ws://host:1: the pipeline reads the log itself, not through a server"),
        (
            "run --log postgres://me:secret@localhost:1/x --lake new",
            3,
            "postgres://me@localhost:1/x: connection failed",
        ),
        ("run --log . --lake new", 3, "this is a directory"),
        ("run --log events.db --lake new --conf spark", 2, "--conf: a setting is NAME=VALUE, not 'spark'"),
        ("run --log events.db --lake new --master local --remote sc://h", 2, "--master and --remote exclude"),
        ("run --log events.db --lake new --once --continuous", 2, "--once and --continuous exclude each other"),
        ("run --log events.db --lake new --continuous --refresh soon", 2, "--refresh is a length of time"),
        ("run --log events.db --lake new --types none", 2, "none: cannot be read"),
        ("run --log events.db --lake new --types types", 2, "order@1.json: not a JSON Schema that can be used"),
        ("run --log events.db --lake events.db", 2, "events.db: this is a file, and a lake is a folder"),
        ("run --log another.db --lake lake --rebuild", 2, "this lake belongs to another log"),
        ("audit --log another.db --lake lake", 2, "this lake belongs to another log"),
        ("audit --log events.db --lake new", 2, "new: there is no lake here"),
        ("sql x --lake types", 2, "types: there is no lake here"),
        ("sql x", 2, "there is nothing to ask"),
        ("replay --lake new --to copy.db --where true", 2, "new: there is no lake here"),
        ("replay --lake lake --to mysql://x --where true", 2, "there is no store for mysql:// here"),
        ("status --lake garbage", 3, "garbage/manifest.db: file is not a database"),
        ("report --lake types", 2, "types: there is no lake here"),
        ("compact --lake new", 2, "new: there is no lake here"),
        ("vacuum --lake lake --grace soon", 2, "--grace is a length of time"),
    ],
)
def test_what_is_refused(run, lake, no_spark, tmp_path: Path, monkeypatch, arguments: str, code: int, said: str):
    monkeypatch.chdir(tmp_path)
    for folder in ("types", "garbage"):
        (tmp_path / folder).mkdir()
    (tmp_path / "types" / "order@1.json").write_text('{"type": 5}')
    (tmp_path / "garbage" / "manifest.db").write_text("no database " * 100)
    with headwater.open("another.db", housekeeping=None) as another:
        another.publish("notes.made", 1)
    result = run("pipeline", *arguments.split())
    assert (result.code, result.out) == (code, "")
    assert said in result.err
    assert "secret" not in result.err
    assert not (tmp_path / "new").exists()


def test_a_folder_with_other_things_is_not_made_a_lake(run, log, path: Path, no_spark, tmp_path: Path):
    """A run sweeps away data files that it does not know."""
    theirs = tmp_path / "data" / "raw" / "years of work.parquet"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("precious")
    result = run("pipeline", "run", "--log", path, "--lake", tmp_path / "data")
    assert result.code == 2
    assert "it holds other things, like raw" in result.err
    assert os.listdir(tmp_path / "data") == ["raw"]
    assert theirs.read_text() == "precious"


@pytest.mark.parametrize("command", ["run --log {log}", "compact", "vacuum"])
def test_one_at_a_time_writes_a_lake(run, lake: Path, path: Path, no_spark, command: str):
    with LakeLock(lake):
        result = run("pipeline", *command.format(log=path).split(), "--lake", lake)
    assert result.code == 3
    assert "another run is writing this lake" in result.err


# --- signals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_that_is_asked_for_ends_the_work_and_is_no_error(handlers: None, number: int):
    done = []
    with StopAtOnce(is_fine=True):
        try:
            signal.raise_signal(number)
            done.append("went on")
        finally:
            signal.raise_signal(number)  # a wrapper passes on what came by itself
            done.append("tidied up")
            raise ConnectionError("Spark is in the middle of something")
    assert done == ["tidied up"]
    signal.raise_signal(number)  # while the process ends: nobody is disturbed any more


def interrupted(*numbers: int) -> None:
    """Work that is interrupted, and then fails to tidy up."""
    try:
        signal.raise_signal(numbers[0])
    finally:
        for number in numbers[1:]:
            signal.raise_signal(number)
        raise ConnectionError("Spark is in the middle of something")


def test_elsewhere_it_is_an_interruption_whatever_spark_makes_of_it(handlers: None):
    with pytest.raises(KeyboardInterrupt), StopAtOnce():
        interrupted(signal.SIGTERM)


def test_who_asks_again_later_does_not_want_to_wait(handlers: None):
    seconds = iter([1.0, 1.0 + SAME_SIGNAL_S])
    with pytest.raises(KeyboardInterrupt), StopAtOnce(is_fine=True, monotonic=lambda: next(seconds)):
        interrupted(signal.SIGINT, signal.SIGINT)


def test_without_a_signal_errors_are_errors(handlers: None):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ConnectionError), StopAtOnce(is_fine=True):
        raise ConnectionError("real")
    assert signal.getsignal(signal.SIGINT) is before


# --- values ---------------------------------------------------------------------------------------------------------


def test_times_are_told_in_utc():
    naive_here = NOON.astimezone().replace(tzinfo=None)  # as Spark hands them out
    assert plain_value(naive_here, "timestamp") == "2026-01-02T12:00:00Z"
    assert plain_value([naive_here + timedelta(0, 0, 5)], "array<timestamp>") == ["2026-01-02T12:00:00.000005Z"]
    assert plain_value(datetime(2026, 1, 2), "timestamp_ntz") == "2026-01-02T00:00:00"
    assert plain_value(NOON.date(), "date") == "2026-01-02"
    assert plain_value({1: bytearray(b"\x01")}, "map<int,binary>") == {"1": "01"}


# --- on Spark -------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(STORY_S_MAX + 30)
def test_run_audit_ask_replay_report(log: headwater.Log, path: Path, tmp_path: Path):
    command = [sys.executable, str(STORY), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=STORY_S_MAX, stdin=subprocess.DEVNULL)
    assert (ended.returncode, ended.stderr) == (0, ""), "Spark's own words are not for the terminal"
    told = {each["name"]: each for each in map(json.loads, ended.stdout.splitlines())}
    codes = {name: each["code"] for name, each in told.items() if each["code"]}
    assert codes == {"a bad query": 2, "a bad condition": 2, "audit of a broken lake": 1}, told

    ran = json.loads(told["run"]["out"])
    assert (ran["messages"], ran["tables"][BRONZE], ran["tables"]["silver.messages"]) == (4, 4, 4)
    assert told["audit"]["out"].splitlines()[-2].startswith("whole up to seq 4")
    assert "</html>" in (tmp_path / "audit.html").read_text()

    rows = [line.split() for line in told["sql"]["out"].splitlines()]
    assert rows == [["topic", "messages"], ["notes.made", "1"], ["orders.new", "3"]]
    times = json.loads(told["sql in JSON"]["out"])
    assert abs(datetime.now(UTC) - datetime.fromisoformat(times["last"])) < timedelta(minutes=30)
    assert (times["n"], times["then"], times["m"]) == (4, "2026-01-02T03:04:05Z", {"a": 1})
    assert told["sql in CSV"]["out"] == "topic,messages\nnotes.made,1\n"
    assert "more than 1 rows" in told["sql in CSV"]["err"]
    views = [json.loads(line)["viewName"] for line in told["views"]["out"].splitlines()]
    assert {"messages", "bronze_messages", "silver_messages", "gold_volume"} <= set(views)
    assert "nowhere" in told["a bad query"]["err"]
    assert "bronze_messages" in told["a bad query"]["err"]

    assert told["replay tried"]["out"].startswith("3 messages would be published\n")
    assert json.loads(told["replay"]["out"])["published"] == 3
    assert told["replay again"]["out"].startswith("0 messages published")
    with headwater.open(tmp_path / "other.db", housekeeping=None) as other:
        assert {topic.topic: topic.count for topic in other.topics()} == {"orders.new": 3}

    assert told["report"]["out"] == f"{tmp_path / 'lake' / 'report.html'}\n"
    broken = json.loads(told["audit of a broken lake"]["out"])
    assert (broken["whole"], len(broken["files_missing"])) == (False, 1)
    assert broken["missing"]
