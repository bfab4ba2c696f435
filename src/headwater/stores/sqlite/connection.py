"""Connections to the file, their settings, the named statements, and SQLite's errors put into ours."""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal
from urllib.parse import quote

import apsw

from headwater.errors import (
    CorruptError,
    DiskFullError,
    HeadwaterError,
    InputOutputError,
    LockedError,
    NotALogError,
    ReadOnlyError,
    StoreError,
    UnsafeSqliteError,
)
from headwater.stores.sql import extra_columns, load, text_of

MEMORY = ":memory:"  # to SQLite, no file; paths of files are absolute
Durability = Literal["full", "relaxed"]

SQLITE_VERSION_MIN = (3, 51, 3)  # before it, a WAL reset at the wrong moment could lose commits
CACHE_KIB = 16 * 1024
WAL_PAGES_CHECKPOINT = 1_000  # moved into the database at a time
WAL_PAGES_MAX = 8_000  # from here on the writer moves them itself
WAL_BYTES_KEPT = 16 * 1024 * 1024

_PACKAGE = "headwater.stores.sqlite"

SCHEMA = text_of(_PACKAGE, "schema.sql")
AMONG = "IN (SELECT value FROM json_each(?))"
SQL = load(
    text_of("headwater.stores", "queries.sql") + text_of(_PACKAGE, "queries.sql"),
    among=AMONG,
    json_rows="json_group_array(json_array",
    as_json=")",
    greatest="max",
    by_key="INDEXED BY deliveries_by_key",  # else SQLite reads all earlier rows, by the primary key
    extras=extra_columns(),
    extras_json=extra_columns("json_quote(m.{})", headers="coalesce(m.{}, 'null')", separator=" || ',' || "),
    extras_but_headers=extra_columns(headers="NULL"),
    extras_raw=extra_columns(headers="CAST({} AS BLOB)"),
)

_SYNCHRONOUS = {"full": "FULL", "relaxed": "NORMAL"}

# The first that fits; more special classes stand before their bases.
_TRANSLATIONS: list[tuple[type[apsw.Error], type[StoreError], str]] = [
    (
        apsw.BusyError,
        LockedError,
        "Another process holds the write lock; end its transaction, or raise busy_timeout",
    ),
    (apsw.LockedError, LockedError, "Another statement of this process holds the lock; try again"),
    (apsw.ProtocolError, LockedError, "Too many processes raced for the lock; try again"),
    (apsw.ReadOnlyError, ReadOnlyError, "Give this user write access to the file and its directory"),
    (apsw.PermissionsError, ReadOnlyError, "Give this user write access to the file and its directory"),
    (apsw.FullError, DiskFullError, "Free some disk space and publish again; nothing committed was lost"),
    (apsw.NotADBError, NotALogError, "Name another file; this one is not SQLite and was left as it is"),
    (apsw.CorruptError, CorruptError, "Restore a replica or a backup (docs/howto/backup.md)"),
    (apsw.IOError, InputOutputError, "Look at the disk (dmesg); nothing committed was lost"),
    (apsw.CantOpenError, StoreError, "Check that the directory exists and may be written"),
]


def refuse_unsafe_sqlite() -> None:
    version = tuple(int(part) for part in apsw.sqlite_lib_version().split(".")[:3])
    if version < SQLITE_VERSION_MIN:
        raise UnsafeSqliteError(
            f"SQLite {apsw.sqlite_lib_version()} can lose commits in WAL mode",
            where="apsw",
            next="Install apsw 3.51.3 or newer from its wheel: pip install -U apsw",
        )


@contextmanager
def immediate(connection: apsw.Connection) -> Iterator[None]:
    """A transaction that begins as a writer: a reader that becomes one may be refused however long it would wait."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # some errors make SQLite roll back by itself
            connection.execute("ROLLBACK")
        raise


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Inside, SQLite's errors come out as Headwater's."""
    try:
        yield
    except apsw.Error as exc:
        raise translate(exc, where) from exc


def translate(exc: apsw.Error, where: str) -> HeadwaterError:
    if getattr(exc, "extendedresult", None) == apsw.SQLITE_IOERR_SHMSIZE:
        why = "the disk is full: there is no room for the index of the write-ahead log"
        return DiskFullError(
            why, where=where, next="Free some disk space and open it again; nothing committed was lost"
        )
    for foreign, own, next in _TRANSLATIONS:
        if isinstance(exc, foreign):
            return own(str(exc) or foreign.__name__, where=where, next=next)
    return StoreError(f"{type(exc).__name__}: {exc}", where=where)


def connect(path: str, *, durability: Durability, busy_timeout_ms: int, vfs: str | None = None) -> apsw.Connection:
    """A connection with our settings. The file is created if it is not there, and its user alone may read it; what
    SQLite puts beside it has the same mode."""
    # Made without opening it: closing a descriptor would drop the locks that another connection of this process holds.
    if vfs is None and path != MEMORY and hasattr(os, "mknod"):
        with suppress(OSError):
            os.mknod(path, 0o600)
    connection = apsw.Connection(path, vfs=vfs)
    connection.set_busy_handler(patience(busy_timeout_ms))
    # On macOS a plain fsync does not reach the disk; elsewhere these two do nothing.
    connection.execute("PRAGMA fullfsync = ON; PRAGMA checkpoint_fullfsync = ON")
    connection.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[durability]}")
    connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_KEPT}")
    connection.execute("PRAGMA temp_store = MEMORY; PRAGMA trusted_schema = OFF; PRAGMA foreign_keys = ON")
    connection.wal_autocheckpoint(0)  # see `Checkpointer`
    _plan_once(connection)
    return connection


def connect_read_only(path: str, *, busy_timeout_ms: int) -> apsw.Connection:
    """A connection to a file, or in a directory, that may not be written. Without a write-ahead log beside it, which a
    reader may not make, it is read as a file that does not change."""
    for query in ("mode=ro", "mode=ro&immutable=1"):
        connection = apsw.Connection(
            f"file:{quote(path)}?{query}", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        )
        connection.set_busy_handler(patience(busy_timeout_ms))
        _plan_once(connection)
        try:
            connection.execute("PRAGMA temp_store = MEMORY; PRAGMA trusted_schema = OFF")
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        except (apsw.CantOpenError, apsw.ReadOnlyError):
            connection.close()
            if query.endswith("immutable=1"):
                raise
        else:
            return connection
    raise AssertionError(path)


def _plan_once(connection: apsw.Connection) -> None:
    """Plan a statement when it is prepared, and never by its parameters: otherwise SQLite prepares most of the cached
    ones again at each use, which takes 25 µs for a scan and 2 µs for the rest of it."""
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)


def keep_journal(connection: apsw.Connection) -> None:
    """Leave the files of the write-ahead log, emptied, when the last connection closes: a disk that is full meanwhile
    has no room to make them, and without them not even a reader can open the database."""
    on = ctypes.c_int(1)
    connection.file_control("main", apsw.SQLITE_FCNTL_PERSIST_WAL, ctypes.addressof(on))


def patience(timeout_ms: int) -> Callable[[int], bool]:
    """Waits for locks in short, uneven steps. SQLite's own handler sleeps up to 100 ms at a time, which starves
    one of two busy writers and costs the other its latency."""
    started = 0.0

    def wait(tries: int) -> bool:
        nonlocal started
        now = time.monotonic()
        if tries == 0:
            started = now
        if (now - started) * 1000 >= timeout_ms:
            return False
        time.sleep(random.uniform(0.000_1, min(0.000_2 * (tries + 1), 0.005)))
        return True

    return wait


def check_file(path: str) -> str:
    """An absolute path whose directory exists; says so clearly if it does not."""
    absolute = os.path.abspath(path)
    directory = os.path.dirname(absolute)
    if os.path.isdir(absolute):
        raise NotALogError("this is a directory", where=absolute, next="Name a file in it")
    if not os.path.isdir(directory):
        raise StoreError("the directory does not exist", where=directory, next=f"mkdir -p {directory}")
    return absolute


def use_wal(connection: apsw.Connection, path: str, busy_timeout_ms: int) -> None:
    """Changing the journal mode does not wait for locks by itself, so two processes creating one file can collide. A
    database in memory has no write-ahead log."""
    if not connection.filename:
        return
    until = time.monotonic() + busy_timeout_ms / 1000
    while True:
        try:
            mode = connection.execute("PRAGMA journal_mode = WAL").get
        except apsw.BusyError as exc:
            if time.monotonic() > until:
                raise LockedError(
                    "another process keeps the file locked", where=path, next="End it, or try again"
                ) from exc
            time.sleep(0.002)
            continue
        if mode != "wal":
            raise StoreError(
                f"this file system cannot keep a write-ahead log (journal mode stays {mode})",
                where=path,
                next="Put the file on a local disk",
            )
        return
