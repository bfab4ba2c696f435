"""A message in the hands of a consumer: what it says, and which attempt it is. The faces add the verbs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from headwater.broker.claims import Claimed
from headwater.message import Message

_UNREAD = object()


class Received:
    __slots__ = ("_claimed", "_data", "settled")

    def __init__(self, claimed: Claimed) -> None:
        self._claimed = claimed
        self._data: Any = _UNREAD
        self.settled = False

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
        return self._claimed.message.seq

    @property
    def id(self) -> str:
        return self._claimed.message.id

    @property
    def topic(self) -> str:
        return self._claimed.message.topic

    @property
    def data(self) -> Any:
        if self._data is _UNREAD:
            self._data = self._claimed.message.data
        return self._data

    @property
    def headers(self) -> dict[str, Any]:
        return self._claimed.message.headers

    @property
    def from_(self) -> str | None:
        return self._claimed.message.from_

    @property
    def to(self) -> str | None:
        return self._claimed.message.to

    @property
    def reply_to(self) -> str | None:
        return self._claimed.message.reply_to

    @property
    def correlation_id(self) -> str | None:
        return self._claimed.message.correlation_id

    @property
    def type(self) -> str | None:
        return self._claimed.message.type

    @property
    def version(self) -> int | None:
        return self._claimed.message.version

    @property
    def priority(self) -> int:
        return self._claimed.message.priority

    @property
    def published_at(self) -> datetime:
        return self._claimed.message.published_at

    @property
    def expires_at(self) -> datetime | None:
        return self._claimed.message.expires_at
