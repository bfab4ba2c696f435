"""What a server offers besides its log: an annex with paths of its own on the same port, like `/sapi/` for replicas.

The server knows the wire, who comes and what their token allows; the annex knows what its frames mean.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from headwater.ports.clock import Clock


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
    target: str
    headers: dict[str, str]
    address: str


class Refusal(NamedTuple):
    status: int
    text: str


class FrameWire(Protocol):
    """A WebSocket to a client of the annex. Called on the event loop only."""

    def send_text(self, text: bytes) -> None: ...

    def send_binary(self, data: bytes) -> None: ...

    def buffered_bytes(self) -> int:
        """Not sent yet. Who sent more than `outbound_bytes_max` holds back until `FrameGuest.on_drained`."""

    @property
    def outbound_bytes_max(self) -> int: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self, code: int, reason: str) -> None: ...


class FrameGuest(Protocol):
    """Who takes the messages of a WebSocket, in order, and none while reading is paused."""

    def receive_text(self, text: bytes) -> None: ...

    def receive_binary(self, data: bytes) -> None: ...

    def on_drained(self) -> None: ...

    def on_closed(self, *, vanished: bool) -> None: ...


class Rights(Protocol):
    """What the token that came allows."""

    def may_publish(self, topic: str) -> bool: ...

    def may_read(self, topic: str) -> bool: ...

    @property
    def who(self) -> Mapping[str, str]:
        """The token's id and label, for the audit trail."""


Publish = Callable[[str, Any, str], Awaitable[None]]
"""Topic, data and message id; returns when it is on disk."""


class Meter(Protocol):
    """Figures of an annex, shown with those of the server. Names are without the server's prefix and without what is
    put behind it (`_total`, `_seconds`). Asked for again, after a stop and a start, a figure goes on."""

    def counter(self, name: str, text: str) -> Callable[[float], None]: ...

    def counter_by(self, name: str, text: str, label: str, values: Sequence[str]) -> Callable[[str], None]:
        """One for each of these values, and no others: who scrapes keeps a series of each."""

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """`read` is called when somebody looks, on the event loop: it must not block."""

    def duration(self, name: str, text: str) -> Callable[[float], None]:
        """Of seconds, by how often they were how many."""


class Record(Protocol):
    """Puts an event into the server's audit trail: by whom, from where, and what else there is to say."""

    def __call__(self, event: str, who: Mapping[str, str], **details: Any) -> None: ...


class Surroundings(NamedTuple):
    """What the server lends to an annex."""

    publish: Publish
    clock: Clock
    needs_token: bool
    meter: Meter
    audit: Record


class Annex(Protocol):
    prefix: str
    """Of its paths, like `/sapi/`."""
    message_bytes_max: int
    """Of one WebSocket message to it; who sends a longer one is sent away with 1009."""

    async def start(self, surroundings: Surroundings) -> None: ...

    async def stop(self) -> None:
        """Nobody new comes; whoever is here is let go. May be cancelled when it takes too long."""

    async def admit(
        self, request: UpgradeRequest, wire: FrameWire, bearer: str | None, rights: Rights | None
    ) -> FrameGuest | Refusal:
        """`bearer`: what came as a token; `rights`: what it allows, if the server knows it.

        The guest may speak from the next turn of the loop on, and hears `on_closed` even if the upgrade then fails.
        """

    async def answer(self, request: HttpRequest, bearer: str | None, rights: Rights | None) -> HttpResponse: ...
