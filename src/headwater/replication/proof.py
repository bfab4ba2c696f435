"""Is a database whole, and is it the same as another one?"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import threading
from functools import partial
from typing import IO

from headwater.errors import Corrupt, Locked, NotADatabase, ReplicationFailed
from headwater.replication import quick_check
from headwater.replication.quick_check import FINDINGS_MAX
from headwater.replication.shell import address_of
from headwater.replication.tools import MEMORY_BYTES_MAX, binary, cpu_s_for, run, start, why_killed

SAID_BYTES_MAX = 4096
CHECK_S_MAX = 600.0
BY_HAND_S_MAX = 24 * 3600.0
HASH_MEMORY_BYTES_MAX = 2 * 1024**3  # a row is read whole, and may have a gigabyte
MMAP_BYTES = 1 << 40  # as much as SQLite allows: a file that nobody writes is read where it lies


class Hashing:
    """A `sqlite3_dbhash` under way, in a child process: of all rows and the schema, not of pages. `live`: somebody may
    write it meanwhile; then the hash may be of no one moment, and says something only if it is one that is known."""

    def __init__(self, path: str, *, live: bool = False) -> None:
        self._path = os.path.abspath(path)
        self._live = live
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  no pipe: nobody need read it while it runs
        place = None if live else _unwritten(self._path)
        self._process = start(
            [binary("sqlite3_dbhash"), place or self._path],
            memory_bytes=HASH_MEMORY_BYTES_MAX,
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
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


def check_integrity(
    path: str, *, by_hand: bool = False, constraints: bool = False, stop: threading.Event | None = None
) -> None:
    """Raises Corrupt if the database is damaged, NotADatabase if it is none, ReplicationFailed if it needs too much
    time or memory, or `stop` is set. For a file that nobody writes. `constraints`: rows that break a CHECK are damage;
    then the file has to be one that may be written, for SQLite forgets them where it cannot write. `by_hand`: somebody
    waits for it, and may give up; a slow disk is no reason not to restore. Blocks.

    In a child process: a database from outside may hold expressions that run for hours without a pause, and a disk that
    fails under a mapped file kills who reads it."""
    if not os.path.exists(path):
        raise NotADatabase("there is no such file", where=path)
    place = (None if constraints else _unwritten(path)) or address_of(path, "mode=rw")
    size = os.path.getsize(path)
    memory_bytes, cpu_s = MEMORY_BYTES_MAX, cpu_s_for(size)
    timeout_s = CHECK_S_MAX
    if by_hand:
        memory_bytes, cpu_s, timeout_s = HASH_MEMORY_BYTES_MAX, BY_HAND_S_MAX, BY_HAND_S_MAX
    check = partial(
        run,
        where=path,
        stop=stop or threading.Event(),
        timeout_s=timeout_s,
        cpu_s=cpu_s,
        memory_bytes=memory_bytes + size,  # which is mapped
        in_background=not by_hand,
    )
    code, said = check([binary("sqlite3_shell"), "-batch", "-noinit", "-safe", "-list", place, _CHECK])
    if code and quick_check.MISSING.search(said):
        code, said = check([sys.executable, "-I", quick_check.__file__, place])
    findings = [line for line in said.rpartition(f"{_FOUND}\n")[2].splitlines() if line not in ("", "ok")]
    if code:
        why = why_killed(code) or " ".join(said.replace(place, "it").split())
        if "not a database" in why or "unable to open" in why:
            raise NotADatabase("this is no SQLite database", where=path)
        if why_killed(code) or "out of memory" in why or "MemoryError" in why:
            limits = f"{cpu_s:.0f} s of a processor and {memory_bytes // 1024**2} MiB"
            raise ReplicationFailed(f"to check it takes more than {limits}: {why}", where=path)
        raise Corrupt(why or f"the check ended with {code}", where=path, next=_RESTORE)
    if findings:
        raise Corrupt("; ".join(findings[:FINDINGS_MAX]), where=path, next=_RESTORE)


_FOUND = "found:"
_CHECK = (
    f"PRAGMA mmap_size = {MMAP_BYTES}; PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON;"
    f" SELECT '{_FOUND}'; PRAGMA integrity_check({FINDINGS_MAX});"
)
_RESTORE = "Restore an older version, or mend the origin and push again"


def _unwritten(path: str) -> str | None:
    """Its address for SQLite to read without locks and without files beside it; None if a log or journal still belongs
    to it. Without locks, whoever opens and closes the same file by other means takes none away."""
    if any(os.path.exists(path + beside) and os.path.getsize(path + beside) for beside in ("-wal", "-journal")):
        return None
    return address_of(path, "immutable=1")
