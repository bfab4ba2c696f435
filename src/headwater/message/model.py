"""One message of the log, and the table of its fields.

Each field is declared once, in `Message`. FIELDS follows from it, and from that drafts, JSON documents, the shape of
`rpc.publish`, and the columns in stores, archive and pipeline. A new field goes last, because positions travel in
`rpc.fetch`. It also needs an option in `PublishOptions` and a column in both schemas; a test compares them with FIELDS.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec

from headwater.formats import Moment, Span, datetime_of, iso, ms_of_iso
from headwater.message.payload import decode, readable

NAME_CHARS_MAX = 256
PRIORITY_MAX = 1_000_000
VERSION_MAX = 1_000_000
SALT_BITS = 26
NO_HEADERS = msgspec.Raw(b"null")

Kind = Literal["text", "whole", "time", "json"]


class Column(NamedTuple):
    """What SQL and JSON call a field, where that is not the attribute's name."""

    name: str


class Header(NamedTuple):
    """A named header: text, or a whole number from 0 to `most`."""

    name: str = ""
    chars_max: int = NAME_CHARS_MAX
    most: int | None = None


class Whole(NamedTuple):
    least: int
    most: int


class Time(NamedTuple):
    """Milliseconds here and in SQL, ISO 8601 in JSON. `span` is the publish option that counts from now."""

    name: str
    span: str = ""


class Message(msgspec.Struct, array_like=True, gc=False):
    """One message of the log. `identity` is its given id, or the log's salt from which the id follows."""

    seq: int
    topic: str
    raw: Annotated[msgspec.Raw, Column("data")]
    published_ms: Annotated[int, Time("published_at")]
    size: int
    identity: Annotated[str | int, Column("id")]
    priority: Annotated[int, Whole(-PRIORITY_MAX, PRIORITY_MAX)] = 0
    deliver_ms: Annotated[int | None, Time("deliver_at", "delay")] = None
    expires_ms: Annotated[int | None, Time("expires_at", "ttl")] = None
    from_: Annotated[str | None, Header("from")] = None
    to: Annotated[str | None, Header()] = None
    reply_to: Annotated[str | None, Header()] = None
    correlation_id: Annotated[str | None, Header()] = None
    type: Annotated[str | None, Header()] = None
    version: Annotated[int | None, Header(most=VERSION_MAX)] = None
    content_type: Annotated[str | None, Header()] = None
    traceparent: Annotated[str | None, Header()] = None
    raw_headers: Annotated[msgspec.Raw, Column("headers")] = NO_HEADERS

    def __repr__(self) -> str:
        return f"<message {self.seq} on {self.topic}>"

    @property
    def id(self) -> str:
        """The publisher's id, or one derived from time, log and seq."""
        if isinstance(self.identity, str):
            return self.identity
        return derived_id(self.published_ms, self.identity, self.seq)

    @property
    def scoped_id(self) -> str:
        """Topic and id in one text: ids are unique within a topic."""
        return scoped_id(self.topic, self.id)

    @property
    def data(self) -> Any:
        """The payload, decoded from JSON."""
        return decode(self.raw, f"message {self.seq} on {self.topic}")

    @property
    def data_json(self) -> str:
        """The payload as JSON text."""
        return bytes(self.raw).decode()

    @property
    def headers(self) -> dict[str, Any]:
        """The free headers; the named ones (`from_`, `type`, …) are attributes."""
        found = decode(self.raw_headers, f"headers of message {self.seq}")
        return found if isinstance(found, dict) else {}

    @property
    def published_at(self) -> datetime:
        """The time of the publish."""
        return datetime_of(self.published_ms)

    @property
    def deliver_at(self) -> datetime | None:
        """The message is not delivered before this time."""
        return None if self.deliver_ms is None else datetime_of(self.deliver_ms)

    @property
    def expires_at(self) -> datetime | None:
        """The message is not delivered after this time."""
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
            "headers": _readable_headers(self),
            **{name: value for name, value in named.items() if value is not None},
            "priority": self.priority,
            **{name: None if (ms := self.field(name)) is None else iso(ms) for name in _TIMES.values()},
            "size": self.size,
        }


class PublishOptions(TypedDict, total=False):
    """The options of a publish besides topic and data; every key is optional."""

    id: str | None
    headers: Mapping[str, Any] | None
    from_: str | None
    to: str | None
    reply_to: str | None
    correlation_id: str | None
    type: str | None
    version: int | None
    content_type: str | None
    traceparent: str | None
    priority: int
    deliver_at: Moment | None
    delay: Span | None
    expires_at: Moment | None
    ttl: Span | None
    published_at: Moment | None


class Field(NamedTuple):
    """`name` is what SQL, JSON and `where` call it, `option` what a publish does."""

    attribute: str
    name: str
    option: str
    kind: Kind
    type: Any
    default: Any
    rule: Column | Header | Whole | Time | None


def _field(info: msgspec.structs.FieldInfo) -> Field:
    type_ = getattr(info.type, "__origin__", info.type)
    [rule] = getattr(info.type, "__metadata__", [None])
    name = getattr(rule, "name", "") or info.name
    is_text = type_ is str or str in getattr(type_, "__args__", ())
    kind: Kind = (
        "time" if isinstance(rule, Time) else "json" if type_ is msgspec.Raw else "text" if is_text else "whole"
    )
    return Field(info.name, name, info.name if isinstance(rule, Header) else name, kind, type_, info.default, rule)


FIELDS = tuple(map(_field, msgspec.structs.fields(Message)))
EXTRA_FIELDS = tuple(field for field in FIELDS if field.default is not msgspec.NODEFAULT)
"""What most messages do without, in the order of their columns."""
HEADER_FIELDS = tuple(field for field in FIELDS if isinstance(field.rule, Header))
NAMED_HEADERS = tuple(field.name for field in HEADER_FIELDS)
HEADERS_AT = Message.__struct_fields__.index("raw_headers")
LEADING_HEADERS = tuple(field.name for field in FIELDS[:HEADERS_AT] if isinstance(field.rule, Header))
"""Their columns stand together in the lake and in archives; those of fields added since then come last."""
_TIMES = {field.attribute: field.name for field in FIELDS if field.kind == "time"}
_ATTRIBUTE_OF = {
    field.name: field.attribute
    for field in FIELDS
    if not isinstance(field.rule, Column) and field.name != field.attribute
}


class _Document(msgspec.Struct):
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


if TYPE_CHECKING:
    MessageDocument = _Document
else:
    MessageDocument = msgspec.defstruct(
        "MessageDocument",
        [
            (field.option, str | None if field.kind == "time" else field.type, field.default)
            for field in EXTRA_FIELDS
            if field.kind != "json"
        ],
        bases=(_Document,),
        namespace={"__doc__": _Document.__doc__},
        module=__name__,
        rename={field.attribute: field.name for field in HEADER_FIELDS if field.attribute != field.name},
        omit_defaults=True,
    )

_SAME_IN_DOCUMENT = ("seq", "topic", "size", *(each.option for each in EXTRA_FIELDS if each.kind in ("text", "whole")))


def _readable_headers(message: Message) -> dict[str, Any]:
    """Invalid ones (put in by hand) are left out: they must not keep a message from its dead letter."""
    return message.headers if readable(message.raw_headers) else {}


def to_document(message: Message) -> MessageDocument:
    data = message.raw
    unreadable = not readable(data)
    if unreadable:
        data = msgspec.Raw(msgspec.json.encode(bytes(data).decode(errors="replace")))
    fields = {name: getattr(message, name) for name in _SAME_IN_DOCUMENT}
    for attribute, name in _TIMES.items():
        ms = getattr(message, attribute)
        fields[name] = None if ms is None else iso(ms)
    headers = message.raw_headers if _readable_headers(message) else NO_HEADERS
    return MessageDocument(id=message.id, data=data, unreadable=unreadable, headers=headers, **fields)


def from_document(document: MessageDocument) -> Message:
    data = document.data
    if document.unreadable:
        data = msgspec.Raw(str(msgspec.json.decode(data)).encode())
    fields = {name: getattr(document, name) for name in _SAME_IN_DOCUMENT}
    for attribute, name in _TIMES.items():
        text = getattr(document, name)
        fields[attribute] = None if text is None else ms_of_iso(text)
    return Message(
        raw=msgspec.Raw(bytes(data)),  # a copy, so that it does not hold on to the whole document
        identity=document.id,
        raw_headers=NO_HEADERS if bytes(document.headers) == b"null" else msgspec.Raw(bytes(document.headers)),
        **fields,
    )


def scoped_id(topic: str, id: str) -> str:
    """What a message is recognised by wherever it may come twice: its id, among those of its topic. A publisher on one
    topic has no influence on the ids of another. No topic holds a #, so no other pair gives the same text; a blank
    would do too, but psycopg quotes texts with blanks one by one, which takes a third of the time of a publish."""
    return f"{topic}#{id}"


def derived_id(published_ms: int, salt: int, seq: int) -> str:
    """A UUIDv7 that follows from when and where a message was published: time, 26 bits of log, 48 bits of seq.

    Nothing has to be generated or stored at publish, and the same row always has the same id.
    """
    return (
        f"{published_ms >> 16:08x}-{published_ms & 0xFFFF:04x}-7{salt >> 14:03x}"
        f"-{0x8000 | (salt & 0x3FFF):04x}-{seq:012x}"
    )
