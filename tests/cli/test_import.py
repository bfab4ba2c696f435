"""`headwater import`: what `tail --json` prints comes in again with its times, each line once, whatever is killed."""

from __future__ import annotations

import io
import json
import signal
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually
from served import ServedFile

import headwater
from headwater.cli import lines

Run = Callable[..., Any]
Start = Callable[..., "subprocess.Popen[str]"]


def write(file: Path, count: int, first: int = 0) -> None:
    with file.open("a") as opened:
        for number in range(first, first + count):
            line = {"topic": "h.x", "data": {"n": number}, "published_at": 1_600_000_000 + number}
            opened.write(json.dumps(line) + "\n")


def numbers(path: Path) -> list[int]:
    with headwater.open(path, maintenance_interval=None) as log:
        return [message.data["n"] for message in headwater_messages(log)]


def headwater_messages(log: headwater.Log) -> list[Any]:
    with log.subscribe("look", ">", mode="ephemeral", start="first") as look:
        return list(look.messages())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "history.jsonl"


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BATCH_LINES", 10)


def test_a_log_comes_out_and_in_again(run: Run, log: headwater.Log, path: Path, file: Path, tmp_path: Path) -> None:
    log.publish(
        "all.of.it",
        {"text": "ü\n", "none": None},
        id="mine",
        headers={"h": 1},
        from_="a",
        to="b",
        reply_to="c",
        correlation_id="d",
        type="e",
        version=3,
        content_type="f",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        priority=-5,
        deliver_at=datetime(2099, 1, 1, tzinfo=UTC),
        expires_at=datetime(2099, 1, 2, tzinfo=UTC),
        published_at=datetime(2001, 2, 3, tzinfo=UTC),
    )
    file.write_text(run("tail", path, "--start", "first", "--json").out)
    copy = tmp_path / "copy.db"
    assert run("import", copy, file, "--json").json == {
        "imported": 5,
        "duplicates": 0,
        "first_seq": 1,
        "last_seq": 5,
        "lines": 5,
        "resumed_after_line": 0,
    }
    assert run("tail", copy, "--start", "first", "--json").out == file.read_text()


def test_again_and_after_it_has_grown(run: Run, path: Path, file: Path) -> None:
    write(file, 25)
    assert run("import", path, file).out == "imported 25 messages  seq 1 to 25\n"
    assert run("import", path, file).out == "imported 0 messages  continued after line 25\n"
    write(file, 5, first=25)
    assert run("import", path, file, "--json").json["imported"] == 5
    file.rename(file.with_suffix(".moved"))
    assert run("import", path, file.with_suffix(".moved"), "--json").json["imported"] == 0
    assert numbers(path) == list(range(30))


def test_ids_that_the_log_knows(run: Run, path: Path, file: Path) -> None:
    with headwater.open(path) as log:
        log.publish("a", 1, id="known")
    lines = [{"topic": "a", "data": n, "id": id} for n, id in enumerate(("known", "new", "new"))]
    file.write_text("\n".join(map(json.dumps, lines)))  # the last line needs no end
    assert run("import", path, file).out == "imported 1 message  seq 2 to 2  2 ids known before\n"


def test_from_stdin(run: Run, path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(file, 12)
    for imported in (12, 0):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"" + file.read_bytes())))
        assert run("import", path, "-", "--json").json["imported"] == imported
    assert run("import", path, file, "--json").json["imported"] == 0  # it is the same file


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "not an object with topic and data"),
        ('{"topic": "a"}', "not an object with topic and data"),
        ('{"topic": "a..b", "data": 1}', "a token is empty"),
        ('{"topic": "a", "data": 1, "colour": 2}', "unknown publish option 'colour'"),
        ('{"topic": "a", "data": 1, "published_at": "yesterday"}', "published_at must be a time"),
        ('{"topic": "a", "data": 1, "published_at": "2999-01-01T00:00:00Z"}', "lies in the future"),
        ('{"topic": "a", "data": "\\ud800"}', "line 13"),
        ('{"topic": 7, "data": 1}', "line 13"),
    ],
)
def test_a_bad_line_is_named(run: Run, path: Path, file: Path, small_batches: None, line: str, complaint: str) -> None:
    write(file, 11)
    file.write_text(f"{file.read_text()}\n{line}\n")  # behind a blank line
    done = run("import", path, file)
    assert done.code == 2
    assert f"{file}, line 13" in done.err
    assert complaint in done.err
    assert "Stored up to line 10" in done.err
    assert numbers(path) == list(range(10))
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:12]))
    write(file, 3, first=11)
    assert run("import", path, file, "--json").json["imported"] == 4
    assert numbers(path) == list(range(14))


def test_a_line_that_is_too_long(run: Run, path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES_MAX", 1_000)
    write(file, 3)
    with file.open("a") as opened:
        opened.write('{"topic": "a", "data": "' + "x" * 2_000 + '"}\n')
    done = run("import", path, file)
    assert (done.code, f"{file}, line 4: longer than 1,000 bytes" in done.err) == (2, True)


def test_another_file_is_not_taken_for_the_first(run: Run, path: Path, file: Path) -> None:
    write(file, 20)
    run("import", path, file)
    lines = file.read_text().splitlines(keepends=True)
    lines[7] = lines[7].replace("h.x", "h.y")
    file.write_text("".join(lines))
    done = run("import", path, file)
    assert done.code == 3
    assert "not the file whose first 20 lines were imported" in done.err
    file.write_text("".join(lines[:5]))
    assert run("import", path, file).code == 3
    assert run("import", path, file, "--name", "second", "--json").json["imported"] == 5
    assert run("import", path, file, "--name", "no way").code == 2


def test_a_file_that_is_not_there_or_empty(run: Run, path: Path, file: Path) -> None:
    assert "cannot be read (No such file" in run("import", path, file).err
    assert not path.exists()
    file.touch()
    assert run("import", path, file).out == "imported 0 messages\n"
    file.write_text("\n \n")
    assert run("import", path, file).out == "imported 0 messages\n"


def reached(log: headwater.Log, seq: int, process: subprocess.Popen[str]) -> None:
    eventually(lambda: log.last_seq() >= seq or process.poll() is not None, True)


def test_a_killed_import_stores_each_line_once(start: Start, path: Path, file: Path, run: Run) -> None:
    count = 60_000
    write(file, count)
    headwater.open(path).close()
    with headwater.open(path, maintenance_interval=None) as log:
        for goal in (5_000, 20_000, 40_000):
            process = start("import", path, file)
            reached(log, goal, process)
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert 40_000 <= log.last_seq() < count
        process = start("import", path, file)
        reached(log, 45_000, process)
        process.send_signal(signal.SIGTERM)  # ends between two batches
        assert process.wait() in (0, 130)
    assert run("import", path, file).code == 0
    assert numbers(path) == list(range(count))


def test_two_imports_of_one_file_exclude_each_other(path: Path, file: Path) -> None:
    from headwater.broker.flow import run_blocking
    from headwater.broker.importing import ImportPosition, import_drafts
    from headwater.errors import ConflictError
    from headwater.message import Draft

    with headwater.open(path) as log:
        core: Any = log._core
        position = ImportPosition(10, 1, 7)
        run_blocking(import_drafts(core.engine, "x", [Draft("a", "1", 1)], None, position))
        with pytest.raises(ConflictError, match="another import"):
            run_blocking(import_drafts(core.engine, "x", [Draft("a", "1", 1)], None, position))
        assert log.last_seq() == 1


def test_behind_a_server(run: Run, tmp_path: Path, file: Path) -> None:
    write(file, 25)
    served = ServedFile(tmp_path / "served.db")
    try:
        assert run("import", served.url(), file, "--json").json["imported"] == 25
        again = run("import", served.url(), file, "--json").json
        assert (again["imported"], again["duplicates"]) == (0, 25)
    finally:
        served.stop()
    with headwater.open(tmp_path / "served.db") as log:
        assert headwater_messages(log)[3].published_at == datetime.fromtimestamp(1_600_000_003, UTC)


def test_another_file_with_the_same_first_line_behind_a_server(run: Run, tmp_path: Path, file: Path) -> None:
    write(file, 3)
    other = tmp_path / "other.jsonl"
    write(other, 1)
    write(other, 2, first=100)
    served = ServedFile(tmp_path / "served.db")
    try:
        assert run("import", served.url(), file, "--json").json["imported"] == 3
        assert run("import", served.url(), other, "--json").json["imported"] == 2
        assert run("import", served.url(), other, "--json").json["imported"] == 0
    finally:
        served.stop()
    assert numbers(tmp_path / "served.db") == [0, 1, 2, 100, 101]


def test_in_postgres(run: Run, postgres_schema_url: str, file: Path) -> None:
    write(file, 25)
    assert run("import", postgres_schema_url, file, "--json").json["imported"] == 25
    write(file, 5, first=25)
    assert run("import", postgres_schema_url, file, "--json").json["imported"] == 5
