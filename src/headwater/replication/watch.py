"""Notices that a database was written by any program, or replaced.

The kernel reports writes to the files of the database (`stores/sqlite/watcher.py`), through the directory, because
those files come and go. An event comes before its commit is visible and says only that something happened; `PRAGMA
data_version` on a connection of our own shows whether it was a commit. So readers, checkpoints and our own pushes wake
nothing. The files are opened by SQLite only.

As a program, `python -m headwater.replication.watch DATABASE`, it prints a line for each event: see `WatcherProcess`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import apsw

from headwater.replication.local_database import Identity, identity_of
from headwater.replication.sqlite_tools import OWN_GROUP
from headwater.stores.sqlite import watcher as file_events
from headwater.stores.sqlite.watcher import take_events, watch_directory

LOOK_PAUSE_S = (0.05, 0.25)  # between a file event and the look; growing while commits go on
STORM_MAX = 8
RECHECKS_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # after an event: its commit may wait for an fsync
FALLBACK_POLL_S = 5.0  # with file events, which can be lost
POLL_S = 1.0  # without them, and while the database is missing
REOPEN_S_MIN = 0.05  # between two times that the connection is closed for a moment
FIRST_LOOK_S_MAX = 30.0
CHILD_READY_S_MAX = 60.0  # for Python to start, and to open the database
CHILD_EXIT_S_MAX = 10.0
CHILD_RESTART_S = 5.0  # after a child that was killed or had no memory
PARENT_POLL_S = 1.0  # whether the parent is alive

READY, WROTE, STOP = b"ready\n", b"wrote\n", b"stop\n"

OLD_WAL = (
    "%s was replaced while its -wal file was in use: every program that opens it reads that file into it. "
    "Close all programs that use a database before you put another in its place"
)

Stamp = tuple[int, int, int]  # inode, size and time of the last write

_KINDS = (
    file_events.MODIFY
    | file_events.CLOSE_WRITE
    | file_events.MOVED_FROM
    | file_events.MOVED_TO
    | file_events.CREATE
    | file_events.DELETE
    | file_events.DIRECTORY_GONE
)

logger = logging.getLogger("headwater")


class DatabaseWatcher:
    """Calls `on_write` from its own thread: soon after a commit, once for many, and after the file was replaced.

    The database, or its directory, may disappear and come back. Every commit after the return of `start` is reported,
    none before its call.
    """

    def __init__(self, path: str, on_write: Callable[[], object]) -> None:
        self.path = os.path.abspath(path)
        self.looks = 0
        self.settled = threading.Event()  # set while every event has been examined
        self._on_write = on_write
        self._view: DatabaseView | None = None
        self._directory: DirectoryEvents | None = None
        self._unreported = False
        self._was_busy = False  # the last look could not read the database
        self._warned = ""
        self._reopened_s = 0.0
        self._stop_read, self._stop_write = os.pipe()
        self._first_look = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwater-database-watcher", daemon=True)

    @property
    def is_watching(self) -> bool:
        """Whether the database is there, as far as is known."""
        return self._view is not None

    def start(self) -> None:
        self._thread.start()
        self._first_look.wait(FIRST_LOOK_S_MAX)

    def stop(self) -> None:
        """End the thread; afterwards no callback is called."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        with contextlib.suppress(OSError):  # the thread has ended
            os.write(self._stop_write, b"x")
        if self._thread.ident is None:  # never started
            os.close(self._stop_read)
        elif self._thread is not threading.current_thread():
            self._thread.join()
        os.close(self._stop_write)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._look()
            self._first_look.set()
            self._watch()
        finally:
            self._first_look.set()
            if self._view is not None:
                self._view.close()
            if self._directory is not None:
                self._directory.close()
            os.close(self._stop_read)

    def _watch(self) -> None:
        rechecks: Iterator[float] = iter(())
        storm = 0
        while True:
            directory = self._directory
            pause_s = next(rechecks, None)
            if pause_s is None:
                is_watched = directory is not None and self.is_watching and not self._was_busy
                pause_s = FALLBACK_POLL_S if is_watched else POLL_S
                if not self._was_busy:  # otherwise the commit of an event may still be unseen
                    if directory is not None:
                        directory.settle()
                    self.settled.set()
            ready = self._wait(pause_s, None if directory is None else directory.events)
            if ready is None:
                return
            if ready and directory is not None:
                concerned = directory.take(self._names())
                if concerned:
                    self.settled.clear()
                # Also for other files of the directory, so that many events there cost little.
                pause_s = min(LOOK_PAUSE_S[0] * 2**storm, LOOK_PAUSE_S[1])
                if not self._has_to_reopen(directory) and self._wait(pause_s) is None:
                    return
                if not concerned:
                    continue
                directory.take(self._names())
            reported = self._look()
            storm = min(storm + 1, STORM_MAX) if reported else 0
            if reported or ready:
                rechecks = iter(RECHECKS_S)

    def _wait(self, seconds: float, events: int | None = None) -> bool | None:
        """Wait for events. Returns whether there are some; None when it is to stop."""
        waiting_on = select.poll()
        waiting_on.register(self._stop_read, select.POLLIN)
        if events is not None:
            waiting_on.register(events, select.POLLIN)
        ready = dict(waiting_on.poll(int(seconds * 1000)))
        return None if self._stop_read in ready else bool(ready)

    def _names(self) -> tuple[bytes, bytes, bytes]:
        name = os.fsencode(os.path.basename(os.path.realpath(self.path)))
        return name, name + b"-wal", name + b"-journal"

    # --- one look ---------------------------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Look for a write and report it. Returns whether one was reported."""
        self.looks += 1
        self._was_busy = False
        try:
            self._look_closely()
            self._warned = ""
        except apsw.BusyError:
            self._was_busy = True  # a program commits or recovers: the next look will show
        except Exception as exc:  # a thread that ended would miss all further writes
            if os.path.exists(self.path):  # otherwise it was removed meanwhile
                self._warn(f"cannot look at {self.path} now: {exc}")
        if not self._unreported or self._stopping.is_set():
            return False
        try:
            self._on_write()
            self._unreported = False
        except Exception:
            logger.exception("a callback of the watcher of %s failed", self.path)
        return True

    def _look_closely(self) -> None:
        self._find_directory()
        identity = identity_of(self.path)
        old_wal = False
        if self._view is not None and self._view.identity != identity:
            old_wal = self._view.has_its_wal_left()
            self._view.close()
            self._view = None
        if identity is None:
            return
        if self._view is None:
            self._unreported = self.looks > 1  # set before it is opened, which may fail
            self._view = DatabaseView(self.path, identity, may_checkpoint=not old_wal)
            if old_wal:
                logger.warning(OLD_WAL, self.path)
        if self._view.moved(self._directory):
            self._unreported = True
        if self._directory is not None:
            self._reopen(self._view, self._directory)

    def _find_directory(self) -> None:
        """Watch the current directory, if there is one."""
        path = os.path.dirname(os.path.realpath(self.path))
        identity = identity_of(path)
        if self._directory is not None and (self._directory.gone or self._directory.identity != identity):
            self._directory.close()
            self._directory = None
        if identity is not None and self._directory is None:
            self._directory = DirectoryEvents.watched(path, identity)

    def _reopen(self, view: DatabaseView, directory: DirectoryEvents) -> None:
        """Close the connection for a moment after another program closed its own.

        The last connection to close a database empties its -wal file. Ours stays open, so without this no other would
        be the last, and a file put in place of a closed database would be read together with the old -wal file.
        """
        if not self._has_to_reopen(directory):
            return
        self._reopened_s = time.monotonic()
        before = view.stamps()
        if view.moved(directory):
            self._unreported = True
            return
        directory.was_closed = False
        if not before.wal or before.wal[1] == 0:
            return
        self._view = None
        view.close()
        closed = view.stamps()
        emptied = closed.wal is None
        self._view = DatabaseView(self.path, view.identity, may_checkpoint=view.may_checkpoint)
        after = self._view.stamps()
        directory.take(self._names(), closed_by_us=True)
        if emptied:
            self._unreported = self._unreported or after.database != closed.database or self._view.wal_frames > 0
        else:
            self._unreported = self._unreported or after != before or self._view.wal_frames != view.wal_frames

    def _has_to_reopen(self, directory: DirectoryEvents) -> bool:
        return directory.was_closed and time.monotonic() >= self._reopened_s + REOPEN_S_MIN

    def _warn(self, text: str) -> None:
        if text != self._warned:  # once, not every time
            logger.warning("%s", text)
            self._warned = text


# --- what a watcher reads -------------------------------------------------------------------------------------------


class DirectoryEvents:
    """The file events of one directory, and what they imply about commits and checkpoints."""

    def __init__(self, events: int, identity: Identity) -> None:
        self.events = events
        self.identity = identity
        self.gone = False
        self.was_closed = False
        self._wal_written = False
        self.commit_then_backfill = False

    @classmethod
    def watched(cls, path: str, identity: Identity) -> DirectoryEvents | None:
        events = watch_directory(path, _KINDS)
        return None if events is None else cls(events, identity)

    def take(self, names: tuple[bytes, bytes, bytes], *, closed_by_us: bool = False) -> bool:
        """Empty the queue; whether an event concerns files of these names, or the directory."""
        database, wal, _ = names
        concerned = False
        for kinds, name in take_events(self.events):
            if kinds & file_events.LOST:
                concerned = self.commit_then_backfill = self.was_closed = True
            elif not name:
                concerned = self.gone = True
            elif name in names:
                concerned = True
                if kinds & file_events.CLOSE_WRITE and not closed_by_us:
                    self.was_closed = True
                if kinds & file_events.MODIFY:
                    self._wal_written = self._wal_written or name == wal
                    self.commit_then_backfill = self.commit_then_backfill or (name == database and self._wal_written)
        return concerned

    def settle(self) -> None:
        """Forget what the events said: without events for a while, all commits have been seen."""
        self._wal_written = self.commit_then_backfill = False

    def close(self) -> None:
        os.close(self.events)


class Stamps(NamedTuple):
    database: Stamp | None
    wal: Stamp | None


class DatabaseView:
    """A connection to the current database at a path, and its last known state."""

    def __init__(self, path: str, identity: Identity, *, may_checkpoint: bool = True) -> None:
        self.identity = identity
        self.may_checkpoint = may_checkpoint
        self._path = path
        self._connection = _connect(path)
        try:
            self._connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, not may_checkpoint)
            self._version = self._data_version()
            self.wal_frames = self._frames()
            self._wal_identity = identity_of(self._wal_path())
            if identity_of(path) != identity:
                raise apsw.CantOpenError("it was replaced while it was opened")
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        # If the file was moved away, SQLite notices it and leaves the -wal file to its successor.
        with contextlib.suppress(apsw.Error):
            self._connection.close()

    def moved(self, directory: DirectoryEvents | None) -> bool:
        """Look at the data version. Returns whether there was a commit since the last look."""
        version = self._data_version()
        if version == self._version:
            return False
        frames_before, self.wal_frames = self.wal_frames, self._frames()
        self._version = version
        # A checkpoint that empties the -wal file looks like a commit. But a commit before it would have been written
        # first to the -wal file and then to the database.
        was_emptied = frames_before >= 0 and self.wal_frames == 0
        return not was_emptied or directory is None or directory.commit_then_backfill

    def has_its_wal_left(self) -> bool:
        """Whether the -wal file of this database is still next to the one that replaced it."""
        wal = _stamp(self._wal_path())
        return wal is not None and wal[1] > 0 and identity_of(self._wal_path()) == self._wal_identity

    def stamps(self) -> Stamps:
        return Stamps(_stamp(self._path), _stamp(self._wal_path()))

    def _wal_path(self) -> str:
        return os.path.realpath(self._path) + "-wal"

    def _data_version(self) -> int:
        return int(self._connection.execute("PRAGMA data_version").get)

    def _frames(self) -> int:
        """The number of frames in the -wal file; -1 without one."""
        return self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)[0]


def _connect(path: str) -> apsw.Connection:
    """Read only in effect, but a WAL can only be shared by writers. Never waits for a lock: the next look will do."""
    try:
        connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READWRITE)
    except apsw.CantOpenError:
        connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
    connection.execute("PRAGMA query_only = ON")
    return connection


def _stamp(path: str) -> Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


# --- a watcher in a child process -----------------------------------------------------------------------------------


class WatcherProcess:
    """A `DatabaseWatcher` in a child process, for a program that has the database open itself: POSIX locks belong to
    the process, and closing the watcher's connection would drop those of the program."""

    def __init__(self, path: str, on_write: Callable[[], object]) -> None:
        self._path = os.path.abspath(path)
        self._on_write = on_write
        self._ready = threading.Event()
        self._has_started = False
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="headwater-watcher-aside", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._ready.wait(CHILD_READY_S_MAX)
        self._has_started = True

    def stop(self) -> None:
        """End the child and the thread; afterwards no callback is called."""
        with self._lock:
            self._stopping.set()
            child = self._child
        if child is not None:
            assert child.stdin is not None
            with contextlib.suppress(OSError, ValueError):  # it has exited
                child.stdin.write(STOP)
            try:
                child.wait(CHILD_EXIT_S_MAX)
            except subprocess.TimeoutExpired:
                child.kill()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                child = self._begin()
                if child is not None:
                    self._listen(child)
                if self._stopping.is_set():
                    return
                logger.warning("the process that watches %s has ended: another one is started", self._path)
                self._stopping.wait(CHILD_RESTART_S)
        finally:
            self._ready.set()

    def _begin(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._stopping.is_set():
                return None
            # The modules of this process, and none from its current directory.
            paths = os.pathsep.join(path for path in sys.path if isinstance(path, str) and path)
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-P", "-m", "headwater.replication.watch", self._path],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,
                    env={**os.environ, "PYTHONPATH": paths},
                    process_group=OWN_GROUP,
                )
            except OSError as exc:
                logger.warning("%s cannot be watched now: %s", self._path, exc)
                self._child = None
            return self._child

    def _listen(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        with child.stdin, child.stdout:
            for line in child.stdout:
                if self._stopping.is_set():
                    break
                if line == READY:
                    if self._has_started:  # a write between the two children was not seen
                        self._on_write()
                    self._ready.set()
                elif line == WROTE:
                    self._on_write()
                else:
                    logger.warning("%s", line.decode(errors="replace").strip())
        child.wait()


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _print(" ".join(record.getMessage().split()).encode(errors="backslashreplace") + b"\n")


def _print(line: bytes) -> None:
    os.write(sys.stdout.fileno(), line)


def _wait_for_the_end(parent: int) -> None:
    """The end of the pipe is not enough: children of the parent may hold it open after its death."""
    waiting_on = select.poll()
    waiting_on.register(sys.stdin, select.POLLIN)
    while os.getppid() == parent and not waiting_on.poll(int(PARENT_POLL_S * 1000)):
        pass


def main(path: str) -> None:
    parent = os.getppid()
    logger = logging.getLogger("headwater")
    logger.addHandler(_Warnings(logging.WARNING))
    logger.propagate = False
    watcher = DatabaseWatcher(path, lambda: _print(WROTE))
    watcher.start()
    try:
        _print(READY)
        _wait_for_the_end(parent)
    finally:
        watcher.stop()


if __name__ == "__main__":
    main(sys.argv[1])
