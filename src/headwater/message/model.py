"""One message of the log."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from headwater.message.payload import decode, readable
from headwater.message.times import datetime_of, iso

NAMED_HEADERS = ("from", "to", "reply_to", "correlation_id", "type", "version", "content_type", "traceparent")
SALT_BITS = 26
NO_HEADERS = msgspec.Raw(b"null")


class Message(msgspec.Struct, array_like=True, gc=False):
    """One message of the log. `identity` is its given id, or the log's salt from which the id follows."""

    seq: int
    topic: str
    raw: msgspec.Raw
    published_ms: int
    size: int
    identity: str | int
    priority: int = 0
    deliver_ms: int | None = None
    expires_ms: int | None = None
    from_: str | None = None
    to: str | None = None
    reply_to: str | None = None
    correlation_id: str | None = None
    type: str | None = None
    version: int | None = None
    content_type: str | None = None
    traceparent: str | None = None
    raw_headers: msgspec.Raw = NO_HEADERS

    @property
    def id(self) -> str:
        if isinstance(self.identity, str):
            return self.identity
        return derived_id(self.published_ms, self.identity, self.seq)

    @property
    def scoped_id(self) -> str:
        """Topic and id in one text: what it is recognised by, for an id belongs to its topic."""
        return scoped_id(self.topic, self.id)

    @property
    def data(self) -> Any:
        return decode(self.raw, f"message {self.seq} on {self.topic}")

    @property
    def data_json(self) -> str:
        return bytes(self.raw).decode()

    @property
    def headers(self) -> dict[str, Any]:
        """The free headers; the named ones (`from_`, `type`, …) are attributes."""
        found = decode(self.raw_headers, f"headers of message {self.seq}")
        return found if isinstance(found, dict) else {}

    @property
    def published_at(self) -> datetime:
        return datetime_of(self.published_ms)

    @property
    def deliver_at(self) -> datetime | None:
        return None if self.deliver_ms is None else datetime_of(self.deliver_ms)

    @property
    def expires_at(self) -> datetime | None:
        return None if self.expires_ms is None else datetime_of(self.expires_ms)

    def field(self, name: str) -> Any:
        """The value of a field by the name users write in `where`: `from`, `data`, `published_at` (in ms), …"""
        return getattr(self, _ATTRIBUTE_OF.get(name, name))

    def to_json(self) -> dict[str, Any]:
        """The whole message as plain JSON values, as the command line and the dead-letter export show it."""
        named = {name: self.field(name) for name in NAMED_HEADERS}
        return {
            "seq": self.seq,
            "id": self.id,
            "topic": self.topic,
            "data": self.data if readable(self.raw) else self.data_json,
            "headers": self.headers,
            **{name: value for name, value in named.items() if value is not None},
            "priority": self.priority,
            "published_at": iso(self.published_ms),
            "deliver_at": None if self.deliver_ms is None else iso(self.deliver_ms),
            "expires_at": None if self.expires_ms is None else iso(self.expires_ms),
            "size": self.size,
        }


_ATTRIBUTE_OF = {
    "from": "from_",
    "published_at": "published_ms",
    "deliver_at": "deliver_ms",
    "expires_at": "expires_ms",
}


def scoped_id(topic: str, id: str) -> str:
    """What a message is recognised by wherever it may come twice: its id, among those of its topic. Who may publish on
    one topic has no say about the ids of another. No topic holds a blank, so no other pair gives the same text."""
    return f"{topic} {id}"


def derived_id(published_ms: int, salt: int, seq: int) -> str:
    """A UUIDv7 that follows from when and where a message was published: time, 26 bits of log, 48 bits of seq.

    Nothing has to be generated or stored at publish, and the same row always has the same id.
    """
    return (
        f"{published_ms >> 16:08x}-{published_ms & 0xFFFF:04x}-7{salt >> 14:03x}"
        f"-{0x8000 | (salt & 0x3FFF):04x}-{seq:012x}"
    )
