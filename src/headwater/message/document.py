"""A message as one JSON document: how dead letters carry it."""

from __future__ import annotations

import msgspec

from headwater.message.model import NO_HEADERS, Message
from headwater.message.payload import readable
from headwater.message.times import iso, ms_of_iso


class MessageDocument(msgspec.Struct, rename={"from_": "from"}, omit_defaults=True):
    """A message as a JSON document, for dead letters, which outlive it. The payload goes in and out as it is; one that
    no parser reads (put in by hand) is kept as text, and says so."""

    seq: int
    id: str
    topic: str
    data: msgspec.Raw
    published_at: str
    size: int
    headers: msgspec.Raw = NO_HEADERS
    unreadable: bool = False
    priority: int = 0
    deliver_at: str | None = None
    expires_at: str | None = None
    from_: str | None = None
    to: str | None = None
    reply_to: str | None = None
    correlation_id: str | None = None
    type: str | None = None
    version: int | None = None
    content_type: str | None = None
    traceparent: str | None = None


_SAME_IN_DOCUMENT = ("seq", "id", "topic", "size", "priority", "from_", "to", "reply_to", "correlation_id", "type",
                     "version", "content_type", "traceparent")  # fmt: skip


def to_document(message: Message) -> MessageDocument:
    data = message.raw
    unreadable = not readable(data)
    if unreadable:
        data = msgspec.Raw(msgspec.json.encode(bytes(data).decode(errors="replace")))
    return MessageDocument(
        data=data,
        unreadable=unreadable,
        headers=message.raw_headers if message.headers else NO_HEADERS,
        published_at=iso(message.published_ms),
        deliver_at=None if message.deliver_ms is None else iso(message.deliver_ms),
        expires_at=None if message.expires_ms is None else iso(message.expires_ms),
        **{name: getattr(message, name) for name in _SAME_IN_DOCUMENT},
    )


def from_document(document: MessageDocument) -> Message:
    data = document.data
    if document.unreadable:
        data = msgspec.Raw(str(msgspec.json.decode(data)).encode())
    same = {name: getattr(document, name) for name in _SAME_IN_DOCUMENT if name != "id"}
    return Message(
        raw=msgspec.Raw(bytes(data)),  # a copy, so that it does not hold on to the whole document
        identity=document.id,
        raw_headers=NO_HEADERS if bytes(document.headers) == b"null" else msgspec.Raw(bytes(document.headers)),
        published_ms=ms_of_iso(document.published_at),
        deliver_ms=None if document.deliver_at is None else ms_of_iso(document.deliver_at),
        expires_ms=None if document.expires_at is None else ms_of_iso(document.expires_at),
        **same,
    )
