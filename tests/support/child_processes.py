"""The children of a process, and the processes that have a file open."""

import contextlib
from pathlib import Path
from typing import NamedTuple


class Child(NamedTuple):
    pid: int
    name: str
    """Also of one that has ended and was not waited for."""
    command: str


def children_of(pid: int, name: str = "") -> list[Child]:
    """Those that have this in their name or in their command. From the list of all processes: the one that the kernel
    keeps for each thread skips some while others end."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            before, _, after = (process / "stat").read_text(errors="replace").rpartition(")")
            _, parent, *_ = after.split()
            if int(parent) == pid:
                child = Child(int(process.name), before.partition("(")[2], _command(process))
                if name in child.name or name in child.command:
                    found.append(child)
    return found


def tools_at(path: Path) -> list[str]:
    """Commands of SQLite's tools that name this path, or one in it, whosever children they are."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = _command(process)
            if str(path) in command and "sqlite3_" in command:
                found.append(command)
    return found


def _command(process: Path) -> str:
    return (process / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
