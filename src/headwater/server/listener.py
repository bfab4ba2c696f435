"""The server's port: accepts connections, reads the first HTTP head and continues as WebSocket or plain HTTP/1.1.

A connection is unauthenticated until it has shown a token; on a server without tokens, until its WebSocket is accepted.
Unauthenticated connections have limits of their own, in total and for each address. A new one then replaces the oldest,
so that silent connections lock out no client.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import string
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import h11
from websockets.http11 import Request

from headwater.protocol.websocket import POLICY_VIOLATION, TRY_LATER, VANISHED, ServerSocket
from headwater.server.budget import MOVED_BYTES_MIN, Account, Budget
from headwater.server.logging import logger
from headwater.server.mount import HttpRequest, HttpResponse, Refusal, UpgradeRequest, text_response
from headwater.settings import is_loopback

if TYPE_CHECKING:
    from headwater.server.server import Server

try:
    import resource
except ImportError:  # not on every system
    resource = None  # type: ignore[assignment]

BACKLOG = 1_024
FILES_RESERVED = 256  # open files besides connections: the database, its readers, replicas, child processes
PAUSE_S = 0.2  # without accepting, when the process or the system is out of files
ADDRESS_PART = 4  # one address may have a quarter of all connections, unless the limits set another number
HTTP_SECONDS_MAX = 30.0  # for one request, from its first byte to its answer
HTTP_BODY_BYTES_MAX = 64 * 1024  # of a request, whose client may be unauthenticated
SLICE_BYTES = 32 * 1024  # processed at a time: frames may be as small as two bytes, and other connections wait
SLICE_MESSAGES = 64  # dispatched at a time
IDLE_FRAMES_MAX = 1_000  # a second, of frames without data: pings, pongs, empty fragments
UNREAD_BYTES = 64 * 1024  # above this, bytes that the client has not read are counted
CLOSE_SECONDS_MAX = 5.0  # for the client to answer a close
PONG_BYTES_MAX = 64 * 1024  # for a client that sends pings and reads nothing
# A request begins with the name of its method. TLS begins with 0x16.
FIRST_BYTES = frozenset(b"!#$%&'*+-.^_`|~" + string.ascii_letters.encode() + string.digits.encode())
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Client(Protocol):
    """Receives the texts of a WebSocket; see `connection`."""

    @property
    def is_unauthenticated(self) -> bool: ...

    @property
    def is_busy(self) -> bool:
        """Whether it has calls without an answer."""

    @property
    def owner(self) -> str:
        """The owner of the connection; "" stands for its address."""

    def receive_text(self, text: bytes) -> None: ...

    def on_drained(self) -> None: ...

    def on_closed(self, *, vanished: bool) -> None: ...


class Admitted(NamedTuple):
    client: Client
    receive_binary: Callable[[bytes], None] | None = None
    """None: a binary message closes the connection."""
    message_bytes_max: int | None = None
    """None: the limit of a JSON-RPC frame."""
    outbound_bytes_max: int | None = None
    """None: the limit of the settings, which is the maximum in any case."""
    speaks_rpc: bool = False
    """Its messages are JSON-RPC."""


Admission = Admitted | Refusal | Coroutine[Any, Any, Admitted | Refusal]


class Acceptor:
    """Accepts connections within the limits of the server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.connections: set[IncomingConnection] = set()
        self.by_address: dict[str, int] = {}
        self._limits = server.limits
        self._connections_max = server.limits.connections
        self._unauthenticated: _Ordered = OrderedDict()  # oldest first; some may have authenticated since
        self._unauthenticated_at: dict[str, _Ordered] = {}
        self._sockets: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._connecting: dict[IncomingConnection, asyncio.Task[None]] = {}  # their TLS handshake is under way
        self._tls: ssl.SSLContext | None = None

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        self._connections_max = _connections_max(self._limits.connections)
        self._tls = tls
        bound = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
        self._sockets = [each.dup() for each in bound.sockets]
        bound.close()
        try:
            for each in self._sockets:
                each.listen(BACKLOG)
                each.setblocking(False)
        except OSError:
            self.close()
            raise
        self._tasks = [loop.create_task(self._accept(each)) for each in self._sockets]

    @property
    def port(self) -> int:
        return int(self._sockets[0].getsockname()[1])

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for each in self._sockets:
            each.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peer = await loop.sock_accept(listening)
            except OSError as exc:
                if exc.errno in _OUT_OF_FILES:
                    details = {"why": exc.strerror, "count": len(self.connections)}
                    logger.warning("no connection can be accepted: %(why)s; there are %(count)d", details)
                await asyncio.sleep(PAUSE_S if exc.errno in _OUT_OF_FILES else 0)
                continue
            try:
                self._begin(accepted, str(peer[0]) if isinstance(peer, tuple) else "local")
            except Exception:  # the next one must be accepted all the same
                logger.exception("a connection was not accepted")
                accepted.close()
            await asyncio.sleep(0)  # an accept that need not wait does not yield to other tasks

    def _begin(self, accepted: socket.socket, address: str) -> None:
        has_room = self._make_room(address)
        if not has_room:
            self.server.metrics.refused.labels("full").inc()
            logger.warning("a connection is refused: there are %(count)d", {"count": len(self.connections)})
            if self._tls is not None:  # a refusal would cost a handshake
                accepted.close()
                return
        connection = IncomingConnection(self, address, has_room=has_room)
        if has_room:
            self._add(connection)
        task = asyncio.get_running_loop().create_task(self._connect(connection, accepted))
        task.add_done_callback(lambda task: accepted.close() if task.cancelled() else None)
        self._connecting[connection] = task

    async def _connect(self, connection: IncomingConnection, accepted: socket.socket) -> None:
        loop, seconds = asyncio.get_running_loop(), self._limits.authenticate_timeout
        options = {} if self._tls is None else {"ssl_handshake_timeout": seconds, "ssl_shutdown_timeout": seconds}
        try:
            await loop.connect_accepted_socket(lambda: connection, accepted, ssl=self._tls, **options)
        except (OSError, ssl.SSLError):  # the client left, speaks no TLS, or is too slow
            self.remove(connection)
            accepted.close()
        finally:
            self._connecting.pop(connection, None)

    # --- limits -------------------------------------------------------------------------------------------------

    def _make_room(self, address: str) -> bool:
        limits, here = self._limits, self._unauthenticated_at.get(address, OrderedDict())
        total = limits.unauthenticated
        if len(here) >= _for_address(limits.unauthenticated_per_address, total, address):
            self._drop_oldest(here)
        if len(self._unauthenticated) >= total:
            self._drop_oldest(self._unauthenticated)
        most_here = _for_address(limits.connections_per_address, self._connections_max, address)
        if self.by_address.get(address, 0) >= most_here:
            return self._drop_oldest(here)
        return len(self.connections) < self._connections_max or self._drop_oldest(self._unauthenticated)

    def _drop_oldest(self, unauthenticated: _Ordered) -> bool:
        """Returns False if all have authenticated."""
        while unauthenticated:
            oldest = next(iter(unauthenticated))
            if not oldest.is_unauthenticated:
                self.on_authenticated(oldest)
                continue
            self.remove(oldest)
            connecting = self._connecting.pop(oldest, None)
            if connecting is not None:
                connecting.cancel()
            oldest.drop()
            return True
        return False

    def _add(self, connection: IncomingConnection) -> None:
        self.connections.add(connection)
        self.by_address[connection.address] = self.by_address.get(connection.address, 0) + 1
        self._unauthenticated[connection] = None
        self._unauthenticated_at.setdefault(connection.address, OrderedDict())[connection] = None

    def on_authenticated(self, connection: IncomingConnection) -> None:
        self._unauthenticated.pop(connection, None)
        here = self._unauthenticated_at.get(connection.address)
        if here is not None:
            here.pop(connection, None)
            if not here:
                del self._unauthenticated_at[connection.address]

    def remove(self, connection: IncomingConnection) -> None:
        if connection in self.connections:
            self.connections.discard(connection)
            self.on_authenticated(connection)
            self.by_address[connection.address] -= 1
            if not self.by_address[connection.address]:
                del self.by_address[connection.address]


def _for_address(limit: int, total: int, address: str) -> int:
    """A loopback address may be a proxy, and so stand for all clients."""
    is_local = address == "local" or is_loopback(address.partition("%")[0])
    return limit or (total if is_local else max(1, total // ADDRESS_PART))


def _connections_max(wanted: int) -> int:
    """The wanted number, or fewer if the system's limit of open files cannot be raised that far."""
    if resource is None:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + FILES_RESERVED
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    possible = soft - min(FILES_RESERVED, soft // 2)
    details = {"possible": possible, "wanted": wanted, "files": soft}
    logger.warning(
        "at most %(possible)d connections, not %(wanted)d: this process may have %(files)d files open", details
    )
    return possible


class IncomingConnection(asyncio.Protocol):
    """An accepted connection. It reads the first head; then `WebSocketTransport` or `HttpExchange` is the protocol."""

    def __init__(self, acceptor: Acceptor, address: str, *, has_room: bool) -> None:
        self.acceptor = acceptor
        self.server = acceptor.server
        self.address = address
        self.transport: asyncio.Transport
        self.websocket: WebSocketTransport | None = None
        self._has_room = has_room
        self._is_dropped = False
        self._head = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        if self._is_dropped:
            transport.abort()
        elif self._has_room:
            seconds = min(HTTP_SECONDS_MAX, self.server.limits.authenticate_timeout)
            self._timer = asyncio.get_running_loop().call_later(seconds, transport.abort)
        else:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE)

    @property
    def is_unauthenticated(self) -> bool:
        return self.websocket is None or self.websocket.is_unauthenticated

    def drop(self) -> None:
        self._is_dropped = True
        if hasattr(self, "transport"):
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # refused; over TLS more data may arrive
            return
        self._head += data
        if self._head and self._head[0] not in FIRST_BYTES:
            # The end of a head will never come. A TLS client recognises plain text as an error.
            self._refuse(HTTPStatus.BAD_REQUEST)
            return
        limits = self.server.limits
        end = self._head.find(b"\r\n\r\n")
        if (end if end >= 0 else len(self._head)) > limits.http_head_bytes:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        if end < 0:
            return
        self._stop_timer()
        head = bytes(self._head)
        self._head.clear()
        if _is_upgrade(head[:end]):
            self.websocket = WebSocketTransport(self)
            self.transport.set_protocol(self.websocket)
            self.websocket.begin(head[: end + 4], head[end + 4 :])
        else:
            exchange = HttpExchange(self, min(HTTP_SECONDS_MAX, limits.authenticate_timeout))
            self.transport.set_protocol(exchange)
            exchange.data_received(head)

    def _refuse(self, status: HTTPStatus) -> None:
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        self.transport.write(head.encode())
        self.transport.close()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.acceptor.remove(self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_Ordered = OrderedDict[IncomingConnection, None]


def _is_upgrade(head: bytes) -> bool:
    lines = head.lower().split(b"\r\n")[1:]
    return any(line.startswith(b"upgrade:") and b"websocket" in line for line in lines)


class WebSocketTransport(asyncio.Protocol):
    """The WebSocket of a client. It passes messages to the client's connection, or to the session of a mount."""

    def __init__(self, incoming: IncomingConnection) -> None:
        limits = incoming.server.limits
        self._incoming = incoming
        self._limits = limits
        self._transport = incoming.transport
        self._socket = ServerSocket(limits.frame_bytes)
        self._client: Client | None = None
        self._loop = asyncio.get_running_loop()
        self._liveness_timer: asyncio.TimerHandle | None = None
        self._received_s = self._loop.time()
        self._pinged_s = 0.0
        self._unread_bytes = 0
        self._written_bytes = 0
        self._read_bytes = 0  # by the client
        self._pong_bytes = 0
        self._wants_drain = False
        self._is_paused = False  # by the client's connection
        self._is_held = False  # for lack of room, or because earlier data is not processed yet
        self.is_dispatching = False
        self._is_scheduled = False
        self._is_ending = False
        self._is_authenticated = False
        self._admitting: asyncio.Task[None] | None = None
        self._pending = b""  # arrived before the admission, or together with data that is being processed
        self._receive_binary: Callable[[bytes], None] | None = None
        self._messages: deque[tuple[bytes, bool]] = deque()  # complete, and not dispatched
        self._queued_bytes = 0  # of those
        self._open_bytes = 0  # of frames that have calls without an answer
        self._open_bytes_max = max(limits.inbound_bytes, limits.frame_bytes)
        self._reserved_bytes = 0
        self._received_bytes = 0
        self._received_messages = 0
        self._idle_frames_left = float(IDLE_FRAMES_MAX)
        self._idle_frames_s = self._received_s
        self.inbound = Inbound(incoming.server.inbound, self)
        self.outbound = Outbound(incoming.server.outbound, self)
        self._limit_outbound(limits.outbound_bytes)

    def _limit_outbound(self, bytes_max: int) -> None:
        self.outbound_bytes_max = bytes_max
        high = min(bytes_max, UNREAD_BYTES)
        self._transport.set_write_buffer_limits(high=high, low=high // 4)

    @property
    def is_unauthenticated(self) -> bool:
        return self._client is None or self._client.is_unauthenticated

    @property
    def owner(self) -> str:
        return (self._client is not None and self._client.owner) or self._incoming.address

    def begin(self, head: bytes, rest: bytes) -> None:
        request = self._socket.receive_request(head)
        if request is None:
            self._flush()
            return
        headers = {name.lower(): value for name, value in request.headers.raw_items()}
        asked = UpgradeRequest(request.path, headers, self._incoming.address)
        admission = self._incoming.server.admit(asked, self)
        self._pending = rest  # frames may have come with the head
        if isinstance(admission, Admitted | Refusal):
            self._answer(request, admission)
        else:
            self._transport.pause_reading()
            self._admitting = self._loop.create_task(self._answer_later(request, admission))

    async def _answer_later(self, request: Request, admission: Coroutine[Any, Any, Admitted | Refusal]) -> None:
        try:
            async with asyncio.timeout(HTTP_SECONDS_MAX):
                admitted = await admission
        except Exception:
            details = {"path": request.path.partition("?")[0], "address": self._incoming.address}
            logger.exception("admitting to %(path)s failed", details)
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
            self._liveness_timer = self._loop.call_later(self._limits.ping_interval, self._check_liveness)
        else:
            admitted.client.on_closed(vanished=False)
        self._flush()
        if self._client is not None:
            self._process()

    # --- reading ------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._received_s = self._loop.time()
        self._received_bytes += len(data)
        self._pending = self._pending + data if self._pending else data
        if self._admitting is None and not self._is_held:
            self._process()

    def _process(self) -> None:
        """A slice of the data received; the rest follows after the other connections."""
        was_open = self._socket.is_open
        if self._client is None and not was_open:
            self._pending = b""
        data, self._pending = self._pending[:SLICE_BYTES], self._pending[SLICE_BYTES:]
        messages = self._socket.receive_messages(data) if data else []
        if was_open:  # messages after our close come too late: the client may have another connection by now
            for message in messages:
                self._messages.append(message)
                self._queued_bytes += len(message[0])
            self._received_messages += len(messages)
        if self._socket.idle_frames or not self._socket.is_open:  # pings, a close, or a violation to answer
            self._answer_control_frames()
        self._dispatch()
        self._update_reading()
        if was_open:
            if self._socket.idle_frames:
                self._limit_idle_frames()
            if not self._is_authenticated:
                self._limit_unauthenticated()

    def _process_more(self) -> None:
        self._is_scheduled = self._is_held = False
        if not self._transport.is_closing():
            self._process()

    def _update_reading(self) -> None:
        """Reads nothing while earlier data is unprocessed, and while there is no room."""
        if self._client is not None:
            self._count_inbound()
        if self._transport.is_closing() or self._is_held:
            return
        has_more = bool(self._pending) or (bool(self._messages) and not self._is_paused)
        if has_more and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._process_more)
        is_full = self._queued_bytes + self._open_bytes > self._open_bytes_max or (
            not self._is_authenticated and self._awaits_authentication
        )
        self._is_held = has_more or ((is_full or not self.inbound.may_grow) and self._socket.is_open)
        if self._is_held or self._is_paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _count_inbound(self) -> None:
        unfinished_bytes = self._socket.unfinished_bytes
        self.inbound.set(self._queued_bytes + self._open_bytes + unfinished_bytes + len(self._pending))

    @property
    def _awaits_authentication(self) -> bool:
        """An unauthenticated client has sent all it may, and waits for an answer, which may authenticate it."""
        return self._client is not None and self._client.is_busy and self._sent_too_much

    @property
    def _sent_too_much(self) -> bool:
        return self.is_unauthenticated and self._received_bytes > self._limits.unauthenticated_bytes

    def _limit_unauthenticated(self) -> None:
        """A client with a call under way may have sent more behind it; that call may authenticate it."""
        if self._client is None:
            return
        if not self._client.is_unauthenticated:
            self._is_authenticated = True
            self._incoming.acceptor.on_authenticated(self._incoming)
        elif self._sent_too_much and not self._client.is_busy:
            self._fail(POLICY_VIOLATION, "too much came before a token")

    def _limit_idle_frames(self) -> None:
        idle, self._socket.idle_frames = self._socket.idle_frames, 0
        now_s = self._loop.time()
        left = self._idle_frames_left + (now_s - self._idle_frames_s) * IDLE_FRAMES_MAX
        self._idle_frames_left, self._idle_frames_s = min(left, IDLE_FRAMES_MAX) - idle, now_s
        if self._idle_frames_left < 0:
            self._fail(POLICY_VIOLATION, "too many frames that carry nothing")

    def _fail(self, code: int, reason: str) -> None:
        """Close and process nothing more: the client is sending more than it may."""
        self._messages.clear()
        self._pending, self._queued_bytes = b"", 0
        self._socket.fail(code, reason)
        self._flush()

    def _answer_control_frames(self) -> None:
        """Pongs are the only data without a limit to a client that does not read."""
        written = self._written_bytes
        self._flush()
        if self._wants_drain:
            self._pong_bytes += self._written_bytes - written
            if self._pong_bytes > PONG_BYTES_MAX:
                self._transport.abort()

    def _dispatch(self) -> None:
        if self.is_dispatching:  # a message may be done at once, and make room for the next one
            return
        self.is_dispatching = True
        count = 0
        while self._messages and self._client is not None and not self._is_paused and count < SLICE_MESSAGES:
            data, is_text = self._messages.popleft()
            self._queued_bytes -= len(data)
            count += 1
            if is_text:
                self._client.receive_text(data)
            elif self._receive_binary is not None:
                self._receive_binary(data)
        self.is_dispatching = False

    def hold(self, bytes: int) -> None:
        """Adds the bytes of a frame with calls that have no answer; a negative number removes them."""
        self._open_bytes += bytes
        if self.is_dispatching:
            return
        if self._is_held:
            self.on_room()
        elif self._client is not None:
            self._count_inbound()

    def on_room(self) -> None:
        self._is_held = False
        self._update_reading()

    # --- for the connection, or the session of a mount --------------------------------------------------------------

    def send(self, texts: Sequence[bytes]) -> None:
        self._socket.send(texts)
        self._flush()

    def send_text(self, text: bytes) -> None:
        self.send((text,))

    def send_binary(self, data: bytes) -> None:
        self._socket.send_binary(data)
        self._flush()

    def buffered_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def reserve(self, bytes: int) -> None:
        """Reserves outbound room for bytes that are being read to be sent; a negative number releases it."""
        if self._client is not None:
            self._reserved_bytes += bytes
            self._count_outbound()

    def _count_outbound(self) -> None:
        unread_bytes = self._transport.get_write_buffer_size()
        self.outbound.set(self._reserved_bytes + (unread_bytes if unread_bytes > UNREAD_BYTES else 0))

    def pause_reading(self) -> None:
        self._is_paused = True
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._dispatch()
        self.on_room()

    def close(self, code: int, reason: str, within_s: float | None = None) -> None:
        self._socket.close(code, reason)
        self._flush()
        self._messages.clear()
        self._queued_bytes = 0
        self.resume_reading()  # for the answer to the close, which follows data that is under way
        self._loop.call_later(CLOSE_SECONDS_MAX if within_s is None else within_s, self._transport.abort)

    def close_stalled(self, why: str) -> None:
        details = {"address": self._incoming.address, "why": why}
        logger.warning("client %(address)s is disconnected: %(why)s", details)
        self._fail(TRY_LATER, why)

    # --- for the event loop -------------------------------------------------------------------------------------

    def _flush(self) -> None:
        data = self._socket.data_to_send()
        if data and not self._transport.is_closing():
            self._written_bytes += len(data)
            self._transport.write(data)
            self._count_outbound()
        if self._socket.wants_eof and not self._is_ending:
            self._end()

    def _end(self) -> None:
        """Close; but wait for the end of a client that violated the protocol and may still be sending. Unread data
        resets a connection that is closed, and the client would never see why."""
        if self._client is None or self._socket.close_code != VANISHED:
            if not self._transport.is_closing():  # closed twice, TLS of asyncio forgets the size of its buffer
                self._transport.close()
            return
        self._is_ending = True
        self._detach()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self.resume_reading()
        self._loop.call_later(CLOSE_SECONDS_MAX, self._transport.abort)

    def _check_liveness(self) -> None:
        """Ping a silent client, and abort the connection of one that does not answer."""
        limits = self._limits
        had_unread, self._unread_bytes = self._unread_bytes > 0, self.buffered_bytes()
        read_bytes, self._read_bytes = self._read_bytes, self._written_bytes - self._unread_bytes
        server_stopped_reading = (self._is_paused or self._is_held) and not self._wants_drain
        client_reads_slowly = had_unread and self._read_bytes > read_bytes
        if server_stopped_reading or client_reads_slowly:  # the client is alive
            self._received_s = self._loop.time()
        now_s = self._loop.time()
        silent_s = now_s - self._received_s
        if self._pinged_s < self._received_s:
            if silent_s >= limits.ping_interval:
                self._pinged_s = now_s
                self._socket.ping()
                self._flush()
        elif now_s - self._pinged_s >= limits.ping_timeout:  # from the ping on: before it the server may have paused
            details = {"address": self._incoming.address, "seconds": silent_s}
            logger.info("client %(address)s was silent for %(seconds).0f s and is disconnected", details)
            self._transport.abort()
            return
        wait_s = min(limits.ping_interval, limits.ping_timeout)
        self._liveness_timer = self._loop.call_later(wait_s, self._check_liveness)

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

    def connection_lost(self, exc: Exception | None) -> None:
        self._incoming.connection_lost(exc)
        self._detach()
        self._reserved_bytes = 0
        self.outbound.close()

    def _detach(self) -> None:
        if self._liveness_timer is not None:
            self._liveness_timer.cancel()
        self.inbound.close()
        if self._client is not None:
            client, self._client = self._client, None
            client.on_closed(vanished=self._socket.close_code == VANISHED)


class _WebSocketAccount(Account):
    def __init__(self, budget: Budget, websocket: WebSocketTransport) -> None:
        super().__init__(budget)
        self._websocket = websocket

    @property
    def owner(self) -> str:
        return self._websocket.owner


class Inbound(_WebSocketAccount):
    """The bytes that a client sent."""

    def is_awaited(self) -> bool:
        websocket = self._websocket
        return websocket._socket.unfinished_bytes > 0 and not websocket._is_paused and not websocket._is_held

    def moved_bytes(self) -> int:
        """A whole message is progress, however short."""
        return self._websocket._received_bytes + MOVED_BYTES_MIN * self._websocket._received_messages

    def on_room(self) -> None:
        self._websocket._loop.call_soon(self._websocket.on_room)

    def on_stalled(self) -> None:
        self._websocket.close_stalled("too much is unfinished for too long")


class Outbound(_WebSocketAccount):
    """The bytes that are sent to a client."""

    def is_awaited(self) -> bool:
        return self._websocket.buffered_bytes() > UNREAD_BYTES

    def moved_bytes(self) -> int:
        return self._websocket._written_bytes - self._websocket.buffered_bytes()

    def on_room(self) -> None:
        client = self._websocket._client
        if client is not None:
            self._websocket._loop.call_soon(client.on_drained)

    def on_stalled(self) -> None:
        self._websocket.close_stalled("too much is unread for too long")


class HttpExchange(asyncio.Protocol):
    """Plain HTTP/1.1, one request at a time."""

    def __init__(self, incoming: IncomingConnection, body_seconds_max: float) -> None:
        self._incoming = incoming
        self._transport = transport = incoming.transport
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=incoming.server.limits.http_head_bytes)
        self._request: h11.Request | None = None
        self._body = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._is_full = False  # of answers that the client has not read
        self._timer = asyncio.get_running_loop().call_later(body_seconds_max, transport.abort)

    def _restart_timer(self) -> None:
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(HTTP_SECONDS_MAX, self._transport.abort)

    def data_received(self, data: bytes) -> None:  # over TLS also when reading is paused, and after `close`
        if self._transport.is_closing():
            return
        self._http.receive_data(data)
        if not self._is_full:
            self._advance()

    def _advance(self) -> None:
        try:
            while (event := self._http.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Request):
                    self._request = event
                elif isinstance(event, h11.Data):
                    self._body += event.data
                    if len(self._body) > HTTP_BODY_BYTES_MAX:
                        self._reply(
                            text_response(413, f"the body is longer than {HTTP_BODY_BYTES_MAX} bytes"), close=True
                        )
                        return
                elif isinstance(event, h11.EndOfMessage):
                    self._transport.pause_reading()
                    self._restart_timer()
                    self._task = asyncio.ensure_future(self._run())
                    return
                elif isinstance(event, h11.ConnectionClosed):
                    self._transport.close()
                    return
            if self._http.they_are_waiting_for_100_continue:
                self._transport.write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        except h11.RemoteProtocolError as exc:
            self._reply(text_response(exc.error_status_hint, str(exc)), close=True)

    async def _run(self) -> None:
        request = self._request
        assert request is not None
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
        asked = HttpRequest(
            request.method.decode("latin-1"),
            request.target.decode("latin-1"),
            headers,
            bytes(self._body),
            self._incoming.address,
        )
        try:
            response = await self._incoming.server.answer(asked)
        except Exception:
            details = {"path": asked.target.partition("?")[0], "address": asked.address}
            logger.exception("answering %(path)s failed", details)
            response = text_response(500, "internal error")
        self._task = None
        if not self._transport.is_closing():
            self._reply(response)

    def _reply(self, response: HttpResponse, close: bool = False) -> None:
        self._restart_timer()  # also for a client that never reads its answer
        headers = [
            ("Content-Type", response.content_type),
            ("X-Content-Type-Options", "nosniff"),
            *response.headers,
        ]
        if response.status != HTTPStatus.NO_CONTENT:  # which must not have one
            headers.append(("Content-Length", str(len(response.body))))
        if close:
            headers.append(("Connection", "close"))
        is_head = self._request is not None and self._request.method == b"HEAD"
        reason = HTTPStatus(response.status).phrase.encode()
        try:
            answer = h11.Response(status_code=response.status, headers=headers, reason=reason)
            for event in (answer, h11.Data(data=b"" if is_head else response.body), h11.EndOfMessage()):
                self._transport.write(self._http.send(event) or b"")
        except h11.LocalProtocolError:  # the request is too invalid for an answer
            self._transport.close()
            return
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            self._transport.close()
            return
        self._http.start_next_cycle()
        self._request = None
        self._body.clear()
        if not self._is_full:
            self._read_next()

    def _read_next(self) -> None:
        self._transport.resume_reading()
        self._advance()  # the next request may have arrived already

    def eof_received(self) -> bool:
        return self._task is not None  # a client that has closed its half still gets its answer

    def pause_writing(self) -> None:
        """A client that reads no answers is not read from."""
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._request is None and not self._transport.is_closing():  # all are answered
            self._read_next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._incoming.connection_lost(exc)
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
