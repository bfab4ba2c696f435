"""Notices commits by other processes.

On Linux the kernel tells of writes to the `-wal` file (inotify through libc, no polling while idle). The write comes
before the commit is visible, so `PRAGMA data_version` is asked again for a few milliseconds until it moves. Elsewhere,
and as a net for lost events, `data_version` is polled: it costs microseconds. The database file itself is never opened
or closed here: in a process that holds SQLite connections on it, that would drop SQLite's locks.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import logging
import os
import select
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator

import apsw

from headwater.stores.sqlite.store import SqliteStore

# After a file event: how often, and how long, to look for the commit it announced. An fsync can take long.
RECHECKS_S = (0.0, 0.000_2, 0.000_3, 0.000_5, 0.001, 0.001, 0.002, 0.002, 0.005, 0.005, 0.01, 0.02, 0.05, 0.1)
FALLBACK_POLL_S = 1.0  # with file events: the net under lost ones
POLL_S = 0.02  # without file events
PAUSE_S = 0.000_2  # between two looks, so that a storm of writes costs little
OWN_PAUSE_S = 0.005  # the most between two looks while only this process writes: its readers know already
RETRY_S_MIN, RETRY_S_MAX = 0.05, 5.0  # after a look that failed, doubled with each that follows
_UNKNOWN = -1

# Events of inotify.
MODIFY = 0x2
CLOSE_WRITE = 0x8
MOVED_FROM = 0x40
MOVED_TO = 0x80
CREATE = 0x100
DELETE = 0x200
DIRECTORY_GONE = 0x400 | 0x800 | 0x2000 | 0x8000  # deleted, moved, unmounted, or not watched any more
LOST = 0x4000  # the queue ran over: events were lost

_READ_BYTES = 64 * 1024
_EVENT_HEAD = struct.Struct("iIII")

logger = logging.getLogger("headwater")


class SqliteWatcher:
    """`ports.store.Notifier`: calls `on_change` after a commit by another process."""

    def __init__(self, store: SqliteStore, on_change: Callable[[], None]) -> None:
        self._store = store
        self._path = store.path
        self._on_change = on_change
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="headwater-watcher", daemon=True)
        self._stopped = False
        self._failure, self._retry_s = "", RETRY_S_MIN

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            os.write(self._stop_write, b"x")
            if self._thread.is_alive():
                self._thread.join()
            os.close(self._stop_read)
            os.close(self._stop_write)

    def _run(self) -> None:
        connection = self._connect()
        if connection is None:
            return
        # The directory, not the file: the -wal file comes and goes.
        events = watch_directory(os.path.dirname(self._path), MODIFY | CREATE | MOVED_TO)
        try:
            self._watch(connection, events)
        finally:
            connection.close()
            if events is not None:
                os.close(events)

    def _connect(self) -> apsw.Connection | None:
        """A connection to ask, whatever passing fault there may be; None when it was stopped before it got one."""
        while True:
            try:
                return self._store.connect()
            except Exception as exc:
                if self._stopped_after_failure("could not begin to look for news", exc):
                    return None

    def _stopped_after_failure(self, what: str, exc: Exception) -> bool:
        """Waits longer after each failure, whatever events there are; the same error is logged once. Returns whether
        the watcher was stopped meanwhile."""
        if str(exc) != self._failure:
            logger.warning("%s, and tries again: %s", what, exc)
        self._failure = str(exc)
        pause_s, self._retry_s = self._retry_s, min(RETRY_S_MAX, self._retry_s * 2)
        stopped = select.poll()  # not `select`, which takes no descriptor above 1023
        stopped.register(self._stop_read, select.POLLIN)
        return bool(stopped.poll(pause_s * 1000))

    def _watch(self, connection: apsw.Connection, events: int | None) -> None:
        waiting_on = select.poll()
        waiting_on.register(self._stop_read, select.POLLIN)
        if events is not None:
            waiting_on.register(events, select.POLLIN)
        wal_name = os.path.basename(self._path).encode() + b"-wal"
        net_s = POLL_S if events is None else FALLBACK_POLL_S
        version = _UNKNOWN  # so that a commit made while we started counts as a change
        rechecks = iter(RECHECKS_S)
        own_in_a_row = 0
        foreign = False
        while True:
            pause_s = next(rechecks, net_s)
            if pause_s < 0.001:
                time.sleep(pause_s)  # poll knows whole milliseconds only
            ready = dict(waiting_on.poll(int(pause_s * 1000)))
            if self._stop_read in ready:
                return
            if events is not None and events in ready and _names_wal(events, wal_name):
                rechecks = iter(RECHECKS_S)
            found = self._data_version(connection)
            if found in (version, _UNKNOWN):
                continue
            rechecks = iter(RECHECKS_S)  # the event of a commit that follows closely may be used up already
            try:
                foreign = self._store.changed_by_others() or foreign
                if foreign:
                    self._on_change()
            except Exception as exc:  # not reported yet, so `version` and `foreign` stay for the next check
                if self._stopped_after_failure("could not look for news", exc):
                    return
                continue
            version, self._failure, self._retry_s = found, "", RETRY_S_MIN
            own_in_a_row = 0 if foreign else own_in_a_row + 1
            time.sleep(PAUSE_S if foreign else min(PAUSE_S * own_in_a_row, OWN_PAUSE_S))
            foreign = False

    def _data_version(self, connection: apsw.Connection) -> int:
        try:
            return self._store.data_version(connection)
        except apsw.Error:  # a recovery going on, a passing fault: whatever it is, the next look will tell
            return _UNKNOWN


def _names_wal(events: int, wal_name: bytes) -> bool:
    """Empty the queue of events; whether one of them was about the -wal file, or events were lost."""
    concerned = False
    for kinds, name in take_events(events):
        concerned = concerned or name == wal_name or bool(kinds & LOST)
    return concerned


def watch_directory(directory: str, kinds: int) -> int | None:
    """A descriptor that is readable when something of these kinds happened; None where that is not possible."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(ctypes.util.find_library("c") or "libc.so.6", use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        return None
    if libc.inotify_add_watch(descriptor, os.fsencode(directory), kinds) < 0:
        os.close(descriptor)
        return None
    return int(descriptor)


def take_events(descriptor: int) -> Iterator[tuple[int, bytes]]:
    """Empties the queue: the kinds and the name of each. The directory itself, and what was lost, has no name."""
    while True:
        try:
            buffer = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        offset = 0
        while offset < len(buffer):
            _watch, kinds, _cookie, length = _EVENT_HEAD.unpack_from(buffer, offset)
            offset += _EVENT_HEAD.size
            yield kinds, buffer[offset : offset + length].rstrip(b"\0")
            offset += length
