"""Messages outside a log: made for a transport alone, and written as one JSON document per line."""

from __future__ import annotations

import secrets
from typing import Any, Unpack

import msgspec

from headwater.errors import InvalidData, PublishOnly, TooLarge
from headwater.message import (
    NO_HEADERS,
    SALT_BITS,
    Extras,
    Message,
    MessageDocument,
    PublishOptions,
    derived_id,
    from_document,
    make_draft,
    to_document,
)
from headwater.topics import check_topic

LINE_BYTES_MAX = 8 * 1024 * 1024  # a payload at its limit that no parser reads, written as text, grows sixfold
LINE_BEGIN = b'{"seq":'
_RANDOM_TAIL_BITS = 48

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(MessageDocument).decode


def make_message(topic: str, data: Any, now_ms: int, **options: Unpack[PublishOptions]) -> Message:
    """A message that was never in a log, for those who publish to a transport directly: seq 0, and a new UUIDv7 as its
    id unless one is given."""
    draft = make_draft(check_topic(topic), data, options, now_ms)
    extras = draft.extras or Extras()
    headers = extras.headers_json
    return Message(
        seq=0,
        topic=draft.topic,
        raw=msgspec.Raw(draft.data_json.encode()),
        published_ms=now_ms,
        size=draft.size,
        identity=draft.id or derived_id(now_ms, secrets.randbits(SALT_BITS), secrets.randbits(_RANDOM_TAIL_BITS)),
        raw_headers=NO_HEADERS if headers is None else msgspec.Raw(headers.encode()),
        **{name: getattr(extras, name) for name in Extras.__struct_fields__ if name != "headers_json"},
    )


def to_line(message: Message) -> bytes:
    """The message as one JSON document that ends its line. Raises TooLarge."""
    line: bytes = _encode(to_document(message))
    if b"\n" in line:  # white space around values that somebody wrote by hand; within text it is always escaped
        line = msgspec.json.format(line, indent=-1)
    if len(line) >= LINE_BYTES_MAX:
        raise TooLarge(f"{len(line)} bytes in one line, the limit is {LINE_BYTES_MAX}", where=f"message {message.id}")
    return line + b"\n"


def from_line(line: bytes, where: str = "line") -> Message:
    """The message of one line. Raises InvalidData, which says `where` the line stood."""
    if len(line) > LINE_BYTES_MAX:
        raise InvalidData(f"over {LINE_BYTES_MAX} bytes without an end", where=where)
    try:
        return from_document(_decode(line))
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise InvalidData(
            f"this is no message ({exc})", where=where, next="Repair or remove the line; the others are whole"
        ) from exc


def publish_only(kind: str, name: str, instead: str) -> PublishOnly:
    """The refusal of those that carry nothing back."""
    return PublishOnly(f"{kind} is publish-only: it carries no messages back", where=name, next=instead)
