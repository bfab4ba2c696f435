"""A transport carries copies of messages to another system. The log remains the source of truth; a forwarder feeds the
transport from it.

All methods block, as those of stores do, and may be called from several threads. Messages have arrived when `publish`
or `publish_many` returns, as durably as the target stores them. If one raises, any part of them may have arrived;
publishing them again is safe where `recognises_ids`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from headwater.errors import InvalidOptionError
from headwater.message import Message


class Transport(Protocol):
    name: str
    """What errors and logs call it: its url without passwords."""
    recognises_ids: bool
    """Whether the target recognises a message by its id, so that one given twice is stored once."""

    @property
    def connected(self) -> bool:
        """Whether the last operation succeeded. Never asks the target itself."""

    def publish(self, message: Message) -> None: ...

    def publish_many(self, messages: Sequence[Message]) -> None:
        """Send messages in their order. Raises TransportFailedError, with the target's own error as its cause;
        InvalidInputError if one of them can never be sent, however often it is tried; ClosedError after `close`."""

    def close(self) -> None:
        """Sends what is buffered and closes connections. Raises UnsentError with what could not be sent. May be
        repeated."""


def check_transport(given: Any, where: str) -> Transport:
    """Check that it has the methods of a transport, so that a url or a log in its place is refused at once."""
    if isinstance(given, type) or not all(hasattr(given, name) for name in ("name", "recognises_ids", "publish_many")):
        raise InvalidOptionError(
            f"expected a transport, got {type(given).__name__}",
            where=where,
            next="Open one with headwater.open_transport(url); another log is headwater:path",
        )
    transport: Transport = given
    return transport


def buffers(transport: Transport) -> bool:
    """Whether messages may still be in this process when `publish` returns, so that they must not be acked then. Such a
    transport has `buffers = True`."""
    return bool(getattr(transport, "buffers", False))


def logs_fed_by(transport: Transport) -> tuple[object, ...]:
    """The logs that it writes to, its `feeds`: a log must not be fed to itself."""
    fed: tuple[object, ...] = getattr(transport, "feeds", ())
    return fed


Handle = Callable[[Message], None]


class TransportSubscription(Protocol):
    """A subscription to what a transport's target holds; made by `subscribe`."""

    def stop(self) -> None:
        """Returns when the handler is done with its current message. May be repeated."""


@runtime_checkable
class Subscribable(Protocol):
    """A transport that also carries messages back. Others raise PublishOnlyError."""

    def subscribe(
        self, pattern: str, handle: Handle, *, group: str | None = None, consumer: str | None = None
    ) -> TransportSubscription:
        """Calls `handle` for every message that matches, on a thread of the transport's own. With a `group`, where the
        target has them, consumers of the same group share the messages, and those of one that fails or dies go to
        another; without, every subscription gets every message from now on."""
