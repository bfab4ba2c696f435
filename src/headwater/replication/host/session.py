"""The server's side of a session: frames are received and sent with backpressure, within limits of time and memory."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from headwater.errors import DiskFullError, HeadwaterError, VersionConflictError
from headwater.protocol.websocket import NORMAL
from headwater.replication.claims import ClientIdentity
from headwater.replication.host.disk import SpaceReservations
from headwater.replication.host.store import ReplicaStore
from headwater.replication.protocol import ABORT, ABORT_ERRORS, CONFIG
from headwater.replication.rsync import READ_BYTES
from headwater.replication.threads import Threads
from headwater.server.mount import MountTransport

if TYPE_CHECKING:
    from headwater.replication.host.events import ReplicaMetrics, VersionAnnouncer
    from headwater.replication.host.subscribe import SubscriberRegistry

FRAME_BYTES_MAX = READ_BYTES  # of one frame of a client
QUEUED_BYTES_MAX = 1024 * 1024  # received and not yet used; above it, reading pauses
FRAME_COST_BYTES = 256  # memory of a frame besides its data
TEXT_BYTES_MAX = 32 * 1024
IDLE_S = 60.0  # of silence: before the first CONFIG, and during the transfer of a small database
WHY_CHARS_MAX = 500
TRY_LATER = 1013
BYTES_A_SECOND_MIN = 4_000  # over the network
READ_BYTES_A_SECOND_MIN = 20_000_000  # of a database, by a client that is silent meanwhile

T = TypeVar("T")


class HostContext(NamedTuple):
    """Shared by all sessions."""

    store: ReplicaStore
    threads: Threads
    announcer: VersionAnnouncer
    subscribers: SubscriberRegistry
    metrics: ReplicaMetrics
    space: SpaceReservations
    bytes_max: int
    """Of one database."""
    idle_s: float
    """That a client may be silent."""


class Gone(Exception):
    """The client has disconnected."""


class Abort(Exception):
    """Ends the session; the client receives `ABORT=<code>:<why>`."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(code, why)
        self.code = code
        self.why = why


def abort_of(error: HeadwaterError) -> Abort:
    """The ABORT that tells a client of an error, without `where`: clients do not see paths of the server."""
    if isinstance(error, VersionConflictError):
        return Abort("VERSION_CONFLICT", str(error.newest))
    code = next((code for code, kind in ABORT_ERRORS.items() if isinstance(error, kind)), "FAILED")
    # The client has a disk as well, and its user would check that one.
    is_unclear = isinstance(error, DiskFullError) and "server" not in error.why
    return Abort(code, f"on the server: {error.why}" if is_unclear else error.why)


def config_of(frame: str | bytes | None, kind: type[T]) -> T:
    """A frame that has to be a CONFIG of this kind."""
    if not isinstance(frame, str) or not frame.startswith(CONFIG):
        came = "nothing more" if frame is None else "a binary frame" if isinstance(frame, bytes) else repr(frame[:20])
        raise Abort("FAILED", f"CONFIG={{…}} has to come here, and {came} came")
    try:
        return msgspec.json.decode(frame[len(CONFIG) :], type=kind)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise Abort("FAILED", f"CONFIG is not as expected: {exc}") from None


def config(**fields: Any) -> str:
    return CONFIG + msgspec.json.encode(fields).decode()


def patience_s(idle_s: float, size: int) -> float:
    """The silence allowed to a client that may read a database of `size` bytes before it answers."""
    return idle_s + size / READ_BYTES_A_SECOND_MIN


class Pace:
    """The minimal speed of a client. Pure; times in seconds.

    There are few slots for pushes and pulls, and neither silence nor dripping bytes may keep one. Waiting for a client
    uses up patience, and every byte that moves, in either direction, restores some of it: below `BYTES_A_SECOND_MIN` in
    the long run it ends. Pauses are allowed: a client reads its whole database before it answers, and the buffers of a
    slow network move much at a time. While the server works, no time passes."""

    def __init__(self, now_s: float, patience_s: float) -> None:
        self._patience_s = self._left_s = patience_s
        self._since_s = now_s
        self._waits = 0

    def wait(self, now_s: float) -> None:
        """Note that the server begins to wait for the client. There may be two waits at a time, to receive and to
        send."""
        if not self._waits:
            self._since_s = now_s
        self._waits += 1

    def waited(self, now_s: float) -> None:
        self._charge(now_s)
        self._waits -= 1

    def worked(self, now_s: float) -> None:
        """Leave out the time so far, in which the server was working."""
        self._since_s = now_s

    def moved(self, size: int, now_s: float) -> None:
        self._charge(now_s)
        self._left_s = min(self._patience_s, self._left_s + size / BYTES_A_SECOND_MIN)

    def left_s(self, now_s: float) -> float:
        """The seconds that are left if nothing moves from now on."""
        self._charge(now_s)
        return self._left_s

    def _charge(self, now_s: float) -> None:
        if self._waits:
            self._left_s -= now_s - self._since_s
        self._since_s = now_s


class ReplicaSession:
    """The frames of one client. `client` is the name that it gives itself; `count_received` and `count_sent` count
    bytes of pages. `on_end` is called when the client disconnects or its rights are revoked."""

    def __init__(
        self,
        transport: MountTransport,
        client: str,
        count_received: Callable[[int], None] = lambda size: None,
        count_sent: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.client = client
        self.identity: ClientIdentity = self
        """Of its claims."""
        self.is_over = False
        self.on_end: Callable[[], None] = lambda: None
        self.revoked: Abort | None = None
        """Why the rights of the client are revoked, if they are."""
        self._transport = transport
        self._frames: deque[tuple[bytes, bool]] = deque()
        self._queued_bytes = 0
        self._count_received = count_received
        self._count_sent = count_sent
        self._pace: Pace | None = None
        self._patience_s = 0.0
        self._sent_bytes = 0
        self._credited_bytes = 0  # of what it took
        self._is_paused = False
        self._arrival: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None

    # --- frames -------------------------------------------------------------------------------------------------

    async def next(self, within_s: float | None = None) -> str | bytes | None:
        """The next frame; None after the last one. Raises Abort when none came in time, when the client is too slow
        (see `expect_pages`), and once its rights are revoked."""
        self._refuse_revoked()
        while not self._frames:
            if self.is_over:
                return None
            self._arrival = asyncio.get_running_loop().create_future()
            try:
                await self._wait_for(self._arrival, within_s)
                self._refuse_revoked()
            finally:
                self._arrival = None
        data, is_text = self._frames.popleft()
        self._queued_bytes -= len(data) + FRAME_COST_BYTES
        if self._is_paused and self._queued_bytes <= QUEUED_BYTES_MAX // 2:
            self._is_paused = False
            self._transport.resume_reading()
        return _text_of(data) if is_text else data

    async def first(self, within_s: float) -> str | bytes:
        """The next frame, without which the session ends."""
        if (frame := await self.next(within_s)) is None:
            raise Gone
        return frame

    async def send_text(self, text: str) -> None:
        self.queue_text(text)
        await self._wait_until_drained()

    async def send_binary(self, data: bytes) -> None:
        """Raises Gone when the client has disconnected, and Abort once its rights are revoked."""
        if self.is_over:
            raise Gone
        self._refuse_revoked()
        self.worked()
        self._sent_bytes += len(data)
        self._count_sent(len(data))
        self._transport.send_binary(data)
        await self._wait_until_drained()
        self._refuse_revoked()

    def queue_text(self, text: str) -> None:
        """Queue a text; a client that leaves too many unread is disconnected."""
        if self.is_over:
            return
        if self._transport.buffered_bytes() > self._transport.outbound_bytes_max:
            self.close(TRY_LATER, "too much was left unread")
        else:
            self._transport.send_text(text.encode())

    def _taken_bytes(self) -> int:
        """The bytes of pages that have left the send buffer. Grows as long as the client reads, however slowly."""
        return self._sent_bytes - self._transport.buffered_bytes()

    async def _wait_until_drained(self) -> None:
        while self._transport.buffered_bytes() > self._transport.outbound_bytes_max and not (
            self.is_over or self.revoked
        ):
            self._drained = asyncio.get_running_loop().create_future()
            try:
                await self._wait_for(self._drained)
            finally:
                self._drained = None
        if self.is_over:
            raise Gone

    # --- pace ---------------------------------------------------------------------------------------------------

    def expect_pages(self, patience_s: float) -> None:
        """Require progress of the client from now on, in either direction: it may be silent for so long."""
        self._pace = Pace(time.monotonic(), patience_s)
        self._patience_s = patience_s
        self._credited_bytes = self._taken_bytes()

    def worked(self) -> None:
        """Leave out the client's silence so far: the server was working."""
        if self._pace is not None:
            self._pace.worked(time.monotonic())

    async def _wait_for(self, event: asyncio.Future[None], within_s: float | None = None) -> None:
        """Wait until it is set, or its time is up. Raises Abort if the client is too slow."""
        pace = self._pace
        if pace is None:
            try:
                async with asyncio.timeout(within_s):
                    await event
            except TimeoutError:
                raise Abort("FAILED", f"nothing came for {within_s:g} s") from None
            return
        pace.wait(now_s := time.monotonic())
        try:
            async with asyncio.timeout(pace.left_s(now_s)):
                await event
        except TimeoutError:
            self._credit_taken(pace)
            if pace.left_s(time.monotonic()) <= 0:
                why = f"nothing moved, or less than {BYTES_A_SECOND_MIN:,} bytes a second"
                raise Abort("FAILED", f"too slow: {why}, for {self._patience_s:.3g} s") from None
        finally:
            pace.waited(time.monotonic())
            self._credit_taken(pace)

    def _credit_taken(self, pace: Pace) -> None:
        if (taken := self._taken_bytes()) > self._credited_bytes:
            pace.moved(taken - self._credited_bytes, time.monotonic())
            self._credited_bytes = taken

    # --- end ----------------------------------------------------------------------------------------------------

    def revoke(self, abort: Abort) -> None:
        """Abort the session at its next wait, for the rights of the client are revoked. A decision before that is still
        sent: a push that has become a version stays one."""
        if not self.is_over and self.revoked is None:
            self.revoked = abort
            self._wake()
            self.on_end()

    def _refuse_revoked(self) -> None:
        if self.revoked is not None:
            raise Abort(self.revoked.code, self.revoked.why)

    def abort(self, abort: Abort) -> None:
        if not self.is_over:
            why = "".join(letter if letter.isprintable() else " " for letter in abort.why[:WHY_CHARS_MAX])
            self._transport.send_text(f"{ABORT}{abort.code}:{why}".encode())
            self.close(NORMAL, "")

    def close(self, code: int, reason: str) -> None:
        if not self.is_over:
            self._end()
            self._transport.close(code, reason)

    def _end(self) -> None:
        self.is_over = True
        self._wake()
        self.on_end()

    def _wake(self) -> None:
        for waiting in (self._arrival, self._drained):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    # --- called by the server -----------------------------------------------------------------------------------

    def receive_text(self, text: bytes) -> None:
        self._receive(text, is_text=True)

    def receive_binary(self, data: bytes) -> None:
        self._receive(data, is_text=False)

    def _receive(self, data: bytes, *, is_text: bool) -> None:
        if self.is_over:
            return
        if not is_text:
            self._count_received(len(data))
        if self._pace is not None:
            self._pace.moved(len(data), time.monotonic())
        self._frames.append((data, is_text))
        self._queued_bytes += len(data) + FRAME_COST_BYTES
        if self._queued_bytes > QUEUED_BYTES_MAX and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def on_drained(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def on_closed(self, *, vanished: bool) -> None:
        self._end()


def _text_of(data: bytes) -> str:
    if len(data) > TEXT_BYTES_MAX:
        raise Abort("FAILED", f"a text of {len(data):,} bytes came, and the limit is {TEXT_BYTES_MAX:,}")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Abort("FAILED", "a text came that is not UTF-8") from None
