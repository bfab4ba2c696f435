"""Complaints about a configuration: where, why, what next; and all of them in one error."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headwater.configuration.frozen import Frozen
from headwater.configuration.settings import SECTIONS, as_shown, written
from headwater.errors import HeadwaterError, InvalidConfiguration
from headwater.topics.topic import quoted

PREFIX_CHARS_MIN = 3
_TOPICS_ADVICE = "Write a [[topics]] table for each"

Location = tuple[str | int, ...]


class Complaint(NamedTuple):
    where: str
    why: str
    next: str = ""


def error_of(complaints: Sequence[Complaint]) -> InvalidConfiguration:
    """One error that says them all."""
    if len(complaints) == 1:
        [only] = complaints
        return InvalidConfiguration(only.why, where=only.where, next=only.next)
    lines = [f"{each.where}: {each.why}" + (f". {each.next}" if each.next else "") for each in complaints]
    return InvalidConfiguration(f"{len(lines)} things are wrong\n" + "\n".join(f"- {line}" for line in lines))


def complaints_of(error: ValidationError, model: type[Frozen], where: Callable[[str], str]) -> list[Complaint]:
    """Pydantic's complaints in our words; `where` tells the place of a key path."""
    return [_complaint(details, model, where) for details in error.errors(include_url=False)]


def _complaint(details: ErrorDetails, model: type[Frozen], where: Callable[[str], str]) -> Complaint:
    location, context = details["loc"], details.get("ctx", {})
    place = where(path_of(location))
    cause = context.get("error")
    if isinstance(cause, HeadwaterError):
        next = cause.next or _advice_from_default(location, model)
        return Complaint(place, f"{cause.where}: {cause.why}" if cause.where else cause.why, next)
    match details["type"]:
        case "extra_forbidden":
            return Complaint(place, "there is no such key", _advice_for_unknown(location, model))
        case "missing":
            return Complaint(place, "it is missing", 'Write it like pattern = "orders.>"')
        case "model_type":
            in_list = isinstance(location[-1], int)
            next = _TOPICS_ADVICE if in_list else f"Write [{path_of(location)}], and its keys below"
            return Complaint(place, f"must be a table, not {shown(details['input'])}", next)
        case "literal_error":
            meant = nearest(str(details["input"]), re.findall(r"'(\w+)'", context["expected"]))
            next = f"Did you mean {meant}?" if meant else _advice_from_default(location, model)
            wanted = context["expected"].replace("'", "")
            return Complaint(place, f"must be {wanted}, not {shown(details['input'])}", next)
    return Complaint(place, _why(details), _advice_from_default(location, model))


def _why(details: ErrorDetails) -> str:
    context = details.get("ctx", {})
    match details["type"]:
        case "int_type" | "int_from_float":
            wanted = "a whole number"
        case "bool_type":
            wanted = "true or false"
        case "string_type":
            wanted = "text"
        case "tuple_type":
            wanted = "a list"
        case "dict_type":
            wanted = "tables by name"
        case "greater_than_equal":
            wanted = f"at least {context['ge']}"
        case "less_than_equal":
            wanted = f"at most {context['le']}"
        case "string_too_short":
            return "it is empty"
        case "string_too_long" | "too_long":
            return f"it is longer than {context['max_length']}"
        case _:
            return details["msg"]
    return f"must be {wanted}, not {shown(details['input'])}"


def _advice_for_unknown(location: Location, model: type[Frozen]) -> str:
    """The key that was probably meant, or those there are."""
    *parents, name = location
    known = list(_model_at(model, parents).model_fields)
    if meant := nearest(str(name), known):
        return f"Did you mean {meant}?"
    elsewhere = [section for section, table in SECTIONS.items() if name in table.model_fields]
    if elsewhere:
        return f"It belongs into [{path_of((*_outside_sections(parents), elsewhere[0]))}]"
    return f"Known keys: {', '.join(known)}"


def _advice_from_default(location: Location, model: type[Frozen]) -> str:
    """Right for every source, unlike a line of TOML, and an example of what is wanted."""
    if location[-1] == "topics":
        return _TOPICS_ADVICE
    *parents, name = [part for part in location if isinstance(part, str)]
    field = _model_at(model, parents).model_fields[name]
    if get_origin(field.annotation) is dict:
        return f"Write [{path_of(location)}.NAME], and its keys below"
    if field.is_required():
        return ""
    return (
        "Leave it out to have none" if field.default is None else f"The default is {written(as_shown(field.default))}"
    )


def _model_at(model: type[Frozen], parents: Iterable[str | int]) -> type[Frozen]:
    parts = iter(parents)
    for part in parts:
        if isinstance(part, str):
            kind: Any = model.model_fields[part].annotation
            if get_origin(kind) is dict:  # tables by name, and the name comes next
                model = get_args(kind)[1]
                next(parts, None)
            else:
                model = kind if isinstance(kind, type) else get_args(kind)[0]  # a table, or the tables of a list
    return model


def _outside_sections(parents: Iterable[str | int]) -> list[str | int]:
    outside = list(parents)
    if outside and outside[-1] in SECTIONS:
        outside.pop()
    return outside


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The one known word that begins so, or else the one most alike."""
    known = list(known)
    begins = [each for each in known if len(word) >= PREFIX_CHARS_MIN and each.startswith(word)]
    close = begins if len(begins) == 1 else difflib.get_close_matches(word, known, n=1)
    return close[0] if close else None


def path_of(location: Iterable[str | int]) -> str:
    """`server.port`, `topics[0].max_age`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else quoted(value)
