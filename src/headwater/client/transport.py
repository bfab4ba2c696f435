"""The WebSocket to a server, over asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

from headwater.broker.logger import logger
from headwater.client.options import HUNG_UP, NO_ANSWER, ConnectionSettings
from headwater.errors import UnauthorizedError, UnreachableError
from headwater.protocol.jsonrpc import FRAME_BYTES_MAX
from headwater.protocol.websocket import NORMAL, ClientSocket

BUFFER_BYTES_MAX = 1024 * 1024  # written and not sent yet; above it, calls wait
CLOSE_SECONDS_MAX = 2.0
ANSWER_BYTES_MAX = 16 * FRAME_BYTES_MAX  # a server may be configured for larger frames


async def connect_transport(
    settings: ConnectionSettings, receive: Callable[[bytes], None], drained: Callable[[], None]
) -> ClientTransport:
    """Connect and upgrade; raises OSError, UnauthorizedError or UnreachableError."""
    headers = {} if settings.token is None else {"Authorization": f"Bearer {settings.token}"}
    loop = asyncio.get_running_loop()
    transport = ClientTransport(
        ClientSocket(settings.url, headers, ANSWER_BYTES_MAX), receive, drained, settings.ping_s
    )
    await loop.create_connection(lambda: transport, settings.host, settings.port, ssl=settings.tls)
    try:
        await transport.opened
    except BaseException:
        transport.abort()
        raise
    return transport


class ClientTransport(asyncio.Protocol):
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
        self._received_s = loop.time()
        self._has_received = self._speaks_tls = False
        self._liveness_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        transport.set_write_buffer_limits(high=BUFFER_BYTES_MAX)
        self._speaks_tls = transport.get_extra_info("ssl_object") is not None
        self._flush()
        self._liveness_timer = self._loop.call_later(self._ping_s, self._check_liveness)

    def data_received(self, data: bytes) -> None:
        self._received_s, self._has_received = self._loop.time(), True
        try:
            messages = self._socket.receive_messages(data)
            if not self.opened.done():
                self._check_opened()
            for text, _ in messages:
                self._receive(text)
            if self._socket.idle_frames or not self._socket.is_open:  # a ping or a close to answer
                self._socket.idle_frames = 0
                self._flush()
        except Exception:  # half of the data may be processed: only a new connection has a known state
            logger.exception("data of the server could not be processed; the connection is replaced")
            self.abort()

    def _check_opened(self) -> None:
        refusal = self._socket.refusal
        if refusal is not None:
            kind = UnauthorizedError if refusal.startswith(("401", "403")) else UnreachableError
            self.opened.set_exception(kind(f"the server refused the connection: {refusal}"))
        elif self._socket.is_open:
            self.opened.set_result(None)

    def send(self, texts: Sequence[bytes]) -> None:
        self._socket.send(texts)
        self._flush()

    def _flush(self) -> None:
        data = self._socket.data_to_send()
        if self._transport is not None and not self._transport.is_closing():
            if data:
                self._transport.write(data)
            if self._socket.wants_eof:
                self._transport.close()

    def _check_liveness(self) -> None:
        # First, because an error must not end the checks.
        self._liveness_timer = self._loop.call_later(self._ping_s / 2, self._check_liveness)
        silent_s = self._loop.time() - self._received_s
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
        if self._liveness_timer is not None:
            self._liveness_timer.cancel()
        try:
            if not self.opened.done() and not self._has_received:
                self.opened.set_exception(UnreachableError(HUNG_UP if self._speaks_tls else NO_ANSWER))
            elif not self.opened.done():
                self._socket.receive_eof()
                self._check_opened()
        finally:
            if not self.opened.done():
                self.opened.set_exception(UnreachableError("the connection broke before it was open"))
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
