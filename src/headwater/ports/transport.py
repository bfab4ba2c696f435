"""A transport carries copies of messages to another system. The log stays the truth; a forwarder feeds it from there.

All methods block, as those of stores do; who must not block calls them on a thread. They may be called from several
threads. What a transport was given has arrived when `publish` or `publish_many` returns, as durably as its target
keeps things; if one raises, any part of what it was given may have arrived, and giving it again is safe where
`recognises_ids`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from headwater.errors import InvalidOption
from headwater.message import Message


class Transport(Protocol):
    name: str
    """What errors and logs call it: its url without passwords."""
    recognises_ids: bool
    """Whether the target knows a message that it has by its id, so that one given twice is there once."""

    @property
    def connected(self) -> bool:
        """Whether the last word from the target was a good one. Never asks the target itself."""

    def publish(self, message: Message) -> None: ...

    def publish_many(self, messages: Sequence[Message]) -> None:
        """In their order. Raises TransportFailed, with the target's own error as its cause; InvalidInput if one of
        them can never be sent, however often it is tried; Closed after `close`."""

    def close(self) -> None:
        """Let go of connections, after what was given has been sent. Raises Unsent if something could not be. Twice is
        harmless."""


def check_transport(given: Any, where: str) -> Transport:
    """That it has the verbs of a transport, so that a url or a log in its place is refused at once."""
    if isinstance(given, type) or not all(hasattr(given, name) for name in ("name", "recognises_ids", "publish_many")):
        raise InvalidOption(
            f"expected a transport, got {type(given).__name__}",
            where=where,
            next="Open one with headwater.open_transport(url); another log is headwater:path",
        )
    transport: Transport = given
    return transport


def buffers(transport: Transport) -> bool:
    """Whether what it was given may still be in this process when `publish` returns, so that nothing may be acked for
    it. One that does says `buffers = True`; those that say nothing do not."""
    return bool(getattr(transport, "buffers", False))


def logs_fed_by(transport: Transport) -> tuple[object, ...]:
    """The logs that it writes to, if it does: a log must not be fed to itself. One that does says them in `feeds`."""
    fed: tuple[object, ...] = getattr(transport, "feeds", ())
    return fed


Handle = Callable[[Message], None]


class Following(Protocol):
    """A subscription to what a transport's target holds; made by `subscribe`."""

    def stop(self) -> None:
        """No further messages; returns when the handler is done with the one it has. Twice is harmless."""


@runtime_checkable
class Subscribable(Protocol):
    """A transport that also carries messages back. Those that do not refuse with PublishOnly."""

    def subscribe(
        self, pattern: str, handle: Handle, *, group: str | None = None, consumer: str | None = None
    ) -> Following:
        """Call `handle` for every message that matches, on a thread of the transport's own. With a `group`, where the
        target has them, consumers of the same group share the messages and one that fails or dies passes its on;
        without, everybody gets everything that comes from now on."""
