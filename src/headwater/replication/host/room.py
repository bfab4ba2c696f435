"""Room on the disk of the replicas. The log is often on the same one, and must be able to go on when pushes have filled
what they may."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.errors import DiskFull
from headwater.replication.host import disk

ROOM_KEPT_BYTES = 256 * 1024 * 1024  # that no push and no pull takes
ROOM_KEPT_PART = 50  # but of a small disk no more than so much of it: a fiftieth


class Room:
    """Of one directory. Who is about to fill some of it says so first, so that no other counts on the same."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._promised_bytes = 0

    @contextmanager
    def promised(self, size: int) -> Iterator[None]:
        """While so much is written. Raises DiskFull when there is no room for it. Blocking."""
        with self._lock:
            refuse_to_fill(self._directory, self._promised_bytes + size)
            self._promised_bytes += size
        try:
            yield
        finally:
            with self._lock:
                self._promised_bytes -= size


def refuse_to_fill(directory: str, size: int) -> None:
    """Raises DiskFull when there is no room for so much more. Blocking."""
    with disk.translated(directory):
        there = shutil.disk_usage(directory)
    if there.free < size + min(ROOM_KEPT_BYTES, there.total // ROOM_KEPT_PART):
        raise DiskFull("the server's disk is full", where=directory, next="Free some disk space on the server")
