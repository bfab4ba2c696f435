"""A private folder for what a Spark leaves lying about; gone with the process, or with the next one."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

if sys.platform != "win32":
    import fcntl

PREFIX = "headwater-spark-"
LEFT_OVER_MAX = 64  # how many of the dead one start tidies up after
_LOCK = "in-use"


class Scratch:
    """The folder, with a lock that says it is in use for as long as this process lives."""

    def __init__(self, parent: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._owner = os.getpid()
        # Locked before it has its name: nobody may find it free in between.
        self._lock = os.open(self.folder / "new", os.O_CREAT | os.O_RDWR, 0o600)
        _try_lock(self._lock)
        (self.folder / "new").rename(self.folder / _LOCK)

    def remove(self) -> None:
        if os.getpid() != self._owner:  # a fork leaves it to its parent
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def make_scratch(parent: Path | None = None) -> Scratch:
    """A new one below `parent`, or below the system's folder for such; those of killed processes are removed."""
    above = Path(tempfile.gettempdir()) if parent is None else parent
    above.mkdir(parents=True, exist_ok=True)
    _remove_left_over(above)
    return Scratch(above)


def _remove_left_over(parent: Path) -> None:
    for folder in sorted(parent.glob(f"{PREFIX}*"))[:LEFT_OVER_MAX]:
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR)
        except OSError:  # another user's, or just being made
            continue
        try:
            if _try_lock(lock):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _try_lock(descriptor: int) -> bool:
    """A lock that ends with the process, however it ends, and that other containers see too."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
