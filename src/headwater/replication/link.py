"""The WebSocket of a session with a server of replicas, and its refusals as our errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import ssl
from collections.abc import Callable
from types import TracebackType
from typing import Annotated, TypeVar

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    ConnectionClosedOK,
    InvalidHandshake,
    InvalidStatus,
    WebSocketException,
)

from headwater.errors import (
    Corrupt,
    DiskFull,
    HeadwaterError,
    InvalidOption,
    Overloaded,
    ReplicationFailed,
    TooLarge,
    Unauthorized,
    UnknownReplica,
    Unreachable,
    VersionConflict,
)
from headwater.protocol.tls import client_context
from headwater.replication.names import ABORT, CONFIG, PREFIX
from headwater.replication.tools import READ_BYTES
from headwater.version import VERSION

FRAME_BYTES_MAX = 8 * 1024 * 1024  # that a server may send at once
SENDING_BYTES_MAX = 4 * READ_BYTES  # sent and not yet taken by the network; above it, sending waits
FRAMES_WAITING_MAX = 16  # received and not yet used; above it, the server waits
OPEN_S_MAX = 10.0
CLOSE_S_MAX = 2.0
PONG_S_MAX = 600.0  # its answer to a ping may wait behind all that is on its way over a thin line
WHY_CHARS_MAX = 1000  # of what a server says
UNREADABLE = (msgspec.MsgspecError, RecursionError)  # JSON of a server
SILENCE_S_MAX = 1800.0  # while a server checks a push or rebuilds an old version; above it, it is lost

CLOSED_EARLY = "the server closed the session too early"

# What a server says of a replica and is noted here, within bounds.
ReplicaID = Annotated[str, msgspec.Meta(max_length=200)]
Hash = Annotated[str, msgspec.Meta(max_length=200)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
PageSize = Annotated[int, msgspec.Meta(ge=512, le=65_536)]

T = TypeVar("T")
U = TypeVar("U")


class _WithoutHeaders(logging.LoggerAdapter[logging.Logger]):
    """Below INFO, websockets tells all headers, with the key in them; whatever level the application has set."""

    def isEnabledFor(self, level: int) -> bool:
        return level >= logging.INFO and super().isEnabledFor(level)


_logger = _WithoutHeaders(logging.getLogger("headwater.replication.link"), {})


class _Straight(connect):
    """The database and the key are for this server, not for another that it may point to."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class Link:
    """Entered: connected. `url` is that of an endpoint, like `ws://host:8765/sapi/push/ns/name`."""

    def __init__(
        self, url: str, *, key: str | None, ca: str | None, client_id: str, pong_s_max: float = PONG_S_MAX
    ) -> None:
        self.url = url
        self.shown = re.sub(f"{PREFIX}(push|pull|subscribe)/", "/", url)
        """As the user named it."""
        self._headers = {"X-ClientID": client_id, "X-ClientVersion": VERSION, **key_header(key, url)}
        self._ca = ca
        self._pong_s_max = pong_s_max
        self._socket: ClientConnection | None = None

    async def __aenter__(self) -> Link:
        tls = client_context(self._ca) if self.url.startswith("wss:") else None
        try:
            self._socket = await _Straight(
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
                logger=_logger,
            )
        except InvalidStatus as exc:
            raise refusal_of(exc.response.status_code, bytes(exc.response.body or b""), self.shown) from exc
        except (OSError, TimeoutError, UnicodeError, InvalidHandshake, WebSocketException) as exc:
            raise unreachable(exc, self.shown) from exc
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._socket is not None:
            if kind is not None:
                with contextlib.suppress(AttributeError):  # see `_send`
                    self._socket.transport.abort()  # there is nothing more to say, and nothing to wait for
            await self._socket.close()

    async def send(self, data: bytes) -> None:
        """A binary frame; waits while too much is on its way. Raises Unreachable if the connection is gone."""
        await self._send(data)

    async def send_text(self, text: str) -> None:
        """It may have to wait behind pages, but not for ever."""
        try:
            async with asyncio.timeout(SILENCE_S_MAX):
                await self._send(text)
        except TimeoutError as exc:
            why = f"the server has not listened for {SILENCE_S_MAX:g} s"
            raise Unreachable(why, where=self.shown, next="Try again") from exc

    async def send_config(self, config: object) -> None:
        await self.send_text(CONFIG + msgspec.json.encode(config).decode())

    async def _send(self, frame: str | bytes) -> None:
        assert self._socket is not None
        try:
            await self._socket.send(frame)
        except ConnectionClosed as exc:
            raise self._cut(exc) from exc
        except AttributeError as exc:  # of asyncio: a transport that closed at this moment cannot be aborted any more
            if not self._socket.transport.is_closing():
                raise
            raise Unreachable("the connection broke", where=self.shown, next="Try again") from exc

    async def next(self) -> str | bytes | None:
        """The next frame; None when the server closed in order. Raises Unreachable if the connection broke."""
        assert self._socket is not None
        try:
            return await self._socket.recv()
        except ConnectionClosedOK:
            return None
        except ConnectionClosed as exc:
            raise self._cut(exc) from exc

    async def answer(self) -> str | bytes | None:
        """The next frame, when it is the server's turn to speak."""
        try:
            async with asyncio.timeout(SILENCE_S_MAX):
                return await self.next()
        except TimeoutError as exc:
            raise self._silence() from exc

    async def first_of(self, speaking: asyncio.Task[T], hearing: asyncio.Task[U], moved: Callable[[], int]) -> None:
        """Wait until one is done. `moved` counts bytes: when it stands still for too long, the server is lost."""
        before = -1
        while not (speaking.done() or hearing.done()):
            if before == (before := moved()):
                raise self._silence()
            await asyncio.wait({speaking, hearing}, timeout=SILENCE_S_MAX, return_when=asyncio.FIRST_COMPLETED)
        if is_cut(speaking):  # perhaps the server has said why, and that is yet to be heard
            await asyncio.wait({hearing}, timeout=CLOSE_S_MAX)

    def _silence(self) -> Unreachable:
        return Unreachable(f"the server said nothing for {SILENCE_S_MAX:g} s", where=self.shown, next="Try again")

    async def config(self, kind: type[T]) -> T:
        """What the server says next, which has to be a CONFIG of this kind; an ABORT is raised."""
        frame = await self.answer()
        if frame is None:  # it is being stopped, most likely: nothing has moved yet, and later it may do
            raise Unreachable(CLOSED_EARLY, where=self.shown, next="Try again")
        if isinstance(frame, bytes):
            raise ReplicationFailed("the server sent pages where it should have said more", where=self.shown)
        return self.config_of(frame, kind)

    def config_of(self, frame: str, kind: type[T]) -> T:
        if frame.startswith(ABORT):
            raise abort_of(frame, self.shown)
        if not frame.startswith(CONFIG):
            raise ReplicationFailed(f"the server said {frame[:40]!r}, which is not known here", where=self.shown)
        try:
            return msgspec.json.decode(frame[len(CONFIG) :], type=kind)
        except UNREADABLE as exc:
            raise ReplicationFailed(f"the server's CONFIG is not as expected: {exc}", where=self.shown) from exc

    def _cut(self, exc: ConnectionClosed) -> Unreachable:
        said = exc.rcvd
        why = "the connection broke"
        if said is not None:
            why = f"the server closed the connection: {plain(said.reason) or said.code}"
        return Unreachable(why, where=self.shown, next="Try again")


def is_cut(speaking: asyncio.Task[T]) -> bool:
    """Whether it ended because nobody listens any more."""
    return speaking.done() and not speaking.cancelled() and isinstance(speaking.exception(), Unreachable)


def key_header(key: str | None, url: str) -> dict[str, str]:
    if key is None:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise InvalidOption("the key holds characters that no key has", where=url)
    return {"Authorization": f"Bearer {key}"}


def is_partial(fault: BaseException) -> bool:
    """Whether it came in the middle: pages were on their way already. Nothing of them stays."""
    return bool(getattr(fault, "partial", False))


def as_partial(fault: HeadwaterError) -> HeadwaterError:
    """A connection that breaks in the middle is more than one that cannot be made."""
    if isinstance(fault, Unreachable):
        fault = ReplicationFailed(f"cut off in the middle: {fault.why}", where=fault.where, next=fault.next)
    fault.partial = True  # type: ignore[attr-defined]
    return fault


def plain(text: str) -> str:
    """What a server says, fit for a terminal: not endless, and without what would steer it."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:WHY_CHARS_MAX]).strip()


def abort_of(frame: str, where: str) -> HeadwaterError:
    """`ABORT=<CODE>:<why>` as an error."""
    code, _, why = map(plain, frame.removeprefix(ABORT).partition(":"))
    if code == "VERSION_CONFLICT":
        if not (why.isascii() and why.isdecimal() and len(why) < 16):
            return ReplicationFailed(f"the server tells of a conflict with {why!r}, which is no version", where=where)
        newest = int(why)
        return VersionConflict(
            f"the newest version is {newest}, and this database does not come from it",
            where=where,
            next=f"Pull it elsewhere and merge by hand, or push over it: {where}@latest",
            newest=newest,
        )
    kind, next = _ABORTS.get(code, (ReplicationFailed, ""))
    return kind(why or code, where=where, next=next)


_ABORTS: dict[str, tuple[type[HeadwaterError], str]] = {
    "TOO_LARGE": (TooLarge, "The server's limit is `replicas.max_bytes`"),
    "DISK_FULL": (DiskFull, "Free some disk space on the server"),
    "CORRUPT": (Corrupt, "Check the database here: PRAGMA integrity_check"),
    "BUSY": (Overloaded, "Try again later"),
    "UNAUTHORIZED": (Unauthorized, "Give a key of the replica, or a token of the server"),
}

_REFUSALS: dict[int, tuple[type[HeadwaterError], str]] = {
    400: (InvalidOption, ""),
    401: (Unauthorized, "Give a key of the replica, or a token of the server"),
    403: (Unauthorized, "This key does not allow it; give another one"),
    404: (
        UnknownReplica,
        "Check the name and the version: `headwater replica ls ws://HOST` and `headwater replica log URL` list them",
    ),
    429: (Overloaded, "Try again later"),
    503: (Overloaded, "Try again later"),
}


def refusal_of(status: int, body: bytes, url: str) -> HeadwaterError:
    why = plain(body[:WHY_CHARS_MAX].decode(errors="replace"))
    kind, next = _REFUSALS.get(status, (Unreachable, "Is this a Headwater server that hosts replicas?"))
    if 300 <= status < 400:
        next = "It points elsewhere, which is not followed: name that place yourself"
    return kind(why or f"the server answered {status}", where=url, next=next)


def unreachable(exc: Exception, url: str) -> Unreachable:
    next = "Is the server running? headwater serve LOG"
    why = str(exc) or "no answer in time"
    if isinstance(exc, ConnectionRefusedError):
        why = "nobody listens there"
    elif isinstance(exc, socket.gaierror):
        why, next = "there is no such host, as far as this machine knows", "Check its name"
    elif isinstance(exc, ssl.SSLCertVerificationError):
        why = f"its certificate is not trusted ({exc.verify_message})"
        next = "Trust a certificate of your own with --ca FILE"
    elif url.startswith(("wss:", "https:")) and isinstance(exc, TimeoutError | ssl.SSLError):
        if getattr(exc, "reason", "") == "WRONG_VERSION_NUMBER":
            why = "it does not speak TLS"
        next = "A server without a certificate speaks ws://, not wss://"
    return Unreachable(why, where=url, next=next)
