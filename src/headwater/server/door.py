"""The one port: reads the head of what comes in and hands it on, to a WebSocket or to HTTP."""

from __future__ import annotations

import asyncio
import string
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol, cast

from websockets.http11 import Request

from headwater.configuration import Limits
from headwater.ports.annex import Refusal, UpgradeRequest
from headwater.protocol.websocket import VANISHED, ServerSocket
from headwater.server.acceptor import Accepted
from headwater.server.budget import MOVED_BYTES_MIN, Account, Budget
from headwater.server.http import Answering, HttpExchange
from headwater.server.logger import logger

HTTP_SECONDS_MAX = 30.0  # for one request, from its first byte to its answer
SLICE_BYTES = 32 * 1024  # read at a time: frames may be as small as two bytes, and others wait meanwhile
SLICE_MESSAGES = 64  # handed on at a time
IDLE_FRAMES_MAX = 1_000  # a second, of frames that carry nothing: pings, pongs, empty fragments
UNREAD_BYTES = 64 * 1024  # from here on, what the client has not read is counted
TRY_LATER = 1013
POLICY_VIOLATION = 1008
CLOSE_SECONDS_MAX = 5.0  # for the other end to answer a close
PONG_BYTES_MAX = 64 * 1024  # for one that pings, and reads nothing
# What a request begins with: the name of its method. TLS begins with 0x16.
FIRST_BYTES = frozenset(b"!#$%&'*+-.^_`|~" + string.ascii_letters.encode() + string.digits.encode())


class Client(Protocol):
    """Who takes the texts of a WebSocket; see `connection`."""

    @property
    def is_stranger(self) -> bool:
        """It has not shown yet who it is."""

    @property
    def is_busy(self) -> bool:
        """It has calls to answer."""

    @property
    def owner(self) -> str:
        """Whose connection it is; "" is its address's."""

    def receive_text(self, text: bytes) -> None: ...

    def on_drained(self) -> None: ...

    def on_closed(self, *, vanished: bool) -> None: ...


class Admitted(NamedTuple):
    client: Client
    receive_binary: Callable[[bytes], None] | None = None
    """None: who sends a binary message is sent away."""
    message_bytes_max: int | None = None
    """None: as long as a frame of JSON-RPC may be."""
    outbound_bytes_max: int | None = None
    """None: as the limits say, which are the most in any case."""
    speaks_rpc: bool = False
    """Its messages are those of JSON-RPC."""


Admission = Admitted | Refusal | Coroutine[Any, Any, Admitted | Refusal]


class House(Answering, Protocol):
    """What the door asks about those who come."""

    limits: Limits

    inbound: Budget
    outbound: Budget

    def admit(self, request: UpgradeRequest, wire: SocketWire) -> Admission: ...

    def recognised(self, door: Door) -> None:
        """It has shown who it is."""

    def left(self, door: Door) -> None: ...


class Door(Accepted):
    """One incoming connection, until its first head is complete."""

    def __init__(self, house: House, address: str, *, has_room: bool) -> None:
        self.house = house
        self.address = address
        self.transport: asyncio.Transport
        self._has_room = has_room
        self._is_dropped = False
        self._head = bytearray()
        self._taken_by: SocketWire | HttpExchange | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        if self._is_dropped:
            transport.abort()
        elif self._has_room:
            seconds = min(HTTP_SECONDS_MAX, self.house.limits.authenticate_timeout)
            self._timer = asyncio.get_running_loop().call_later(seconds, transport.abort)
        else:
            self._turn_away(HTTPStatus.SERVICE_UNAVAILABLE)

    @property
    def is_stranger(self) -> bool:
        return not isinstance(self._taken_by, SocketWire) or self._taken_by.is_stranger

    def drop(self) -> None:
        self._is_dropped = True
        if hasattr(self, "transport"):
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._taken_by is not None:
            self._taken_by.data_received(data)
            return
        if self.transport.is_closing():  # turned away; over TLS more may come in all the same
            return
        self._head += data
        if self._head and self._head[0] not in FIRST_BYTES:
            # The end of a head will never come. To a client that speaks TLS, plain text is an error it knows.
            self._turn_away(HTTPStatus.BAD_REQUEST)
            return
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
            limits = self.house.limits
            body_seconds_max = min(HTTP_SECONDS_MAX, limits.authenticate_timeout)
            self._taken_by = HttpExchange(
                self.transport, self.address, self.house, limits.http_head_bytes, body_seconds_max, HTTP_SECONDS_MAX
            )
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
        self._written_bytes = 0
        self._taken_bytes = 0
        self._pong_bytes = 0
        self._wants_drain = False
        self._is_paused = False  # by the client's own connection
        self._is_held_up = False  # for lack of room, or because what came is not used up
        self._is_handing_on = False
        self._goes_on_soon = False
        self._is_ending = False
        self._is_known = False
        self._admitting: asyncio.Task[None] | None = None
        self._unused = b""  # came before it was admitted, or with what is being used
        self._receive_binary: Callable[[bytes], None] | None = None
        self._messages: deque[tuple[bytes, bool]] = deque()  # read, and not handed on
        self._queued_bytes = 0  # of those
        self._open_bytes = 0  # of frames that have calls without an answer
        self._reserved_bytes = 0
        self._received_bytes = 0
        self._received_messages = 0
        self._idle_frames_left = float(IDLE_FRAMES_MAX)
        self._idle_at_s = self._heard_s
        self.inbound = Account(door.house.inbound, Inbound(self))
        self.outbound = Account(door.house.outbound, Outbound(self))
        self._limit_outbound(door.house.limits.outbound_bytes)

    def _limit_outbound(self, bytes_max: int) -> None:
        self.outbound_bytes_max = bytes_max
        high = min(bytes_max, UNREAD_BYTES)
        self._transport.set_write_buffer_limits(high=high, low=high // 4)

    @property
    def is_stranger(self) -> bool:
        return self._client is None or self._client.is_stranger

    @property
    def owner(self) -> str:
        return (self._client is not None and self._client.owner) or self._door.address

    def begin(self, head: bytes, rest: bytes) -> None:
        request = self._socket.receive_request(head)
        if request is None:
            self._flush()
            return
        headers = {name.lower(): value for name, value in request.headers.raw_items()}
        admitted = self._door.house.admit(UpgradeRequest(request.path, headers, self._door.address), self)
        self._unused = rest  # frames may have come with the head
        if isinstance(admitted, Admitted | Refusal):
            self._answer(request, admitted)
        else:
            self._transport.pause_reading()
            self._admitting = self._loop.create_task(self._answer_later(request, admitted))

    async def _answer_later(self, request: Request, admission: Coroutine[Any, Any, Admitted | Refusal]) -> None:
        try:
            async with asyncio.timeout(HTTP_SECONDS_MAX):
                admitted = await admission
        except Exception:
            told = {"path": request.path.partition("?")[0], "address": self._door.address}
            logger.exception("admitting to %(path)s failed", told)
            admitted = Refusal(500, "internal error\n")
        self._admitting = None
        if self._transport.is_closing():
            if isinstance(admitted, Admitted):
                admitted.client.on_closed(vanished=True)
            return
        self._transport.resume_reading()
        self._answer(request, admitted)

    def _answer(self, request: Request, admitted: Admitted | Refusal) -> None:
        if isinstance(admitted, Refusal):
            self._socket.refuse(admitted.status, admitted.text)
        elif self._socket.accept(request, speaks_rpc=admitted.speaks_rpc):
            self._client, self._receive_binary, limit, outbound_bytes_max, _ = admitted
            self._socket.takes_binary = self._receive_binary is not None
            if limit is not None:
                self._socket.limit_messages(limit)
            if outbound_bytes_max is not None:
                self._limit_outbound(min(outbound_bytes_max, self.outbound_bytes_max))
            self._pinger = self._loop.call_later(self._door.house.limits.ping_interval, self._look_alive)
        else:
            admitted.client.on_closed(vanished=False)
        self._flush()
        if self._client is not None:
            self._use()

    # --- reading ------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        self._received_bytes += len(data)
        self._unused = self._unused + data if self._unused else data
        if self._admitting is None and not self._is_held_up:
            self._use()

    def _use(self) -> None:
        """A slice of what has come; the rest follows when others have had their turn."""
        if self._client is None and not self._socket.is_open:
            self._unused = b""
        data, self._unused = self._unused[:SLICE_BYTES], self._unused[SLICE_BYTES:]
        was_open = self._socket.is_open
        messages = self._socket.receive_messages(data) if data else []
        if was_open:  # what comes after our goodbye comes too late: its client may be back on another connection
            self._messages.extend(messages)
            self._queued_bytes += sum(len(message) for message, _ in messages)
            self._received_messages += len(messages)
        self._answer_pings()
        self._hand_on()
        self._read_or_not()
        if was_open:
            self._bound_idle_frames()
            self._bound_strangers()

    def _use_more(self) -> None:
        self._goes_on_soon = self._is_held_up = False
        if not self._transport.is_closing():
            self._use()

    def _read_or_not(self) -> None:
        """Nothing is read while what came before is not used up, and while there is no room."""
        if self._client is not None:
            self.inbound.set(self._queued_bytes + self._open_bytes + self._socket.unfinished_bytes + len(self._unused))
        if self._transport.is_closing() or self._is_held_up:
            return
        has_more = bool(self._unused) or (bool(self._messages) and not self._is_paused)
        if has_more and not self._goes_on_soon:
            self._goes_on_soon = True
            self._loop.call_soon(self._use_more)
        is_full = self._queued_bytes + self._open_bytes > self._inbound_bytes_max or self._is_asked_who_it_is
        self._is_held_up = has_more or (self._socket.is_open and (is_full or not self.inbound.may_grow))
        if self._is_held_up or self._is_paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    @property
    def _is_asked_who_it_is(self) -> bool:
        """A stranger has sent all it may, and waits for an answer: by that it may be known."""
        return self._client is not None and self._client.is_busy and self._sent_too_much

    @property
    def _sent_too_much(self) -> bool:
        return self.is_stranger and self._received_bytes > self._door.house.limits.unauthenticated_bytes

    @property
    def _inbound_bytes_max(self) -> int:
        limits = self._door.house.limits
        return max(limits.inbound_bytes, limits.frame_bytes)

    def _bound_strangers(self) -> None:
        """Those that are being asked who they are may have sent more behind their answer."""
        if self._is_known or self._client is None:
            return
        if not self._client.is_stranger:
            self._is_known = True
            self._door.house.recognised(self._door)
        elif self._sent_too_much and not self._client.is_busy:
            self._fail(POLICY_VIOLATION, "too much came before a token")

    def _bound_idle_frames(self) -> None:
        idle, self._socket.idle_frames = self._socket.idle_frames, 0
        now_s = self._loop.time()
        left = self._idle_frames_left + (now_s - self._idle_at_s) * IDLE_FRAMES_MAX
        self._idle_frames_left, self._idle_at_s = min(left, IDLE_FRAMES_MAX) - idle, now_s
        if self._idle_frames_left < 0:
            self._fail(POLICY_VIOLATION, "too many frames that carry nothing")

    def _fail(self, code: int, reason: str) -> None:
        """Close without listening any more: the client is in the middle of something that is too much."""
        self._messages.clear()
        self._unused, self._queued_bytes = b"", 0
        self._socket.fail(code, reason)
        self._flush()

    def _answer_pings(self) -> None:
        """What the socket says by itself. Nobody else sends without end to one that does not read."""
        written = self._written_bytes
        self._flush()
        if self._wants_drain:
            self._pong_bytes += self._written_bytes - written
            if self._pong_bytes > PONG_BYTES_MAX:
                self._transport.abort()

    def _hand_on(self) -> None:
        if self._is_handing_on:  # what is handed on may be done at once, and want the next one
            return
        self._is_handing_on = True
        count = 0
        while self._messages and self._client is not None and not self._is_paused and count < SLICE_MESSAGES:
            data, is_text = self._messages.popleft()
            self._queued_bytes -= len(data)
            count += 1
            if is_text:
                self._client.receive_text(data)
            elif self._receive_binary is not None:
                self._receive_binary(data)
        self._is_handing_on = False

    def hold(self, bytes: int) -> None:
        """So many bytes more, or less, of frames with calls that have no answer."""
        self._open_bytes += bytes
        if not self._is_handing_on:
            self.go_on()

    def go_on(self) -> None:
        """There may be room again."""
        self._is_held_up = False
        self._read_or_not()

    # --- for the connection, or the guest of an annex -----------------------------------------------------------------

    def send(self, texts: Sequence[bytes]) -> None:
        for text in texts:
            self._socket.send(text)
        self._flush()

    def send_text(self, text: bytes) -> None:
        self._socket.send(text)
        self._flush()

    def send_binary(self, data: bytes) -> None:
        self._socket.send_binary(data)
        self._flush()

    def buffered_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def reserve(self, bytes: int) -> None:
        """So many bytes more, or less, that are being read to be sent."""
        if self._client is not None:
            self._reserved_bytes += bytes
            self._count_outbound()

    def _count_outbound(self) -> None:
        unread_bytes = self.buffered_bytes()
        self.outbound.set(self._reserved_bytes + (unread_bytes if unread_bytes > UNREAD_BYTES else 0))

    def pause_reading(self) -> None:
        self._is_paused = True
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._hand_on()
        self.go_on()

    def close(self, code: int, reason: str, within_s: float = CLOSE_SECONDS_MAX) -> None:
        self._socket.close(code, reason)
        self._flush()
        self._messages.clear()
        self._queued_bytes = 0
        self.resume_reading()  # for the answer to the close, behind what is on its way
        self._loop.call_later(within_s, self._transport.abort)

    def give_up(self, why: str) -> None:
        told = {"address": self._door.address, "why": why}
        logger.warning("client %(address)s is let go: %(why)s", told)
        self._fail(TRY_LATER, why)

    # --- for the transport --------------------------------------------------------------------------------------

    def _flush(self) -> None:
        data = self._socket.data_to_send()
        if data and not self._transport.is_closing():
            self._written_bytes += len(data)
            self._transport.write(data)
            self._count_outbound()
        if self._socket.wants_eof and not self._is_ending:
            self._end()

    def _end(self) -> None:
        """Close; but while a client that broke the rules may still be sending, first wait for it. What is unread when a
        connection closes resets it, and the client would never see why."""
        if self._client is None or self._socket.close_code != VANISHED:
            self._transport.close()
            return
        self._is_ending = True
        self._leave()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self.resume_reading()
        self._loop.call_later(CLOSE_SECONDS_MAX, self._transport.abort)

    def _look_alive(self) -> None:
        """Ask a silent client whether it is there; let go of one that does not answer."""
        limits = self._door.house.limits
        had_unread, self._unread_bytes = self._unread_bytes > 0, self.buffered_bytes()
        taken_bytes, self._taken_bytes = self._taken_bytes, self._written_bytes - self._unread_bytes
        is_busy = (self._is_paused or self._is_held_up) and not self._wants_drain  # we do not listen
        if is_busy or (had_unread and self._taken_bytes > taken_bytes):  # or it reads, if slowly
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
        self._count_outbound()
        if self._wants_drain and self._client is not None:
            self._wants_drain = False
            self._pong_bytes = 0
            self._client.on_drained()

    def connection_lost(self) -> None:
        self._leave()
        self._reserved_bytes = 0
        self.outbound.close()

    def _leave(self) -> None:
        if self._pinger is not None:
            self._pinger.cancel()
        self.inbound.close()
        if self._client is not None:
            client, self._client = self._client, None
            client.on_closed(vanished=self._socket.close_code == VANISHED)


class Inbound:
    """The account of what a client sent."""

    def __init__(self, wire: SocketWire) -> None:
        self._wire = wire

    @property
    def owner(self) -> str:
        return self._wire.owner

    def is_awaited(self) -> bool:
        wire = self._wire
        return wire._socket.unfinished_bytes > 0 and not wire._is_paused and not wire._is_held_up

    def moved_bytes(self) -> int:
        """A whole message is progress, however short."""
        return self._wire._received_bytes + MOVED_BYTES_MIN * self._wire._received_messages

    def on_room(self) -> None:
        self._wire._loop.call_soon(self._wire.go_on)

    def on_stalled(self) -> None:
        self._wire.give_up("too much is unfinished for too long")


class Outbound:
    """The account of what is sent to a client."""

    def __init__(self, wire: SocketWire) -> None:
        self._wire = wire

    @property
    def owner(self) -> str:
        return self._wire.owner

    def is_awaited(self) -> bool:
        return self._wire.buffered_bytes() > UNREAD_BYTES

    def moved_bytes(self) -> int:
        return self._wire._written_bytes - self._wire.buffered_bytes()

    def on_room(self) -> None:
        client = self._wire._client
        if client is not None:
            self._wire._loop.call_soon(client.on_drained)

    def on_stalled(self) -> None:
        self._wire.give_up("too much is unread for too long")
