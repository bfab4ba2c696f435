"""The client's connections to a server of replicas: the WebSocket of a session, and plain HTTP requests. Refusals of
the server become our errors."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit, urlunsplit

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    ConnectionClosedOK,
    InvalidHandshake,
    InvalidStatus,
    WebSocketException,
)

from headwater.client.options import tls_context
from headwater.errors import (
    HeadwaterError,
    InvalidOptionError,
    OverloadedError,
    ReplicationFailedError,
    UnauthorizedError,
    UnknownReplicaError,
    UnreachableError,
    VersionConflictError,
)
from headwater.replication.names import Remote
from headwater.replication.outcome import TransferOptions
from headwater.replication.protocol import ABORT, ABORT_ERRORS, CONFIG, PREFIX, NewestVersion
from headwater.replication.rsync import READ_BYTES
from headwater.version import VERSION

FRAME_BYTES_MAX = 8 * 1024 * 1024  # of one frame of a server
SENDING_BYTES_MAX = 4 * READ_BYTES  # in the send buffer; above it, sending waits
FRAMES_WAITING_MAX = 16  # received and not yet used; above it, the server waits
OPEN_S_MAX = 10.0
CLOSE_S_MAX = 2.0
PONG_S_MAX = 600.0  # the answer to a ping may queue behind all pages in flight on a slow network
WHY_CHARS_MAX = 1000  # of an error text of a server
UNREADABLE = (msgspec.MsgspecError, RecursionError)  # JSON of a server
SILENCE_S_MAX = 1800.0  # while a server checks a push or rebuilds an old version

HTTP_SILENCE_S_MAX = 10.0
HTTP_S_MAX = 30.0  # for a whole answer, however slowly it arrives
HTTP_BYTES_MAX = 64 * 1024 * 1024
REFUSAL_BYTES_MAX = 16 * 1024

CLOSED_EARLY = "the server closed the session too early"

T = TypeVar("T")
U = TypeVar("U")

logger = logging.getLogger("headwater")


class _WithoutHeaders(logging.LoggerAdapter[logging.Logger]):
    """Below INFO, websockets logs all headers, which hold the key; so it never logs there."""

    def isEnabledFor(self, level: int) -> bool:
        return level >= logging.INFO and super().isEnabledFor(level)


_websockets_logger = _WithoutHeaders(logging.getLogger("headwater.replication.connection"), {})


class _WithoutRedirects(connect):
    """The database and the key are for this server only."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


# --- a session ------------------------------------------------------------------------------------------------------


class ReplicaConnection:
    """Connected while entered. `url` is that of an endpoint, like `ws://host:8765/sapi/push/ns/name`."""

    def __init__(self, url: str, options: TransferOptions, *, pong_s_max: float = PONG_S_MAX) -> None:
        self.url = url
        self.shown = shown_url(url)
        self._headers = {
            "X-ClientID": options.client_id,
            "X-ClientVersion": VERSION,
            **key_header(options.key, url),
        }
        self._ca = options.ca
        self._pong_s_max = pong_s_max
        self._socket: ClientConnection | None = None

    async def __aenter__(self) -> ReplicaConnection:
        tls = tls_context(self._ca) if self.url.startswith("wss:") else None
        try:
            self._socket = await _WithoutRedirects(
                self.url,
                additional_headers=self._headers,
                ssl=tls,
                user_agent_header=None,
                compression=None,
                proxy=None,
                open_timeout=OPEN_S_MAX,
                close_timeout=CLOSE_S_MAX,
                ping_timeout=self._pong_s_max,
                max_size=FRAME_BYTES_MAX,
                max_queue=FRAMES_WAITING_MAX,
                write_limit=SENDING_BYTES_MAX,
                logger=_websockets_logger,
            )
        except InvalidStatus as exc:
            raise refusal_of(exc.response.status_code, bytes(exc.response.body or b""), self.shown) from exc
        except (OSError, TimeoutError, UnicodeError, InvalidHandshake, WebSocketException) as exc:
            raise unreachable(exc, self.shown) from exc
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if self._socket is not None:
            if kind is not None:
                with contextlib.suppress(AttributeError):  # see `send`
                    self._socket.transport.abort()  # no data in flight is worth waiting for
            await self._socket.close()

    async def send_text(self, text: str) -> None:
        """Send a text. It may queue behind pages, but not without limit."""
        try:
            async with asyncio.timeout(SILENCE_S_MAX):
                await self.send(text)
        except TimeoutError as exc:
            why = f"the server has not read for {SILENCE_S_MAX:g} s"
            raise UnreachableError(why, where=self.shown, next="Try again") from exc

    async def send_config(self, config: object) -> None:
        await self.send_text(CONFIG + msgspec.json.encode(config).decode())

    async def send(self, frame: str | bytes) -> None:
        """Waits while the send buffer is full. Raises UnreachableError if the connection is lost."""
        assert self._socket is not None
        try:
            await self._socket.send(frame)
        except ConnectionClosed as exc:
            raise self._lost(exc) from exc
        except AttributeError as exc:  # of asyncio, when the transport closes at this moment
            if not self._socket.transport.is_closing():
                raise
            raise UnreachableError("the connection broke", where=self.shown, next="Try again") from exc

    async def next(self) -> str | bytes | None:
        """The next frame; None after an orderly close. Raises UnreachableError if the connection is lost."""
        assert self._socket is not None
        try:
            return await self._socket.recv()
        except ConnectionClosedOK:
            return None
        except ConnectionClosed as exc:
            raise self._lost(exc) from exc

    async def answer(self) -> str | bytes | None:
        """The next frame, which the server has to send in time."""
        try:
            async with asyncio.timeout(SILENCE_S_MAX):
                return await self.next()
        except TimeoutError as exc:
            raise self._silent() from exc

    async def first_of(self, sending: asyncio.Task[T], receiving: asyncio.Task[U], moved: Callable[[], int]) -> None:
        """Wait until one is done. `moved` counts bytes: when it stands still for too long, the server is lost."""
        before = -1
        while not (sending.done() or receiving.done()):
            if before == (before := moved()):
                raise self._silent()
            await asyncio.wait({sending, receiving}, timeout=SILENCE_S_MAX, return_when=asyncio.FIRST_COMPLETED)
        if is_cut(sending):  # the reason that the server sent may still be unread
            await asyncio.wait({receiving}, timeout=CLOSE_S_MAX)

    def _silent(self) -> UnreachableError:
        return UnreachableError(f"the server sent nothing for {SILENCE_S_MAX:g} s", where=self.shown, next="Try again")

    async def config(self, kind: type[T]) -> T:
        """The next frame, which has to be a CONFIG of this kind; an ABORT is raised."""
        frame = await self.answer()
        if frame is None:  # most likely the server is stopping, and no page has moved
            raise UnreachableError(CLOSED_EARLY, where=self.shown, next="Try again")
        if isinstance(frame, bytes):
            raise ReplicationFailedError("the server sent pages instead of its CONFIG", where=self.shown)
        return self.config_of(frame, kind)

    def config_of(self, frame: str, kind: type[T]) -> T:
        if frame.startswith(ABORT):
            raise abort_of(frame, self.shown)
        if not frame.startswith(CONFIG):
            raise ReplicationFailedError(f"the server sent {frame[:40]!r}, which is unknown here", where=self.shown)
        try:
            return msgspec.json.decode(frame[len(CONFIG) :], type=kind)
        except UNREADABLE as exc:
            raise ReplicationFailedError(f"the server's CONFIG is not as expected: {exc}", where=self.shown) from exc

    def _lost(self, exc: ConnectionClosed) -> UnreachableError:
        close = exc.rcvd
        why = "the connection broke"
        if close is not None:
            why = f"the server closed the connection: {plain(close.reason) or close.code}"
        return UnreachableError(why, where=self.shown, next="Try again")


def is_cut(sending: asyncio.Task[T]) -> bool:
    """Whether it ended because the connection is lost."""
    return sending.done() and not sending.cancelled() and isinstance(sending.exception(), UnreachableError)


def shown_url(url: str) -> str:
    """The url of an endpoint, as the user named the replica or the server."""
    named = re.sub(f"{PREFIX}((push|pull|subscribe|versions|replicas)(/|$))?", "/", url.partition("?")[0], count=1)
    return re.sub("^http", "ws", named).rstrip("/")


# --- plain HTTP -----------------------------------------------------------------------------------------------------


def http_url(remote: Remote, collection: str = "") -> str:
    """The url of a replica, for error reports, or of its `versions/`, to list them."""
    scheme, host, *_ = urlsplit(remote.url_base)
    path = f"{PREFIX}{collection}{remote.name.path}"
    return urlunsplit(("https" if scheme == "wss" else "http", host, path, "", ""))


def newest_version(remote: Remote, key: str | None, ca: str | None) -> NewestVersion | None:
    """None if there is none, or the key does not allow to see it."""
    try:
        answer = http_request(http_url(remote, "versions/"), key=key, ca=ca)
        versions = msgspec.json.decode(answer, type=list[NewestVersion])
    except (HeadwaterError, *UNREADABLE):
        return None
    return versions[0] if versions else None


def http_request(url: str, *, key: str | None, ca: str | None, body: bytes | None = None) -> bytes:
    """A GET, or a POST of JSON. Goes to this server only: neither proxies nor redirects are followed. Blocks."""
    headers = {"Connection": "close", **key_header(key, url)}
    if body:
        headers["Content-Type"] = "application/json"
    parts = urlsplit(url)
    try:
        with contextlib.closing(_http_connection(parts, ca)) as connection:
            connection.connect()
            with _deadline(connection.sock, HTTP_S_MAX):
                target = urlunsplit(("", "", parts.path, parts.query, ""))
                connection.request("POST" if body else "GET", target, body, headers)
                response = connection.getresponse()
                if not 200 <= response.status < 300:
                    raise refusal_of(response.status, _refusal_body(response), shown_url(url))
                answer = response.read(HTTP_BYTES_MAX + 1)
                if response.length and len(answer) <= HTTP_BYTES_MAX:
                    raise http.client.IncompleteRead(answer, response.length)
    except HeadwaterError:
        raise
    except (OSError, http.client.HTTPException, UnicodeError) as exc:  # the last one: no valid host name
        raise unreachable(exc, shown_url(url)) from exc
    if len(answer) > HTTP_BYTES_MAX:
        raise UnreachableError(f"the answer has more than {HTTP_BYTES_MAX} bytes", where=shown_url(url))
    return answer


def _http_connection(parts: SplitResult, ca: str | None) -> http.client.HTTPConnection:
    host = parts.hostname or ""
    if parts.scheme == "https":
        context = tls_context(ca)
        return http.client.HTTPSConnection(host, parts.port or 443, timeout=HTTP_SILENCE_S_MAX, context=context)
    return http.client.HTTPConnection(host, parts.port or 80, timeout=HTTP_SILENCE_S_MAX)


@contextlib.contextmanager
def _deadline(connection: socket.socket, seconds: float) -> Iterator[None]:
    """The timeout of a socket applies to each read; this one to the whole block."""
    is_over = threading.Event()

    def end() -> None:
        is_over.set()
        with contextlib.suppress(OSError):  # it is closed already
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # not that of TLS, which would wait

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if not is_over.is_set():
            raise
    finally:
        timer.cancel()
    if is_over.is_set():
        raise TimeoutError(f"the answer took longer than {seconds:g} s")


def _refusal_body(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(REFUSAL_BYTES_MAX)
    except (OSError, http.client.HTTPException):
        return b""


def key_header(key: str | None, url: str) -> dict[str, str]:
    if key is None:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise InvalidOptionError("the key holds characters that no key has", where=url)
    return {"Authorization": f"Bearer {key}"}


# --- errors ---------------------------------------------------------------------------------------------------------


def is_partial(error: BaseException) -> bool:
    """Whether it came while pages were in flight. None of them stays."""
    return bool(getattr(error, "partial", False))


def as_partial(error: HeadwaterError) -> HeadwaterError:
    """A connection lost during a transfer is a failed replication, not an unreachable server."""
    if isinstance(error, UnreachableError):
        error = ReplicationFailedError(f"cut off in the middle: {error.why}", where=error.where, next=error.next)
    error.partial = True  # type: ignore[attr-defined]
    return error


def plain(text: str) -> str:
    """A text of a server, fit for a terminal: shortened, without control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:WHY_CHARS_MAX]).strip()


def abort_of(frame: str, where: str) -> HeadwaterError:
    """`ABORT=<CODE>:<why>` as an error."""
    code, _, why = map(plain, frame.removeprefix(ABORT).partition(":"))
    if code == "VERSION_CONFLICT":
        if not (why.isascii() and why.isdecimal() and len(why) < 16):
            return ReplicationFailedError(
                f"the server reports a conflict with {why!r}, which is no version", where=where
            )
        newest = int(why)
        return VersionConflictError(
            f"the newest version is {newest}, and this database does not come from it",
            where=where,
            next=f"Pull it elsewhere and merge by hand, or push over it: {where}@latest",
            newest=newest,
        )
    kind = ABORT_ERRORS.get(code, ReplicationFailedError)
    return kind(why or code, where=where, next=_AFTER_ABORT.get(code, ""))


_AFTER_ABORT = {
    "TOO_LARGE": "The server's limit is `replicas.max_bytes`",
    "DISK_FULL": "Free some disk space on the server",
    "CORRUPT": "Check the database here: PRAGMA integrity_check",
    "BUSY": "Try again later",
    "UNAUTHORIZED": "Give a key of the replica, or a token of the server",
}

_REFUSALS: dict[int, tuple[type[HeadwaterError], str]] = {
    400: (InvalidOptionError, ""),
    401: (UnauthorizedError, "Give a key of the replica, or a token of the server"),
    403: (
        UnauthorizedError,
        "Pass a key of the replica with this right, or a token with the right to its topic, replica.NS.NAME",
    ),
    404: (
        UnknownReplicaError,
        "Check the name and the version: `headwater replica ls ws://HOST` and `headwater replica log URL` list them",
    ),
    429: (OverloadedError, "Try again later"),
    503: (OverloadedError, "Try again later"),
}


def refusal_of(status: int, body: bytes, url: str) -> HeadwaterError:
    why = plain(body[:WHY_CHARS_MAX].decode(errors="replace"))
    kind, next = _REFUSALS.get(status, (UnreachableError, "Is this a Headwater server that hosts replicas?"))
    if 300 <= status < 400:
        next = "Redirects are not followed: name the other server yourself"
    return kind(why or f"the server answered {status}", where=url, next=next)


def unreachable(exc: Exception, url: str) -> UnreachableError:
    next = "Is the server running? headwater serve LOG"
    why = str(exc) or "no answer in time"
    if isinstance(exc, ConnectionRefusedError):
        why = "connection refused"
    elif isinstance(exc, socket.gaierror):
        why, next = "this machine does not know such a host", "Check its name"
    elif isinstance(exc, ssl.SSLCertVerificationError):
        why = f"its certificate is not trusted ({exc.verify_message})"
        next = "Trust a certificate of your own with --ca FILE"
    elif url.startswith(("wss:", "https:")) and isinstance(exc, TimeoutError | ssl.SSLError):
        if getattr(exc, "reason", "") == "WRONG_VERSION_NUMBER":
            why = "it does not speak TLS"
        next = "A server without a certificate speaks ws://, not wss://"
    return UnreachableError(why, where=url, next=next)
