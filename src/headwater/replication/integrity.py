"""Whether a database is intact, and the hash of its content."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from contextlib import AbstractAsyncContextManager
from functools import partial

from headwater.errors import CorruptError, LockedError, NotADatabaseError, ReplicationFailedError
from headwater.replication import quick_check
from headwater.replication.local_database import url_of
from headwater.replication.quick_check import FINDINGS_MAX
from headwater.replication.sqlite_tools import MEMORY_BYTES_MAX, cpu_s_for, limit_exceeded, run, tool_path
from headwater.replication.threads import running, stoppable

CHECK_S_MAX = 600.0
INTERACTIVE_S_MAX = 24 * 3600.0
HASH_MEMORY_BYTES_MAX = 2 * 1024**3  # a row is read whole, and may have a gigabyte
MMAP_BYTES = 1 << 40  # as much as SQLite allows


def dbhash(path: str, *, live: bool = False, stop: threading.Event | None = None) -> str:
    """The hash of all rows and the schema, independent of pages: 40 hexadecimal digits. Blocks.

    `live`: other programs may write the database meanwhile. Then the hash may mix two states, and has a meaning only if
    it equals a known one."""
    path = os.path.abspath(path)
    url = None if live else _immutable_url(path)
    command = [tool_path("sqlite3_dbhash"), url or path]
    code, output = run(command, path, stop or threading.Event(), memory_bytes=HASH_MEMORY_BYTES_MAX)
    digest, _, _ = (output := output.strip()).partition(" ")
    if live and "not a valid SQLite database" in output:  # it was read before; the tool waits for no lock
        raise LockedError("a program is writing it", where=path, next="Try again when its transaction has ended")
    if code or not re.fullmatch("[0-9a-f]{40}", digest):
        raise ReplicationFailedError(f"sqlite3_dbhash: {output or code}", where=path)
    return digest


def dbhash_if_any(path: str, *, live: bool = False, stop: threading.Event | None = None) -> str | None:
    """None for a database that needs functions or collations of its application to be read. Blocks."""
    try:
        return dbhash(path, live=live, stop=stop)
    except ReplicationFailedError as exc:
        if "SQL statement error" in exc.why:
            return None
        raise


def hashing(path: str, *, live: bool = False) -> AbstractAsyncContextManager[asyncio.Task[str | None]]:
    """Run `dbhash_if_any` as a task while it is entered; afterwards the file is released."""
    return running(stoppable(lambda stop: dbhash_if_any(path, live=live, stop=stop)))


def check_integrity(
    path: str, *, interactive: bool = False, constraints: bool = False, stop: threading.Event | None = None
) -> None:
    """Raises CorruptError if the database is damaged, NotADatabaseError if it is none, ReplicationFailedError if it
    needs too much time or memory, or `stop` is set. No program may write the file. Blocks.

    `constraints`: rows that break a CHECK count as damage; the file has to be writable then, because SQLite skips them
    in a file that it cannot write. `interactive`: a user waits for the result and can interrupt it, so the limits are
    generous.

    In a child process: a hostile database may hold expressions that run for hours, and a disk that fails under a mapped
    file kills the process that reads it."""
    if not os.path.exists(path):
        raise NotADatabaseError("there is no such file", where=path)
    url = (None if constraints else _immutable_url(path)) or url_of(path, "mode=rw")
    size = os.path.getsize(path)
    memory_bytes, cpu_s = MEMORY_BYTES_MAX, cpu_s_for(size)
    timeout_s = CHECK_S_MAX
    if interactive:
        memory_bytes, cpu_s, timeout_s = HASH_MEMORY_BYTES_MAX, INTERACTIVE_S_MAX, INTERACTIVE_S_MAX
    check = partial(
        run,
        where=path,
        stop=stop or threading.Event(),
        timeout_s=timeout_s,
        cpu_s=cpu_s,
        memory_bytes=memory_bytes + size,  # which is mapped
        in_background=not interactive,
    )
    code, output = check([tool_path("sqlite3_shell"), "-batch", "-noinit", "-safe", "-list", url, _CHECK])
    if code and quick_check.MISSING.search(output):
        code, output = check([sys.executable, "-I", quick_check.__file__, url])
    findings = [line for line in output.rpartition(f"{_FOUND}\n")[2].splitlines() if line not in ("", "ok")]
    if code:
        exceeded = limit_exceeded(code)
        why = exceeded or " ".join(output.replace(url, "it").split())
        if "not a database" in why or "unable to open" in why:
            raise NotADatabaseError("this is no SQLite database", where=path)
        if exceeded or "out of memory" in why or "MemoryError" in why:
            limits = f"{cpu_s:.0f} s of a processor and {memory_bytes // 1024**2} MiB"
            raise ReplicationFailedError(f"to check it takes more than {limits}: {why}", where=path)
        raise CorruptError(why or f"the check ended with {code}", where=path, next=_RESTORE)
    if findings:
        raise CorruptError("; ".join(findings[:FINDINGS_MAX]), where=path, next=_RESTORE)


_FOUND = "found:"
_CHECK = (
    f"PRAGMA mmap_size = {MMAP_BYTES}; PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON;"
    f" SELECT '{_FOUND}'; PRAGMA integrity_check({FINDINGS_MAX});"
)
_RESTORE = "Restore an older version, or repair the origin and push again"


def _immutable_url(path: str) -> str | None:
    """A url by which SQLite reads the file without locks and without files next to it; None if a log or journal still
    belongs to it."""
    if any(os.path.exists(path + beside) and os.path.getsize(path + beside) for beside in ("-wal", "-journal")):
        return None
    return url_of(path, "immutable=1")
