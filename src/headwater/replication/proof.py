"""Is a database whole, and is it the same as another one?"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
from typing import IO

from headwater.errors import Corrupt, Locked, NotADatabase, ReplicationFailed
from headwater.replication import quick_check
from headwater.replication.quick_check import FINDINGS_MAX
from headwater.replication.tools import OWN_GROUP, binary

SAID_BYTES_MAX = 4096
CHECK_S_MAX = 600.0
MMAP_BYTES = 1 << 40  # as much as SQLite allows: a file that nobody writes is read where it lies


class Hashing:
    """A `sqlite3_dbhash` under way, in a child process: of all rows and the schema, not of pages. `live`: somebody may
    write it meanwhile; then the hash may be of no one moment, and says something only if it is one that is known."""

    def __init__(self, path: str, *, live: bool = False) -> None:
        self._path = os.path.abspath(path)
        self._live = live
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  no pipe: nobody need read it while it runs
        place = None if live else _unwritten(self._path)
        self._process = subprocess.Popen(
            [binary("sqlite3_dbhash"), place or self._path],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            process_group=OWN_GROUP,
        )

    def result(self) -> str:
        """40 hexadecimal digits. Blocks."""
        self._process.wait()
        with self._said:
            said = os.pread(self._said.fileno(), SAID_BYTES_MAX, 0).decode(errors="replace").strip()
        digest, _, _ = said.partition(" ")
        if self._live and "not a valid SQLite database" in said:  # it has been read before; this one waits for no lock
            raise Locked("somebody is writing it", where=self._path, next="Try again when its transaction has ended")
        if self._process.returncode or not re.fullmatch("[0-9a-f]{40}", digest):
            raise ReplicationFailed(f"sqlite3_dbhash: {said or self._process.returncode}", where=self._path)
        return digest

    def result_if_any(self) -> str | None:
        """None for a database that cannot be read without functions or collations of its application."""
        try:
            return self.result()
        except ReplicationFailed as exc:
            if "SQL statement error" in exc.why:
                return None
            raise

    async def gone(self) -> None:
        """Kill it if need be, and wait until it has let go of its files."""
        if self._process.poll() is None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self._said.close()


def dbhash(path: str, *, live: bool = False) -> str:
    """The hash of all rows and the schema. Blocks."""
    return Hashing(path, live=live).result()


def check_integrity(path: str, timeout_s: float = CHECK_S_MAX) -> None:
    """Raises Corrupt if the database is damaged, NotADatabase if it is none, ReplicationFailed if it took too long. For
    a file that nobody writes. Blocks.

    In a child process: a database from outside may hold expressions that run for hours without a pause, and a disk that
    fails under a mapped file kills who reads it."""
    deadline_s = time.monotonic() + timeout_s
    if not os.path.exists(path):
        raise NotADatabase("there is no such file", where=path)
    place = _unwritten(path) or path
    shell = [binary("sqlite3_shell"), "-batch", "-noinit", "-safe", "-list", place, _CHECK]
    code, said = _child(shell, path, deadline_s)
    if code and quick_check.MISSING.search(said):
        code, said = _child([sys.executable, "-I", quick_check.__file__, place], path, deadline_s)
        findings = list(filter(None, said.splitlines()))
    else:
        findings = [line for line in said.splitlines()[1:] if line != "ok"]  # the first is the answer to mmap_size
    if code:
        why = " ".join(said.split())[:SAID_BYTES_MAX]
        if "not a database" in why or "unable to open" in why:
            raise NotADatabase("this is no SQLite database", where=path)
        raise Corrupt(why or f"the check ended with {code}", where=path, next=_RESTORE)
    if findings:
        raise Corrupt("; ".join(findings[:FINDINGS_MAX]), where=path, next=_RESTORE)


_CHECK = (
    f"PRAGMA mmap_size = {MMAP_BYTES}; PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON;"
    f" PRAGMA integrity_check({FINDINGS_MAX});"
)
_RESTORE = "Restore an older version, or mend the origin and push again"


def _child(command: list[str], path: str, deadline_s: float) -> tuple[int, str]:
    """Its exit code, and what it said."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, process_group=OWN_GROUP)
        try:
            code = process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise ReplicationFailed("the integrity check took too long", where=path) from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        return code, os.pread(said.fileno(), SAID_BYTES_MAX, 0).decode(errors="replace")


def _unwritten(path: str) -> str | None:
    """Its address for SQLite to read without locks and without files beside it; None if a log or journal still belongs
    to it. Without locks, whoever opens and closes the same file by other means takes none away."""
    if any(os.path.exists(path + beside) and os.path.getsize(path + beside) for beside in ("-wal", "-journal")):
        return None
    return f"file:{urllib.parse.quote(os.fsencode(os.path.abspath(path)))}?immutable=1"
