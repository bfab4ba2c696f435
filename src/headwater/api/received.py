"""A delivered message with its attempt. `_async` and `_sync` add ack, nack and the other verbs."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from headwater.arguments import no_attribute
from headwater.broker.deliveries import Claimed
from headwater.message import Message


class Received(msgspec.Struct, gc=False, eq=False, repr_omit_defaults=True):
    """A Struct, and kept from the garbage collector, because a busy consumer makes hundreds of thousands a second."""

    _claimed: Claimed
    _subscription: Any
    settled: bool = False
    declined: bool = False  # nacked or rejected
    _decoded: Any = msgspec.UNSET
    _ack: Any = None  # the completion of an ack whose caller was cancelled while it waited

    if not TYPE_CHECKING:  # a type checker refuses a name that is not there by itself

        def __getattr__(self, name: str) -> NoReturn:
            no_attribute(self, "message", name)

        def __getitem__(self, key: object) -> NoReturn:
            raise TypeError(f"{self!r} is no mapping. Write message.data[{key!r}]")

    def __repr__(self) -> str:
        return f"<message {self.seq} on {self.topic}, attempt {self.attempt}>"

    @property
    def message(self) -> Message:
        """The message as the log holds it."""
        return self._claimed.message

    @property
    def attempt(self) -> int:
        """1 for the first delivery."""
        return self._claimed.attempt

    @property
    def seq(self) -> int:
        """The position in the log. Seqs ascend and are never used twice."""
        return self._claimed.message.seq

    @property
    def id(self) -> str:
        """The publisher's id, or one derived from the message; the same in every attempt."""
        return self._claimed.message.id

    @property
    def topic(self) -> str:
        """The topic that it was published to."""
        return self._claimed.message.topic

    @property
    def data(self) -> Any:
        """The payload, decoded from JSON."""
        if self._decoded is msgspec.UNSET:
            self._decoded = self._claimed.message.data
        return self._decoded

    @property
    def headers(self) -> dict[str, Any]:
        """The headers that the publisher gave."""
        return self._claimed.message.headers

    @property
    def from_(self) -> str | None:
        """The sender."""
        return self._claimed.message.from_

    @property
    def to(self) -> str | None:
        """The receiver; None is a broadcast."""
        return self._claimed.message.to

    @property
    def reply_to(self) -> str | None:
        """The topic for replies."""
        return self._claimed.message.reply_to

    @property
    def correlation_id(self) -> str | None:
        """Connects a reply to its request."""
        return self._claimed.message.correlation_id

    @property
    def type(self) -> str | None:
        """The name of the message's class."""
        return self._claimed.message.type

    @property
    def version(self) -> int | None:
        """The version of the message's class."""
        return self._claimed.message.version

    @property
    def content_type(self) -> str | None:
        """How the payload is encoded; None is JSON."""
        return self._claimed.message.content_type

    @property
    def traceparent(self) -> str | None:
        """The trace that the publish belongs to, in the form of W3C Trace Context."""
        return self._claimed.message.traceparent

    @property
    def size(self) -> int:
        """The size of the payload as JSON, in bytes."""
        return self._claimed.message.size

    @property
    def priority(self) -> int:
        """A higher priority is delivered first by subscriptions with `order="priority"`."""
        return self._claimed.message.priority

    @property
    def published_at(self) -> datetime:
        """The time of the publish."""
        return self._claimed.message.published_at

    @property
    def deliver_at(self) -> datetime | None:
        """The message is not delivered before this time."""
        return self._claimed.message.deliver_at

    @property
    def expires_at(self) -> datetime | None:
        """The message is not delivered after this time."""
        return self._claimed.message.expires_at
