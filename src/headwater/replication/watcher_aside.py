"""A watcher in a child process, for a program that may have the database open itself: the locks of a file belong to the
process, and the connection of a watcher here would take them away from the program whenever it is closed (see `shell`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable

from headwater.replication import watcher_process
from headwater.replication.tools import OWN_GROUP
from headwater.replication.watcher_process import READY, STOP, WROTE

READY_S_MAX = 60.0  # for Python to start, and for the first look at the database
EXIT_S_MAX = 10.0
AGAIN_S = 5.0  # after a child that died; it does so only if somebody kills it, or there is no memory

logger = logging.getLogger("headwater")


class WatcherAside:
    """Like `DatabaseWatcher`. When `start` returns, all writes from then on are told."""

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
        self._ready.wait(READY_S_MAX)
        self._has_started = True

    def stop(self) -> None:
        """Ends the child and the thread; afterwards nothing is called any more."""
        with self._lock:
            self._stopping.set()
            child = self._child
        if child is not None:
            assert child.stdin is not None
            with contextlib.suppress(OSError, ValueError):  # it has gone by itself
                child.stdin.write(STOP)
            try:
                child.wait(EXIT_S_MAX)
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
                self._stopping.wait(AGAIN_S)
        finally:
            self._ready.set()

    def _begin(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._stopping.is_set():
                return None
            # The same modules as here, and none from the directory that the program happens to be in.
            paths = os.pathsep.join(path for path in sys.path if isinstance(path, str) and path)
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-P", "-m", watcher_process.__name__, self._path],
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
                    if self._has_started:  # nobody has seen what was written until now
                        self._on_write()
                    self._ready.set()
                elif line == WROTE:
                    self._on_write()
                else:
                    logger.warning("%s", line.decode(errors="replace").strip())
        child.wait()
