"""A database of somebody else, looked at from a child process.

Never from this one: a program that syncs its own database has it open itself, perhaps by another copy of SQLite (that
of Python's `sqlite3`), and the locks of a file belong to the process. The first close here would take them away from
there, in the middle of a transaction."""

from __future__ import annotations

import os
import re
import secrets
import select
import shutil
import subprocess
import threading
import urllib.parse
from types import TracebackType

from headwater.errors import Corrupt, DiskFull, HeadwaterError, InputOutput, Locked, NotADatabase, ReplicationFailed
from headwater.replication.local_files import refuse_no_database
from headwater.replication.tools import binary, start

BUSY_S_MAX = 30.0  # for others to let us in
LOOK_S = 0.05  # between two looks at `stop`
ANSWER_BYTES_MAX = 64 * 1024
EXIT_S_MAX = 10.0  # to close the database
ROOM_BYTES_MIN = 128 * 1024  # for the index of a write-ahead log
STOP_S_MAX = 1.0  # the same when nobody waits for its answer any more

_DONE = b"that is all\n"
_FAULT = re.compile(r"(?:Parse |Runtime )?[Ee]rror\b.*?: (.*)")


class Shell:
    """Holds the database at `path` open while it is entered; it is not created. Blocks. A `stop` that is set ends a
    question with ReplicationFailed."""

    def __init__(self, path: str, stop: threading.Event | None = None) -> None:
        self._path = os.path.realpath(path)
        self._stop = stop or threading.Event()
        if not os.path.exists(self._path):
            raise NotADatabase("there is no such file", where=path, next="Check the path")
        if not os.path.isfile(self._path):
            raise NotADatabase("this is not a file", where=path, next="Name a database file")
        refuse_no_database(path)
        # In safe mode nothing that is asked touches another file or starts a program, but for a line after the nonce.
        # An address, because a file whose name ends with .sql or .txt would be read as a script.
        self._nonce = secrets.token_hex(16)
        options = ["-batch", "-noinit", "-safe", "-nonce", self._nonce, "-ifexists", "-list"]
        waiting = f".timeout {BUSY_S_MAX * 1000:.0f}"
        self._process = start(
            [binary("sqlite3_shell"), *options, "-cmd", waiting, address_of(self._path, "mode=rw")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        )

    def __enter__(self) -> Shell:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(EXIT_S_MAX if kind is None else STOP_S_MAX)

    def close(self, wait_s: float = EXIT_S_MAX) -> None:
        """What it has begun and not committed is rolled back. A second time does nothing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:  # let it close the database in order, even now: it takes its log away with it
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def ask(self, sql: str) -> list[str]:
        """Run statements or one command, a line of text; the lines of the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        said = b""
        answering = select.poll()  # not `select`, which takes no descriptor above 1023
        answering.register(self._process.stdout, select.POLLIN)
        if self._stop.is_set():
            raise ReplicationFailed("stopped", where=self._path)
        try:
            self._process.stdin.write(sql.encode(errors="surrogateescape") + b"\n.print " + _DONE)
            while not said.endswith(_DONE):
                while not answering.poll(LOOK_S * 1000):
                    if self._stop.is_set():
                        raise ReplicationFailed("stopped", where=self._path)
                data = self._process.stdout.read(ANSWER_BYTES_MAX)
                if not data:
                    break
                said = (said + data)[-ANSWER_BYTES_MAX:]
        except BrokenPipeError:
            pass
        answer = said.removesuffix(_DONE).decode(errors="replace").splitlines()
        fault = next(filter(None, map(_FAULT.match, answer)), None)
        if fault or not said.endswith(_DONE):
            raise fault_of(fault[1] if fault else "; ".join(answer) or "sqlite3_shell has gone", self._path)
        return answer

    def ask_unsafe(self, command: str) -> list[str]:
        """One command that names another file, which has to be one of ours."""
        return self.ask(f".nonce {self._nonce}\n{command}")

    def begin(self) -> None:
        """A transaction that reads."""
        self.ask("BEGIN; PRAGMA schema_version;")  # it begins with the first read

    def commit(self) -> None:
        self.ask("COMMIT;")

    def data_version(self) -> str:
        """Another one when somebody else has written."""
        return self.ask("PRAGMA data_version;")[0]


def address_of(path: str, how: str) -> str:
    """The address of a file for SQLite, whatever its name is. `how`: like `mode=rw`."""
    return f"file:{urllib.parse.quote(os.fsencode(os.path.abspath(path)))}?{how}"


def quoted(path: str) -> str:
    """As an argument of a command."""
    escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def fault_of(why: str, where: str) -> HeadwaterError:
    """SQLite's message, always in English, as one of our errors."""
    if "not a database" in why:
        return NotADatabase("this is no SQLite database", where=where, next="Name another file")
    if "malformed" in why:
        return Corrupt(why, where=where, next="Restore a replica or a backup")
    if "is locked" in why:
        return Locked("a writer holds it for too long", where=where, next="End its transaction")
    if "unable to open" in why or "cannot open" in why:
        return NotADatabase("it cannot be opened", where=where, next="Check the rights of file and directory")
    if "disk is full" in why or ("disk I/O error" in why and _is_full(where)):
        return DiskFull("the disk is full", where=where, next="Free some disk space; nothing was changed")
    return InputOutput(why, where=where)


def _is_full(path: str) -> bool:
    """A database in WAL mode needs a little room even to be read, and lacks it with another error."""
    try:
        return shutil.disk_usage(os.path.dirname(path)).free < ROOM_BYTES_MIN
    except OSError:
        return False
