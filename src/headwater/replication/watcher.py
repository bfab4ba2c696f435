"""Notices that a database got a commit by anybody, or was replaced.

The kernel tells of writes to the files of the database (`stores/sqlite/file_events.py`), on the directory, because
those files come and go. Such an event says only that something happened, and comes before it can be seen; `PRAGMA
data_version` on a connection of our own says whether it was a commit. So readers, checkpoints and our own pushes wake
nobody. The files are never opened by other means than SQLite; what is asked of the file system is `stat`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal

import apsw

from headwater.replication.local_files import identity_of
from headwater.replication.watched_files import DatabaseView, DirectoryEvents

LOOK_PAUSE_S = (0.05, 0.25)  # between a file event and the look; longer and longer in a storm of commits
STORM_MAX = 8
RECHECKS_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # after an event: the commit it announced may wait for an fsync
NET_POLL_S = 5.0  # with file events: the net under lost ones
POLL_S = 1.0  # without them, and while the database is not there
LET_GO_S_MIN = 0.05  # between two times that the connection is given up
FIRST_LOOK_S_MAX = 30.0

State = Literal["new", "watching", "missing", "no directory"]

_GONE = {"missing": "the database is not there", "no directory": "the directory of the database is not there"}

OLD_WAL = (
    "%s was replaced while its -wal file was in use: whoever opens it reads that file into it. "
    "Close all programs that use a database before you put another in its place"
)

logger = logging.getLogger("headwater")


class DatabaseWatcher:
    """Calls `on_write` from its own thread: soon after a commit, once for many, and after the file was replaced.

    `on_gone(why)` and `on_back()` tell when the database, or its directory, is away for a while. When `start` returns,
    everything from then on is told; what was there before is not.
    """

    def __init__(
        self,
        path: str,
        on_write: Callable[[], object],
        on_gone: Callable[[str], object] | None = None,
        on_back: Callable[[], object] | None = None,
    ) -> None:
        self.path = os.path.abspath(path)
        self.looks = 0
        self.settled = threading.Event()  # set while all that happened has been looked at
        self._on_write, self._on_gone, self._on_back = on_write, on_gone, on_back
        self._state: State = "new"
        self._view: DatabaseView | None = None
        self._directory: DirectoryEvents | None = None
        self._untold = False
        self._was_busy = False  # the last look saw nothing
        self._warned = ""
        self._let_go_s = 0.0
        self._stop_read, self._stop_write = os.pipe()
        self._first_look = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwater-database-watcher", daemon=True)

    @property
    def state(self) -> State:
        return self._state

    def start(self) -> None:
        self._thread.start()
        self._first_look.wait(FIRST_LOOK_S_MAX)

    def stop(self) -> None:
        """Ends the thread; afterwards nothing is called any more."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        with contextlib.suppress(OSError):  # nobody reads it any more
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
                is_watched = directory is not None and self._state == "watching" and not self._was_busy
                pause_s = NET_POLL_S if is_watched else POLL_S
                if not self._was_busy:  # else what events told of may yet have to be seen
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
                # Also when others write in the directory: so that a storm of theirs costs little.
                pause_s = min(LOOK_PAUSE_S[0] * 2**storm, LOOK_PAUSE_S[1])
                if not self._has_to_let_go(directory) and self._wait(pause_s) is None:
                    return
                if not concerned:
                    continue
                directory.take(self._names())
            told = self._look()
            storm = min(storm + 1, STORM_MAX) if told else 0
            if told or ready:
                rechecks = iter(RECHECKS_S)

    def _wait(self, seconds: float, events: int | None = None) -> bool | None:
        """None when it is to stop, else whether there are events."""
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
        """Whether there was something to tell."""
        self.looks += 1
        self._was_busy = False
        try:
            self._look_closely()
            self._warned = ""
        except apsw.BusyError:
            self._was_busy = True  # someone commits just now, or recovers: the next look will tell
        except Exception as exc:  # whatever it is: a thread that ended would let writes go unseen for weeks
            if os.path.exists(self.path):  # else it went away meanwhile
                self._warn(f"cannot look at {self.path} now: {exc}")
        if not self._untold or self._stopping.is_set():
            return False
        self._untold = not self._tell(self._on_write)
        return True

    def _look_closely(self) -> None:
        has_directory = self._find_directory()
        identity = identity_of(self.path)
        old_wal = False
        if self._view is not None and self._view.identity != identity:
            old_wal = self._view.has_its_wal_left()
            self._view.close()
            self._view = None
        if identity is None:
            self._change("missing" if has_directory else "no directory")
            return
        if self._view is None:
            self._untold = self.looks > 1  # said before it is opened, which may fail
            self._view = DatabaseView(self.path, identity, may_checkpoint=not old_wal)
            if old_wal:
                logger.warning(OLD_WAL, self.path)
        self._change("watching")
        if self._view.moved(self._directory):
            self._untold = True
        if self._directory is not None:
            self._let_go(self._view, self._directory)

    def _find_directory(self) -> bool:
        """Watch the directory that is there now; whether there is one."""
        path = os.path.dirname(os.path.realpath(self.path))
        identity = identity_of(path)
        if self._directory is not None and (self._directory.gone or self._directory.identity != identity):
            self._directory.close()
            self._directory = None
        if identity is not None and self._directory is None:
            self._directory = DirectoryEvents.watched(path, identity)
        return identity is not None

    def _let_go(self, view: DatabaseView, directory: DirectoryEvents) -> None:
        """Give the connection up for a moment after someone else closed theirs.

        The last to close a database empties its -wal file. We are there all the time, so without this nobody would be
        the last, and a file put in place of a closed database would be read together with the old -wal file.
        """
        if not self._has_to_let_go(directory):
            return
        self._let_go_s = time.monotonic()
        before = view.stamps()
        if view.moved(directory):
            self._untold = True
            return
        directory.someone_closed = False
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
            self._untold = self._untold or after.database != closed.database or self._view.wal_frames > 0
        else:
            self._untold = self._untold or after != before or self._view.wal_frames != view.wal_frames

    def _has_to_let_go(self, directory: DirectoryEvents) -> bool:
        return directory.someone_closed and time.monotonic() >= self._let_go_s + LET_GO_S_MIN

    def _change(self, state: State) -> None:
        before = self._state
        if state == before or self._stopping.is_set():
            return
        self._state = state
        if state in _GONE and self._on_gone is not None:
            on_gone = self._on_gone
            self._tell(lambda: on_gone(_GONE[state]))
        if before in _GONE and state == "watching" and self._on_back is not None:
            self._tell(self._on_back)

    def _tell(self, callback: Callable[[], object]) -> bool:
        try:
            callback()
        except Exception:
            logger.exception("whoever watches %s did not take the news", self.path)
            return False
        return True

    def _warn(self, text: str) -> None:
        if text != self._warned:  # once, not at every look
            logger.warning("%s", text)
            self._warned = text
