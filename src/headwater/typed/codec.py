"""An event as a message, and back.

A serializer gets the plain values that JSON has too (a Decimal or a datetime is text by then), so every serializer
carries them exactly. A log holds JSON, so bytes travel in it as base64. The content type of a message selects the
serializer that reads it; none is JSON.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from pydantic import BaseModel, ValidationError

from headwater.errors import InvalidMessageError, InvalidOptionError, UnknownTypeError, VersionMismatchError
from headwater.message import NAME_CHARS_MAX, Message, encode

if TYPE_CHECKING:
    from headwater.typed.declaration import Declaration
    from headwater.typed.event import Event

JSON = "application/json"
WRAPPING = "base64"  # the one key of a payload that is bytes
DECLARED_BY_CLASS = ("type", "version", "content_type")
FIRST_VERSION = 1
"""The version of a message that has none."""
ERRORS_SHOWN_MAX = 3

_SEQUENCES = (list, tuple, deque)


class Serializer(NamedTuple):
    name: str
    content_type: str
    encode: Callable[[dict[str, Any]], Any]
    """From plain values to JSON values or bytes."""
    decode: Callable[[Any], Any]


_by_name: dict[str, Serializer] = {
    "json": Serializer("json", JSON, lambda value: value, lambda value: value),
    "msgpack": Serializer("msgpack", "application/msgpack", msgspec.msgpack.encode, msgspec.msgpack.decode),
}


def register_serializer(
    name: str, content_type: str, encode: Callable[[dict[str, Any]], Any], decode: Callable[[Any], Any]
) -> None:
    """Adds a serializer for `class …(Event, serializer=name)`. Publisher and consumer both register it, under a name
    and content type that are not in use."""
    for word, value in (("name", name), ("content_type", content_type)):
        if not isinstance(value, str) or not 0 < len(value) <= NAME_CHARS_MAX:
            raise InvalidOptionError(
                f"its {word} must be text of 1 to {NAME_CHARS_MAX} characters", where=f"serializer {name!r}"
            )
    if not callable(encode) or not callable(decode):
        raise InvalidOptionError("encode and decode are functions", where=f"serializer {name!r}")
    for taken in _by_name.values():
        if name == taken.name or content_type == taken.content_type:
            raise InvalidOptionError(
                f"there is a serializer {taken.name!r} of {taken.content_type} already",
                where=f"serializer {name!r}",
                next="Give this one another name and content type",
            )
    _by_name[name] = Serializer(name, content_type, encode, decode)


def serializer_named(name: object, where: str) -> Serializer:
    if not isinstance(name, str) or name not in _by_name:
        raise InvalidOptionError(
            f"there is no serializer {name!r}",
            where=where,
            next=f"Name one of {', '.join(_by_name)}, or register yours before the class with register_serializer()",
        )
    return _by_name[name]


def to_data(serializer: Serializer, plain: dict[str, Any], where: str) -> Any:
    try:
        encoded = serializer.encode(plain)
    except Exception as exc:
        raise InvalidMessageError(
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
        raise InvalidMessageError(
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
    given = content_type or JSON
    for wanted in (given, _without_parameters(given)):
        for serializer in _by_name.values():
            if serializer.content_type == wanted:
                return serializer
    known = ", ".join(each.content_type for each in _by_name.values())
    raise InvalidMessageError(
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


# --- publishing -------------------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    topic: str
    data: Any
    options: dict[str, Any]


def prepare(event: Event, options: Mapping[str, Any], *, topic: str | None = None) -> Prepared:
    """The arguments of `log.publish`, checked and encoded. `topic` overrides that of the class, `options` its `from_`,
    `to` and `reply_to`."""
    declared = type(event).__headwater__
    refused = next((name for name in DECLARED_BY_CLASS if name in options), None)
    if refused is not None:
        raise InvalidOptionError(f"{refused} belongs to the class", where=declared.type, next="Leave it out")
    plain = plain_values(event)
    if topic is None:
        if declared.topic is None:
            raise InvalidOptionError(
                "it has no topic",
                where=f"class {type(event).__name__}",
                next=f'Write class {type(event).__name__}(…, topic="…")',
            )
        fields = type(event).model_fields
        names = {name: plain.get(fields[name].serialization_alias or name) for name in declared.topic.fields}
        topic = declared.topic.fill(names, declared.type)
    headers: dict[str, Any] = {"from_": declared.from_, "to": declared.to, "reply_to": declared.reply_to}
    if not is_json(declared.serializer.content_type):
        headers["content_type"] = declared.serializer.content_type
    given = {name: value for name, value in {**headers, **options}.items() if value is not None}
    given |= {"type": declared.type, "version": declared.version}
    return Prepared(topic, to_data(declared.serializer, plain, declared.type), given)


def plain_values(event: Event) -> dict[str, Any]:
    """The fields as JSON values. They are read back and compared: `model_construct()` checks nothing, a list in a field
    can change after it was checked, and some values change in JSON without an error: a secret becomes asterisks, an
    instance of a subclass loses the fields it adds, a Decimal in a field of type Any becomes text. Raises
    InvalidMessageError, or InvalidDataError for numbers that JSON does not have."""
    cls, where = type(event), type(event).__headwater__.type
    try:
        plain: dict[str, Any] = event.model_dump(mode="json", by_alias=True, round_trip=True, warnings="none")
    except (ValueError, OverflowError) as exc:
        raise InvalidMessageError(str(exc), where=where, next="Nothing was published") from exc
    try:
        back: Any = cls.__pydantic_validator__.validate_json(encode(plain, where)[0])
    except ValidationError as exc:
        path, why = summarize(exc)
        raise InvalidMessageError(
            why, where=f"{where}{path}", next=f"Nothing was published; {cls.__name__}(…) checks when it is made"
        ) from exc
    if back != event and (changed := _difference(event, back)) is not None:
        raise InvalidMessageError(
            f"it would be read as {_other(changed)}",
            where=".".join([where, *changed.path]),
            next="Nothing was published; give the field the type of its value, or a serializer that writes all of it",
        )
    return plain


def summarize(error: ValidationError) -> tuple[str, str]:
    """Pydantic's errors in one short line without values, which may be secret: the path of the field if there is only
    one (with a dot before it), and what is wrong."""
    details = error.errors(include_url=False, include_input=False, include_context=False)
    if len(details) == 1:
        path = ".".join(map(str, details[0]["loc"]))
        return (f".{path}" if path else ""), _lower(details[0]["msg"])
    parts = [f"{'.'.join(map(str, each['loc']))}: {_lower(each['msg'])}" for each in details[:ERRORS_SHOWN_MAX]]
    more = len(details) - len(parts)
    return "", "; ".join(parts) + (f"; and {more} more" if more else "")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


class _Difference(NamedTuple):
    path: tuple[str, ...]
    given: Any
    read: Any


def _other(changed: _Difference) -> str:
    given, read = type(changed.given).__name__, type(changed.read).__name__
    return f"a {read}, and it is a {given}" if given != read else f"another {given}"


def _difference(given: Any, read: Any) -> _Difference | None:
    """The first place where two values differ. `==` is too strict for private attributes, an hour that a clock shows
    twice, and objects that are only equal to themselves."""
    if isinstance(given, BaseModel):
        return _first(_fields(given, read)) if _model(given) is _model(read) else _Difference((), given, read)
    if isinstance(given, Mapping) and isinstance(read, Mapping) and given.keys() == read.keys():
        return _first((key, value, read[key]) for key, value in given.items())
    if isinstance(given, _SEQUENCES) and isinstance(read, _SEQUENCES) and len(given) == len(read):
        return _first((at, *pair) for at, pair in enumerate(zip(given, read, strict=True)))
    if dataclasses.is_dataclass(given) and type(given) is type(read):
        names = [field.name for field in dataclasses.fields(given)]
        return _first((name, getattr(given, name), getattr(read, name)) for name in names)
    if isinstance(given, datetime) and isinstance(read, datetime) and given.tzinfo and read.tzinfo:
        alike = not given - read  # astimezone() overflows in the first and the last year
    elif type(given).__eq__ is object.__eq__:  # type: ignore[comparison-overlap]
        alike = type(given) is type(read)
    else:
        alike = bool(given == read)
    return None if alike else _Difference((), given, read)


def _first(pairs: Iterable[tuple[object, Any, Any]]) -> _Difference | None:
    for name, given, read in pairs:
        found = _difference(given, read)
        if found is not None:
            return found._replace(path=(str(name), *found.path))
    return None


def _fields(given: BaseModel, read: BaseModel) -> Iterable[tuple[str, Any, Any]]:
    """Each name with the values of two models of one class, without the fields that the class excludes."""
    for name, field in type(given).model_fields.items():
        if not field.exclude and field.exclude_if is None:
            yield name, given.__dict__.get(name), read.__dict__.get(name)
    more, there = given.__pydantic_extra__ or {}, read.__pydantic_extra__ or {}
    for name in {**more, **there}:
        yield name, more.get(name), there.get(name)


def _model(value: Any) -> type[Any]:
    """The class of a generic alias: Envelope for Envelope[int]."""
    return getattr(value, "__pydantic_generic_metadata__", {}).get("origin") or type(value)


# --- reading ----------------------------------------------------------------------------------------------------


def class_of(classes: Sequence[type[Event]], message: Message) -> type[Event] | None:
    """The class of the message's type, or a subclass of one of these; of several versions the message's own, or else
    the newest, which may have an upgrader."""
    version = FIRST_VERSION if message.version is None else message.version
    alike = [cls for cls in classes if cls.__headwater__.type == message.type]
    if alike:
        return max(alike, key=lambda cls: (cls.__headwater__.version == version, cls.__headwater__.version))
    for registry in {id(cls.registry): cls.registry for cls in classes}.values():
        found = registry.find(message.type, version)
        if found is not None and issubclass(found, tuple(classes)):
            return found
    return None


def unknown_type(classes: Sequence[type[Event]], message: Message) -> UnknownTypeError:
    wanted = " or ".join(cls.__headwater__.type for cls in classes)
    why = "it has no type" if message.type is None else f"its type is {message.type!r}"
    return UnknownTypeError(
        f"{why}, and this wants {wanted}",
        where=_where(message),
        next="Publish it by its class, or let a handler of that class read it",
    )


def read_event(cls: type[Event], message: Message) -> Event:
    """Raises VersionMismatchError, InvalidMessageError or InvalidDataError."""
    declared = cls.__headwater__
    version = FIRST_VERSION if message.version is None else message.version
    where = _where(message)
    text: bytes | str = bytes(message.raw)
    if version != declared.version or not is_json(message.content_type):
        fields = from_data(message.content_type, message.data, where)
        text, _ = encode(_upgraded(declared, version, fields, where), where)
    try:
        event: Any = cls.__pydantic_validator__.validate_json(text)
    except ValidationError as exc:
        path, why = summarize(exc)
        raise InvalidMessageError(
            why,
            where=f"{where}, {declared.type}{path}",
            next=f"It is marked as version {version}; changed fields need a new version and an upgrader",
        ) from exc
    return event  # type: ignore[no-any-return]


def _where(message: Message) -> str:
    return f"message {message.seq} on {message.topic}"


def _upgraded(declared: Declaration, version: int, fields: Any, where: str) -> Any:
    """The fields of an older version as those of the class's own."""
    if version > declared.version:
        raise VersionMismatchError(
            f"the message is version {version} of {declared.type}, and the class here is version {declared.version}",
            where=where,
            next="Give consumers the new class before publishers, then redrive this",
        )
    missing = next((each for each in range(version, declared.version) if each not in declared.upgraders), None)
    if missing is not None:
        raise VersionMismatchError(
            f"the message is version {version} of {declared.type}, the class here is version {declared.version}, and "
            f"nothing upgrades {missing} to {missing + 1}",
            where=where,
            next=f"Declare @{declared.type}.upgrade(from_version={missing}), then redrive this",
        )
    for each in range(version, declared.version):
        try:
            fields = declared.upgraders[each](fields)
        except Exception as exc:
            raise InvalidMessageError(
                f"its upgrade from version {each} failed: {type(exc).__name__}: {exc}", where=where
            ) from exc
        if not isinstance(fields, dict):
            raise InvalidMessageError(
                f"its upgrade from version {each} gave a {type(fields).__name__}",
                where=where,
                next="An upgrader returns the fields as a dict",
            )
    return fields
