"""SQLite's command-line tools, run as child processes with limits.

A database from elsewhere may hold expressions that need any time and any memory, so every child has a limit of both.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from typing import Any

import apsw.sqlite_extra

from headwater.errors import ReplicationFailedError

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]

OWN_GROUP = 0  # process group: Ctrl-C at a terminal reaches the program only, which ends its children in order
OUTPUT_BYTES_MAX = 4096  # of what a tool printed, as shown to the user

MEMORY_BYTES_MAX = 512 * 1024 * 1024
CPU_S_MAX = 3600.0  # when the size of the database is unknown
CPU_S_MIN = 10.0  # for a database of any size; more by its size:
CPU_BYTES_A_SECOND = 10_000_000  # at most a tenth of what the tools do in a second on common hardware
POLLS_S = (0.002, 0.02)  # between two looks at a running child: the first and the longest
BACKGROUND_NICE = 10  # work that a remote client causes yields the processor to other programs

_KILLED = {
    int(getattr(signal, "SIGXCPU", 0)): "it needs more processor time than is allowed",
    int(getattr(signal, "SIGXFSZ", 0)): "it is larger than is allowed",
}


def tool_path(name: str) -> str:
    """The path of a tool that comes with APSW."""
    return str(apsw.sqlite_extra.path(name))


def cpu_s_for(size: int) -> float:
    """The processor time that a child may use for a database of `size` bytes."""
    return CPU_S_MIN + size / CPU_BYTES_A_SECOND


def start(
    command: list[str],
    *,
    memory_bytes: int = MEMORY_BYTES_MAX,
    cpu_s: float = CPU_S_MAX,
    file_bytes: int | None = None,
    in_background: bool = False,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a child with limits of its address space, its processor time and the size of the files it writes."""
    process = subprocess.Popen(command, process_group=OWN_GROUP, **options)
    # Set from the parent: a process with threads must not run Python code between fork and exec.
    prlimit = getattr(resource, "prlimit", None)
    if prlimit is not None:
        seconds = max(1, round(cpu_s))
        limits = {
            resource.RLIMIT_CORE: (0, 0),
            resource.RLIMIT_AS: (memory_bytes, memory_bytes),
            resource.RLIMIT_CPU: (seconds, seconds + 1),  # the soft limit names the cause, the hard one kills
        }
        if file_bytes is not None:
            limits[resource.RLIMIT_FSIZE] = (file_bytes, file_bytes)
        for kind, most in limits.items():
            with contextlib.suppress(OSError, ValueError):  # the child has exited, or a lower limit applies
                prlimit(process.pid, kind, most)
    if in_background:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, BACKGROUND_NICE)
    return process


def run(
    command: list[str], where: str, stop: threading.Event, *, timeout_s: float | None = None, **options: Any
) -> tuple[int, str]:
    """Run a child to its end; returns its exit code and the beginning of its output. Blocks.

    Kills it and raises ReplicationFailedError when `stop` is set or `timeout_s` has passed."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    poll_s, longest_s = POLLS_S
    with tempfile.TemporaryFile() as output:
        if stop.is_set():
            raise ReplicationFailedError("stopped", where=where)
        process = start(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, **options)
        try:
            while process.poll() is None:
                if stop.wait(poll_s):
                    raise ReplicationFailedError("stopped", where=where)
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    raise ReplicationFailedError(f"it did not end in {timeout_s:g} s", where=where)
                poll_s = min(2 * poll_s, longest_s)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        return process.returncode, os.pread(output.fileno(), OUTPUT_BYTES_MAX, 0).decode(errors="replace")


def limit_exceeded(code: int) -> str | None:
    """Which limit ended a child, by its exit code; None if none did."""
    return _KILLED.get(-code) if code < 0 else None
