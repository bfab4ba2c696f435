"""A session with a client, out of the callbacks of its WebSocket: frames are waited for and sent with backpressure."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from headwater.errors import Corrupt, DiskFull, HeadwaterError, Overloaded, TooLarge, VersionConflict
from headwater.ports.annex import FrameWire
from headwater.protocol.websocket import NORMAL
from headwater.replication.claims import Who
from headwater.replication.host.pace import BYTES_A_SECOND_MIN, Pace
from headwater.replication.names import ABORT
from headwater.replication.tools import READ_BYTES

FRAME_BYTES_MAX = READ_BYTES  # of what a client sends
QUEUED_BYTES_MAX = 1024 * 1024  # received and not yet used; above it, the client is not listened to
FRAME_COST_BYTES = 256  # that a frame takes besides its data
TEXT_BYTES_MAX = 32 * 1024
IDLE_S = 60.0  # for a client to say what it wants, and to be silent in the middle of a small database
WHY_CHARS_MAX = 500
TRY_LATER = 1013


class Gone(Exception):
    """The client has left."""


class Abort(Exception):
    """The session cannot go on; the client is told `ABORT=<code>:<why>`."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(code, why)
        self.code = code
        self.why = why


_CODES: tuple[tuple[type[HeadwaterError], str], ...] = (
    (TooLarge, "TOO_LARGE"),
    (DiskFull, "DISK_FULL"),
    (Corrupt, "CORRUPT"),
    (Overloaded, "BUSY"),
)
UNAUTHORIZED = "UNAUTHORIZED"


def abort_of(error: HeadwaterError) -> Abort:
    """Without `where`: files of the server are no business of its clients."""
    if isinstance(error, VersionConflict):
        return Abort("VERSION_CONFLICT", str(error.newest))
    code = next((code for kind, code in _CODES if isinstance(error, kind)), "FAILED")
    # The client has a disk as well, and its user would look at that one.
    is_unclear = isinstance(error, DiskFull) and "server" not in error.why
    return Abort(code, f"on the server: {error.why}" if is_unclear else error.why)


def _nobody_counts(size: int) -> None:
    pass


def _nothing() -> None:
    pass


class Visit:
    """A `FrameGuest`. `client` is what it calls itself; `count_received` and `count_sent` hear of bytes of pages.
    `on_end` is called when the client has left, or is withdrawn."""

    def __init__(
        self,
        wire: FrameWire,
        client: str,
        count_received: Callable[[int], None] = _nobody_counts,
        count_sent: Callable[[int], None] = _nobody_counts,
    ) -> None:
        self.client = client
        self.who: Who = self
        """Among those who claim."""
        self.is_over = False
        self.on_end: Callable[[], None] = _nothing
        self._withdrawn: Abort | None = None
        self._wire = wire
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
        self._room: asyncio.Future[None] | None = None

    # --- for the session ----------------------------------------------------------------------------------------

    async def next(self, within_s: float | None = None) -> str | bytes | None:
        """The next frame; None when there will be no more. Raises Abort when none came in time, when the client is too
        slow, see `expect_pages`, and once it is withdrawn."""
        self._go_on_or_abort()
        while not self._frames:
            if self.is_over:
                return None
            self._arrival = asyncio.get_running_loop().create_future()
            try:
                await self._wait_for(self._arrival, within_s)
                self._go_on_or_abort()
            finally:
                self._arrival = None
        data, is_text = self._frames.popleft()
        self._queued_bytes -= len(data) + FRAME_COST_BYTES
        if self._is_paused and self._queued_bytes <= QUEUED_BYTES_MAX // 2:
            self._is_paused = False
            self._wire.resume_reading()
        return _text_of(data) if is_text else data

    async def send_text(self, text: str) -> None:
        self.tell(text)
        await self._wait_for_room()

    async def send_binary(self, data: bytes) -> None:
        """Raises Gone when nobody is there to read it, and Abort once the client is withdrawn."""
        if self.is_over:
            raise Gone
        self._go_on_or_abort()
        self.worked()
        self._sent_bytes += len(data)
        self._count_sent(len(data))
        self._wire.send_binary(data)
        await self._wait_for_room()
        self._go_on_or_abort()

    def tell(self, text: str) -> None:
        """A text that may wait until it is read; who leaves too many of them unread is let go."""
        if self.is_over:
            return
        if self._wire.buffered_bytes() > self._wire.outbound_bytes_max:
            self.close(TRY_LATER, "too much was left unread")
        else:
            self._wire.send_text(text.encode())

    def _taken_bytes(self) -> int:
        """Of the pages sent to it. It grows as long as somebody is there, if on a thin line."""
        return self._sent_bytes - self._wire.buffered_bytes()

    async def _wait_for_room(self) -> None:
        while self._wire.buffered_bytes() > self._wire.outbound_bytes_max and not (self.is_over or self._withdrawn):
            self._room = asyncio.get_running_loop().create_future()
            try:
                await self._wait_for(self._room)
            finally:
                self._room = None
        if self.is_over:
            raise Gone

    # --- how long it may take -----------------------------------------------------------------------------------

    def expect_pages(self, patience_s: float) -> None:
        """From now on the client has to keep pace, in whatever direction pages go: it may be silent for so long."""
        self._pace = Pace(time.monotonic(), patience_s)
        self._patience_s = patience_s
        self._credited_bytes = self._taken_bytes()

    def worked(self) -> None:
        """Our side was at work until now, and the client may have had nothing to say."""
        if self._pace is not None:
            self._pace.worked(time.monotonic())

    async def _wait_for(self, event: asyncio.Future[None], within_s: float | None = None) -> None:
        """Until it happens, or it is time to look how long it has taken. Raises Abort if the client is too slow."""
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

    # --- how it ends --------------------------------------------------------------------------------------------

    def withdraw(self, abort: Abort) -> None:
        """The client is no longer welcome, which its session hears as soon as it waits for it. What was decided before
        is still told to it: that its push has become a version is true, whatever it may by now."""
        if not self.is_over and self._withdrawn is None:
            self._withdrawn = abort
            self._wake()
            self.on_end()

    @property
    def is_withdrawn(self) -> bool:
        return self._withdrawn is not None

    def _go_on_or_abort(self) -> None:
        if self._withdrawn is not None:
            raise Abort(self._withdrawn.code, self._withdrawn.why)

    def abort(self, abort: Abort) -> None:
        if not self.is_over:
            why = "".join(letter if letter.isprintable() else " " for letter in abort.why[:WHY_CHARS_MAX])
            self._wire.send_text(f"{ABORT}{abort.code}:{why}".encode())
            self.close(NORMAL, "")

    def close(self, code: int, reason: str) -> None:
        if not self.is_over:
            self._end()
            self._wire.close(code, reason)

    def _end(self) -> None:
        self.is_over = True
        self._wake()
        self.on_end()

    def _wake(self) -> None:
        for waiting in (self._arrival, self._room):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    # --- for the wire -------------------------------------------------------------------------------------------

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
            self._wire.pause_reading()
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def on_drained(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def on_closed(self, *, vanished: bool) -> None:
        self._end()


def _text_of(data: bytes) -> str:
    if len(data) > TEXT_BYTES_MAX:
        raise Abort("FAILED", f"a text of {len(data):,} bytes came, and the limit is {TEXT_BYTES_MAX:,}")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Abort("FAILED", "a text came that is not UTF-8") from None
