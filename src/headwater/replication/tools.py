"""SQLite's own tools, as child processes with limits. `sqlite3_rsync` has two ends that talk over pipes: the origin
reads a database, the replica writes one, and whoever joins them moves the pages.

A database from elsewhere may hold expressions that need any time and any memory, so no child has all of either."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, Any, Literal

import apsw.sqlite_extra

from headwater.errors import ReplicationFailed
from headwater.replication.local_files import make_private, refuse_no_database
from headwater.replication.rsync_stream import ERROR, REPLICA_ERROR, error_at_the_end

try:
    import fcntl
    import resource
except ImportError:  # no pipes of another size there, and no such limits
    fcntl = resource = None  # type: ignore[assignment]

OWN_GROUP = 0  # of processes: Ctrl-C at a terminal is for the program, which lets them finish or ends them
READ_BYTES = 256 * 1024  # at a time; also the largest frame of a session
PIPE_BYTES = 1024 * 1024
STDERR_BYTES_MAX = 4096  # of what an end complained, as told to the user
EXIT_S_MAX = 60.0  # for an end to go after its last byte: it commits and checkpoints then

MEMORY_BYTES_MAX = 512 * 1024 * 1024  # of a child
CPU_S_MAX = 3600.0  # of a child, where nothing is said of the size of its database
CPU_S_MIN = 10.0  # for a database of any size, and more by its size:
CPU_BYTES_A_SECOND = 10_000_000  # a tenth of what the tools do in a second here, or less
LOOKS_S = (0.002, 0.02)  # between two looks at a child that runs, from the first on
BACKGROUND = 10  # as `nice` has it: what a stranger lets us do takes no processor from others

_KILLED = {
    int(getattr(signal, "SIGXCPU", 0)): "it needs more processor time than is allowed",
    int(getattr(signal, "SIGXFSZ", 0)): "it is larger than is allowed",
}

Way = Literal["--origin", "--replica"]


def binary(name: str) -> str:
    """The path of a tool that came with APSW."""
    return str(apsw.sqlite_extra.path(name))


def cpu_s_for(size: int) -> float:
    """What a child may take for a database of so many bytes."""
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
    """A child process with limits, of its address space, its processor time and the files that it writes."""
    process = subprocess.Popen(command, process_group=OWN_GROUP, **options)
    # Set from here: a process with threads runs no code of ours between fork and exec.
    prlimit = getattr(resource, "prlimit", None)
    if prlimit is not None:
        seconds = max(1, round(cpu_s))
        limits = {
            resource.RLIMIT_CORE: (0, 0),
            resource.RLIMIT_AS: (memory_bytes, memory_bytes),
            resource.RLIMIT_CPU: (seconds, seconds + 1),  # the first tells what ended it, the second kills
        }
        if file_bytes is not None:
            limits[resource.RLIMIT_FSIZE] = (file_bytes, file_bytes)
        for kind, most in limits.items():
            with contextlib.suppress(OSError, ValueError):  # it has gone already, or a lower limit holds
                prlimit(process.pid, kind, most)
    if in_background:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, BACKGROUND)
    return process


def run(
    command: list[str], where: str, stop: threading.Event, *, timeout_s: float | None = None, **options: Any
) -> tuple[int, str]:
    """A child to its end: its exit code, and the first of what it said. It is killed, and ReplicationFailed raised,
    when `stop` is set or it takes too long. Blocks."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    look_s, longest_s = LOOKS_S
    with tempfile.TemporaryFile() as said:
        if stop.is_set():
            raise ReplicationFailed("stopped", where=where)
        process = start(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, **options)
        try:
            while process.poll() is None:
                if stop.wait(look_s):
                    raise ReplicationFailed("stopped", where=where)
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    raise ReplicationFailed(f"it did not end in {timeout_s:g} s", where=where)
                look_s = min(2 * look_s, longest_s)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        return process.returncode, os.pread(said.fileno(), STDERR_BYTES_MAX, 0).decode(errors="replace")


def why_killed(code: int) -> str | None:
    """Of a child that a limit ended: which one, by its exit code."""
    return _KILLED.get(-code) if code < 0 else None


class End:
    """One end of `sqlite3_rsync`. It went well if `wait` returns and the other end's says the same: an end that fails
    tells the other one, which complains on its stderr; both exit with 0.

    A replica goes by itself after the last page. An origin then waits for the replica's last words, which can only be
    an error (that the commit failed), and goes when its input is closed. Over a network it may have gone by then, so
    `wait` also raises what its own end was the last to say, if that was an error. Read to the end before."""

    def __init__(self, way: Way, place: str, *, where: str | None = None, **limits: Any) -> None:
        """`place`: the database, as the tool is told; what it complains about, to the other end too, is spelled so.
        `limits`: those of `start`."""
        self._loop = asyncio.get_running_loop()
        self._where = where or place
        self._error = ERROR if way == "--origin" else REPLICA_ERROR
        self._last_said = b""
        self._waiting: dict[int, asyncio.Future[None]] = {}
        with contextlib.ExitStack() as of_the_child, contextlib.ExitStack() as ours:
            # A file: a pipe that nobody reads could fill.
            self._complaints: IO[bytes] = ours.enter_context(tempfile.TemporaryFile())
            child_in, self._input = os.pipe()
            of_the_child.callback(os.close, child_in)
            ours.callback(os.close, self._input)
            self._output, child_out = os.pipe()
            of_the_child.callback(os.close, child_out)
            ours.callback(os.close, self._output)
            for end in (self._input, self._output):
                os.set_blocking(end, False)
                _enlarge(end)
            places = [place, "x"] if way == "--origin" else ["x", place]
            self._process = start(
                [binary("sqlite3_rsync"), way, *places],
                stdin=child_in,
                stdout=child_out,
                stderr=self._complaints,
                **limits,
            )
            ours.pop_all()  # they stay
        self.pid = self._process.pid

    @classmethod
    async def origin(cls, path: str) -> End:
        """Reads the database at `path`, in one read transaction."""
        await asyncio.to_thread(refuse_no_database, path)
        return cls("--origin", os.path.abspath(path), where=path)

    @classmethod
    async def replica(cls, path: str) -> End:
        """Writes the database at `path`, in one transaction; it is created, for this user alone, if it is not there."""
        make_private(path)
        await asyncio.to_thread(refuse_no_database, path)
        return cls("--replica", os.path.abspath(path), where=path)

    async def read(self) -> bytes:
        """What it says, as far as it has; empty when it says no more."""
        while True:
            if self._output < 0:
                return b""
            try:
                data = os.read(self._output, READ_BYTES)
            except BlockingIOError:
                await self._ready(self._output, self._loop.add_reader)
                continue
            if data:
                short = len(data) < STDERR_BYTES_MAX
                self._last_said = (self._last_said[-STDERR_BYTES_MAX:] + data) if short else data
            return data

    async def write(self, data: bytes) -> None:
        """Tell it. What an end that has gone no longer hears is dropped: `wait` says why it went."""
        rest = memoryview(data)
        while rest and self._input >= 0:
            try:
                rest = rest[os.write(self._input, rest) :]
            except BlockingIOError:
                await self._ready(self._input, self._loop.add_writer)
            except BrokenPipeError:
                self.close_input()

    async def _ready(self, end: int, add: Callable[[int, Callable[[], None]], None]) -> None:
        waiting = self._waiting[end] = self._loop.create_future()
        add(end, lambda: None if waiting.done() else waiting.set_result(None))
        try:
            await waiting
        finally:
            self._wait_no_more(end)

    def _wait_no_more(self, end: int) -> None:
        """Once only: when the pipe has been closed meanwhile, its number may belong to another one."""
        waiting = self._waiting.pop(end, None)
        if waiting is not None:
            (self._loop.remove_writer if end == self._input else self._loop.remove_reader)(end)
            if not waiting.done():
                waiting.set_result(None)

    @property
    def is_deaf(self) -> bool:
        """Its input is closed."""
        return self._input < 0

    def close_input(self) -> None:
        if self._input >= 0:
            self._wait_no_more(self._input)
            os.close(self._input)
            self._input = -1

    async def wait(self) -> None:
        """Until it has gone; raises ReplicationFailed with what it complained about."""
        self.close_input()
        try:
            await asyncio.to_thread(self._process.wait, EXIT_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ReplicationFailed(f"sqlite3_rsync did not end in {EXIT_S_MAX:g} s", where=self._where) from None
        why = self.complaint() or error_at_the_end(self._last_said, self._error)
        self._let_go()
        if why or (code := self._process.returncode):
            raise ReplicationFailed(why or why_killed(code) or f"sqlite3_rsync ended with {code}", where=self._where)

    def complaint(self) -> str:
        """What it wrote to stderr so far."""
        if self._complaints.closed:
            return ""
        said = os.pread(self._complaints.fileno(), STDERR_BYTES_MAX, 0).decode(errors="replace")
        lines = [line.removeprefix("ERROR: ").strip() for line in said.splitlines()]
        at_length = "it complains without end" if len(said) == STDERR_BYTES_MAX else ""
        return "; ".join(line for line in lines if line) or at_length

    def kill(self) -> None:
        """End it now. What a replica wrote is rolled back by whoever opens its database next."""
        if self._process.poll() is None:
            self._process.kill()
        self._let_go()

    async def gone(self) -> None:
        """Kill it if need be, and wait until it has let go of its files."""
        self.kill()
        await asyncio.to_thread(self._process.wait)

    def _let_go(self) -> None:
        self.close_input()
        if self._output >= 0:
            self._wait_no_more(self._output)
            os.close(self._output)
            self._output = -1
        self._complaints.close()


def _enlarge(pipe: int) -> None:
    resize = getattr(fcntl, "F_SETPIPE_SZ", None)
    if resize is not None:
        with contextlib.suppress(OSError):  # over the limit of this user: slower, that is all
            fcntl.fcntl(pipe, resize, PIPE_BYTES)


class Moved:
    """Bytes between two ends, counted while they move."""

    def __init__(self) -> None:
        self.to_replica = 0
        self.to_origin = 0
        self.watch: Callable[[], None] = lambda: None


async def both_ends(origin_path: str, replica_path: str) -> tuple[End, End]:
    """Of two databases of this machine; or none of them."""
    origin = await End.origin(origin_path)
    try:
        return origin, await End.replica(replica_path)
    except BaseException:
        await asyncio.shield(origin.gone())
        raise


async def join(origin: End, replica: End, moved: Moved | None = None) -> Moved:
    """Let two ends of this machine talk until both have gone; raises ReplicationFailed if either complained."""
    moved = moved or Moved()

    async def forth() -> None:
        while data := await origin.read():
            moved.to_replica += len(data)
            await replica.write(data)
            moved.watch()
        replica.close_input()

    async def back() -> None:
        while data := await replica.read():
            moved.to_origin += len(data)
            await origin.write(data)
        origin.close_input()

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(forth())
            tasks.create_task(back())
        await replica.wait()
        await origin.wait()
    finally:
        await asyncio.shield(_both_gone(origin, replica))
    return moved


async def _both_gone(origin: End, replica: End) -> None:
    await origin.gone()
    await replica.gone()
