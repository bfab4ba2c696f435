"""`headwater sync`, as typed at a shell."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
from served import RunningServer

import headwater
from headwater.cli.sync import sentence
from headwater.replication.outcome import Outcome


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "server").mkdir()
    server = RunningServer(tmp_path / "server" / "log.db")
    yield server.url
    server.stop()


@pytest.fixture
def app(tmp_path: Path) -> Path:
    path = tmp_path / "app.db"
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("PRAGMA journal_mode = WAL; CREATE TABLE item (name)").fetchall()
        connection.executemany("INSERT INTO item VALUES (?)", ((f"item {n}" * 20,) for n in range(2_000)))
    return path


def add(path: Path, name: str) -> None:
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("INSERT INTO item VALUES (?)", (name,))


def count(path: Path) -> int:
    with closing(apsw.Connection(str(path))) as connection:
        return int(connection.execute("SELECT count(*) FROM item").get)


def test_push_pull_and_copy(run: Any, url: str, app: Path, tmp_path: Path) -> None:
    remote = f"{url}/shop/app.db"
    pushed = run("sync", app, remote, "-m", "first")
    assert (pushed.code, pushed.err) == (0, "")
    assert pushed.out.startswith(f"pushed {app} as version 1 of {remote}: ")
    assert re.search(r": 3\d\d KiB; 3\d\d KiB sent, \d+ B received, \d\.\d\d s$", pushed.out), pushed.out
    unchanged = [run("sync", app, remote, *dry).out.partition(" (")[0] for dry in (["--dry"], [])]
    assert unchanged == [f"nothing to push: version 1 of {remote} has the same pages"] * 2
    add(app, "second")
    again = run("sync", app, remote, "--json").json
    assert f", speed-up {again['speedup']:.0f} ×" in sentence(msgspec.convert(again, Outcome))
    assert (again["version"], again["is_new"], again["base"], again["changed_pages"] < 5) == (2, True, 1, True)
    assert run("sync", f"{remote}@1", tmp_path / "old.db").out.startswith("pulled version 1 of ")
    assert run("sync", f"{remote}@latest-1", tmp_path / "older.db").code == 0
    assert run("sync", remote, tmp_path / "new.db").code == 0
    assert run("sync", remote, tmp_path / "new.db").out.startswith(f"nothing new: version 2 of {remote} is in ")
    assert f"from {remote}@1 to " in run("sync", f"{remote}@1", tmp_path / "new.db", "--dry").out
    assert run("sync", app, tmp_path / "copy.db").out.startswith("copied ")
    assert run("sync", app, tmp_path / "copy.db").out.startswith("nothing to copy: ")
    counts = {name: count(tmp_path / f"{name}.db") for name in ("old", "older", "new", "copy")}
    assert counts == {"old": 2_000, "older": 2_000, "new": 2_001, "copy": 2_001}


def test_dry_moves_nothing(run: Any, url: str, app: Path, tmp_path: Path) -> None:
    remote = f"{url}/shop/app.db"
    assert run("sync", app, remote, "--dry").out.startswith("would move ")
    assert run("sync", remote, tmp_path / "nothing.db").code == 2  # there is no such replica
    run("sync", app, remote)
    add(app, "second")
    would = run("sync", app, remote, "--dry-run", "--json").json
    assert (would["dry"], would["is_new"], 0 < would["changed_pages"] < 5) == (True, True, True)
    assert run("sync", remote, tmp_path / "pulled.db", "--dry").code == 0
    assert run("sync", app, tmp_path / "copy.db", "--dry").code == 0
    assert not (tmp_path / "pulled.db").exists()
    assert not (tmp_path / "copy.db").exists()
    did = run("sync", app, remote, "--json").json
    # What would move is what moves, but for page 1, whose counters each side keeps for itself.
    assert abs(did["changed_pages"] - would["changed_pages"]) <= 1
    assert run("replica", "rm", tmp_path / "server" / "log.db-replicas", "shop/app.db", "--yes").code == 0
    anew = run("sync", app, remote, "--dry")
    assert "it would be pushed anew" in anew.err
    assert anew.out.startswith("would move ")
    assert "it is pushed anew" in run("sync", app, remote).err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["app.db", "ws://host"], "namespace"),
        (["app.db", "http://host/ns/app.db"], "ws://"),
        (["ws://host/a/b", "ws://host/c/d"], "source or target must be a file"),
        (["app.db", "ws://host/ns/app.db@latest1"], "latest1"),
        (["app.db", "ws://host/ns/..", "--dry"], "name"),
        (["app.db", "ws://host/ns/app.db", "--waitIdle", "3s"], "--wait-idle is for --subscribe"),
        (["app.db", "ws://host/ns/app.db", "--coordinate"], "--coordinate is for --subscribe"),
        (["app.db", "ws://host/ns/app.db", "--subscribe", "--waitIdle", "3mo"], "3mo"),
        (["app.db", "ws://host/ns/app.db", "--subscribe", "--waitIdle", "0s"], "waitIdle"),
        (["app.db", "ws://host/ns/app.db", "--subscribe", "--wait-idle", "25d"], "waitIdle"),
        (["app.db", "ws://host/ns/app.db", "--subscribe", "--minInterval", "2h", "--maxInterval", "1h"], "maxInterval"),
        (["app.db", "ws://host/ns/app.db", "--subscribe", "--dry"], "--dry"),
        (["ws://host/ns/app.db", "app.db", "--subscribe", "--coordinate"], "--coordinate is for pushing"),
        (["ws://host/ns/app.db@latest-2", "app.db", "--subscribe"], "newest version"),
        (["app.db", "copy.db", "--subscribe"], "only a replica on a server"),
        (["ws://host/ns/app.db", "app.db", "-m", "hello"], "a message goes with a new version"),
        (["app.db", "ws://host/ns/app.db", "--overwrite"], "overwrite is for a pull"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_meant_is_reported(run: Any, arguments: list[str], says: str) -> None:
    result = run("sync", *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert says in result.err
    assert "next: " in result.err


def test_what_is_not_there_is_reported(run: Any, tmp_path: Path, url: str, app: Path) -> None:
    missing = run("sync", tmp_path / "no.db", f"{url}/shop/app.db")
    assert missing.code == 2
    assert f"there is no such file\nnext: Check the path; it was looked for in {tmp_path}" in missing.err
    for directory in (run("sync", tmp_path, f"{url}/shop/app.db"), run("sync", f"{url}/shop/app.db", tmp_path)):
        assert (directory.code, "this is a directory\nnext: Name a " in directory.err) == (2, True)
    subscribed = run("sync", tmp_path / "no.db", f"{url}/shop/app.db", "--subscribe", "--waitIdle", "1s")
    assert (subscribed.code, subscribed.err) == (missing.code, missing.err)
    for source in (f"{url}/shop/app.db", app):
        nowhere = run("sync", source, tmp_path / "no" / "such" / "x.db")
        assert (nowhere.code, f"next: mkdir -p {tmp_path}/no/such\n" in nowhere.err) == (2, True)
    (tmp_path / "text.db").write_text("this is no database " * 100)
    assert "no SQLite database" in run("sync", tmp_path / "text.db", f"{url}/shop/app.db").err
    away = run("sync", tmp_path / "text.db", "ws://127.0.0.1:1/shop/app.db")
    assert away.code == 3
    assert not (tmp_path / "no.db-headwater").exists()


def test_a_stale_base_is_refused_and_what_next_is_reported(run: Any, url: str, app: Path, tmp_path: Path) -> None:
    remote = f"{url}/shop/app.db"
    run("sync", app, remote)
    run("sync", remote, tmp_path / "other.db")
    add(tmp_path / "other.db", "theirs")
    assert run("sync", tmp_path / "other.db", remote).code == 0
    add(app, "mine")
    refused = run("sync", app, remote)
    assert refused.code == 3
    assert "the newest version is 2" in refused.err
    assert "@latest" in refused.err
    assert run("sync", app, f"{remote}@latest").out.startswith(f"pushed {app} as version 3 ")


def test_changes_that_were_never_pushed_are_not_overwritten(run: Any, url: str, app: Path, tmp_path: Path) -> None:
    remote, copy = f"{url}/shop/app.db", tmp_path / "copy.db"
    run("sync", app, remote)
    run("sync", remote, copy)
    add(copy, "mine")
    refused = run("sync", remote, copy)
    assert refused.code == 3
    assert "--overwrite" in refused.err
    assert count(copy) == 2_001
    assert run("sync", remote, copy, "--overwrite").code == 0
    assert count(copy) == 2_000


def test_a_key_closes_a_replica(run: Any, url: str, app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote, data = f"{url}/shop/app.db", tmp_path / "server" / "log.db-replicas"
    run("sync", app, remote)
    push_key = run("replica", "key", "create", data, "shop/app.db", "--push").out.strip()
    pull_key = run("replica", "key", "create", data, "shop/app.db", "--pull").out.strip()
    keyless = run("sync", remote, tmp_path / "copy.db")
    assert keyless.code == 3
    assert "headwater replica key create" in keyless.err
    assert run("sync", remote, tmp_path / "copy.db", "--pullKey", pull_key).code == 0
    add(app, "second")
    assert run("sync", app, remote, "--pushKey", pull_key).code == 3
    assert run("sync", app, remote, "--push-key", push_key).code == 0
    monkeypatch.setenv("HEADWATER_PULL_KEY", pull_key)
    assert run("sync", remote, tmp_path / "copy.db").code == 0


def test_it_keeps_at_it_until_terminated(command: Any, url: str, app: Path) -> None:
    with headwater.open(url) as log, log.subscribe("seer", "replica.shop.app.db") as versions:
        process = command("sync", app, f"{url}/shop/app.db", "--subscribe", "--waitIdle", "1s", "--json")
        [first] = versions.fetch(1, timeout=30)
        first.ack()
        add(app, "second")
        [second] = versions.fetch(1, timeout=30)
        second.ack()
        assert (first.data["version"], second.data["version"], second.data["base"]) == (1, 2, 1)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    reported = [json.loads(line) for line in out.splitlines()]
    assert [line["version"] for line in reported if line["is_new"]] == [1, 2]
    when = "after 1s without a write, or 1d after the last push"
    assert err.splitlines()[0] == f"pushing {app} to {url}/shop/app.db {when}; Ctrl-C ends it"


def test_it_can_be_ended_as_soon_as_it_says_so(command: Any, url: str, app: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        process = command("sync", app, f"{url}/shop/app.db", "--subscribe")
        first = process.stderr.readline()
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
        assert "Ctrl-C ends it" in first
        assert (process.returncode, "Traceback" in err) == (0, False)


def test_it_pushes_what_is_left_when_it_is_to_do_so(command: Any, url: str, app: Path) -> None:
    process = command("sync", app, f"{url}/shop/app.db", "--subscribe", "--waitIdle", "1h", "--pushOnExit", "--json")
    assert json.loads(process.stdout.readline())["version"] == 1
    add(app, "second")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, json.loads(out)["version"]) == (0, 2)


def test_the_progress_on_a_terminal_does_not_take_what_goes_to_a_pipe(url: str, app: Path) -> None:
    ours, terminal = os.openpty()
    words = ["sync", str(app), f"{url}/shop/app.db", "--subscribe", "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "headwater", *words], stdout=subprocess.PIPE, stderr=terminal
    ) as process:
        assert process.stdout is not None
        shown = threading.Thread(target=_drain, args=(ours,), daemon=True)
        shown.start()
        killer = threading.Timer(30, process.kill)
        killer.start()
        assert json.loads(process.stdout.readline())["version"] == 1
        killer.cancel()
        process.terminate()
    os.close(terminal)
    shown.join(10)
    os.close(ours)


def _drain(terminal: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(terminal, 65_536):
            pass


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        words = ["-m", "headwater", *map(str, arguments)]
        process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
