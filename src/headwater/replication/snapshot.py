"""A private copy of a live database, as it was between two transactions.

It has the pages of the original, byte for byte, but for the counters of changes in the header (bytes 24-27 and 92-99).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading

import msgspec

from headwater.errors import DiskFullError, HeadwaterError, LockedError, NotADatabaseError
from headwater.replication.local_database import (
    Shell,
    identity_of,
    make_private,
    quoted,
    remove_database,
)
from headwater.replication.threads import stoppable

LOCKED_BYTES_MAX = 128 * 1024 * 1024  # copied while the writers of a rollback journal wait
UNLOCKED_S_MIN = 5.0  # to copy a larger one in steps, between which writers get the lock; more by its size:
UNLOCKED_BYTES_A_SECOND = 100_000_000
TRIES_MAX = 3  # when another file takes its place meanwhile
SPARE_BYTES = 16 * 1024 * 1024  # to leave free on the disk

PAGE_COUNT, SCHEMA_COOKIE = 28, 40  # offsets in the header, each of four bytes


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    page_size: int
    pages: int
    size: int
    is_copy: bool
    """False: there was no space for a copy, and this is the live database itself. Only in WAL mode, where a long read
    does not block writers. It has no hash: no second process can read the same transaction."""


def snapshot(path: str, into: str, stop: threading.Event | None = None) -> Snapshot:
    """Copy the database at `path` to the file `into`, which is overwritten. Blocks; writers go on, or wait briefly.

    Raises ReplicationFailedError soon after `stop` is set."""
    path = os.path.realpath(path)  # SQLite's log is next to the file, not next to a link to it
    for _ in range(TRIES_MAX):
        identity = identity_of(path)
        try:
            taken = _snapshot(path, into, stop or threading.Event())
        except HeadwaterError:
            if identity_of(path) in (None, identity):
                raise
        else:
            # Otherwise another file took its place, and its log may have been read with the old file.
            if identity_of(path) == identity:
                return taken
    remove_database(into)
    raise LockedError("the file was replaced during each try", where=path, next="Try again later")


async def take_snapshot(path: str, into: str) -> Snapshot:
    """Take a `snapshot` on a thread. When cancelled, it ends soon and leaves no file."""
    try:
        return await stoppable(lambda stop: snapshot(path, into, stop))
    except asyncio.CancelledError:
        remove_database(into)
        raise


def _snapshot(path: str, into: str, stop: threading.Event) -> Snapshot:
    with Shell(path, stop) as source:
        page_size, pages, is_wal, _ = source.shape()
        if pages == 0:
            raise NotADatabaseError("this database is empty", where=path, next="Create a table first")
        size = page_size * pages
        live = Snapshot(path=path, page_size=page_size, pages=pages, size=size, is_copy=False)
        if _free_bytes(os.path.dirname(os.path.abspath(into))) < size + SPARE_BYTES:
            return _without_copy(live, is_wal)
        try:
            if is_wal or size <= LOCKED_BYTES_MAX or not _backup_unlocked(path, into, size, stop):
                _backup(source, into)
        except DiskFullError:
            remove_database(into)
            return _without_copy(live, is_wal)
        except BaseException:
            remove_database(into)
            raise
    size, page_size = os.path.getsize(into), _page_size_of(into)  # a VACUUM before the backup may have changed it
    pages = size // page_size
    _write_header(into, PAGE_COUNT, pages)  # SQLite before 3.7 leaves a stale number, which the backup copies
    return Snapshot(path=into, page_size=page_size, pages=pages, size=size, is_copy=True)


def _page_size_of(path: str) -> int:
    """The page size in the header of a database file."""
    with open(path, "rb") as file:
        file.seek(16)
        found = int.from_bytes(file.read(2), "big")
    return 65_536 if found == 1 else found


def _without_copy(live: Snapshot, is_wal: bool) -> Snapshot:
    if is_wal:
        return live
    raise DiskFullError(
        f"there is no disk space for a copy of {live.size} bytes beside it",
        where=live.path,
        next="Free some disk space, or set `PRAGMA journal_mode=WAL`, which needs no copy",
    )


def _backup(source: Shell, into: str) -> None:
    """Copy in one read transaction."""
    (cookie,) = source.ask("BEGIN; PRAGMA schema_version;")  # the transaction begins with the first read
    _run_backup(source, into)
    source.ask("COMMIT;")
    _write_header(into, SCHEMA_COOKIE, int(cookie))


def _backup_unlocked(path: str, into: str, size: int, stop: threading.Event) -> bool:
    """Copy in many short read transactions, for a rollback journal, where a long one would block writers. SQLite begins
    anew after each write, so it may not end in time: then the caller copies in one transaction."""
    with Shell(path, stop) as source:
        before = source.ask("PRAGMA data_version; PRAGMA schema_version;")
        try:
            _run_backup(source, into, UNLOCKED_S_MIN + size / UNLOCKED_BYTES_A_SECOND)
        except TimeoutError:
            source.close(0)
            return False
        if source.ask("PRAGMA data_version; PRAGMA schema_version;") != before:
            return False  # written meanwhile: the cookie may not belong to the copy
    _write_header(into, SCHEMA_COOKIE, int(before[1]))
    return True


def _run_backup(source: Shell, into: str, timeout_s: float | None = None) -> None:
    remove_database(into)
    make_private(into)
    source.ask_unsafe(f".backup --async main {quoted(os.path.abspath(into))}", timeout_s)


def _write_header(path: str, offset: int, number: int) -> None:
    """Write a number into the header of a copy, like the schema cookie, which a backup changes."""
    file = os.open(path, os.O_RDWR)
    try:
        os.pwrite(file, number.to_bytes(4, "big"), offset)
    finally:
        os.close(file)


def _free_bytes(directory: str) -> int:
    return shutil.disk_usage(directory).free
