"""`sqlite3_rsync`: two processes, joined by pipes or a network, make one database equal to another.

The origin reads a database, the replica writes one; only pages that differ move. Both exit with 0 even if they fail: a
process that fails tells the other one, which prints the error to its stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from typing import IO, Any, Literal

from headwater.errors import ReplicationFailedError
from headwater.replication.local_database import check_database_file, make_private
from headwater.replication.sqlite_tools import OUTPUT_BYTES_MAX, limit_exceeded, start, tool_path
from headwater.replication.threads import together

try:
    import fcntl
except ImportError:  # Windows: pipes keep their size
    fcntl = None  # type: ignore[assignment]

READ_BYTES = 256 * 1024  # at a time; also the largest frame of a session
PIPE_BYTES = 1024 * 1024
EXIT_S_MAX = 60.0  # from the last byte to the exit: a replica commits and checkpoints in this time

# Message types of the protocol, as far as they matter here.
END, ERROR, PAGE, TXN = 0x42, 0x43, 0x44, 0x45  # of an origin
REPLICA_BEGIN, REPLICA_ERROR = 0x61, 0x62  # of a replica
BEGIN_BYTES = 7  # the last four: the number of pages of the origin's database
PAGE_HEAD_BYTES = 5  # the type and the number of the page; the page follows
END_BYTES = 6  # of an origin's last messages: TXN with the number of pages, END

Role = Literal["--origin", "--replica"]


class RsyncProcess:
    """One `sqlite3_rsync` process. A transfer succeeded if `wait` of both processes returns.

    A replica exits after the last page. An origin then waits for an error of the replica (a failed commit), and exits
    when its input is closed. Over a network it may have exited before that error arrives, so `wait` also raises an
    error that was the last message of its own process. Read all output before `wait`."""

    def __init__(self, role: Role, database: str, *, where: str | None = None, **limits: Any) -> None:
        """`database`: as passed to the tool; its error messages, which the peer sees too, spell it that way.
        `limits`: those of `sqlite_tools.start`."""
        self._loop = asyncio.get_running_loop()
        self._where = where or database
        self._error_type = ERROR if role == "--origin" else REPLICA_ERROR
        self._last_output = b""
        self._waiting: dict[IO[bytes], asyncio.Future[None]] = {}
        databases = [database, "x"] if role == "--origin" else ["x", database]
        with contextlib.ExitStack() as failed:
            # A file: a pipe that is not read could fill.
            self._stderr: IO[bytes] = failed.enter_context(tempfile.TemporaryFile())
            self._process = start(
                [tool_path("sqlite3_rsync"), role, *databases],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                **limits,
            )
            failed.pop_all()  # it stays open
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        for pipe in (self._input, self._output):
            os.set_blocking(pipe.fileno(), False)
            _enlarge(pipe)

    @classmethod
    async def origin(cls, path: str) -> RsyncProcess:
        """Reads the database at `path`, in one read transaction."""
        await asyncio.to_thread(check_database_file, path)
        return cls("--origin", os.path.abspath(path), where=path)

    @classmethod
    async def replica(cls, path: str) -> RsyncProcess:
        """Writes the database at `path`, in one transaction; a missing file is created with mode 0600."""
        make_private(path)
        await asyncio.to_thread(check_database_file, path)
        return cls("--replica", os.path.abspath(path), where=path)

    async def read(self) -> bytes:
        """The next part of its output; empty at the end."""
        while True:
            if self._output.closed:
                return b""
            try:
                data = os.read(self._output.fileno(), READ_BYTES)
            except BlockingIOError:
                await self._ready(self._output, self._loop.add_reader)
                continue
            if data:
                is_short = len(data) < OUTPUT_BYTES_MAX
                self._last_output = (self._last_output[-OUTPUT_BYTES_MAX:] + data) if is_short else data
            return data

    async def write(self, data: bytes) -> None:
        """Write to its input. Data for a process that has exited is dropped: `wait` raises why it did."""
        rest = memoryview(data)
        while rest and not self._input.closed:
            try:
                rest = rest[os.write(self._input.fileno(), rest) :]
            except BlockingIOError:
                await self._ready(self._input, self._loop.add_writer)
            except BrokenPipeError:
                self.close_input()

    async def _ready(self, pipe: IO[bytes], add: Callable[[IO[bytes], Callable[[], None]], None]) -> None:
        waiting = self._waiting[pipe] = self._loop.create_future()
        add(pipe, lambda: None if waiting.done() else waiting.set_result(None))
        try:
            await waiting
        finally:
            self._stop_waiting(pipe)

    def _stop_waiting(self, pipe: IO[bytes]) -> None:
        """End the wait for a pipe, once only: after the pipe is closed, its number may belong to another one."""
        waiting = self._waiting.pop(pipe, None)
        if waiting is not None:
            (self._loop.remove_writer if pipe is self._input else self._loop.remove_reader)(pipe)
            if not waiting.done():
                waiting.set_result(None)

    @property
    def is_input_closed(self) -> bool:
        return self._input.closed

    def close_input(self) -> None:
        self._close(self._input)

    def _close(self, pipe: IO[bytes]) -> None:
        self._stop_waiting(pipe)
        pipe.close()

    async def wait(self) -> None:
        """Wait for its exit; raises ReplicationFailedError with its error, if it had one."""
        self.close_input()
        try:
            await asyncio.to_thread(self._process.wait, EXIT_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ReplicationFailedError(f"sqlite3_rsync did not end in {EXIT_S_MAX:g} s", where=self._where) from None
        why = self.error_output() or error_at_the_end(self._last_output, self._error_type)
        self._close_pipes()
        if why or (code := self._process.returncode):
            raise ReplicationFailedError(
                why or limit_exceeded(code) or f"sqlite3_rsync ended with {code}", where=self._where
            )

    def error_output(self) -> str:
        """What it has written to stderr so far."""
        if self._stderr.closed:
            return ""
        text = os.pread(self._stderr.fileno(), OUTPUT_BYTES_MAX, 0).decode(errors="replace")
        lines = [line.removeprefix("ERROR: ").strip() for line in text.splitlines()]
        at_length = "its error output is too long" if len(text) == OUTPUT_BYTES_MAX else ""
        return "; ".join(line for line in lines if line) or at_length

    def refuse_error_output(self) -> None:
        """Raise its errors as soon as it prints one: a remote peer can make it print without end."""
        if error := self.error_output():
            raise ReplicationFailedError(error)

    def kill(self) -> None:
        """End it now. The next connection to a replica's database rolls back what it wrote."""
        if self._process.poll() is None:
            self._process.kill()
        self._close_pipes()

    async def gone(self) -> None:
        """Kill it if it runs, and wait until it has released its files."""
        self.kill()
        await asyncio.to_thread(self._process.wait)

    def _close_pipes(self) -> None:
        self._close(self._input)
        self._close(self._output)
        self._stderr.close()


def _enlarge(pipe: IO[bytes]) -> None:
    resize = getattr(fcntl, "F_SETPIPE_SZ", None)
    if resize is not None:
        with contextlib.suppress(OSError):  # over the limit of this user: only slower
            fcntl.fcntl(pipe, resize, PIPE_BYTES)


class OriginStream:
    """The bytes of an origin's output, counted; only its last messages are kept."""

    def __init__(self, page_size: int = 0) -> None:
        """`page_size`: for `changed_pages`."""
        self._page_size = page_size
        self.bytes = 0
        self._tail = b""

    def feed(self, data: bytes) -> None:
        self.bytes += len(data)
        kept = PAGE_HEAD_BYTES + self._page_size + END_BYTES
        self._tail = data[-kept:] if len(data) >= kept else (self._tail + data)[-kept:]

    @property
    def has_ended(self) -> bool:
        return self.bytes >= END_BYTES and self._tail[-END_BYTES] == TXN and self._tail[-1] == END

    @property
    def may_have_committed(self) -> bool:
        """A replica commits when it receives TXN, which is almost the last message."""
        return TXN in self._tail[-END_BYTES:]

    def changed_pages(self, *, is_first_page_same: bool) -> int:
        """About how many pages were sent: each follows its number, and all other messages are far smaller.

        `is_first_page_same`: but for the counters of changes, which each copy keeps for itself. If that page alone was
        sent, the content has not changed."""
        pages = self.bytes // (PAGE_HEAD_BYTES + self._page_size)
        if pages == 1 and is_first_page_same and self._tail[:PAGE_HEAD_BYTES] == bytes([PAGE, 0, 0, 0, 1]):
            return 0
        return pages


def error_at_the_end(output: bytes, kind: int) -> str:
    """The text of an ERROR or REPLICA_ERROR that is the last message of a process; empty if there is none."""
    if kind == ERROR and output[-END_BYTES : 1 - END_BYTES] == bytes([TXN]) and output[-1:] == bytes([END]):
        return ""
    at = output.rfind(kind)
    while at >= 0:
        text = output[at + 5 :]
        if len(output) > at + 5 and int.from_bytes(output[at + 1 : at + 5], "big") == len(text):
            return text.decode(errors="replace").strip("\0\n ") or "it failed without a message"
        at = output.rfind(kind, 0, at)
    return ""


async def transfer(
    origin_path: str,
    replica_path: str,
    stream: OriginStream,
    on_progress: Callable[[int, int], None] = lambda sent, received: None,
) -> int:
    """Make one database of this machine equal to another; returns the bytes that the replica sent. Raises
    ReplicationFailedError if either process failed. `on_progress`: bytes to and from the replica."""
    received = 0
    async with contextlib.AsyncExitStack() as stack:
        origin = await RsyncProcess.origin(origin_path)
        stack.push_async_callback(lambda: asyncio.shield(origin.gone()))
        replica = await RsyncProcess.replica(replica_path)
        stack.push_async_callback(lambda: asyncio.shield(replica.gone()))

        async def forth() -> None:
            while data := await origin.read():
                stream.feed(data)
                await replica.write(data)
                on_progress(stream.bytes, received)
            replica.close_input()

        async def back() -> None:
            nonlocal received
            while data := await replica.read():
                received += len(data)
                await origin.write(data)
            origin.close_input()

        await together(forth(), back())
        await replica.wait()
        await origin.wait()
    return received
