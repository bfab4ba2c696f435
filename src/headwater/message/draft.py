"""A message about to be published: checked, encoded, without a place in the log yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import msgspec

from headwater.errors import InvalidData, InvalidOption, TooLarge
from headwater.message.model import NAMED_HEADERS, Message
from headwater.message.payload import DATA_BYTES_MAX, encode
from headwater.message.times import Moment, Span, span_ms, time_ms

HEADERS_BYTES_MAX = 64 * 1024
ID_CHARS_MAX = 128
NAME_CHARS_MAX = 256
BATCH_MESSAGES_MAX = 100_000
PRIORITY_MAX = 1_000_000
VERSION_MAX = 1_000_000


_NAMES = ("from_", "to", "reply_to", "correlation_id", "type", "content_type", "traceparent")


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
    for name in _NAMES:
        value = options.get(name)
        if value is not None:
            _check_name(name, value, NAME_CHARS_MAX)
    version = options.get("version")
    if version is not None:
        check_whole("version", version, 0, VERSION_MAX)
    priority = check_whole("priority", options.get("priority", 0), -PRIORITY_MAX, PRIORITY_MAX)
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
            f"header {misplaced!r} has an option of its own", where=topic, next=f"Give it as the option {option}"
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
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise InvalidOption(f"{name} holds half a surrogate pair, which is no text") from exc
    if len(value) > limit:
        raise TooLarge(f"{name} has {len(value)} characters, the limit is {limit}")


def check_limits(message: Message) -> None:
    """Hold a message that comes from a file to the limits of one that is published."""
    for name, size, limit in (
        ("data", len(message.raw), DATA_BYTES_MAX),
        ("headers", len(message.raw_headers), HEADERS_BYTES_MAX),
        ("id", len(str(message.identity)), ID_CHARS_MAX),
        *((name, len(getattr(message, name) or ""), NAME_CHARS_MAX) for name in _NAMES),
    ):
        if size > limit:
            raise TooLarge(f"{name} has a length of {size}, the limit is {limit}")
    check_whole("priority", message.priority, -PRIORITY_MAX, PRIORITY_MAX)


def _moment(at_name: str, at: Moment | None, span_name: str, span: Span | None, now_ms: int) -> int | None:
    if at is not None and span is not None:
        raise InvalidOption(f"{at_name} and {span_name} exclude each other", next="Pass one of them")
    if span is not None:
        return now_ms + span_ms(span, span_name)
    return None if at is None else time_ms(at, at_name)


def check_whole(name: str, value: object, least: int, most: int) -> int:
    """A whole number within bounds; True and 3.0 are none."""
    if type(value) is not int or not least <= value <= most:
        raise InvalidOption(f"{name} must be a whole number from {least} to {most}, not {value!r}")
    return value
