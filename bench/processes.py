"""The memory and processor time of processes, read from /proc."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

SAMPLE_S = 0.25
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tree(root: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                children.setdefault(int(_stat(int(entry))[1]), []).append(int(entry))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def pss_bytes(pid: int) -> int:
    """Proportional memory: shared pages are divided among processes, so that a sum over processes is correct."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def used_ns(pids: list[int]) -> int:
    """Processor time of processes with all their threads."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # it has ended
                total += int(task.read_text().split()[0])
    return total


def cpu_s(pids: list[int]) -> float:
    """Of these processes and of their ended children."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            ticks += sum(int(each) for each in _stat(pid)[11:15])
    return ticks / _TICKS_PER_S


def _stat(pid: int) -> list[str]:
    """The fields after the name, which may contain spaces: state, parent, …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class Peak:
    """The peak memory of a process tree while the block runs."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.bytes = 0

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.bytes = max(self.bytes, sum(pss_bytes(pid) for pid in tree(self._root)))
