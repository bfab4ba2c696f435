"""The files of a data directory: their paths, durable writes, and the space that pushes leave free.

    catalogue.db                      replicas, versions, keys and reports
    serving.lock                      held by the one server of this directory
    removed-<replica id>/             a replica that is being removed
    <replica id>/new                  marks a replica without an accepted version, or one that is being removed
    <replica id>/<n>.db               its newest version, whole
    <replica id>/<n>.pages            an older version, as a delta against the next
    <replica id>/scratch-<uuid>.db    a running push, and `.pages` its delta
    <replica id>/reading-<uuid>/      a version that is being read; its reader holds the `lock` in it

Names that clients choose are no part of any path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.errors import DiskFullError, HeadwaterError, InputOutputError, InvalidOptionError, ReadOnlyError
from headwater.files import sync_file
from headwater.replication.local_database import SIDECARS, private

CATALOGUE = "catalogue.db"
SERVING_LOCK = "serving.lock"
READING = "reading-"
REMOVED = "removed-"
NEW = "new"

COPY_BYTES = 1024 * 1024
COPIED_AT_ONCE_MAX = 1 << 30  # by the kernel
FREE_BYTES_MIN = 256 * 1024 * 1024  # that pushes and pulls leave to others; the log is often on the same disk
FREE_PART_MIN = 50  # but on a small disk not more than a fiftieth of it

_ID_BYTES = 8
_ID = re.compile(r"[0-9a-f]{16}")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_FAST_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)


# --- paths ----------------------------------------------------------------------------------------------------------


def new_replica_id() -> str:
    return secrets.token_hex(_ID_BYTES)


def is_replica_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


class Layout:
    def __init__(self, directory: str) -> None:
        self.directory = os.path.abspath(directory)
        self.serving_lock = os.path.join(self.directory, SERVING_LOCK)

    def home(self, replica_id: str) -> str:
        return os.path.join(self.directory, replica_id)

    def removed(self, replica_id: str) -> str:
        return os.path.join(self.directory, f"{REMOVED}{replica_id}")

    def new_mark(self, replica_id: str) -> str:
        return os.path.join(self.directory, replica_id, NEW)

    def head(self, replica_id: str, number: int) -> str:
        return os.path.join(self.directory, replica_id, f"{number}.db")

    def delta(self, replica_id: str, number: int) -> str:
        return os.path.join(self.directory, replica_id, f"{number}.pages")

    def new_scratch(self, replica_id: str) -> str:
        return os.path.join(self.directory, replica_id, f"scratch-{uuid.uuid4().hex}.db")

    def new_reading(self, replica_id: str) -> str:
        return os.path.join(self.directory, replica_id, f"{READING}{uuid.uuid4().hex}")


def refuse_foreign(directory: str) -> None:
    """Recovery removes files that the catalogue does not name, so a data directory must not hold others."""
    if not os.path.exists(directory) or os.path.exists(os.path.join(directory, CATALOGUE)):
        return
    next = "Name a new or an empty directory"
    if not os.path.isdir(directory):
        raise InvalidOptionError("this is a file, and replicas are kept in a directory", where=directory, next=next)
    others = sorted(name for name in os.listdir(directory) if name != SERVING_LOCK and not name.startswith(CATALOGUE))
    if others:
        raise InvalidOptionError(
            f"this directory has no replicas, and it holds other things, like {others[0]}", where=directory, next=next
        )


# --- errors ---------------------------------------------------------------------------------------------------------


def is_full(exc: OSError) -> bool:
    return exc.errno in _FULL


def error_of(exc: OSError, where: str) -> HeadwaterError:
    why = exc.strerror or str(exc)
    if is_full(exc):
        return DiskFullError(
            f"no disk space ({why})", where=where, next="Free some disk space and try again; nothing was changed"
        )
    if exc.errno in _DENIED:
        return ReadOnlyError(why, where=where, next="Give this user write access to the directory")
    return InputOutputError(why, where=where, next="Look at the disk (dmesg); accepted versions are as they were")


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Translates OSError to Headwater's errors."""
    try:
        yield
    except OSError as exc:
        raise error_of(exc, where) from exc


# --- files ----------------------------------------------------------------------------------------------------------


def copy(source: str, target: str) -> None:
    """Copy a file as fast as the file system can: by shared blocks, otherwise inside the kernel."""
    with open(source, "rb", buffering=0) as reading, open(target, "wb", opener=private) as writing:
        try:
            while hasattr(os, "copy_file_range") and os.copy_file_range(
                reading.fileno(), writing.fileno(), COPIED_AT_ONCE_MAX
            ):
                pass
        except OSError as exc:
            if exc.errno not in _NO_FAST_COPY:
                raise
        shutil.copyfileobj(reading, writing, COPY_BYTES)  # what is left


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        copy(source, target)


def touch(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def make_directory(path: str) -> None:
    """Make a directory and its parents, mode 0700; durable when it returns."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for each in reversed(missing):
        os.makedirs(each, 0o700, exist_ok=True)
        sync_file(os.path.dirname(each))


def remove(path: str) -> None:
    """A missing file is no error."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def sidecars_in_use(path: str) -> list[str]:
    """SQLite's files next to a database that is open, or was not closed in order."""
    return [path + beside for beside in SIDECARS if os.path.exists(path + beside) and not _is_idle(path + beside)]


def _is_idle(beside: str) -> bool:
    """A journal that is kept between transactions (journal_mode TRUNCATE or PERSIST) is empty or zeroed."""
    if not beside.endswith("-journal"):
        return False
    with open(beside, "rb") as journal:
        return journal.read(1) in (b"", b"\0")


def remove_tree(path: str) -> None:
    """Remove as much as possible; the next recovery removes the rest."""
    shutil.rmtree(path, ignore_errors=True)


# --- free space -----------------------------------------------------------------------------------------------------


class SpaceReservations:
    """Reservations in one directory: concurrent writers do not count on the same free space."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._reserved_bytes = 0

    @contextmanager
    def reserved(self, size: int) -> Iterator[None]:
        """Reserve so many bytes while they are written. Raises DiskFullError if there is no space for them. Blocks."""
        with self._lock:
            refuse_to_fill(self._directory, self._reserved_bytes + size)
            self._reserved_bytes += size
        try:
            yield
        finally:
            with self._lock:
                self._reserved_bytes -= size


def refuse_to_fill(directory: str, size: int) -> None:
    """Raises DiskFullError if there is no space for so many bytes more. Blocks."""
    with translated(directory):
        disk = shutil.disk_usage(directory)
    if disk.free < size + min(FREE_BYTES_MIN, disk.total // FREE_PART_MIN):
        raise DiskFullError("the server's disk is full", where=directory, next="Free some disk space on the server")
