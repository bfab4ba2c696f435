"""Mounts: paths on the server's port that another package serves, like `/sapi/` for replicas.

The server owns the port: it reads HTTP and WebSocket frames, checks the token and counts connections. A mount owns its
prefix: it admits WebSocket sessions, answers HTTP requests and gives the frames their meaning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from headwater.broker.flow import run_async
from headwater.ports.clock import Clock
from headwater.server.logging import logger
from headwater.topics import parse_pattern

if TYPE_CHECKING:
    from headwater.broker.log import LocalLog
    from headwater.server.audit import Audit
    from headwater.server.auth import Grant, Scopes
    from headwater.server.pages import Metrics

# Not sent yet, to one session. The answer to a ping queues behind it, so it must be short on a slow line.
OUTBOUND_BYTES_MAX = 512 * 1024


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


def text_response(status: int, text: str, *headers: tuple[str, str]) -> HttpResponse:
    return HttpResponse(status, "text/plain; charset=utf-8", f"{text}\n".encode(), headers)


class UpgradeRequest(NamedTuple):
    target: str
    headers: dict[str, str]
    address: str


class Refusal(NamedTuple):
    status: int
    text: str


class MountTransport(Protocol):
    """The WebSocket of a session. Called on the event loop only."""

    def send_text(self, text: bytes) -> None: ...

    def send_binary(self, data: bytes) -> None: ...

    def buffered_bytes(self) -> int:
        """The bytes that are not sent yet. Above `outbound_bytes_max` the session stops sending until
        `MountSession.on_drained`."""

    @property
    def outbound_bytes_max(self) -> int: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self, code: int, reason: str) -> None: ...


class MountSession(Protocol):
    """Receives the messages of a WebSocket in order, and none while reading is paused."""

    def receive_text(self, text: bytes) -> None: ...

    def receive_binary(self, data: bytes) -> None: ...

    def on_drained(self) -> None: ...

    def on_closed(self, *, vanished: bool) -> None: ...


class Rights:
    """What the token of a request allows. `scopes` returns the scopes that the token has now; None when it was revoked
    or has expired. `identity`: the token's id and label, for the audit trail."""

    def __init__(self, grant: Grant, scopes: Callable[[], Scopes | None]) -> None:
        self.identity = {"token": grant.token_id, "label": grant.label}
        self._scopes = scopes

    def may_publish(self, topic: str) -> bool:
        scopes = self._scopes()
        return scopes is not None and scopes.may_publish(topic)

    def may_read(self, topic: str) -> bool:
        scopes = self._scopes()
        return scopes is not None and scopes.may_read(parse_pattern(topic))


Publish = Callable[[str, Any, str], Awaitable[None]]
"""Topic, data and message id; returns when the message is durable."""


class MountContext(NamedTuple):
    """What the server lends to a mount."""

    publish: Publish
    clock: Clock
    needs_token: bool
    meter: Metrics
    audit: Callable[..., None]
    """`audit(event, identity, **details)` writes to the audit trail."""


class Mount(Protocol):
    prefix: str
    """Of its paths, like `/sapi/`."""
    message_bytes_max: int
    """Of one WebSocket message; a larger one closes the connection with 1009."""

    async def start(self, context: MountContext) -> None: ...

    async def stop(self) -> None:
        """Admits no more sessions and ends those that run. Cancelled when it takes too long."""

    async def admit(
        self, request: UpgradeRequest, transport: MountTransport, bearer: str | None, rights: Rights | None
    ) -> MountSession | Refusal:
        """`bearer`: the credential of the request; `rights`: what it allows, if it is a token of the server.

        The session may send from the next turn of the loop on; `on_closed` is called even if the upgrade then fails.
        """

    async def answer(self, request: HttpRequest, bearer: str | None, rights: Rights | None) -> HttpResponse: ...


class Mounts:
    """The mounts of a server and their open sessions."""

    def __init__(self, mounts: Sequence[Mount], metrics: Metrics) -> None:
        self._mounts = mounts
        self._metrics = metrics
        self._started: list[Mount] = []
        self.sessions: set[CountedSession] = set()

    def find(self, target: str) -> Mount | None:
        path = path_of(target)
        return next((mount for mount in self._mounts if path.startswith(mount.prefix)), None)

    async def start(self, core: LocalLog, audit: Audit, *, needs_token: bool) -> None:
        async def publish(topic: str, data: Any, id: str) -> None:
            await run_async(core.publish(topic, data, {"id": id}))

        context = MountContext(publish, core.engine.clock, needs_token, self._metrics, audit.record)
        for mount in self._mounts:
            await mount.start(context)
            self._started.append(mount)

    async def stop(self) -> None:
        mounts, self._started = self._started, []
        for result in await asyncio.gather(*(mount.stop() for mount in mounts), return_exceptions=True):
            if isinstance(result, Exception):
                logger.error("a mount did not stop cleanly", exc_info=result)

    def add(self, session: MountSession) -> CountedSession:
        counted = CountedSession(self, session)
        self.sessions.add(counted)
        self._metrics.connections.inc()
        self._metrics.connected.inc()
        return counted

    def remove(self, session: CountedSession) -> None:
        self.sessions.discard(session)
        self._metrics.connections.dec()


class CountedSession:
    """A session of a mount as the listener sees it. The mount has authenticated its client."""

    is_unauthenticated = False
    is_busy = False
    owner = ""

    def __init__(self, mounts: Mounts, session: MountSession) -> None:
        self._mounts = mounts
        self._session = session
        self.receive_text = session.receive_text
        self.on_drained = session.on_drained

    def on_closed(self, *, vanished: bool) -> None:
        self._mounts.remove(self)
        self._session.on_closed(vanished=vanished)


def path_of(target: str) -> str:
    """The path of a request; empty if it has none. A target that begins with a slash is a path, also with two: a proxy
    with rules for paths reads no host in it either."""
    if target.startswith("/"):
        return target.partition("?")[0].partition("#")[0]
    try:
        return urlsplit(target).path
    except ValueError:
        return ""
