"""A SQLite database file of this machine, read and written through child processes only.

A program that syncs its own database has it open itself, perhaps by another copy of SQLite (that of Python's
`sqlite3`), and POSIX locks of a file belong to the process: a close here would drop that program's locks in the middle
of a transaction."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import select
import shlex
import shutil
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import NamedTuple

from headwater.errors import (
    CorruptError,
    DiskFullError,
    HeadwaterError,
    InputOutputError,
    InvalidOptionError,
    LockedError,
    NotADatabaseError,
    ReplicationFailedError,
)
from headwater.replication.sqlite_tools import start, tool_path
from headwater.replication.threads import stoppable

BUSY_S_MAX = 30.0  # that a statement waits for locks of other programs
POLL_S = 0.05  # between two looks at `stop`
ANSWER_BYTES_MAX = 64 * 1024
EXIT_S_MAX = 10.0  # to close the database
STOP_S_MAX = 1.0  # the same after an error
FREE_BYTES_MIN = 128 * 1024  # for the index of a write-ahead log
SETTLING_S_MAX = 5.0  # to open a database after a child that was killed; other programs may hold a lock

MAGIC = b"SQLite format 3\0"  # at the beginning of every database but an empty one
SIDECARS = ("-wal", "-shm", "-journal")  # files that SQLite keeps next to a database in use
COUNTERS = (slice(24, 28), slice(92, 100))  # in the header: counters of commits, which differ between copies

Identity = tuple[int, int]  # device and inode

_DONE = b"that is all\n"
_ERROR = re.compile(r"(?:Parse |Runtime )?[Ee]rror\b.*?: (.*)")
# The first page without the bytes of COUNTERS; `substr` counts from 1.
_SHAPE = (
    "PRAGMA journal_mode; PRAGMA page_size; PRAGMA page_count;"
    " SELECT hex(sha3(hex(substr(data, 1, 24)) || hex(substr(data, 29, 64)) || hex(substr(data, 101))))"
    " FROM sqlite_dbpage WHERE pgno = 1;"
)


# --- files ----------------------------------------------------------------------------------------------------------


def identity_of(path: str) -> Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def check_database_file(path: str) -> None:
    """Raise NotADatabaseError if the file exists and is no SQLite database; an empty file is an empty database. Blocks.

    Called before an SQLite tool opens the file: some tools run a file as a script, depending on its name or content. A
    child process reads the file, because closing it here would drop the locks of this process."""
    if not os.path.exists(path) or os.path.getsize(path) == 0:
        return
    command = ["head", "-c", str(len(MAGIC)), "--", os.path.abspath(path)]
    try:
        read = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # no such tool, or no permission: SQLite reports it
        return
    if read != MAGIC:
        raise NotADatabaseError("this is no SQLite database", where=path, next="Name another file")


def private(path: str, flags: int) -> int:
    """An opener that creates files with mode 0600."""
    return os.open(path, flags, 0o600)


def make_private(path: str) -> None:
    """Create an empty file with mode 0600 unless there is one: SQLite itself would create it readable for others. An
    error is left to the process that writes it."""
    with contextlib.suppress(OSError):
        os.close(private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))


def require_file(path: str) -> None:
    if os.path.isdir(path):
        raise InvalidOptionError("this is a directory", where=path, next="Name a database file in it")
    if not os.path.exists(path):
        directory = os.path.dirname(os.path.realpath(path))
        where = f"it was looked for in {directory}" if os.path.isdir(directory) else f"there is no {directory} either"
        raise InvalidOptionError("there is no such file", where=path, next=f"Check the path; {where}")


def require_place_for(path: str) -> None:
    """Check the path of a file that is written and may be new."""
    if os.path.isdir(path):
        raise InvalidOptionError("this is a directory", where=path, next="Name a file in it")
    directory = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(directory):
        remedy = f"mkdir -p {shlex.quote(directory)}"
        raise InvalidOptionError("the directory does not exist", where=directory, next=remedy)


def no_space(path: str) -> DiskFullError:
    return DiskFullError("the disk is full", where=path, next="Free some disk space and try again")


def remove_database(path: str) -> None:
    """Remove a file that no program has open, with SQLite's files next to it; a missing file is no error."""
    for end in ("", *SIDECARS):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + end)


# --- a connection in a child process --------------------------------------------------------------------------------


class Shell:
    """A `sqlite3` shell that holds the database at `path` open while it is entered; it does not create one. Blocks.

    When `stop` is set, `ask` raises ReplicationFailedError."""

    def __init__(self, path: str, stop: threading.Event | None = None) -> None:
        self._path = os.path.realpath(path)
        self._stop = stop or threading.Event()
        if not os.path.exists(self._path):
            raise NotADatabaseError("there is no such file", where=path, next="Check the path")
        if not os.path.isfile(self._path):
            raise NotADatabaseError("this is not a file", where=path, next="Name a database file")
        check_database_file(path)
        # In safe mode no statement opens another file or starts a program, except on a line after the nonce. A url,
        # because a file whose name ends with .sql or .txt would be read as a script.
        self._nonce = secrets.token_hex(16)
        options = ["-batch", "-noinit", "-safe", "-nonce", self._nonce, "-ifexists", "-list"]
        timeout = f".timeout {BUSY_S_MAX * 1000:.0f}"
        self._process = start(
            [tool_path("sqlite3_shell"), *options, "-cmd", timeout, url_of(self._path, "mode=rw")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        )

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self.close(EXIT_S_MAX if kind is None else STOP_S_MAX)

    def close(self, wait_s: float = EXIT_S_MAX) -> None:
        """Uncommitted changes are rolled back. A second call does nothing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:  # an orderly close removes the write-ahead log
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def ask(self, sql: str, timeout_s: float | None = None) -> list[str]:
        """Run statements or one shell command, on one line; returns the lines of the answer. After a TimeoutError the
        shell is of no more use."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = b""
        readable = select.poll()  # not `select`, which accepts no descriptor above 1023
        readable.register(self._process.stdout, select.POLLIN)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        if self._stop.is_set():
            raise ReplicationFailedError("stopped", where=self._path)
        try:
            self._process.stdin.write(sql.encode(errors="surrogateescape") + b"\n.print " + _DONE)
            while not answer.endswith(_DONE):
                while not readable.poll(POLL_S * 1000):
                    if self._stop.is_set():
                        raise ReplicationFailedError("stopped", where=self._path)
                    if deadline_s is not None and time.monotonic() > deadline_s:
                        raise TimeoutError
                data = self._process.stdout.read(ANSWER_BYTES_MAX)
                if not data:
                    break
                answer = (answer + data)[-ANSWER_BYTES_MAX:]
        except BrokenPipeError:
            pass
        lines = answer.removesuffix(_DONE).decode(errors="replace").splitlines()
        error = next(filter(None, map(_ERROR.match, lines)), None)
        if error or not answer.endswith(_DONE):
            raise _error_of(error[1] if error else "; ".join(lines) or "sqlite3_shell has exited", self._path)
        return lines

    def ask_unsafe(self, command: str, timeout_s: float | None = None) -> list[str]:
        """Run one command of the shell that names another file, which has to be one of ours."""
        return self.ask(f".nonce {self._nonce}\n{command}", timeout_s)

    def data_version(self) -> str:
        """Changes whenever another connection has committed."""
        return self.ask("PRAGMA data_version;")[0]

    def shape(self) -> DatabaseShape:
        mode, page_size, pages, *head = self.ask(_SHAPE)
        return DatabaseShape(int(page_size), int(pages), mode == "wal", head[0] if head else None)


def url_of(path: str, parameters: str) -> str:
    """The file as a url for SQLite, whatever its name is. `parameters`: like `mode=rw`."""
    return f"file:{urllib.parse.quote(os.fsencode(os.path.abspath(path)))}?{parameters}"


def quoted(path: str) -> str:
    """The path as an argument of a dot-command of SQLite's shell."""
    escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def _error_of(why: str, where: str) -> HeadwaterError:
    """SQLite's message, which is always in English, as one of our errors."""
    if "not a database" in why:
        return NotADatabaseError("this is no SQLite database", where=where, next="Name another file")
    if "malformed" in why:
        return CorruptError(why, where=where, next="Restore a replica or a backup")
    if "is locked" in why:
        return LockedError("a writer holds it for too long", where=where, next="End its transaction")
    if "unable to open" in why or "cannot open" in why:
        return NotADatabaseError("it cannot be opened", where=where, next="Check the rights of file and directory")
    if "disk is full" in why or ("disk I/O error" in why and _is_disk_full(where)):
        return DiskFullError("the disk is full", where=where, next="Free some disk space; nothing was changed")
    return InputOutputError(why, where=where)


def _is_disk_full(path: str) -> bool:
    """Whether the disk has next to no space: even reading a database in WAL mode needs a little, and fails with another
    error without it."""
    try:
        return shutil.disk_usage(os.path.dirname(path)).free < FREE_BYTES_MIN
    except OSError:
        return False


# --- shape and first page -------------------------------------------------------------------------------------------


class DatabaseShape(NamedTuple):
    page_size: int
    pages: int
    is_wal: bool
    head: str | None
    """A hash of the first page without its counters of commits, which each copy keeps for itself; None if empty."""


def shape_of(path: str, stop: threading.Event | None = None) -> DatabaseShape | None:
    """None if the file is missing or empty. Blocks."""
    if not os.path.exists(path):
        return None
    with Shell(path, stop) as shell:
        shape = shell.shape()
        return shape if shape.pages else None


async def require_shape(path: str) -> DatabaseShape:
    """Raises NotADatabaseError if the file is missing or empty. Ends soon when cancelled."""
    shape = await stoppable(lambda stop: shape_of(path, stop))
    if shape is None:
        is_there = os.path.exists(path)
        raise NotADatabaseError(
            "this database is empty" if is_there else "there is no such file",
            where=path,
            next="Create a table first" if is_there else "Check the path",
        )
    return shape


# --- writing --------------------------------------------------------------------------------------------------------


async def settle(path: str) -> None:
    """Roll back what a killed child left half written in the database at `path`, and remove its log and journal."""
    path = os.path.realpath(path)
    if not any(os.path.exists(path + end) for end in SIDECARS):
        return
    with contextlib.suppress(HeadwaterError, OSError):
        async with asyncio.timeout(SETTLING_S_MAX):
            await stoppable(lambda stop: _settle(path, stop))


def _settle(path: str, stop: threading.Event) -> None:
    with Shell(path, stop) as shell:
        is_wal = shell.shape().is_wal
        if not is_wal and os.path.exists(path + "-journal"):  # of a transaction that wrote nothing; SQLite leaves it
            shell.ask("PRAGMA journal_mode = TRUNCATE; PRAGMA journal_mode = DELETE;")  # no effect while in use


def remove_if_empty(path: str) -> None:
    """Remove the file that a failed replica has created, but no database that another program has put there. Blocks."""
    with contextlib.suppress(HeadwaterError):
        if shape_of(path) is None:  # reading it rolls back what was half written
            remove_database(path)


def replace_content(source: str, target: Shell, before: Callable[[], None] = lambda: None) -> None:
    """Make the live database `target` equal to `source`, whatever its page size is, in one transaction. Blocks.

    In WAL mode, which fixes the page size, no other program may have `target` open. `before` is called under the
    exclusive lock, and may refuse."""
    url = url_of(os.path.realpath(source), "mode=rw")  # this mode does not create a missing source, empty
    (mode,) = target.ask("PRAGMA journal_mode;")
    _lock(target, mode)
    before()  # now, because a change of the mode sometimes counts as a write
    try:
        if mode == "wal":
            target.ask("PRAGMA journal_mode = DELETE;")
        target.ask_unsafe(f".restore main {quoted(url)}")
        if target.ask("PRAGMA journal_mode;") == ["wal"]:
            mode = "wal"  # as the source
    except BaseException:
        with contextlib.suppress(HeadwaterError):
            _unlock(target, mode)
        raise
    _unlock(target, mode)


def _lock(shell: Shell, mode: str) -> None:
    """Hold the lock until `_unlock` or the close."""
    shell.ask("PRAGMA locking_mode = EXCLUSIVE;")
    if mode == "wal":
        shell.ask("PRAGMA busy_timeout = 0;")  # a program that has it open keeps it open
    try:
        shell.ask("BEGIN EXCLUSIVE; COMMIT;")  # in this locking mode the lock stays
    except LockedError as exc:
        if mode != "wal":
            raise
        next = "Close all programs that use it, and try again"
        raise LockedError("its page size changes, and another program has it open", where=exc.where, next=next) from exc


def _unlock(shell: Shell, mode: str) -> None:
    shell.ask("PRAGMA journal_mode = DELETE;")  # while it is locked; otherwise the journal of WAL content would stay
    shell.ask("PRAGMA locking_mode = NORMAL; PRAGMA schema_version;")  # the next read releases the lock
    if mode == "wal":
        shell.ask("PRAGMA journal_mode = WAL;")
