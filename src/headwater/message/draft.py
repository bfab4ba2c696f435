"""A message about to be published: checked, encoded, without a place in the log yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from headwater.arguments import check_whole, unknown_option
from headwater.errors import InvalidDataError, InvalidOptionError, TooLargeError
from headwater.formats import Moment, iso, span_ms, time_ms
from headwater.message.model import (
    EXTRA_FIELDS,
    HEADER_FIELDS,
    PRIORITY_MAX,
    Header,
    Message,
    PublishOptions,
    Time,
    Whole,
)
from headwater.message.payload import DATA_BYTES_MAX, encode

HEADERS_BYTES_MAX = 64 * 1024
ID_CHARS_MAX = 128
BATCH_MESSAGES_MAX = 100_000
PUBLISHED_AHEAD_MS_MAX = 60_000  # the clocks of two machines may differ by so much

if TYPE_CHECKING:

    class Extras(msgspec.Struct):
        headers_json: str | None = None
else:
    Extras = msgspec.defstruct(
        "Extras",
        [
            ("headers_json", str | None, None) if field.kind == "json" else (field.attribute, field.type, field.default)
            for field in EXTRA_FIELDS
        ],
        namespace={"__doc__": "EXTRA_FIELDS of a draft, kept apart so that the plain message stays cheap."},
        module=__name__,
        gc=False,
        frozen=True,
    )


class Draft(msgspec.Struct, gc=False, frozen=True):
    """A message that is checked and encoded, but has no place in the log yet. One with a time of its own has extras,
    even if they are empty: then it is not plain."""

    topic: str
    data_json: str
    size: int
    id: str | None = None
    extras: Extras | None = None
    published_ms: int | None = None


_NO_EXTRAS = Extras()
_TEXTS: dict[str, int] = {}
_WHOLES: dict[str, tuple[int, int]] = {}
_TIMES: dict[str, tuple[str, Time]] = {}
for _field in EXTRA_FIELDS:
    match _field.rule:
        case Header(chars_max=_chars_max, most=None):
            _TEXTS[_field.option] = _chars_max
        case Header(most=int(_most)):
            _WHOLES[_field.option] = (0, _most)
        case Whole():
            _WHOLES[_field.option] = _field.rule
        case Time(_at, _span):
            _TIMES[_at] = _TIMES[_span] = (_field.attribute, _field.rule)
_OPTION_OF_HEADER = {field.name: field.option for field in HEADER_FIELDS}


def make_draft(topic: str, data: Any, options: PublishOptions, now_ms: int) -> Draft:
    """Check and encode one message; `topic` has been checked by the caller. Raises InvalidInputError, changes
    nothing."""
    encoded, data_json = encode(data, topic)
    size = len(encoded)
    if not options:  # the hot path: nothing but topic and data
        return Draft(topic, data_json, size)
    unknown = options.keys() - PublishOptions.__annotations__.keys()
    if unknown:
        name = sorted(map(str, unknown))[0]
        raise InvalidOptionError(
            f"unknown publish option {name!r}",
            where=topic,
            next=unknown_option(name, "publish", list(PublishOptions.__annotations__)),
        )
    given_id = options.get("id")
    if given_id is not None:
        _check_name("id", given_id, ID_CHARS_MAX)
    extras = _make_extras(topic, cast(Mapping[str, Any], options), now_ms)
    published_at = options.get("published_at")
    if published_at is not None:
        return Draft(topic, data_json, size, given_id, extras, _past_ms(published_at, now_ms))
    return Draft(topic, data_json, size, given_id, extras if extras != _NO_EXTRAS else None)


def _past_ms(published_at: Moment, now_ms: int) -> int:
    ms = time_ms(published_at, "published_at")
    if ms > now_ms + PUBLISHED_AHEAD_MS_MAX:
        raise InvalidOptionError(
            f"published_at lies in the future: {iso(ms)}",
            next="It is for messages of the past; deliver_at delays a new one",
        )
    return ms


def copy_draft(message: Message, topic: str) -> Draft:
    """A stored message as a new one on another topic, with all its headers but without its id and times."""
    fields = {
        field.attribute: getattr(message, field.attribute)
        for field in EXTRA_FIELDS
        if field.kind not in ("time", "json")
    }
    headers = bytes(message.raw_headers)
    extras = Extras(**fields, headers_json=None if headers == b"null" else headers.decode())
    return Draft(topic, message.data_json, message.size, None, extras)


def _make_extras(topic: str, options: Mapping[str, Any], now_ms: int) -> Extras:
    extras: dict[str, Any] = {}
    value: Any
    for name, value in options.items():
        if name in _TEXTS:
            if value is not None:
                _check_name(name, value, _TEXTS[name])
                extras[name] = value
        elif name in _WHOLES:
            if value is not None or name == "priority":
                extras[name] = check_whole(name, value, *_WHOLES[name])
        elif name in _TIMES and value is not None:
            attribute, (at, span) = _TIMES[name]
            if attribute in extras:
                raise InvalidOptionError(f"{at} and {span} exclude each other", next="Pass one of them")
            extras[attribute] = now_ms + span_ms(value, name) if name == span else time_ms(value, name)
    headers = options.get("headers")
    if headers:
        extras["headers_json"] = _encode_headers(headers, topic)
    return Extras(**extras)


def _encode_headers(headers: Mapping[str, Any], topic: str) -> str:
    if not isinstance(headers, Mapping) or not all(isinstance(name, str) for name in headers):
        raise InvalidDataError(
            f"headers must be a mapping with text keys, not {headers!r:.80}", where=topic, next='Write {"tenant": "a"}'
        )
    misplaced = next((name for name in headers if name in _OPTION_OF_HEADER), None)
    if misplaced is not None:
        raise InvalidOptionError(
            f"header {misplaced!r} has an option of its own",
            where=topic,
            next=f"Give it as the option {_OPTION_OF_HEADER[misplaced]}",
        )
    encoded, text = encode(dict(headers), f"headers on {topic}")
    if len(encoded) > HEADERS_BYTES_MAX:
        raise TooLargeError(
            f"headers take {len(encoded)} bytes, the limit is {HEADERS_BYTES_MAX}",
            where=topic,
            next="Put what is large into data",
        )
    return text


def _check_name(name: str, value: object, limit: int) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidOptionError(
            f"{name} must be non-empty text, not {value!r}",
            next="" if value is None or isinstance(value, str) else "Convert it with str(…)",
        )
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise InvalidOptionError(f"{name} holds half a surrogate pair, which is no text") from exc
    if len(value) > limit:
        raise TooLargeError(f"{name} has {len(value)} characters, the limit is {limit}")


def check_limits(message: Message) -> None:
    """Hold a message that comes from a file to the limits of one that is published."""
    for name, size, limit in (
        ("data", len(message.raw), DATA_BYTES_MAX),
        ("headers", len(message.raw_headers), HEADERS_BYTES_MAX),
        ("id", len(str(message.identity)), ID_CHARS_MAX),
        *((name, len(getattr(message, name) or ""), chars_max) for name, chars_max in _TEXTS.items()),
    ):
        if size > limit:
            raise TooLargeError(f"{name} has a length of {size}, the limit is {limit}")
    check_whole("priority", message.priority, -PRIORITY_MAX, PRIORITY_MAX)
