"""One direction of one connection: reads chunks, keeps them as long as the weather says, and passes them on."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields

CHUNK_BYTES_MAX = 64 * 1024
BUFFER_BYTES_MAX = 4 * 1024 * 1024
THROTTLE_SLICE_S = 0.01


class Direction(enum.Enum):
    TO_SERVER = "client → server"
    TO_CLIENT = "server → client"


class Ending(enum.Enum):
    FIN = "closed"
    RESET = "reset"


@dataclass
class Weather:
    """What one direction suffers at present, on all connections."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float | None = None
    swallowing: bool = False
    cut_in_bytes: int | None = None

    def due_s(self, arrived_s: float, jitter_share: float) -> float:
        return arrived_s + self.delay_s + self.jitter_s * jitter_share

    def clear(self) -> None:
        for field in fields(self):
            setattr(self, field.name, field.default)


@dataclass
class Chunk:
    arrived_s: float
    jitter_share: float
    data: memoryview
    ending: Ending | None = None


class Lane:
    """Two tasks, `fill` and `drain`, with a bounded buffer between them; the source feels a full one as TCP would."""

    def __init__(
        self,
        direction: Direction,
        source: socket.socket,
        target: socket.socket,
        weather: Weather,
        dice: random.Random,
        on_held: Callable[[int], None],
        on_passed: Callable[[Direction, int], None],
        on_swallowed: Callable[[int], None],
        on_cut: Callable[[], None],
        on_target_gone: Callable[[Direction], None],
    ) -> None:
        self.direction = direction
        self.held = False
        self.lost = False
        """Bytes of it were swallowed: a stream with a hole is not TCP, so nothing follows them, not even an end."""
        self.ignoring = False
        """The proxy ended it: what the source still says is read and dropped."""
        self.buffered_bytes = 0
        self._source, self._target = source, target
        self._weather, self._dice = weather, dice
        self._on_held, self._on_passed, self._on_swallowed = on_held, on_passed, on_swallowed
        self._on_cut, self._on_target_gone = on_cut, on_target_gone
        self._chunks: deque[Chunk] = deque()
        self._free_s = 0.0
        self._stirred = asyncio.Event()
        self._room = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def stir(self) -> None:
        """Something changed: decide again."""
        self._stirred.set()

    def end(self, ending: Ending) -> None:
        """As if the source had ended here: what is buffered still goes out, in its time."""
        if not self.ignoring:
            self.ignoring = True
            self._room.set()
            self._keep(memoryview(b""), ending)

    async def fill(self) -> None:
        """Returns when the source has ended."""
        while True:
            while self.buffered_bytes >= BUFFER_BYTES_MAX and not self.ignoring:
                self._room.clear()
                await self._room.wait()
            try:
                data = await self._loop.sock_recv(self._source, CHUNK_BYTES_MAX)
                ending = None if data else Ending.FIN
            except OSError:
                data, ending = b"", Ending.RESET
            if not self.ignoring:
                self._keep(memoryview(data), ending)
            if ending:
                return

    async def drain(self) -> Ending | None:
        """Returns how the source ended, once the target may know; None if it may not."""
        while True:
            self._stirred.clear()
            wait_s = self._wait_s(self._loop.time())
            if wait_s is None or wait_s > 0:
                await self._wait_stirred(wait_s)
            elif self._swallows():
                if self._swallow():
                    return None
            elif (ending := self._chunks[0].ending) is not None:
                return ending
            elif not await self._pass_on():
                return None

    def _keep(self, data: memoryview, ending: Ending | None) -> None:
        self._chunks.append(Chunk(self._loop.time(), self._dice.random(), data, ending))
        self.buffered_bytes += len(data)
        if self.held:
            self._on_held(len(data))
        self.stir()

    def _wait_s(self, now_s: float) -> float | None:
        """Zero: the first chunk is due. None: wait until something changes."""
        if self.held or not self._chunks:
            return None
        if self._swallows():
            return 0
        first, weather = self._chunks[0], self._weather
        due_s = weather.due_s(first.arrived_s, first.jitter_share)
        if weather.bytes_per_s is not None:
            due_s = max(due_s, self._free_s)
        return max(0.0, due_s - now_s)

    async def _wait_stirred(self, wait_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._stirred.wait()

    def _swallows(self) -> bool:
        return self.lost or self._weather.swallowing

    def _swallow(self) -> bool:
        """True if the end went with the rest."""
        self.lost = True
        ended = any(chunk.ending for chunk in self._chunks)
        self._on_swallowed(self.buffered_bytes)
        self._chunks.clear()
        self._took(self.buffered_bytes)
        return ended

    async def _pass_on(self) -> bool:
        """False if nothing may follow."""
        chunk, weather = self._chunks[0], self._weather
        size = len(chunk.data)
        if weather.bytes_per_s is not None:
            size = min(size, max(1, int(weather.bytes_per_s * THROTTLE_SLICE_S)))
        if weather.cut_in_bytes is not None:
            size = min(size, weather.cut_in_bytes)
            weather.cut_in_bytes -= size  # before the send: another connection must not count the same bytes
        is_cut = weather.cut_in_bytes == 0
        if is_cut:
            weather.cut_in_bytes = None
        try:
            await self._loop.sock_sendall(self._target, chunk.data[:size])
        except OSError:
            self.lost = True
            self._on_target_gone(self.direction)
            return False
        if weather.bytes_per_s is not None:
            self._free_s = max(self._free_s, self._loop.time()) + size / weather.bytes_per_s
        chunk.data = chunk.data[size:]
        if not chunk.data:
            self._chunks.popleft()
        self._took(size)
        self._on_passed(self.direction, size)
        if is_cut:
            self._on_cut()
        return not is_cut

    def _took(self, size: int) -> None:
        self.buffered_bytes -= size
        self._room.set()
