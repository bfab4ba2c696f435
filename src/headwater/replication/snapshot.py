"""A private copy of a live database, as it was between two transactions.

It has the pages of the original, byte for byte, but for the counters of changes in the header (bytes 24-27 and 92-99).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading

import msgspec

from headwater.errors import DiskFull, HeadwaterError, InputOutput, Locked, NotADatabase
from headwater.replication.database_file import remove_database, shape_seen_by
from headwater.replication.local_files import identity_of, make_private
from headwater.replication.shell import Shell, quoted
from headwater.replication.threads import stoppable
from headwater.replication.tools import run

LOCKED_BYTES_MAX = 128 * 1024 * 1024  # copied while a rollback journal's writers wait; more goes in steps
STEP_BYTES = 64 * 1024 * 1024  # between two chances for writers; whole blocks
BLOCK_BYTES = 1024 * 1024
TRIES_MAX = 3  # to copy the file as it lies, and with another one in its place
RESTARTS_MAX = 3  # by writers, before the copy is made in one go
SPARE_BYTES = 16 * 1024 * 1024  # to leave free on the disk

LOG_HEADER_BYTES = 32
COOKIE = slice(40, 44)  # of the schema, in the header of a database


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    page_size: int
    pages: int
    size: int
    is_copy: bool
    """False: there was no room for a copy, and this is the live database itself. Only for WAL, where reading it for
    long keeps nobody from writing; it has no hash, for nobody else sees the transaction it is read in."""


def snapshot(path: str, into: str, stop: threading.Event | None = None) -> Snapshot:
    """Copy the database at `path` to the file `into`, which is overwritten. Blocks, but not its writers, or not for
    long. When `stop` is set it ends soon, with ReplicationFailed."""
    path = os.path.realpath(path)  # SQLite's log lies beside the file, not beside a link to it
    for _ in range(TRIES_MAX):
        here = identity_of(path)
        try:
            taken = _snapshot(path, into, stop or threading.Event())
        except HeadwaterError:
            if identity_of(path) in (None, here):
                raise
        else:
            # Another file that came in its place was copied without a lock on it.
            if identity_of(path) == here:
                return taken
    remove_database(into)
    raise Locked("another file is put in its place all the time", where=path, next="Try again later")


def _snapshot(path: str, into: str, stop: threading.Event) -> Snapshot:
    with Shell(path, stop) as source:
        page_size, pages, is_wal = shape_seen_by(source)
        if pages == 0:
            raise NotADatabase("this database is empty", where=path, next="Create a table first")
        size = page_size * pages
        log_bytes = _size_of(path + "-wal") if is_wal else 0
        live = Snapshot(path=path, page_size=page_size, pages=pages, size=size, is_copy=False)
        if _free_bytes(os.path.dirname(os.path.abspath(into))) < size + log_bytes + SPARE_BYTES:
            return _without_room(live, is_wal)
        try:
            if not (
                (not is_wal and size > LOCKED_BYTES_MAX and _copied_in_steps(source, path, into, stop))
                or _copied_as_it_lies(source, path, into, stop)
            ):
                _copied_by_sqlite(source, into)
        except DiskFull:
            remove_database(into)
            return _without_room(live, is_wal)
        except BaseException:
            remove_database(into)
            raise
    page_size, pages = _settled(into)
    return Snapshot(path=into, page_size=page_size, pages=pages, size=page_size * pages, is_copy=True)


async def snapshot_aside(path: str, into: str) -> Snapshot:
    """The same on a thread. When cancelled, it ends soon and leaves nothing."""
    stop = threading.Event()
    try:
        return await stoppable(asyncio.to_thread(snapshot, path, into, stop), stop)
    except asyncio.CancelledError:
        remove_database(into)
        raise


def _without_room(live: Snapshot, is_wal: bool) -> Snapshot:
    if is_wal:
        return live
    raise DiskFull(
        f"there is no room for a copy of {live.size} bytes beside it",
        where=live.path,
        next="Free some disk space, or set `PRAGMA journal_mode=WAL`, which needs no copy",
    )


def _copied_as_it_lies(source: Shell, path: str, into: str, stop: threading.Event) -> bool:
    """Copy the file while a read transaction keeps it as it is: several times faster than page by page. A child
    process does it, since closing the file here would take the locks of this process away.

    With a rollback journal nobody writes the file meanwhile. With WAL, checkpoints may write to it what the log holds
    up to our transaction; so the log is copied after it, and SQLite plays it back over the copy, up to the last commit
    that is whole in it. Only a log that began anew in between would not fit: its header tells, and we try again."""
    if shutil.which("cp") is None:
        return False
    for _ in range(TRIES_MAX):
        _make_anew(into)
        source.begin()
        log_header = _log_header(path)
        _run(["cp", "--", path, into], into, stop)
        if log_header:
            make_private(into + "-wal")
            _run(["cp", "--", path + "-wal", into + "-wal"], into, stop)
        fits = _log_header(path) == log_header
        source.commit()
        if fits:
            return True
    return False


def _copied_in_steps(source: Shell, path: str, into: str, stop: threading.Event) -> bool:
    """The same for a large file with a rollback journal: between two steps its writers get in. What they write makes
    it begin anew, so after a few times the rest goes in one go."""
    if shutil.which("dd") is None:
        return False
    restarts = at = size = 0
    version = ""
    while True:
        source.begin()
        if _log_header(path):  # WAL since a moment ago
            source.commit()
            return False
        if version != (version := source.data_version()):
            restarts += bool(at)
            at = 0
            _make_anew(into)
            shape = shape_seen_by(source)
            size = shape.page_size * shape.pages
        step = STEP_BYTES if restarts < RESTARTS_MAX else size
        blocks = (f"skip={at // BLOCK_BYTES}", f"seek={at // BLOCK_BYTES}", f"count={-(-step // BLOCK_BYTES)}")
        _run(["dd", f"if={path}", f"of={into}", f"bs={BLOCK_BYTES}", *blocks, "conv=notrunc"], into, stop)
        at += step
        source.commit()
        if at >= size:
            return True


def _make_anew(into: str) -> None:
    """Empty, and for this user alone, whatever the rights of the original are."""
    remove_database(into)
    make_private(into)


def _log_header(path: str) -> bytes:
    """Of the write-ahead log; it changes whenever the log begins anew. Other than the database, it may be opened."""
    try:
        with open(path + "-wal", "rb") as log:
            return log.read(LOG_HEADER_BYTES)
    except FileNotFoundError:
        return b""


def _run(command: list[str], into: str, stop: threading.Event) -> None:
    code, said = run(command, into, stop, env={**os.environ, "LC_ALL": "C"})
    if code:
        is_full = "space left" in said or "quota" in said
        raise (DiskFull if is_full else InputOutput)(
            " ".join(said.split()) or f"{command[0]} ended with {code}", where=into
        )


def _copied_by_sqlite(source: Shell, into: str) -> None:
    """By SQLite's backup, where nothing else copies a file, or the log of a WAL database begins anew all the time."""
    _make_anew(into)
    source.begin()
    (cookie,) = source.ask("PRAGMA schema_version;")
    source.ask_unsafe(f".backup --async main {quoted(os.path.abspath(into))}")
    source.commit()
    _set_cookie(into, int(cookie))


def _set_cookie(path: str, cookie: int) -> None:
    """The backup gave the copy a cookie of its own. Nobody has it open now."""
    file = os.open(path, os.O_RDWR)
    try:
        os.pwrite(file, cookie.to_bytes(4, "big"), COOKIE.start)
    finally:
        os.close(file)


def _settled(path: str) -> tuple[int, int]:
    """Play a copied log back into the copy; its page size and how many pages it has."""
    with Shell(path) as copy:
        page_size, pages, _ = shape_seen_by(copy)
        if os.path.exists(path + "-wal"):
            copy.ask("PRAGMA synchronous = OFF; PRAGMA wal_checkpoint(TRUNCATE);")
    _set_count(path, pages)
    return page_size, pages


def _set_count(path: str, pages: int) -> None:
    """Programs older than SQLite 3.7 leave a number of pages behind that does not hold; SQLite knows it by the counters
    of changes, which do not travel."""
    with open(path, "r+b") as copy:
        header = copy.read(100)
        if header[24:28] != header[92:96]:
            copy.seek(28)
            copy.write(pages.to_bytes(4, "big"))


def _free_bytes(directory: str) -> int:
    return shutil.disk_usage(directory).free


def _size_of(path: str) -> int:
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return 0
