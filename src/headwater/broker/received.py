"""A message in the hands of a consumer: what it says, and which attempt it is. The faces add the verbs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from headwater.broker.claims import Claimed
from headwater.message import Message


class Received(msgspec.Struct, gc=False, eq=False, repr_omit_defaults=True):
    """A Struct, and kept from the garbage collector, because a busy consumer makes hundreds of thousands a second."""

    claimed: Claimed
    subscription: Any
    settled: bool = False
    decoded: Any = msgspec.UNSET

    def __repr__(self) -> str:
        return f"<message {self.seq} on {self.topic}, attempt {self.attempt}>"

    @property
    def message(self) -> Message:
        """The message as the log holds it."""
        return self.claimed.message

    @property
    def attempt(self) -> int:
        """1 for the first delivery."""
        return self.claimed.attempt

    @property
    def seq(self) -> int:
        return self.claimed.message.seq

    @property
    def id(self) -> str:
        return self.claimed.message.id

    @property
    def topic(self) -> str:
        return self.claimed.message.topic

    @property
    def data(self) -> Any:
        if self.decoded is msgspec.UNSET:
            self.decoded = self.claimed.message.data
        return self.decoded

    @property
    def headers(self) -> dict[str, Any]:
        return self.claimed.message.headers

    @property
    def from_(self) -> str | None:
        return self.claimed.message.from_

    @property
    def to(self) -> str | None:
        return self.claimed.message.to

    @property
    def reply_to(self) -> str | None:
        return self.claimed.message.reply_to

    @property
    def correlation_id(self) -> str | None:
        return self.claimed.message.correlation_id

    @property
    def type(self) -> str | None:
        return self.claimed.message.type

    @property
    def version(self) -> int | None:
        return self.claimed.message.version

    @property
    def priority(self) -> int:
        return self.claimed.message.priority

    @property
    def published_at(self) -> datetime:
        return self.claimed.message.published_at

    @property
    def expires_at(self) -> datetime | None:
        return self.claimed.message.expires_at
