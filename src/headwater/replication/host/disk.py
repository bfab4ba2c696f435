"""Files: copied, made durable, renamed and removed, with the system's errors put into ours."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from typing import BinaryIO

from headwater.errors import DiskFull, HeadwaterError, InputOutput, ReadOnly
from headwater.replication.database_file import SIDECARS
from headwater.replication.local_files import private

COPY_BYTES = 1024 * 1024

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_FAST_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)


def is_full(exc: OSError) -> bool:
    return exc.errno in _FULL


def error_of(exc: OSError, where: str) -> HeadwaterError:
    why = exc.strerror or str(exc)
    if is_full(exc):
        return DiskFull(f"no room ({why})", where=where, next="Free some disk space and try again; nothing was changed")
    if exc.errno in _DENIED:
        return ReadOnly(why, where=where, next="Give this user write access to the directory")
    return InputOutput(why, where=where, next="Look at the disk (dmesg); accepted versions are as they were")


@contextlib.contextmanager
def translated(where: str) -> Iterator[None]:
    """Inside, the system's errors come out as Headwater's."""
    try:
        yield
    except OSError as exc:
        raise error_of(exc, where) from exc


def copy(source: str, target: str) -> None:
    """Copy a file as fast as the file system can: shared blocks where it knows them, else inside the kernel."""
    with open(source, "rb", buffering=0) as reading, open(target, "wb", buffering=0, opener=private) as writing:
        if not _copied_by_kernel(reading, writing):
            while block := reading.read(COPY_BYTES):
                write_all(writing, block)


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """A disk that is nearly full takes the first part of what it is told, and says so only by how much it took."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _copied_by_kernel(reading: BinaryIO, writing: BinaryIO) -> bool:
    if not hasattr(os, "copy_file_range"):
        return False
    left = os.fstat(reading.fileno()).st_size
    try:
        while left > 0:
            copied = os.copy_file_range(reading.fileno(), writing.fileno(), left)
            if copied == 0:
                break
            left -= copied
    except OSError as exc:
        # It refuses the first piece if it cannot do this at all; both files are still where they were.
        if exc.errno in _NO_FAST_COPY and writing.tell() == 0:
            return False
        raise
    return True


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        copy(source, target)


def sync_file(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: str) -> None:
    sync_file(path)


def touch(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def make_directory(path: str) -> None:
    """For this user alone, with those above it; none of them is lost with the power."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for each in reversed(missing):
        os.makedirs(each, 0o700, exist_ok=True)
        sync_directory(os.path.dirname(each))


def rename(source: str, target: str) -> None:
    os.replace(source, target)


def remove(path: str) -> None:
    """Whether or not it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def left_beside(path: str) -> list[str]:
    """What SQLite left beside it: it is open somewhere, or was cut off in the middle of writing."""
    return [path + beside for beside in SIDECARS if os.path.exists(path + beside) and not _is_idle(path + beside)]


def _is_idle(beside: str) -> bool:
    """A journal that its database keeps between transactions (journal_mode TRUNCATE or PERSIST): nothing is in it."""
    if not beside.endswith("-journal"):
        return False
    with open(beside, "rb") as journal:
        return journal.read(1) in (b"", b"\0")


def remove_tree(path: str) -> None:
    """Whatever can be removed of it; a later recovery sees to the rest."""
    shutil.rmtree(path, ignore_errors=True)


def lock(path: str) -> int | None:
    """A descriptor that holds the only lock on this file until it is closed; None if somebody else has it."""
    import fcntl  # here, because Windows has none, and other commands should start there all the same

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
