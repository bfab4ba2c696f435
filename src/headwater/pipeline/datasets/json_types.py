"""From JSON Schemas to columns: which Spark type a property gets, over all versions of a message type. Pure.

A property whose type is not one of those below, or whose versions contradict each other, is TEXT: objects and arrays as
JSON, anything else as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from headwater.errors import TooLarge

COLUMNS_MAX = 1_000
NESTING_MAX = 16
PREFIX = "data_"


class Simple(Enum):
    """The value is how SQL spells it."""

    TEXT = "string"
    WHOLE = "bigint"
    NUMBER = "double"
    TRUTH = "boolean"
    TIME = "timestamp"


@dataclass(frozen=True)
class ArrayOf:
    element: Kind


@dataclass(frozen=True)
class Fields:
    fields: tuple[tuple[str, Kind], ...]


Kind: TypeAlias = Simple | ArrayOf | Fields


@dataclass(frozen=True)
class Property:
    """One column of a typed table: its name there, and the property of the JSON that it shows."""

    column: str
    name: str
    kind: Kind


_BY_NAME = {"string": Simple.TEXT, "integer": Simple.WHOLE, "number": Simple.NUMBER, "boolean": Simple.TRUTH}


def properties(documents: Sequence[Mapping[str, Any]], taken: Iterable[str]) -> list[Property]:
    """The columns of all versions, the oldest first, so that a new version never renames an old column.

    Spark does not tell upper from lower case. A name that is `taken` gets a prefix; one that differs from an earlier
    one only in case gets a number.
    """
    kinds: dict[str, Kind] = {}
    for document in documents:
        for name, kind in _fields_of(document, document, NESTING_MAX):
            kinds[name] = _merged(kinds[name], kind) if name in kinds else kind
    if len(kinds) > COLUMNS_MAX:
        raise TooLarge(f"{len(kinds)} properties, a typed table has at most {COLUMNS_MAX}", next="Nest some of them")
    used = {name.lower() for name in taken}
    reserved = frozenset(used)
    found = []
    for name, kind in kinds.items():
        plain = f"{PREFIX}{name}" if name.lower() in reserved or not name else name
        column, count = plain, 1
        while column.lower() in used:
            count += 1
            column = f"{plain}_{count}"
        used.add(column.lower())
        found.append(Property(column, name, kind))
    return found


def sql_type(kind: Kind) -> str:
    if isinstance(kind, Simple):
        return kind.value
    if isinstance(kind, ArrayOf):
        return f"array<{sql_type(kind.element)}>"
    fields = ", ".join(f"{quoted(name)}: {sql_type(each)}" for name, each in kind.fields)
    return f"struct<{fields}>"


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _fields_of(schema: object, root: Mapping[str, Any], nesting: int) -> list[tuple[str, Kind]]:
    found = _plain(schema, root, nesting).get("properties")
    if not isinstance(found, dict):
        return []
    return [(name, _kind(each, root, nesting - 1)) for name, each in found.items()]


def _kind(schema: object, root: Mapping[str, Any], nesting: int) -> Kind:
    if nesting <= 0:  # also where a schema contains itself
        return Simple.TEXT
    plain = _plain(schema, root, nesting)
    name = _type_name(plain)
    if name == "string" and plain.get("format") == "date-time":
        return Simple.TIME
    if name == "array":
        return ArrayOf(_kind(plain["items"], root, nesting - 1)) if "items" in plain else Simple.TEXT
    if name == "object":
        return _struct(_fields_of(plain, root, nesting))
    return _BY_NAME.get(name, Simple.TEXT)


def _struct(fields: Sequence[tuple[str, Kind]]) -> Kind:
    names = {name.lower() for name, _ in fields}
    return Fields(tuple(fields)) if fields and len(names) == len(fields) else Simple.TEXT


def _type_name(plain: Mapping[str, Any]) -> str:
    """The one type besides null; empty if there are several."""
    declared = plain.get("type")
    names = declared if isinstance(declared, list) else [declared]
    known = [name for name in names if name != "null" and isinstance(name, str)]
    return known[0] if len(known) == 1 else ""


def _plain(schema: object, root: Mapping[str, Any], hops: int) -> Mapping[str, Any]:
    """The schema behind `$ref`s inside the document and behind "this or null"."""
    for _ in range(hops):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        choices = _choices(schema)
        if isinstance(reference, str):
            schema = _at_pointer(root, reference)
        elif len(choices) == 1 and "type" not in schema:
            schema = choices[0]
        else:
            return schema
    return {}


def _choices(schema: Mapping[str, Any]) -> list[object]:
    for keyword in ("anyOf", "oneOf", "allOf"):
        listed = schema.get(keyword)
        if isinstance(listed, list):
            return [each for each in listed if each != {"type": "null"}]
    return []


def _at_pointer(root: Mapping[str, Any], reference: str) -> object:
    if not reference.startswith("#"):
        return None
    found: object = root
    for step in reference[1:].split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _merged(old: Kind, new: Kind) -> Kind:
    if old == new:
        return old
    if isinstance(old, ArrayOf) and isinstance(new, ArrayOf):
        return ArrayOf(_merged(old.element, new.element))
    if isinstance(old, Fields) and isinstance(new, Fields):
        fields = dict(old.fields)
        for name, kind in new.fields:
            fields[name] = _merged(fields[name], kind) if name in fields else kind
        return _struct(list(fields.items()))
    if {old, new} == {Simple.WHOLE, Simple.NUMBER}:
        return Simple.NUMBER
    return Simple.TEXT
