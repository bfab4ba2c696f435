"""How the fields of an event become a payload, and back. A log holds JSON, so bytes travel in it as base64.

A serializer is given the plain values that JSON has too (a Decimal or a datetime is text by then), so what it carries
comes back exactly whichever it is. The content type of a message says which one reads it; no content type is JSON.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from headwater.errors import InvalidMessage, InvalidOption
from headwater.message import NAME_CHARS_MAX

JSON = "application/json"
WRAPPING = "base64"  # the one key of a payload that is bytes


class Serializer(NamedTuple):
    name: str
    content_type: str
    encode: Callable[[dict[str, Any]], Any]
    """From plain values to what travels: JSON values, or bytes."""
    decode: Callable[[Any], Any]


def _as_it_is(value: Any) -> Any:
    return value


_by_name: dict[str, Serializer] = {
    "json": Serializer("json", JSON, _as_it_is, _as_it_is),
    "msgpack": Serializer("msgpack", "application/msgpack", msgspec.msgpack.encode, msgspec.msgpack.decode),
}


def register_serializer(
    name: str, content_type: str, encode: Callable[[dict[str, Any]], Any], decode: Callable[[Any], Any]
) -> None:
    """Let classes say `serializer=name`. Both sides have to register it; a name or content type is taken once."""
    for word, value in (("name", name), ("content_type", content_type)):
        if not isinstance(value, str) or not 0 < len(value) <= NAME_CHARS_MAX:
            raise InvalidOption(
                f"its {word} must be text of 1 to {NAME_CHARS_MAX} characters", where=f"serializer {name!r}"
            )
    if not callable(encode) or not callable(decode):
        raise InvalidOption("encode and decode are functions", where=f"serializer {name!r}")
    for taken in _by_name.values():
        if name == taken.name or content_type == taken.content_type:
            raise InvalidOption(
                f"there is a serializer {taken.name!r} of {taken.content_type} already",
                where=f"serializer {name!r}",
                next="Give this one another name and content type",
            )
    _by_name[name] = Serializer(name, content_type, encode, decode)


def serializer_named(name: object, where: str) -> Serializer:
    if not isinstance(name, str) or name not in _by_name:
        raise InvalidOption(
            f"there is no serializer {name!r}",
            where=where,
            next=f"Name one of {', '.join(_by_name)}, or register yours before the class with register_serializer()",
        )
    return _by_name[name]


def to_data(serializer: Serializer, plain: dict[str, Any], where: str) -> Any:
    try:
        encoded = serializer.encode(plain)
    except Exception as exc:
        raise InvalidMessage(
            f"its serializer {serializer.name!r} failed: {type(exc).__name__}: {exc}",
            where=where,
            next="Nothing was published",
        ) from exc
    if isinstance(encoded, bytes | bytearray | memoryview):
        return {WRAPPING: base64.b64encode(encoded).decode("ascii")}
    return encoded


def from_data(content_type: str | None, data: Any, where: str) -> Any:
    serializer = _of_content_type(content_type, where)
    if serializer.content_type == JSON:
        return data
    try:
        return serializer.decode(_unwrapped(data))
    except Exception as exc:
        raise InvalidMessage(
            f"it cannot be read as {content_type}: {type(exc).__name__}: {exc}",
            where=where,
            next="See what its publisher sends",
        ) from exc


def is_json(content_type: str | None) -> bool:
    return content_type is None or _without_parameters(content_type) == JSON


def _without_parameters(content_type: str) -> str:
    """`Application/JSON; charset=utf-8` is application/json."""
    return content_type.partition(";")[0].strip().lower()


def _of_content_type(content_type: str | None, where: str) -> Serializer:
    said = content_type or JSON
    for wanted in (said, _without_parameters(said)):
        for serializer in _by_name.values():
            if serializer.content_type == wanted:
                return serializer
    known = ", ".join(each.content_type for each in _by_name.values())
    raise InvalidMessage(
        f"no serializer reads {content_type!r}",
        where=where,
        next=f"Known are {known}; register_serializer() adds more",
    )


def _unwrapped(data: Any) -> Any:
    if isinstance(data, Mapping) and list(data) == [WRAPPING] and isinstance(data[WRAPPING], str):
        try:
            return base64.b64decode(data[WRAPPING], validate=True)
        except binascii.Error as exc:
            raise ValueError(f"not base64 ({exc})") from exc
    return data
