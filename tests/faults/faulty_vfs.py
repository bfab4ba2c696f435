"""A SQLite VFS that does what the real one does, until set to fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

import apsw

Operation = Literal["read", "write", "sync", "truncate"]

_CODES: dict[Operation, int] = {
    "read": apsw.SQLITE_IOERR_READ,
    "write": apsw.SQLITE_IOERR_WRITE,
    "sync": apsw.SQLITE_IOERR_FSYNC,
    "truncate": apsw.SQLITE_IOERR_TRUNCATE,
}


class FaultyVfs(apsw.VFS):
    """`full`: no write goes through, as on a disk without space. `fail_at`: the nth operation of a kind from now on
    fails with an I/O error. `reads_fail_in`: every read of threads with this name does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.full = False
        self.reads_fail_in: str | None = None
        self.counts: dict[Operation, int] = {"read": 0, "write": 0, "sync": 0, "truncate": 0}
        self.failures = 0
        self._fail_at: dict[Operation, range] = {}
        self._lock = threading.Lock()
        super().__init__(name, "")

    def fail_at(self, operation: Operation, nth: int, times: int = 1) -> None:
        first = self.counts[operation] + nth
        self._fail_at[operation] = range(first, first + times)

    def heal(self) -> None:
        self.full = False
        self.reads_fail_in = None
        self._fail_at.clear()

    def before(self, operation: Operation) -> None:
        with self._lock:
            self.counts[operation] += 1
            due = self.counts[operation] in self._fail_at.get(operation, ())
            if operation == "read" and self.reads_fail_in is not None:
                due = due or threading.current_thread().name == self.reads_fail_in
            self.failures += due or (self.full and operation == "write")
        if due:
            raise _io_error(operation)
        if self.full and operation == "write":
            raise apsw.FullError("database or disk is full")

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return _FaultyFile(self.before, name, flags)


class _FaultyFile(apsw.VFSFile):
    def __init__(self, before: Callable[[Operation], None], name: Any, flags: list[int]) -> None:
        self._before = before
        super().__init__("", name, flags)

    def xRead(self, amount: int, offset: int) -> bytes:
        self._before("read")
        return super().xRead(amount, offset)

    def xWrite(self, data: Any, offset: int) -> None:
        self._before("write")
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        self._before("sync")
        super().xSync(flags)

    def xTruncate(self, newsize: int) -> None:
        self._before("truncate")
        super().xTruncate(newsize)


def _io_error(operation: Operation) -> apsw.IOError:
    error = apsw.IOError(f"disk I/O error ({operation})")
    error.extendedresult = _CODES[operation]
    return error
