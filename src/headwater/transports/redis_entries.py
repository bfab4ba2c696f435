"""A message as an entry of a Redis stream, and back. Other consumers find `id`, `topic` and `type` as plain fields;
`doc` is the whole message as its JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from headwater.errors import InvalidData
from headwater.message import Message, MessageDocument, from_document, to_document
from headwater.topics import check_topic

BATCH_MESSAGES_MAX = 500  # per script: it keeps the server from all else for a few milliseconds
BATCH_BYTES_MAX = 4 * 1024 * 1024

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(MessageDocument).decode

Fields = Mapping[bytes, bytes]


class Entry(msgspec.Struct, frozen=True):
    """`type` is empty where a message has none: entries with the same fields share their names in a stream."""

    id: str
    topic: str
    type: str
    doc: bytes

    @property
    def size(self) -> int:
        return len(self.doc) + len(self.id) + len(self.topic) + len(self.type)


def to_doc(message: Message) -> bytes:
    return _encode(to_document(message))


def to_entry(message: Message) -> Entry:
    return Entry(message.id, message.topic, message.type or "", to_doc(message))


def from_doc(doc: bytes | None, where: str) -> Message:
    """Raises InvalidData for what Headwater did not write."""
    if doc is None:
        raise InvalidData("there is no field 'doc'", where=where)
    try:
        message = from_document(_decode(doc))
        check_topic(message.topic)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise InvalidData(f"this is no message ({exc})", where=where) from exc
    return message


def from_fields(fields: Fields, where: str) -> Message:
    return from_doc(fields.get(b"doc"), where)


def batches(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """In their order, each within both limits; one that is over the limit of bytes by itself goes alone."""
    begin = size = 0
    for at, entry in enumerate(entries):
        if at > begin and (at - begin == BATCH_MESSAGES_MAX or size + entry.size > BATCH_BYTES_MAX):
            yield entries[begin:at]
            begin, size = at, 0
        size += entry.size
    if entries:
        yield entries[begin:]
