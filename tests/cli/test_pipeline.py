"""`headwater pipeline`: what needs no JVM in this process, and one story on Spark in another."""

from __future__ import annotations

import importlib
import io
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from py4j import java_gateway
from rich.console import Console
from s3_server import S3Server

import headwater
from headwater.cli.output import Bars
from headwater.cli.pipeline import StopAtOnce, is_not_py4j, plain_value
from headwater.cli.stopping import SAME_SIGNAL_S
from headwater.pipeline.columns import MESSAGE_SCHEMA
from headwater.pipeline.delta import AFTER, JOB, UPTO
from headwater.pipeline.lake import BRONZE, Lake
from headwater.pipeline.run import bind
from headwater.pipeline.storage import TableWriter
from headwater.version import install_hint

STORY_S_MAX = 120
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


@pytest.fixture
def lake(log: headwater.Log, path: Path, tmp_path: Path) -> Path:
    fill_lake(str(tmp_path / "lake"), path)
    return tmp_path / "lake"


def fill_lake(where: str, path: Path) -> None:
    """The lake of the log, with its four messages in bronze, in two commits of the same day."""
    made = Lake.open(where, create=True)
    bind(made, str(path))
    for seqs in ((1, 2), (3, 4)):
        rows = [{"seq": seq, "topic": "orders.new", "data": "{}", "published_at": NOON, "size": 2} for seq in seqs]
        writer = TableWriter(made.storage, BRONZE, by_day=True)
        writer.write(pa.RecordBatch.from_pylist(rows, MESSAGE_SCHEMA))
        noted = {JOB: "ingest", AFTER: str(seqs[0] - 1), UPTO: str(seqs[1])}
        made.table(BRONZE).commit(writer.finish(), transaction=seqs[1], counters={"rows": seqs[1]}, metadata=noted)


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that starts Spark here fails."""

    def start(*arguments: object, **options: object) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(importlib.import_module("headwater.pipeline.session"), "Spark", start)


# --- without a JVM --------------------------------------------------------------------------------------------------


def test_status(run, lake: Path):
    result = run("pipeline", "status", "--lake", lake)
    lines = [line.split() for line in result.out.splitlines()]
    assert ["ingested", "up", "to", "seq", "4"] in lines
    assert [line[:3] for line in lines if line[0] == BRONZE] == [[BRONZE, "4", "2"]]
    assert "headwater pipeline audit" in result.out
    found = run("pipeline", "status", "--lake", lake, "--json").json
    assert found["last_seq"] == 4
    assert found["tables"][0]["rows"] == 4


def test_history_names_each_version_with_its_seqs(run, lake: Path):
    result = run("pipeline", "history", "--lake", lake)
    rows = [line.split() for line in result.out.splitlines()]
    assert rows[0] == ["version", "time", "operation", "job", "rows", "seqs"]
    assert [row[0] for row in rows[1:]] == ["3", "2", "1", "0"]
    assert rows[1][2:] == ["WRITE", "ingest", "2", "3", "to", "4"]
    found = run("pipeline", "history", "--lake", lake, "--table", "bronze_messages", "--limit", 1, "--json").json
    assert (found["table"], [each["upto"] for each in found["items"]]) == (BRONZE, [4])
    refused = run("pipeline", "history", "--lake", lake, "--table", "gold/none")
    assert refused.code == 2
    assert "Tables here: bronze/messages" in refused.err


def test_report_is_a_page_in_the_lake_or_where_it_is_wanted(run, lake: Path, tmp_path: Path):
    result = run("pipeline", "report", "--lake", lake)
    assert (result.code, result.out, result.err) == (0, f"{lake / 'report.html'}\n", "")
    assert run("pipeline", "report", "--lake", lake, "--out", tmp_path / "page.html").code == 0
    assert "</html>" in (tmp_path / "page.html").read_text()
    refused = run("pipeline", "report", "--lake", lake, "--out", tmp_path / "none" / "page.html")
    assert refused.code == 2
    assert "cannot be written" in refused.err


def test_report_of_a_lake_that_lost_a_file(run, lake: Path):
    Lake.open(lake).table("gold/forecast").append(pa.table({"pattern": [">"]}), transaction=1)
    next(lake.glob("gold/forecast/*.parquet")).unlink()
    result = run("pipeline", "report", "--lake", lake)
    assert result.code == 3
    assert "gone or damaged" in result.err
    assert "--rebuild" in result.err


@pytest.mark.parametrize("command", ["optimize", "compact"])
def test_optimize(run, lake: Path, command: str):
    assert run("pipeline", command, "--lake", lake).out == "no table has files to merge\n"
    assert run("pipeline", command, "--lake", lake, "--all").out == "bronze/messages had 2 files and has 1\n"
    again = run("pipeline", command, "--lake", lake, "--all", "--json")
    assert again.json == {"files_before": 1, "files_after": 1, "tables": {}}
    versions = run("pipeline", "history", "--lake", lake, "--json").items
    assert [each["job"] for each in versions[:2]] == ["optimize", "ingest"]


def test_vacuum_says_what_would_go_and_then_removes_it(run, lake: Path):
    run("pipeline", "optimize", "--lake", lake, "--all")
    files = sorted(lake.rglob("*.parquet"))
    assert len(files) == 3
    assert run("pipeline", "vacuum", "--lake", lake, "--dry-run").out.startswith("0 files would be removed")
    refused = run("pipeline", "vacuum", "--lake", lake, "--older", "23h")
    assert refused.code == 2
    assert "add --force" in refused.err
    now = ("--older", "0s", "--force")
    assert run("pipeline", "vacuum", "--lake", lake, "--dry-run", *now).out.startswith("2 files would be removed")
    assert sorted(lake.rglob("*.parquet")) == files
    sizes = {file: file.stat().st_size for file in files}
    removed = run("pipeline", "vacuum", "--lake", lake, *now, "--json").json
    assert (removed["files"], removed["removed"]) == (2, True)
    [kept] = lake.rglob("*.parquet")
    assert removed["bytes"] == sum(sizes.values()) - sizes[kept]


def test_commands_without_spark_do_not_import_it(tmp_path: Path):
    """A run with nothing new is one of them: its time is that of Python."""
    story = (
        "import sys\n"
        "from headwater.cli import main\n"
        "log, lake = sys.argv[1:]\n"
        "for command in (['run', '--log', log], ['status'], ['history'], ['report'], ['optimize'], ['vacuum']):\n"
        "    assert main(['pipeline', *command, '--lake', lake]) == 0, command\n"
        "    assert 'pyspark' not in sys.modules, command\n"
    )
    with headwater.open(tmp_path / "empty.db", maintenance_interval=None):
        pass
    command = [sys.executable, "-c", story, str(tmp_path / "empty.db"), str(tmp_path / "lake")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_a_lake_in_a_bucket(run, log, path: Path, s3: S3Server, bucket_url: str, tmp_path: Path, monkeypatch):
    """Its pages are put where the command is called."""
    environment = {"AWS_ENDPOINT_URL": s3.endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{urlsplit(bucket_url).netloc}/lake"
    monkeypatch.chdir(tmp_path)
    fill_lake(url, path)
    assert run("pipeline", "status", "--lake", url, "--json").json["last_seq"] == 4
    assert run("pipeline", "report", "--lake", url).out == f"{tmp_path / 'report.html'}\n"
    assert run("pipeline", "optimize", "--lake", url, "--all").out == "bronze/messages had 2 files and has 1\n"
    opened = Lake.open(url)
    assert opened.table_at(BRONZE, opened.moment(2)).rows == 2
    removed = run("pipeline", "vacuum", "--lake", url, "--older", "0s", "--force", "--json").json
    assert (removed["files"], removed["bytes"] > 0) == (2, True)
    with pytest.raises(headwater.errors.InvalidOptionError, match="vacuum has removed files"):
        opened.table_at(BRONZE, opened.moment(2))


@pytest.mark.parametrize("command", ["status --lake x", "run --log {log} --lake x", "sql x --log {log}"])
def test_without_the_extra_the_error_says_how_to_get_it(run, log, path, command: str, monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pyspark", None)  # an import of it fails now
    result = run("pipeline", *command.format(log=path).split())
    assert result.code == 2
    assert f"next: {install_hint('spark')}" in result.err
    assert not (tmp_path / "x").exists()


def test_the_bar_moves_within_a_step():
    screen = io.StringIO()
    with Bars(Console(file=screen, force_terminal=True, width=100)) as bars:
        bars.step("messages", 2_000)
        bars.reached(500)
        bars._bars.refresh()
        assert "500 of 2,000" in screen.getvalue()
        bars.step("reports")
        bars._bars.refresh()
    assert "2,000 of 2,000" in screen.getvalue()


# --- time travel ----------------------------------------------------------------------------------------------------


def test_a_moment_is_a_version_or_a_time(lake: Path):
    opened = Lake.open(lake)
    at = opened.moment(2)
    assert opened.table(BRONZE, at).transaction() == 2
    assert opened.table(BRONZE, at + timedelta(milliseconds=1)).version == 3
    assert opened.table(BRONZE, opened.moment(3)).version == 3
    assert opened.table_at("gold/volume", at).exists is False


def test_a_copy_of_a_lake_has_the_same_past(lake: Path):
    """Its entries have other times on the disk; their commits say when they were made."""
    at = Lake.open(lake).moment(2)
    for entry in (lake / BRONZE / "_delta_log").iterdir():
        os.utime(entry, (0, 0))
    assert Lake.open(lake).table(BRONZE, at).version == 2


def test_a_table_is_absent_before_it_was_made(lake: Path):
    opened = Lake.open(lake)
    opened.table("gold/forecast").append(pa.table({"pattern": [">"]}), transaction=1)
    assert opened.table("gold/forecast", opened.moment(2)).exists is False
    assert opened.table("gold/forecast", datetime.now(UTC)).exists


def test_what_vacuum_removed_cannot_be_read_and_the_oldest_moment_is_named(run, lake: Path, no_spark):
    opened = Lake.open(lake)
    run("pipeline", "optimize", "--lake", lake, "--all")
    run("pipeline", "vacuum", "--lake", lake, "--older", "0s", "--force")
    with pytest.raises(headwater.errors.InvalidOptionError, match="vacuum has removed files") as refused:
        opened.table_at(BRONZE, opened.moment(3))
    [merged_at] = [each["at"] for each in opened.history(BRONZE) if each["job"] == "optimize"]
    assert merged_at in refused.value.next
    assert opened.table_at(BRONZE, opened.moment(1)).rows == 0, "it had no files then"


# --- impossible requests fail before Spark is started --------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
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
        ("run --log events.db --lake new --continuous --refresh soon", 2, "--refresh must be a duration"),
        ("run --log events.db --lake new --types none", 2, "none: cannot be read"),
        ("run --log events.db --lake new --types types", 2, "order@1.json: not a JSON Schema that can be used"),
        ("run --log events.db --lake events.db", 2, "events.db: this is a file, and a lake is a folder"),
        ("run --log another.db --lake lake --rebuild", 2, "this lake belongs to another log"),
        ("audit --log another.db --lake lake", 2, "this lake belongs to another log"),
        ("audit --log events.db --lake new", 2, "new: there is no lake here"),
        ("audit --log events.db --lake lake --out none/audit.html", 2, "Name another file: --out FILE"),
        ("report --lake lake --out none/report.html", 2, "Name another file: --out FILE"),
        ("sql x --lake types", 2, "types: there is no lake here"),
        ("sql x", 2, "there is nothing to query"),
        ("replay --lake new --to copy.db --where true", 2, "new: there is no lake here"),
        ("replay --lake lake --to mysql://x --where true", 2, "there is no store for mysql:// here"),
        ("status --lake old", 2, "this lake is of the kind before Delta tables"),
        ("status --lake s3://me:secret@host/x", 2, "credentials do not belong into the url"),
        ("sql x --lake lake --at 99", 2, "bronze has no version 99"),
        ("sql x --lake lake --at -2d", 2, "the lake has no state of"),
        ("sql x --lake lake --at soon", 2, "--at must be a time"),
        ("sql x --lake lake --log events.db --at 1", 2, "--at is for a lake alone"),
        ("report --lake types", 2, "types: there is no lake here"),
        ("optimize --lake new", 2, "new: there is no lake here"),
        ("vacuum --lake lake --older soon", 2, "--older must be a duration"),
    ],
)
def test_what_is_refused(run, lake, no_spark, tmp_path: Path, monkeypatch, arguments: str, code: int, printed: str):
    monkeypatch.chdir(tmp_path)
    for folder in ("types", "old"):
        (tmp_path / folder).mkdir()
    (tmp_path / "types" / "order@1.json").write_text('{"type": 5}')
    (tmp_path / "old" / "manifest.db").touch()
    with headwater.open("another.db", maintenance_interval=None) as another:
        another.publish("notes.made", 1)
    result = run("pipeline", *arguments.split())
    assert (result.code, result.out) == (code, "")
    assert printed in result.err
    assert "secret" not in result.err
    assert not (tmp_path / "new").exists()


def test_a_folder_with_other_things_is_not_made_a_lake(run, log, path: Path, no_spark, tmp_path: Path):
    """A vacuum removes data files that no table names."""
    theirs = tmp_path / "data" / "raw" / "years of work.parquet"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("precious")
    result = run("pipeline", "run", "--log", path, "--lake", tmp_path / "data")
    assert result.code == 2
    assert "it holds other things, like raw" in result.err
    assert os.listdir(tmp_path / "data") == ["raw"]
    assert theirs.read_text() == "precious"


@pytest.mark.parametrize("command", ["run --log {log}", "optimize", "vacuum"])
def test_one_at_a_time_writes_a_lake(run, lake: Path, path: Path, no_spark, command: str):
    with Lake.open(lake).lock():
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
    signal.raise_signal(number)  # while the process ends: it is ignored


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


def test_a_later_second_signal_ends_it_at_once(handlers: None):
    seconds = iter([1.0, 1.0 + SAME_SIGNAL_S])
    with pytest.raises(KeyboardInterrupt), StopAtOnce(is_fine=True, monotonic=lambda: next(seconds)):
        interrupted(signal.SIGINT, signal.SIGINT)


def test_what_py4j_meets_when_the_jvm_ends_is_not_shown(caplog: pytest.LogCaptureFixture):
    """Its thread for garbage logs a traceback by the root logger, at the end of one run in a few."""
    speak = "import logging; logging.error('Exception while sending command.')"
    logging.getLogger().addFilter(is_not_py4j)
    try:
        exec(compile(speak, java_gateway.__file__, "exec"))
        exec(compile(speak, __file__, "exec"))
    finally:
        logging.getLogger().removeFilter(is_not_py4j)
    assert [record.pathname for record in caplog.records] == [__file__]


def test_without_a_signal_errors_are_errors(handlers: None):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ConnectionError), StopAtOnce(is_fine=True):
        raise ConnectionError("real")
    assert signal.getsignal(signal.SIGINT) is before


# --- values ---------------------------------------------------------------------------------------------------------


def test_times_are_reported_in_utc():
    naive_here = NOON.astimezone().replace(tzinfo=None)  # as Spark hands them out
    assert plain_value(naive_here, "timestamp") == "2026-01-02T12:00:00Z"
    assert plain_value([naive_here + timedelta(0, 0, 5)], "array<timestamp>") == ["2026-01-02T12:00:00.000005Z"]
    assert plain_value(datetime(2026, 1, 2), "timestamp_ntz") == "2026-01-02T00:00:00"
    assert plain_value(NOON.date(), "date") == "2026-01-02"
    assert plain_value({1: bytearray(b"\x01")}, "map<int,binary>") == {"1": "01"}


# --- on Spark -------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(STORY_S_MAX * 2)
def test_a_query_as_a_newcomer_makes_it(path: Path, log: headwater.Log, tmp_path: Path):
    """The command starts Spark, and ends it; its output is not for the terminal. The tutorial runs the other commands
    that need Spark, and tests/pipeline calls them all in its own process."""
    fill_lake(str(tmp_path / "lake"), path)
    query = "select toppic from bronze_messages"
    asked = subprocess.run(
        [sys.executable, "-m", "headwater", "pipeline", "sql", query, "--lake", "lake"],
        capture_output=True, text=True, timeout=STORY_S_MAX, stdin=subprocess.DEVNULL, cwd=tmp_path,
    )  # fmt: skip
    assert (asked.returncode, asked.stdout) == (2, "")
    first, second = asked.stderr.splitlines()
    assert first.startswith("error: QUERY: there is no column `toppic`; did you mean `topic`")
    assert second.startswith("next: Correct it there. Tables: ")
