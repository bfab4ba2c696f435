"""The watcher of a database, with writers in other processes."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest

from headwater.replication import snapshot as snapshots
from headwater.replication import watch
from headwater.replication import watch as watcher_module
from headwater.replication.local_database import identity_of
from headwater.replication.rsync import OriginStream, transfer
from headwater.replication.watch import FALLBACK_POLL_S, DatabaseWatcher

WAIT_S = 60.0
NEVER_S = 3600.0
NET_S = 20.0  # so long that a look is one at what just happened; and yet it helps where a commit waits for a slow disk

# Runs each line of SQL that it is given, and says so; `close` and `open` are about its connection.
WRITER = """
import sys, time, apsw
path = sys.argv[1]
def opened():
    connection = apsw.Connection(path)
    connection.set_busy_timeout(10_000)  # the first two to open a WAL meet for a moment
    return connection
connection = opened()
print("ready", flush=True)
for line in sys.stdin:
    verb, _, rest = line.strip().partition(" ")
    if verb == "close":
        connection.close()
    elif verb == "open":
        connection = opened()
    elif verb == "storm":
        connection.execute("PRAGMA synchronous = OFF")
        until = time.monotonic() + float(rest)
        while time.monotonic() < until:
            connection.execute("INSERT INTO t VALUES (1)")
    else:
        connection.execute(line).fetchall()
    print("done", flush=True)
"""


LEFT_OPEN = """
import os, sys
from headwater.replication.watch import DatabaseWatcher
def watch():
    watcher = DatabaseWatcher(sys.argv[1], lambda: None)
    watcher.start()
    watcher.stop()
watch()  # what is opened once, like a library, stays
before = set(os.listdir("/proc/self/fd"))
for _ in range(3):
    watch()
print(sorted(set(os.listdir("/proc/self/fd")) - before))
"""


class Writer:
    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._hear("ready")

    def __call__(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        self._hear("done")

    def _hear(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=WAIT_S)


class Ear:
    """What a watcher reported."""

    def __init__(self) -> None:
        self.news: list[str] = []
        self._changed = threading.Condition()

    def hear(self, word: str) -> None:
        with self._changed:
            self.news.append(word)
            self._changed.notify_all()

    def wait_for(self, *words: str) -> None:
        """Until they were reported, in this order; then they are forgotten."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._has(words), WAIT_S), (words, self.news)
            self.news.clear()

    def _has(self, words: tuple[str, ...]) -> bool:
        output = iter(self.news)
        return all(word in output for word in words)


Start = Callable[..., tuple[DatabaseWatcher, Ear]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
def writer(path: Path) -> Iterator[Writer]:
    writer = Writer(path)
    yield writer
    writer.end()


@pytest.fixture(params=["wal", "delete", "truncate"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    watchers: list[DatabaseWatcher] = []
    monkeypatch.setattr(watcher_module, "RECHECKS_S", (0.02, 0.05, 0.1))  # so that it settles soon
    monkeypatch.setattr(watcher_module, "FALLBACK_POLL_S", NET_S)

    def begin(place: Path = path) -> tuple[DatabaseWatcher, Ear]:
        ear = Ear()
        watcher = DatabaseWatcher(str(place), lambda: ear.hear("write"))
        watchers.append(watcher)
        watcher.start()
        return watcher, ear

    yield begin
    for watcher in watchers:
        watcher.stop()
    assert not [watcher for watcher in watchers if watcher._thread.is_alive()]


def settle(watcher: DatabaseWatcher, looks_before: int) -> None:
    """Until it has looked at what just happened, and is through with it."""
    deadline = time.monotonic() + WAIT_S
    while watcher.looks <= looks_before:
        assert time.monotonic() < deadline, "it did not look"
        watcher.settled.wait(0.01)
        os.sched_yield()
    assert watcher.settled.wait(WAIT_S)


def wait_until(watcher: DatabaseWatcher, *, is_watching: bool) -> None:
    """A write is reported also while the database is locked, and cannot be watched yet."""
    deadline = time.monotonic() + WAIT_S
    while watcher.is_watching != is_watching:
        assert time.monotonic() < deadline, f"is_watching stays {not is_watching}"
        watcher.settled.wait(0.01)
        os.sched_yield()


def prepared(writer: Writer, mode: str = "wal") -> None:
    writer(f"PRAGMA journal_mode = {mode}")
    writer("CREATE TABLE t (x)")


# --- commits --------------------------------------------------------------------------------------------------------


def test_file_events_alone_tell_of_what_another_process_does(
    writer: Writer, path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(watcher_module, "FALLBACK_POLL_S", NEVER_S)
    monkeypatch.setattr(watcher_module, "RECHECKS_S", (0.05,) * 1000)  # however long a commit waits for the disk
    prepared(writer, mode)
    _, ear = start()
    for _ in range(3):
        writer("INSERT INTO t VALUES (1)")
        ear.wait_for("write")
    writer("VACUUM")
    ear.wait_for("write")
    other = path.with_name("other.db")
    newer = Writer(other)
    prepared(newer, mode)
    newer.end()
    other.rename(path)
    ear.wait_for("write")


def test_a_lock_that_is_met_in_every_look_after_an_event_is_waited_out(
    writer: Writer, path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher_module, "FALLBACK_POLL_S", NEVER_S)
    monkeypatch.setattr(watcher_module, "RECHECKS_S", ())
    monkeypatch.setattr(watcher_module, "POLL_S", 0.05)
    prepared(writer, "delete")
    _, ear = start()
    looked = threading.Event()
    look = watch.DatabaseView.moved
    is_locked = True

    def busy(view: watch.DatabaseView, directory: watch.DirectoryEvents | None) -> bool:
        if is_locked:
            looked.set()
            raise apsw.BusyError("database is locked")
        return look(view, directory)

    monkeypatch.setattr(watch.DatabaseView, "moved", busy)
    looked.clear()
    writer("INSERT INTO t VALUES (1)")
    for _ in range(2):  # that of the event, and one more: by then there are no events any more
        assert looked.wait(WAIT_S)
        looked.clear()
    assert ear.news == []
    is_locked = False
    ear.wait_for("write")


def test_a_commit_of_another_connection_of_this_process_is_reported(path: Path, start: Start) -> None:
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA journal_mode = WAL; CREATE TABLE t (x)").fetchall()
    _, ear = start()
    connection.execute("INSERT INTO t VALUES (1)")
    ear.wait_for("write")
    connection.close()


def test_reading_and_what_is_rolled_back_wakes_no_watcher(writer: Writer, start: Start, mode: str) -> None:
    prepared(writer, mode)
    watcher, ear = start()
    writer("SELECT * FROM t")
    writer("PRAGMA cache_size = 5")
    looks = watcher.looks
    writer(
        "BEGIN; WITH RECURSIVE s(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM s WHERE i < 20000)"
        " INSERT INTO t SELECT i FROM s"
    )
    writer("ROLLBACK")  # after pages were spilled to the file
    settle(watcher, looks)
    assert ear.news == []
    writer("INSERT INTO t VALUES (1)")
    ear.wait_for("write")


@pytest.mark.parametrize("kind", ["PASSIVE", "FULL", "RESTART", "TRUNCATE"])
def test_a_checkpoint_by_another_process_wakes_no_watcher(writer: Writer, start: Start, kind: str) -> None:
    prepared(writer)
    watcher, ear = start()
    looks = watcher.looks
    writer("INSERT INTO t VALUES (1)")
    ear.wait_for("write")
    settle(watcher, looks)
    looks = watcher.looks
    ear.news.clear()
    writer(f"PRAGMA wal_checkpoint({kind})")
    settle(watcher, looks)
    assert ear.news == []
    writer("INSERT INTO t VALUES (2)")
    ear.wait_for("write")


def test_a_commit_right_before_a_truncating_checkpoint_is_reported(writer: Writer, start: Start) -> None:
    prepared(writer)
    writer("PRAGMA wal_checkpoint(TRUNCATE)")
    watcher, ear = start()
    for _ in range(5):
        looks = watcher.looks
        writer("INSERT INTO t VALUES (1); PRAGMA wal_checkpoint(TRUNCATE)")
        ear.wait_for("write")
        settle(watcher, looks)
        ear.news.clear()


def test_other_files_of_the_directory_are_not_even_looked_at(writer: Writer, path: Path) -> None:
    prepared(writer)
    watcher = DatabaseWatcher(str(path), lambda: None)
    names, identity = watcher._names(), identity_of(str(path.parent))
    watcher.stop()
    assert identity is not None
    directory = watch.DirectoryEvents.watched(str(path.parent), identity)
    assert directory is not None
    beside = path.with_name("app.db-headwater")
    beside.mkdir()
    for name in ("app.db.tmp", ".app.db.swp", "other.db", "app.db-headwater/state.json"):
        (path.parent / name).write_text("x")
    shutil.rmtree(beside)
    assert not directory.take(names)
    writer("INSERT INTO t VALUES (1)")
    assert directory.take(names)
    writer("PRAGMA wal_checkpoint(TRUNCATE)")
    assert directory.take(names)
    assert not directory.take(names)
    directory.close()


@pytest.mark.parametrize(("mode", "has_room"), [("wal", True), ("delete", True), ("truncate", True), ("wal", False)])
async def test_our_own_push_wakes_no_watcher(
    writer: Writer,
    path: Path,
    tmp_path: Path,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    has_room: bool,
) -> None:
    """What it does to a database: it makes a snapshot; where there is no room for one, its origin reads the live
    file (only with WAL)."""
    prepared(writer, mode)
    watcher, ear = start()
    looks = watcher.looks
    writer("INSERT INTO t VALUES (1)")
    ear.wait_for("write")
    settle(watcher, looks)
    ear.news.clear()
    if not has_room:
        monkeypatch.setattr(snapshots, "_free_bytes", lambda _: 0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    looks = watcher.looks
    taken = snapshots.snapshot(str(path), str(elsewhere / "snapshot.db"))
    assert taken.is_copy == has_room
    await transfer(taken.path, str(elsewhere / "replica.db"), OriginStream())
    settle(watcher, looks)
    assert ear.news == []
    writer("INSERT INTO t VALUES (2)")
    ear.wait_for("write")


# --- other files under the same name ----------------------------------------------------------------------------------


def test_a_database_renamed_over_it_is_reported_and_watched(
    writer: Writer, path: Path, start: Start, mode: str
) -> None:
    prepared(writer, mode)
    watcher, ear = start()
    looks = watcher.looks
    writer("close")
    settle(watcher, looks)
    other = path.with_name("other.db")
    newer = Writer(other)
    prepared(newer, mode)
    newer("INSERT INTO t VALUES (42)")
    newer("close")
    ear.news.clear()
    other.rename(path)
    ear.wait_for("write")
    writer("open")
    writer("INSERT INTO t VALUES (43)")
    ear.wait_for("write")
    newer.end()
    connection = apsw.Connection(str(path))
    assert connection.execute("SELECT x FROM t").fetchall() == [(42,), (43,)]
    assert connection.pragma("integrity_check") == "ok"
    connection.close()


def test_a_database_deleted_and_made_again_is_reported_and_watched(
    writer: Writer, path: Path, start: Start, mode: str
) -> None:
    prepared(writer, mode)
    watcher, ear = start()
    writer("close")
    for file in path.parent.glob("app.db*"):
        file.unlink(missing_ok=True)  # the watcher empties the -wal file at the same time
    wait_until(watcher, is_watching=False)
    writer("open")
    prepared(writer, mode)
    ear.wait_for("write")
    wait_until(watcher, is_watching=True)
    looks = watcher.looks
    writer("INSERT INTO t VALUES (1)")
    settle(watcher, looks)
    ear.news.clear()
    writer("INSERT INTO t VALUES (1)")
    ear.wait_for("write")


def test_a_database_that_is_not_there_yet_is_waited_for(path: Path, start: Start) -> None:
    watcher, ear = start()
    wait_until(watcher, is_watching=False)
    writer = Writer(path)
    prepared(writer)
    ear.wait_for("write")
    writer.end()
    wait_until(watcher, is_watching=True)


def test_a_directory_that_goes_away_is_reported_and_waited_for(tmp_path: Path, start: Start) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    writer = Writer(directory / "app.db")
    prepared(writer)
    watcher, ear = start(directory / "app.db")
    writer.end()
    directory.rename(tmp_path / "elsewhere")
    wait_until(watcher, is_watching=False)
    directory.mkdir()
    writer = Writer(directory / "app.db")
    prepared(writer)
    ear.wait_for("write")
    looks = watcher.looks
    writer("INSERT INTO t VALUES (1)")
    settle(watcher, looks)
    ear.news.clear()
    writer("INSERT INTO t VALUES (1)")
    ear.wait_for("write")
    writer.end()


def test_a_link_to_a_database_is_watched_where_it_leads(
    writer: Writer, path: Path, tmp_path: Path, start: Start
) -> None:
    prepared(writer)
    link = tmp_path / "links" / "app"
    link.parent.mkdir()
    link.symlink_to(path)
    _, ear = start(link)
    writer("INSERT INTO t VALUES (1)")
    ear.wait_for("write")


def test_the_wal_is_emptied_when_all_others_are_gone(writer: Writer, path: Path, start: Start) -> None:
    """As it would be without us: else a database put in its place would be read with the old -wal file."""
    prepared(writer)
    watcher, ear = start()
    looks = watcher.looks
    writer("INSERT INTO t VALUES (1)")
    ear.wait_for("write")
    settle(watcher, looks)
    wal = path.with_name("app.db-wal")
    assert wal.stat().st_size > 0
    ear.news.clear()
    looks = watcher.looks
    writer.end()  # killed, even
    settle(watcher, looks)
    assert wal.stat().st_size == 0
    assert ear.news == [], "a checkpoint is no commit"
    second = Writer(path)
    second("INSERT INTO t VALUES (2)")
    ear.wait_for("write")
    second.end()


def test_a_database_put_beside_the_wal_of_another_is_warned_about_and_left_alone(
    writer: Writer, path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    prepared(writer)
    watcher, ear = start()
    other = path.with_name("other.db")
    connection = apsw.Connection(str(other))
    connection.execute("CREATE TABLE other (x)")
    connection.close()
    content = other.read_bytes()
    other.rename(path)  # while the writer is there, and its -wal file full
    ear.wait_for("write")
    assert "was replaced while its -wal file was in use" in caplog.text
    looks = watcher.looks
    writer.end()
    settle(watcher, looks)
    watcher.stop()
    assert subprocess.check_output(["cat", path]) == content


# --- cost, faults, the end --------------------------------------------------------------------------------------------


def test_a_storm_of_commits_costs_few_looks(writer: Writer, start: Start) -> None:
    prepared(writer)
    watcher, ear = start()
    looks, began = watcher.looks, time.monotonic()
    writer("storm 1")
    looks = watcher.looks - looks
    assert looks <= 20 * (time.monotonic() - began) + 2
    ear.wait_for("write")
    settle(watcher, 0)
    ear.news.clear()
    writer("INSERT INTO t VALUES (1)")
    ear.wait_for("write")


def test_a_look_costs_little(writer: Writer, start: Start) -> None:
    prepared(writer)
    watcher, _ = start()
    watcher.stop()
    identity = identity_of(watcher.path)
    assert identity is not None
    watcher._view = watch.DatabaseView(watcher.path, identity)
    began = time.thread_time()
    for _ in range(100):
        watcher._look()
    seconds_a_look = (time.thread_time() - began) / 100
    watcher._view.close()
    assert seconds_a_look / FALLBACK_POLL_S < 0.001 / 2  # of a processor, while nothing happens


def test_without_file_events_it_polls(writer: Writer, start: Start, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(watch, "watch_directory", lambda *_: None)
    monkeypatch.setattr(watcher_module, "POLL_S", 0.05)
    prepared(writer, mode)
    _, ear = start()
    writer("INSERT INTO t VALUES (1)")
    ear.wait_for("write")


def test_news_that_were_not_taken_are_reported_again(
    writer: Writer, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepared(writer)
    ear = Ear()

    def take() -> None:
        ear.hear("write")
        if len(ear.news) == 1:
            raise RuntimeError("not now")

    watcher = DatabaseWatcher(str(path), take)
    watcher.start()
    with caplog.at_level(logging.ERROR):
        writer("INSERT INTO t VALUES (1)")
        ear.wait_for("write", "write")
    assert "a callback of the watcher" in caplog.text
    watcher.stop()


def test_a_file_that_is_no_database_is_waited_out(path: Path, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text("no database, " * 1000)
    _, ear = start()
    other = path.with_name("other.db")
    connection = apsw.Connection(str(other))
    connection.execute("CREATE TABLE t (x)")
    connection.close()
    other.rename(path)
    ear.wait_for("write")
    assert caplog.text.count("cannot look at") == 1


def test_it_can_be_stopped_twice_from_inside_and_without_a_start(writer: Writer, path: Path) -> None:
    DatabaseWatcher(str(path), lambda: None).stop()
    prepared(writer)
    watcher: DatabaseWatcher = DatabaseWatcher(str(path), lambda: watcher.stop())
    watcher.start()
    writer("INSERT INTO t VALUES (1)")
    watcher._thread.join(WAIT_S)
    assert not watcher._thread.is_alive()
    watcher.stop()


def test_nothing_is_left_open(writer: Writer, path: Path) -> None:
    """In a process of its own: what else this one has open comes and goes."""
    prepared(writer)
    found = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN, str(path)], check=True, capture_output=True, text=True, timeout=WAIT_S
    )
    assert found.stdout == "[]\n"
