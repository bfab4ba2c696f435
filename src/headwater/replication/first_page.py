"""The first page of a database. Its header counts commits, each copy for itself; all else in it is content."""

from __future__ import annotations

import hashlib
import threading
from typing import NamedTuple

from headwater.replication.database_file import COUNTERS
from headwater.replication.shell import Shell
from headwater.replication.snapshot import Snapshot


class FirstPage(NamedTuple):
    counters: str
    rest: str
    """A hash of all else."""

    def differs_only_by_counters(self, other: FirstPage) -> bool:
        return self.rest == other.rest and self.counters != other.counters


def first_page_seen_by(shell: Shell) -> FirstPage:
    """Of a live database. Blocks."""
    counters, rest = shell.ask(_ASKED)
    return FirstPage(counters, rest)


def first_page_of(path: str, stop: threading.Event | None = None) -> FirstPage:
    """The same. Blocks."""
    with Shell(path, stop) as shell:
        return first_page_seen_by(shell)


def rest_of_first_page(taken: Snapshot) -> str | None:
    """The same for a copy of our own; None if it is none: a live database is not opened in this process. Blocks."""
    if not taken.is_copy:
        return None
    with open(taken.path, "rb") as copy:
        page = copy.read(taken.page_size)
    rest = page[: COUNTERS[0].start] + page[COUNTERS[0].stop : COUNTERS[1].start] + page[COUNTERS[1].stop :]
    return hashlib.sha3_256(rest.hex().upper().encode()).hexdigest().upper()


def _piece(start: int, stop: int | None = None) -> str:
    length = "" if stop is None else f", {stop - start}"
    return f"hex(substr(data, {start + 1}{length}))"


_FIRST, _SECOND = COUNTERS
_COUNTERS = f"{_piece(_FIRST.start, _FIRST.stop)} || {_piece(_SECOND.start, _SECOND.stop)}"
_REST = f"{_piece(0, _FIRST.start)} || {_piece(_FIRST.stop, _SECOND.start)} || {_piece(_SECOND.stop)}"
_ASKED = f"SELECT {_COUNTERS} || char(10) || hex(sha3({_REST})) FROM sqlite_dbpage WHERE pgno = 1;"
