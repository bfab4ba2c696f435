"""SQLite's own tools, as child processes. `sqlite3_rsync` has two ends that talk over pipes: the origin reads a
database, the replica writes one, and whoever joins them moves the pages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from typing import IO

import apsw.sqlite_extra

from headwater.errors import ReplicationFailed
from headwater.replication.rsync_stream import ERROR, REPLICA_ERROR, error_at_the_end

try:
    import fcntl
except ImportError:  # no pipes of another size there
    fcntl = None  # type: ignore[assignment]

OWN_GROUP = 0  # of processes: Ctrl-C at a terminal is for the program, which lets them finish or ends them
READ_BYTES = 256 * 1024  # at a time; also the largest frame of a session
PIPE_BYTES = 1024 * 1024
STDERR_BYTES_MAX = 4096  # of what an end complained, as told to the user
EXIT_S_MAX = 60.0  # for an end to go after its last byte: it commits and checkpoints then


def binary(name: str) -> str:
    """The path of a tool that came with APSW."""
    return str(apsw.sqlite_extra.path(name))


class End:
    """One end of `sqlite3_rsync`. It went well if `wait` returns and the other end's says the same: an end that fails
    tells the other one, which complains on its stderr; both exit with 0.

    A replica goes by itself after the last page. An origin then waits for the replica's last words, which can only be
    an error (that the commit failed), and goes when its input is closed. Over a network it may have gone by then, so
    `wait` also raises what its own end was the last to say, if that was an error. Read to the end before."""

    def __init__(self, arguments: list[str], where: str, error: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._where = where
        self._error = error
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
            self._process = subprocess.Popen(
                [binary("sqlite3_rsync"), *arguments],
                stdin=child_in,
                stdout=child_out,
                stderr=self._complaints,
                process_group=OWN_GROUP,
            )
            ours.pop_all()  # they stay
        self.pid = self._process.pid

    @classmethod
    async def origin(cls, path: str) -> End:
        """Reads the database at `path`, in one read transaction."""
        return cls(["--origin", os.path.abspath(path), "x"], path, ERROR)

    @classmethod
    async def replica(cls, path: str) -> End:
        """Writes the database at `path`, in one transaction; it is created if it is not there."""
        return cls(["--replica", "x", os.path.abspath(path)], path, REPLICA_ERROR)

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
        if why or self._process.returncode:
            raise ReplicationFailed(why or f"sqlite3_rsync ended with {self._process.returncode}", where=self._where)

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
