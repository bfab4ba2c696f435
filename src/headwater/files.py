"""Files as several packages need them: durable, locked for as long as a process lives, and watched for changes."""

from __future__ import annotations

import errno
import os

try:
    import fcntl
except ImportError:  # Windows: there nothing is locked
    fcntl = None  # type: ignore[assignment]


Signature = tuple[int, int, int, int]


def signature_at(path: str | os.PathLike[str]) -> Signature | None:
    """Differs whenever the file has changed; None if there is no file."""
    try:
        return signature_of(os.stat(path))
    except OSError:
        return None


def signature_of(found: os.stat_result) -> Signature:
    # With the mode, because `chmod` changes none of the others and may be the correction.
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode


def sync_file(path: str | os.PathLike[str]) -> None:
    """Flush a file to the disk; or a directory, with the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(path: str | os.PathLike[str], flags: int = os.O_RDWR | os.O_CREAT) -> int | None:
    """A descriptor that holds an exclusive lock on this file until it is closed, at the latest by the end of the
    process; None if another process holds it."""
    descriptor = os.open(path, flags, 0o600)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(descriptor)
        if exc.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise
    return descriptor
