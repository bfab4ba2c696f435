"""What is published (`Draft`) and what the log holds (`Message`), with the limits on both.

Times are whole milliseconds since 1970 UTC inside, aware `datetime`s at the surface. Payloads are JSON text that is
encoded once, at publish, and decoded only when somebody asks for `data`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict

import msgspec

from headwater.errors import InvalidData, InvalidOption, TooLarge

DATA_BYTES_MAX = 1024 * 1024
HEADERS_BYTES_MAX = 64 * 1024
ID_CHARS_MAX = 128
NAME_CHARS_MAX = 256
BATCH_MESSAGES_MAX = 100_000
PRIORITY_MAX = 1_000_000
TIME_MS_MAX = 253_402_300_799_999  # the last millisecond of year 9999, the most a datetime can say

NAMED_HEADERS = ("from", "to", "reply_to", "correlation_id", "type", "version", "content_type", "traceparent")

Moment = datetime | int | float
Span = timedelta | int | float


class PublishOptions(TypedDict, total=False):
    """What may stand beside topic and data in a publish; every key is optional."""

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


class Extras(msgspec.Struct, gc=False, frozen=True):
    """What most messages do without; kept apart so that the plain message stays cheap."""

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
    headers_json: str | None = None


class Draft(msgspec.Struct, gc=False, frozen=True):
    """A message that is checked and encoded, but has no place in the log yet."""

    topic: str
    data_json: str
    size: int
    id: str | None = None
    extras: Extras | None = None


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
    def data(self) -> Any:
        return _decode(self.raw, f"message {self.seq} on {self.topic}")

    @property
    def data_json(self) -> str:
        return bytes(self.raw).decode()

    @property
    def headers(self) -> dict[str, Any]:
        """The free headers; the named ones (`from_`, `type`, …) are attributes."""
        found = _decode(self.raw_headers, f"headers of message {self.seq}")
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
            "data": self.data,
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


def message_from_json(plain: Mapping[str, Any]) -> Message:
    """The reverse of `Message.to_json`, for dead letters that outlived their message."""
    data, size = encode(plain["data"], "data")
    headers = plain.get("headers") or None
    return Message(
        seq=plain["seq"],
        topic=plain["topic"],
        raw=msgspec.Raw(data.encode()),
        published_ms=ms_of_iso(plain["published_at"]),
        size=size,
        identity=plain["id"],
        priority=plain.get("priority", 0),
        deliver_ms=None if plain.get("deliver_at") is None else ms_of_iso(plain["deliver_at"]),
        expires_ms=None if plain.get("expires_at") is None else ms_of_iso(plain["expires_at"]),
        from_=plain.get("from"),
        to=plain.get("to"),
        reply_to=plain.get("reply_to"),
        correlation_id=plain.get("correlation_id"),
        type=plain.get("type"),
        version=plain.get("version"),
        content_type=plain.get("content_type"),
        traceparent=plain.get("traceparent"),
        raw_headers=NO_HEADERS if headers is None else msgspec.Raw(encode(headers, "headers")[0].encode()),
    )


# --- drafting -------------------------------------------------------------------------------------------------------


def make_draft(topic: str, data: Any, options: PublishOptions, now_ms: int) -> Draft:
    """Check and encode one message; `topic` has been checked by the caller. Raises InvalidInput, changes nothing."""
    data_json, size = encode(data, topic)
    if not options:  # the hot path: nothing but topic and data
        return Draft(topic, data_json, size)
    unknown = options.keys() - PublishOptions.__annotations__.keys()
    if unknown:
        raise InvalidOption(
            f"unknown publish option {sorted(unknown)[0]!r}",
            where=topic,
            next=f"Known ones: {', '.join(PublishOptions.__annotations__)}",
        )
    given_id = options.get("id")
    if given_id is not None:
        _check_name("id", given_id, ID_CHARS_MAX)
    extras = _make_extras(topic, options, now_ms)
    return Draft(topic, data_json, size, given_id, extras if extras != _NO_EXTRAS else None)


def _make_extras(topic: str, options: PublishOptions, now_ms: int) -> Extras:
    for name in ("from_", "to", "reply_to", "correlation_id", "type", "content_type", "traceparent"):
        value = options.get(name)
        if value is not None:
            _check_name(name, value, NAME_CHARS_MAX)
    version = options.get("version")
    if version is not None and (
        not isinstance(version, int) or isinstance(version, bool) or abs(version) > PRIORITY_MAX
    ):
        raise InvalidOption(f"version must be a whole number, not {version!r}", where=topic)
    priority = options.get("priority", 0)
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > PRIORITY_MAX:
        raise InvalidOption(f"priority must be a whole number within ±{PRIORITY_MAX}, not {priority!r}", where=topic)
    return Extras(
        priority=priority,
        deliver_ms=_moment("deliver_at", options.get("deliver_at"), "delay", options.get("delay"), now_ms),
        expires_ms=_moment("expires_at", options.get("expires_at"), "ttl", options.get("ttl"), now_ms),
        from_=options.get("from_"),
        to=options.get("to"),
        reply_to=options.get("reply_to"),
        correlation_id=options.get("correlation_id"),
        type=options.get("type"),
        version=version,
        content_type=options.get("content_type"),
        traceparent=options.get("traceparent"),
        headers_json=_encode_headers(options.get("headers"), topic),
    )


_NO_EXTRAS = Extras()


def _encode_headers(headers: Mapping[str, Any] | None, topic: str) -> str | None:
    if not headers:
        return None
    if not isinstance(headers, Mapping) or not all(isinstance(name, str) for name in headers):
        raise InvalidData("headers must be a mapping with text keys", where=topic)
    misplaced = next((name for name in headers if name in NAMED_HEADERS), None)
    if misplaced is not None:
        option = "from_" if misplaced == "from" else misplaced
        raise InvalidOption(
            f"header {misplaced!r} has an option of its own", where=topic, next=f"Pass {option}=… to publish"
        )
    text, size = encode(dict(headers), f"headers on {topic}")
    if size > HEADERS_BYTES_MAX:
        raise TooLarge(
            f"headers take {size} bytes, the limit is {HEADERS_BYTES_MAX}",
            where=topic,
            next="Put what is large into data",
        )
    return text


def _check_name(name: str, value: object, limit: int) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidOption(f"{name} must be non-empty text, not {value!r}")
    if len(value) > limit:
        raise TooLarge(f"{name} has {len(value)} characters, the limit is {limit}")


def _moment(at_name: str, at: Moment | None, span_name: str, span: Span | None, now_ms: int) -> int | None:
    if at is not None and span is not None:
        raise InvalidOption(f"{at_name} and {span_name} exclude each other", next="Pass one of them")
    if span is not None:
        return now_ms + span_ms(span, span_name)
    return None if at is None else time_ms(at, at_name)


# --- JSON -----------------------------------------------------------------------------------------------------------


def _foreign(value: object) -> object:
    dump = getattr(value, "model_dump", None)  # a pydantic model, without depending on pydantic
    if callable(dump):
        return dump(mode="json")
    raise TypeError(f"a {type(value).__name__} is not JSON")


_encode = msgspec.json.Encoder(enc_hook=_foreign).encode
_decoder = msgspec.json.Decoder()


def encode(data: Any, where: str) -> tuple[str, int]:
    """JSON text of `data` and its size in bytes, or InvalidData/TooLarge that says where it stood."""
    try:
        encoded = _encode(data)
    except (TypeError, ValueError, RecursionError, OverflowError) as exc:
        raise InvalidData(str(exc) or type(exc).__name__, where=where, next="Send JSON values only") from exc
    size = len(encoded)
    if size > DATA_BYTES_MAX:
        raise TooLarge(
            f"{size} bytes of JSON, the limit is {DATA_BYTES_MAX}",
            where=where,
            next="Store it elsewhere and publish a reference",
        )
    text = encoded.decode()
    # The encoder writes NaN and infinities as null and bytes as base64; refusing them beats changing them silently.
    if "null" in text:
        _refuse_non_finite(data, where)
    if type(data) in _BYTES:
        raise InvalidData("bytes are not JSON", where=where, next="Decode them, or send base64 text")
    return text, size


_BYTES = frozenset({bytes, bytearray, memoryview})


def _refuse_non_finite(value: object, where: str) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidData(f"{value} is not JSON", where=where, next="Send null or text instead")
    elif isinstance(value, Mapping):
        for part in value.values():
            _refuse_non_finite(part, where)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for part in value:
            _refuse_non_finite(part, where)


def _decode(raw: msgspec.Raw, where: str) -> Any:
    try:
        return _decoder.decode(raw)
    except msgspec.DecodeError as exc:
        raise InvalidData(f"the stored payload is not JSON ({exc})", where=where) from exc


# --- ids and times --------------------------------------------------------------------------------------------------


def derived_id(published_ms: int, salt: int, seq: int) -> str:
    """A UUIDv7 that follows from when and where a message was published: time, 26 bits of log, 48 bits of seq.

    Nothing has to be generated or stored at publish, and the same row always has the same id.
    """
    return (
        f"{published_ms >> 16:08x}-{published_ms & 0xFFFF:04x}-7{salt >> 14:03x}"
        f"-{0x8000 | (salt & 0x3FFF):04x}-{seq:012x}"
    )


SALT_BITS = 26


def time_ms(at: Moment, name: str = "time") -> int:
    """Milliseconds of an aware datetime, or of seconds since 1970."""
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise InvalidOption(f"{name} has no time zone", next="Use datetime.now(UTC) or .astimezone()")
        ms = round(at.timestamp() * 1000)
    elif isinstance(at, (int, float)) and not isinstance(at, bool) and math.isfinite(at):
        ms = round(at * 1000)
    else:
        raise InvalidOption(f"{name} must be a datetime or seconds since 1970, not {at!r}")
    if not 0 <= ms <= TIME_MS_MAX:
        raise InvalidOption(f"{name} lies outside the years 1970 to 9999: {at!r}")
    return ms


def span_ms(span: Span, name: str) -> int:
    """Milliseconds of a timedelta, or of seconds; never negative."""
    if isinstance(span, timedelta):
        seconds = span.total_seconds()
    elif isinstance(span, (int, float)) and not isinstance(span, bool) and math.isfinite(span):
        seconds = float(span)
    else:
        raise InvalidOption(f"{name} must be seconds or a timedelta, not {span!r}")
    if not 0 <= seconds <= 3_155_760_000:  # a century; beyond it arithmetic on times would overflow
        raise InvalidOption(f"{name} must lie between 0 and a hundred years, not {span!r}")
    return round(seconds * 1000)


def datetime_of(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def iso(ms: int) -> str:
    return datetime_of(ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@functools.lru_cache(maxsize=1024)
def ms_of_iso(text: str) -> int:
    return time_ms(datetime.fromisoformat(text))
