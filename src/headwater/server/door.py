"""The one port: reads the head of what comes in and hands it on, to a WebSocket or to HTTP."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Sequence
from http import HTTPStatus
from typing import NamedTuple, Protocol, cast

import h11

from headwater.configuration import Limits
from headwater.protocol.websocket import ServerSocket
from headwater.server.logger import logger

HTTP_BODY_BYTES_MAX = 1024 * 1024
HTTP_SECONDS_MAX = 30.0  # for one request, from its first byte to its answer
CLOSE_SECONDS_MAX = 5.0  # for the other end to answer a close
READ_BUFFER_MAX = 64 * 1024


class HttpRequest(NamedTuple):
    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    address: str


class HttpResponse(NamedTuple):
    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class UpgradeRequest(NamedTuple):
    path: str
    headers: dict[str, str]
    address: str


class Refusal(NamedTuple):
    status: int
    text: str


class Client(Protocol):
    """Who takes the texts of a WebSocket; see `connection`."""

    def receive_text(self, text: bytes) -> None: ...

    def on_drained(self) -> None: ...

    def on_closed(self, *, vanished: bool) -> None: ...


class House(Protocol):
    """What the door asks about those who come."""

    limits: Limits

    def admit(self, request: UpgradeRequest, wire: SocketWire) -> Client | Refusal: ...

    def answer(self, request: HttpRequest) -> Awaitable[HttpResponse]: ...

    def came(self, door: Door) -> bool:
        """Somebody is at the door; False if there is no room."""

    def left(self, door: Door) -> None: ...


class Door(asyncio.Protocol):
    """One incoming connection, until its first head is complete."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.address = ""
        self.transport: asyncio.Transport
        self._head = bytearray()
        self._taken_by: SocketWire | HttpExchange | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if isinstance(peer, tuple) else "local"
        if not self.house.came(self):
            self._turn_away(HTTPStatus.SERVICE_UNAVAILABLE)
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HTTP_SECONDS_MAX, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._taken_by is not None:
            self._taken_by.data_received(data)
            return
        if self.transport.is_closing():  # turned away; over TLS more may come in all the same
            return
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if (end if end >= 0 else len(self._head)) > self.house.limits.http_head_bytes:
            self._turn_away(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        if end < 0:
            return
        self._stop_timer()
        head = bytes(self._head)
        self._head.clear()
        if _is_upgrade(head[:end]):
            self._taken_by = wire = SocketWire(self)
            wire.begin(head[: end + 4], head[end + 4 :])
        else:
            self._taken_by = HttpExchange(self)
            self._taken_by.data_received(head)

    def _turn_away(self, status: HTTPStatus) -> None:
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        self.transport.write(head.encode())
        self.transport.close()

    def eof_received(self) -> bool:
        return self._taken_by is not None and self._taken_by.eof_received()

    def pause_writing(self) -> None:
        if self._taken_by is not None:
            self._taken_by.pause_writing()

    def resume_writing(self) -> None:
        if self._taken_by is not None:
            self._taken_by.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.house.left(self)
        if self._taken_by is not None:
            self._taken_by.connection_lost()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _is_upgrade(head: bytes) -> bool:
    lines = head.lower().split(b"\r\n")[1:]
    return any(line.startswith(b"upgrade:") and b"websocket" in line for line in lines)


class SocketWire:
    """A WebSocket to a client, over a transport."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._transport = door.transport
        self._socket = ServerSocket(door.house.limits.frame_bytes)
        self._client: Client | None = None
        self._loop = asyncio.get_running_loop()
        self._pinger: asyncio.TimerHandle | None = None
        self._heard_s = self._loop.time()
        self._asked_s = 0.0  # by a ping
        self._unread_bytes = 0
        self._wants_drain = False
        self._is_paused = False
        self._is_handing_on = False
        self._texts: deque[bytes] = deque()  # read, and not handed on
        limits = door.house.limits
        self._transport.set_write_buffer_limits(high=limits.outbound_bytes, low=limits.outbound_bytes // 4)

    def begin(self, head: bytes, rest: bytes) -> None:
        request = self._socket.receive_request(head)
        if request is not None:
            headers = {name.lower(): value for name, value in request.headers.raw_items()}
            admitted = self._door.house.admit(UpgradeRequest(request.path, headers, self._door.address), self)
            if isinstance(admitted, Refusal):
                self._socket.refuse(admitted.status, admitted.text)
            elif self._socket.accept(request):
                self._client = admitted
                self._pinger = self._loop.call_later(self._door.house.limits.ping_interval, self._look_alive)
            else:
                admitted.on_closed(vanished=False)
        self._flush()
        if self._client is not None:
            self.data_received(rest)  # frames may have come with the head

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        was_open = self._socket.is_open
        texts = self._socket.receive(data)
        if was_open:  # what comes after our goodbye comes too late: its client may be back on another connection
            self._texts.extend(texts)
        self._hand_on()
        self._flush()

    def _hand_on(self) -> None:
        if self._is_handing_on:  # what is handed on may be done at once, and want the next one
            return
        self._is_handing_on = True
        while self._texts and self._client is not None and not self._is_paused:
            self._client.receive_text(self._texts.popleft())
        self._is_handing_on = False

    # --- for the connection -------------------------------------------------------------------------------------

    def send(self, texts: Sequence[bytes]) -> None:
        for text in texts:
            self._socket.send(text)
        self._flush()

    def buffered_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        self._is_paused = True
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._hand_on()
        if not self._is_paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self, code: int, reason: str) -> None:
        self._socket.close(code, reason)
        self._flush()
        self._texts.clear()
        self.resume_reading()  # for the answer to the close
        self._loop.call_later(CLOSE_SECONDS_MAX, self._transport.abort)

    # --- for the transport --------------------------------------------------------------------------------------

    def _flush(self) -> None:
        data = self._socket.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)
        if self._socket.wants_eof:
            self._transport.close()

    def _look_alive(self) -> None:
        """Ask a silent client whether it is there; let go of one that does not answer."""
        limits = self._door.house.limits
        unread_bytes, self._unread_bytes = self._unread_bytes, self.buffered_bytes()
        is_busy = self._is_paused and not self._wants_drain  # it waits for answers, and we do not listen
        if is_busy or self._unread_bytes < unread_bytes:  # or it reads, if slowly
            self._heard_s = self._loop.time()
        now_s = self._loop.time()
        silent_s = now_s - self._heard_s
        if self._asked_s < self._heard_s:
            if silent_s >= limits.ping_interval:
                self._asked_s = now_s
                self._socket.ping()
                self._flush()
        elif now_s - self._asked_s >= limits.ping_timeout:  # so long since it was asked: we may have been silent, too
            told = {"address": self._door.address, "seconds": silent_s}
            logger.info("client %(address)s has not been heard for %(seconds).0f s and is let go", told)
            self._transport.abort()
            return
        wait_s = min(limits.ping_interval, limits.ping_timeout)
        self._pinger = self._loop.call_later(wait_s, self._look_alive)

    def eof_received(self) -> bool:
        self._socket.receive_eof()
        self._flush()
        return False

    def pause_writing(self) -> None:
        self._wants_drain = True

    def resume_writing(self) -> None:
        if self._wants_drain and self._client is not None:
            self._wants_drain = False
            self._client.on_drained()

    def connection_lost(self) -> None:
        if self._pinger is not None:
            self._pinger.cancel()
        if self._client is not None:
            client, self._client = self._client, None
            client.on_closed(vanished=self._socket.close_code == 1006)


class HttpExchange:
    """Plain HTTP/1.1, one request at a time."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._transport = door.transport
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=door.house.limits.http_head_bytes)
        self._request: h11.Request | None = None
        self._body = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._timer = self._new_timer()

    def _new_timer(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(HTTP_SECONDS_MAX, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        self._http.receive_data(data)
        self._advance()

    def _advance(self) -> None:
        try:
            while (event := self._http.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Request):
                    self._request = event
                elif isinstance(event, h11.Data):
                    self._body += event.data
                    if len(self._body) > HTTP_BODY_BYTES_MAX:
                        self._reply(_plain(413, f"the body is longer than {HTTP_BODY_BYTES_MAX} bytes"), close=True)
                        return
                elif isinstance(event, h11.EndOfMessage):
                    self._transport.pause_reading()
                    self._task = asyncio.ensure_future(self._run())
                    return
                elif isinstance(event, h11.ConnectionClosed):
                    self._transport.close()
                    return
            if self._http.they_are_waiting_for_100_continue:
                self._transport.write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        except h11.RemoteProtocolError as exc:
            self._reply(_plain(exc.error_status_hint, str(exc)), close=True)

    async def _run(self) -> None:
        request = self._request
        assert request is not None
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
        asked = HttpRequest(
            request.method.decode("latin-1"),
            request.target.decode("latin-1"),
            headers,
            bytes(self._body),
            self._door.address,
        )
        try:
            response = await self._door.house.answer(asked)
        except Exception:
            told = {"path": asked.target.partition("?")[0], "address": asked.address}
            logger.exception("answering %(path)s failed", told)
            response = _plain(500, "internal error")
        self._task = None
        if not self._transport.is_closing():
            self._reply(response)

    def _reply(self, response: HttpResponse, close: bool = False) -> None:
        self._timer.cancel()
        self._timer = self._new_timer()  # also for one that never reads its answer
        headers = [
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            ("X-Content-Type-Options", "nosniff"),
            *response.headers,
        ]
        if close:
            headers.append(("Connection", "close"))
        is_head = self._request is not None and self._request.method == b"HEAD"
        reason = HTTPStatus(response.status).phrase.encode()
        try:
            answer = h11.Response(status_code=response.status, headers=headers, reason=reason)
            for event in (answer, h11.Data(data=b"" if is_head else response.body), h11.EndOfMessage()):
                self._transport.write(self._http.send(event) or b"")
        except h11.LocalProtocolError:  # it had sent so much nonsense that there is no answering it
            self._transport.close()
            return
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            self._transport.close()
            return
        self._http.start_next_cycle()
        self._request = None
        self._body.clear()
        self._transport.resume_reading()
        self._advance()  # the next request may be here already

    def eof_received(self) -> bool:
        return self._task is not None  # who has closed its half still gets its answer

    def pause_writing(self) -> None:
        """One answer at a time: there is nothing to hold back."""

    def resume_writing(self) -> None:
        """See above."""

    def connection_lost(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()


def _plain(status: int, text: str) -> HttpResponse:
    return HttpResponse(status, "text/plain; charset=utf-8", f"{text}\n".encode())
