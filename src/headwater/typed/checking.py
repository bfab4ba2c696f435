"""What is published must be read as what it was: an event is read back before it goes out.

`model_construct()` checks nothing, a list in a field can change after it was checked, and some values change on their
way through JSON without a word: a secret becomes asterisks, an instance of a subclass loses the fields it adds, a
Decimal in a field of type Any becomes text.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ValidationError

from headwater.errors import InvalidMessage
from headwater.message import encode

if TYPE_CHECKING:
    from headwater.typed.event import Event

ERRORS_TOLD_MAX = 3

_SEQUENCES = (list, tuple, deque)


def plain_values(event: Event) -> dict[str, Any]:
    """The fields as JSON has them. Raises InvalidMessage, or InvalidData for numbers that JSON does not have."""
    cls, where = type(event), type(event).__headwater__.where
    try:
        plain: dict[str, Any] = event.model_dump(mode="json", by_alias=True, round_trip=True, warnings="none")
    except (ValueError, OverflowError) as exc:
        raise InvalidMessage(str(exc), where=where, next="Nothing was published") from exc
    try:
        back: Any = cls.__pydantic_validator__.validate_json(encode(plain, where)[0])
    except ValidationError as exc:
        path, why = told(exc)
        raise InvalidMessage(
            why, where=f"{where}{path}", next=f"Nothing was published; {cls.__name__}(…) checks when it is made"
        ) from exc
    if back != event and (changed := _difference(event, back)) is not None:
        raise InvalidMessage(
            f"it would be read as {_other(changed)}",
            where=".".join([where, *changed.path]),
            next="Nothing was published; give the field the type of its value, or a serializer that writes all of it",
        )
    return plain


def told(error: ValidationError) -> tuple[str, str]:
    """Pydantic's complaints in one short line without values, which may be nobody's business: the path of the field if
    there is only one (with a dot before it), and what is wrong."""
    details = error.errors(include_url=False, include_input=False, include_context=False)
    if len(details) == 1:
        path = _path(details[0]["loc"])
        return (f".{path}" if path else ""), _lower(details[0]["msg"])
    parts = [f"{_path(each['loc'])}: {_lower(each['msg'])}" for each in details[:ERRORS_TOLD_MAX]]
    more = len(details) - len(parts)
    return "", "; ".join(parts) + (f"; and {more} more" if more else "")


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)


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
    """The first place where two values differ. `==` is too strict for some: private attributes, an hour that a clock
    shows twice, and objects that are only equal to themselves."""
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
        alike = given.astimezone(UTC) == read.astimezone(UTC)
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
    """Without those that stay here because the class says so."""
    for name, field in type(given).model_fields.items():
        if not field.exclude and field.exclude_if is None:
            yield name, given.__dict__.get(name), read.__dict__.get(name)
    more, there = given.__pydantic_extra__ or {}, read.__pydantic_extra__ or {}
    for name in {**more, **there}:
        yield name, more.get(name), there.get(name)


def _model(value: Any) -> type[Any]:
    """Of Envelope[int], Envelope."""
    return getattr(value, "__pydantic_generic_metadata__", {}).get("origin") or type(value)
