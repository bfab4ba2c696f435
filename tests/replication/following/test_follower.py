"""`headwater.follow` inside a program that goes on with its own work."""

import os
import queue
import select
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from child_processes import children_of
from fault_proxy import FaultProxy
from followed import PATIENCE_S, Database, Outcomes, names_in
from intruder import LOCKED, try_to_write
from served import RunningServer

import headwater
from headwater.errors import InvalidOptionError, UnreachableError, VersionConflictError
from headwater.replication import watch
from headwater.replication.outcome import Outcome

WATCHING = "headwater.replication.watch"
FOLLOW = """
import os, sys, threading, time, headwater
pushed = threading.Event()
follower = headwater.follow(sys.argv[1], sys.argv[2], wait_idle=1, on_outcome=lambda outcome: pushed.set())
pushed.wait()
if "forks" in sys.argv and not os.fork():  # it has all that is open here, and lives on
    os.close(1)
    follower.close()
    sys.stdin.read()
    os._exit(0)
print("pushed", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_database_that_the_program_writes_itself_is_pushed(server: RunningServer, tmp_path: Path, mode: str) -> None:
    database, remote = Database(tmp_path / "app.db", mode), f"{server.url}/shop/app.db"
    outcomes = Outcomes()
    with (
        closing(sqlite3.connect(database.path, isolation_level=None)) as connection,
        headwater.follow(database.path, remote, wait_idle="1s", message="first", on_outcome=outcomes.put) as follower,
    ):
        assert outcomes.reached(1).version == 1
        for number in (2, 3):  # after the second one, the watcher has had reason to open and close its connection
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO item (name) VALUES (?)", (str(number),))
            assert try_to_write(database.path) == LOCKED  # the program's own locks are still there
            connection.execute("COMMIT")
            outcome = outcomes.reached(number)
            assert (outcome.version, outcome.is_new) == (number, True)
        assert follower.outcome is not None
        assert follower.outcome.version == 3
    assert not children_of(os.getpid(), WATCHING)
    headwater.sync(remote, tmp_path / "pulled.db")
    assert names_in(tmp_path / "pulled.db") == ["2", "3"]


def test_a_push_can_be_asked_for_and_the_end_can_begin_with_one(server: RunningServer, tmp_path: Path) -> None:
    database, remote = Database(tmp_path / "app.db"), f"{server.url}/shop/app.db"
    outcomes = Outcomes()
    with headwater.follow(
        database.path, remote, wait_idle="1h", push_on_exit=True, on_outcome=outcomes.put
    ) as follower:
        assert outcomes.reached(1).version == 1
        database.write("now")
        follower.push_soon()
        assert outcomes.reached(2).version == 2
        database.write("at the end")
    assert outcomes.get(timeout=0).version == 3
    follower.push_soon()  # it has ended: in vain
    with headwater.follow(remote, tmp_path / "copy.db") as pulling, pytest.raises(InvalidOptionError, match="pulls"):
        pulling.push_soon()
    with pytest.raises(InvalidOptionError, match="--pushOnExit is for pushing"):
        headwater.follow(remote, tmp_path / "copy.db", push_on_exit=True)


def test_a_copy_stays_up_to_date_and_the_server_may_go_away(
    server: RunningServer, database: Database, tmp_path: Path
) -> None:
    copy, errors = tmp_path / "copy.db", queue.Queue[Exception]()
    outcomes = Outcomes()
    direct = f"{server.url}/shop/app.db"
    headwater.sync(database.path, direct)
    with FaultProxy("127.0.0.1", int(server.url.rpartition(":")[2])) as proxy:
        remote = f"ws://127.0.0.1:{proxy.port}/shop/app.db"
        with headwater.follow(remote, copy, on_outcome=outcomes.put, on_error=errors.put) as follower:
            assert outcomes.reached(1).version == 1
            proxy.refuse()
            proxy.reset()
            assert isinstance(errors.get(timeout=PATIENCE_S), UnreachableError)
            assert follower.error is None
            assert not follower.join(0)
            database.write("while it was away")
            headwater.sync(database.path, direct)
            proxy.accept()
            assert outcomes.reached(2).version == 2
    assert names_in(copy) == ["while it was away"]


def test_what_no_waiting_mends_ends_it_and_is_raised(
    server: RunningServer, database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remote, other, reported = f"{server.url}/shop/app.db", Database(tmp_path / "other.db"), list[Exception]()
    other.write("another")
    headwater.sync(other.path, remote)
    follower = headwater.follow(database.path, remote, on_error=reported.append)
    with pytest.raises(VersionConflictError) as caught:
        follower.join(PATIENCE_S)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]  # reported once
    assert caught.value is follower.error
    assert reported == [follower.error]
    with pytest.raises(VersionConflictError):
        follower.close()
    with pytest.raises(KeyError), follower:  # which is more urgent
        raise KeyError


def test_a_callback_may_close_it_and_one_that_fails_ends_it(server: RunningServer, database: Database) -> None:
    remote, is_made = f"{server.url}/shop/app.db", threading.Event()

    def close_it(outcome: Outcome) -> None:
        is_made.wait(PATIENCE_S)
        follower.close()

    follower = headwater.follow(database.path, remote, on_outcome=close_it)
    is_made.set()
    assert follower.join(PATIENCE_S)
    failing = headwater.follow(database.path, remote, on_outcome=lambda outcome: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.join(PATIENCE_S)


def test_what_cannot_be_meant_is_reported_at_once(database: Database, tmp_path: Path) -> None:
    remote = "ws://127.0.0.1:1/shop/app.db"
    calls: list[Callable[[], object]] = [
        lambda: headwater.follow(database.path, tmp_path / "copy.db"),
        lambda: headwater.follow(database.path, remote, wait_idle="10"),
        lambda: headwater.follow(database.path, remote, wait_idle=0.5),
        lambda: headwater.follow(remote, tmp_path / "copy.db", coordinate=True),
        lambda: headwater.follow(f"{remote}@3", tmp_path / "copy.db"),
    ]
    for call in calls:
        with pytest.raises(InvalidOptionError):
            call()


def test_it_can_be_closed_before_it_has_reached_a_server(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        headwater.follow(database.path, "ws://127.0.0.1:1/shop/app.db").close(PATIENCE_S)
    reported: queue.Queue[Exception] = queue.Queue()
    caplog.clear()
    with headwater.follow(database.path, "ws://127.0.0.1:1/shop/app.db", on_error=reported.put):
        assert "connection refused" in str(reported.get(timeout=PATIENCE_S))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["it ends with changes that are not pushed: the next start pushes them"]
    assert not children_of(os.getpid(), WATCHING)


def test_a_watching_process_that_dies_is_replaced_and_nothing_is_missed(
    server: RunningServer, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "CHILD_RESTART_S", 0.01)
    outcomes = Outcomes()
    with headwater.follow(database.path, f"{server.url}/shop/app.db", wait_idle=1, on_outcome=outcomes.put):
        assert outcomes.reached(1).version == 1
        (watching,) = children_of(os.getpid(), WATCHING)
        os.kill(watching.pid, signal.SIGKILL)
        database.write("while it was closed")
        assert outcomes.reached(2).version == 2


@pytest.mark.parametrize("how", ["alone", "forks"])
def test_a_program_that_is_killed_leaves_no_process_behind(server: RunningServer, database: Database, how: str) -> None:
    command = [sys.executable, "-c", FOLLOW, str(database.path), f"{server.url}/shop/app.db", how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"pushed\n"
        (watching,) = children_of(program.pid, WATCHING)
        gone = os.pidfd_open(watching.pid)
        program.kill()
        try:
            waiting_on = select.poll()
            waiting_on.register(gone, select.POLLIN)
            assert waiting_on.poll(int(PATIENCE_S * 1000))
        finally:
            os.close(gone)


def test_a_program_may_go_to_another_directory_and_have_odd_paths(
    server: RunningServer, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(database.path.parent)
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # no text: Python itself ignores it
    outcomes = Outcomes()
    remote = f"{server.url}/shop/app.db"
    with headwater.follow(database.path.name, remote, wait_idle=1, on_outcome=outcomes.put):
        assert outcomes.reached(1).version == 1
        monkeypatch.chdir(tmp_path / "elsewhere")
        database.write("from afar")
        assert outcomes.reached(2).version == 2


def test_an_end_without_a_callback_is_logged(
    server: RunningServer, database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Database(tmp_path / "other.db")
    other.write("by another")
    headwater.sync(other.path, f"{server.url}/shop/app.db")
    with pytest.raises(VersionConflictError):
        headwater.follow(database.path, f"{server.url}/shop/app.db").join(PATIENCE_S)
    levels = [record.levelname for record in caplog.records if "following " in record.getMessage()]
    assert levels == ["WARNING"]
