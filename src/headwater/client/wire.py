"""One WebSocket to a server, over a transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

from headwater.broker.logger import logger
from headwater.client.options import HUNG_UP, Settings
from headwater.errors import Unauthorized, Unreachable
from headwater.protocol.jsonrpc import FRAME_BYTES_MAX
from headwater.protocol.websocket import NORMAL, ClientSocket

BUFFER_BYTES_MAX = 1024 * 1024  # written and not yet taken by the network; above it, calls wait
CLOSE_SECONDS_MAX = 2.0
ANSWER_BYTES_MAX = 16 * FRAME_BYTES_MAX  # a server may be set up for larger frames than ours


async def open_wire(settings: Settings, receive: Callable[[bytes], None], drained: Callable[[], None]) -> Wire:
    """Connect and upgrade; raises OSError, Unauthorized or Unreachable."""
    headers = {} if settings.token is None else {"Authorization": f"Bearer {settings.token}"}
    loop = asyncio.get_running_loop()
    wire = Wire(ClientSocket(settings.url, headers, ANSWER_BYTES_MAX), receive, drained, settings.ping_s)
    await loop.create_connection(lambda: wire, settings.host, settings.port, ssl=settings.tls)
    try:
        await wire.opened
    except BaseException:
        wire.abort()
        raise
    return wire


class Wire(asyncio.Protocol):
    def __init__(
        self, socket: ClientSocket, receive: Callable[[bytes], None], drained: Callable[[], None], ping_s: float
    ) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        self.is_full = False
        self._loop = loop
        self._socket = socket
        self._receive = receive
        self._drained = drained
        self._ping_s = ping_s
        self._transport: asyncio.Transport | None = None
        self._heard_s = loop.time()
        self._has_heard = self._speaks_tls = False
        self._pinger: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        transport.set_write_buffer_limits(high=BUFFER_BYTES_MAX)
        self._speaks_tls = transport.get_extra_info("ssl_object") is not None
        self._flush()
        self._pinger = self._loop.call_later(self._ping_s, self._look_alive)

    def data_received(self, data: bytes) -> None:
        self._heard_s, self._has_heard = self._loop.time(), True
        try:
            texts = self._socket.receive(data)
            if not self.opened.done():
                self._see_whether_open()
            for text in texts:
                self._receive(text)
            self._flush()
        except Exception:  # half of it may have been taken in: only a new connection knows where it stands
            logger.exception("what came from the server could not be taken in; the connection is replaced")
            self.abort()

    def _see_whether_open(self) -> None:
        refusal = self._socket.refusal
        if refusal is not None:
            kind = Unauthorized if refusal.startswith(("401", "403")) else Unreachable
            self.opened.set_exception(kind(f"the server refused the connection: {refusal}"))
        elif self._socket.is_open:
            self.opened.set_result(None)

    def send(self, texts: Sequence[bytes]) -> None:
        for text in texts:
            self._socket.send(text)
        self._flush()

    def _flush(self) -> None:
        data = self._socket.data_to_send()
        if self._transport is not None and not self._transport.is_closing():
            if data:
                self._transport.write(data)
            if self._socket.wants_eof:
                self._transport.close()

    def _look_alive(self) -> None:
        self._pinger = self._loop.call_later(self._ping_s / 2, self._look_alive)  # first: no error may end the looking
        silent_s = self._loop.time() - self._heard_s
        if silent_s >= 2 * self._ping_s:
            self.abort()
            return
        if silent_s >= self._ping_s / 2:
            self._socket.ping()
            self._flush()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self._drained()

    def eof_received(self) -> None:
        self._socket.receive_eof()
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._pinger is not None:
            self._pinger.cancel()
        try:
            if not self.opened.done() and not self._has_heard and self._speaks_tls:
                self.opened.set_exception(Unreachable(HUNG_UP))
            elif not self.opened.done():
                self._socket.receive_eof()
                self._see_whether_open()
        finally:
            if not self.opened.done():
                self.opened.set_exception(Unreachable("the connection broke before it was open"))
            if not self.opened.cancelled():
                self.opened.exception()  # marks it as retrieved, should its waiter be gone
            if not self.lost.done():
                self.lost.set_result(None)

    async def close(self) -> None:
        self._socket.close(NORMAL, "")
        self._flush()
        try:
            async with asyncio.timeout(CLOSE_SECONDS_MAX):
                await asyncio.shield(self.lost)
        except TimeoutError:
            self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
