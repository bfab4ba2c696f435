"""A database file as a whole: its shape, what lies beside it, how it goes and how its content is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

from headwater.errors import HeadwaterError, Locked, NotADatabase
from headwater.replication.shell import Shell, address_of, quoted
from headwater.replication.threads import stoppable

SIDECARS = ("-wal", "-shm", "-journal")  # what SQLite keeps beside a database while it is in use
COUNTERS = (slice(24, 28), slice(92, 100))  # in the header: they count commits, and differ between copies
SETTLING_S_MAX = 5.0  # to open a database after a child that was killed; others may hold it

_SHAPE = "PRAGMA journal_mode; PRAGMA page_size; PRAGMA page_count;"


class Shape(NamedTuple):
    page_size: int
    pages: int
    is_wal: bool


def shape_of(path: str, stop: threading.Event | None = None) -> Shape | None:
    """Of the database there; None if there is no file, or an empty one. Blocks."""
    if not os.path.exists(path):
        return None
    with Shell(path, stop) as shell:
        shape = shape_seen_by(shell)
        return shape if shape.pages else None


def shape_seen_by(shell: Shell) -> Shape:
    mode, page_size, pages = shell.ask(_SHAPE)
    return Shape(int(page_size), int(pages), mode == "wal")


async def shape_aside(path: str) -> Shape:
    """Of a database that has to be there, or NotADatabase. When cancelled, it ends soon."""
    stop = threading.Event()
    shape = await stoppable(asyncio.to_thread(shape_of, path, stop), stop)
    if shape is None:
        is_there = os.path.exists(path)
        raise NotADatabase(
            "this database is empty" if is_there else "there is no such file",
            where=path,
            next="Create a table first" if is_there else "Check the path",
        )
    return shape


async def settle(path: str) -> None:
    """After a child that may have been killed while it had the database at `path` open. Whoever opens it next rolls
    back what was half done, and takes the log and the journal away; so that is us, and they do not stay behind."""
    path = os.path.realpath(path)
    if not any(os.path.exists(path + end) for end in SIDECARS):
        return
    stop = threading.Event()
    asyncio.get_running_loop().call_later(SETTLING_S_MAX, stop.set)
    with contextlib.suppress(HeadwaterError, OSError):
        await stoppable(asyncio.to_thread(_settle, path, stop), stop)


def _settle(path: str, stop: threading.Event) -> None:
    with Shell(path, stop) as shell:
        is_wal = shape_seen_by(shell).is_wal
        if not is_wal and os.path.exists(path + "-journal"):  # one that was not begun: nobody would take it away
            shell.ask("PRAGMA journal_mode = TRUNCATE; PRAGMA journal_mode = DELETE;")  # it does, unless it is in use


def remove_if_empty(path: str) -> None:
    """What a replica that failed has made; but not what somebody else has put there meanwhile. Blocks."""
    with contextlib.suppress(HeadwaterError):
        if shape_of(path) is None:  # asking rolls back what it left half done
            remove_database(path)


def remove_database(path: str) -> None:
    """A file that nobody has open, with what SQLite left beside it. Whether or not it is there."""
    for end in ("", *SIDECARS):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + end)


def replace_content(source: str, target: Shell, before: Callable[[], None] = lambda: None) -> None:
    """Make the live database `target` the same as `source`, whatever its page size is. In one transaction; nobody
    else may have `target` open in WAL mode, for that mode keeps its page size. `before` is called when nobody else can
    write it any more, and may refuse. Blocks."""
    place = address_of(os.path.realpath(source), "mode=rw")  # should it not be there, it is not made, empty, and copied
    (mode,) = target.ask("PRAGMA journal_mode;")
    _lock(target, mode)
    before()  # now, for a change of the mode counts as a write at times
    try:
        if mode == "wal":
            target.ask("PRAGMA journal_mode = DELETE;")
        target.ask_unsafe(f".restore main {quoted(place)}")
        if target.ask("PRAGMA journal_mode;") == ["wal"]:
            mode = "wal"  # the source has it, and so has the copy
    except BaseException:
        with contextlib.suppress(HeadwaterError):
            _unlock(target, mode)
        raise
    _unlock(target, mode)


def _lock(shell: Shell, mode: str) -> None:
    """Until it is unlocked, or closed."""
    shell.ask("PRAGMA locking_mode = EXCLUSIVE;")
    if mode == "wal":
        shell.ask("PRAGMA busy_timeout = 0;")  # whoever has it open does so for long
    try:
        shell.ask("BEGIN EXCLUSIVE; COMMIT;")  # in this locking mode the lock stays
    except Locked as exc:
        if mode != "wal":
            raise
        next = "Close all programs that use it, and try again"
        raise Locked("its page size changes, and somebody has it open", where=exc.where, next=next) from exc


def _unlock(shell: Shell, mode: str) -> None:
    shell.ask("PRAGMA journal_mode = DELETE;")  # while it is locked; else the journal of WAL content would stay
    shell.ask("PRAGMA locking_mode = NORMAL; PRAGMA schema_version;")  # it is let go with the next read
    if mode == "wal":
        shell.ask("PRAGMA journal_mode = WAL;")
