"""Registered message types: JSON Schemas in a directory, as `TYPE@VERSION.json`, or `TYPE.json` for any version.

Plain texts, so that they travel to executors. A schema stands for itself: what it refers to lies inside it, and nothing
is ever fetched from a file or an address that it names.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jsonschema_rs

from headwater.errors import InvalidOption, TooLarge
from headwater.message.draft import VERSION_MAX

SCHEMAS_MAX = 1_000
SCHEMA_BYTES_MAX = 256 * 1024
WHY_CHARS_MAX = 300

_VERSION = re.compile(r"0|[1-9][0-9]{0,6}")
_NO_TABLE_NAME = re.compile(r"[^a-z0-9_]+")


@dataclass(frozen=True)
class RegisteredSchema:
    """The JSON Schema of one version of a type; version None is for every version that has none of its own."""

    type: str
    version: int | None
    text: str

    @property
    def document(self) -> dict[str, Any]:
        """The schema; what is written as `true` or `false` says nothing of properties."""
        found = json.loads(self.text)
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Types:
    """All registered schemas, by type and version."""

    schemas: tuple[RegisteredSchema, ...] = ()

    @cached_property
    def by_name(self) -> dict[str, dict[int | None, RegisteredSchema]]:
        found: dict[str, dict[int | None, RegisteredSchema]] = {}
        for each in sorted(self.schemas, key=_by_age):
            found.setdefault(each.type, {})[each.version] = each
        return found

    @cached_property
    def table_names(self) -> dict[str, str]:
        """A name for the typed table of each type: lower case, and no two alike."""
        names: dict[str, str] = {}
        for name in self.by_name:
            plain = _NO_TABLE_NAME.sub("_", name.lower()).strip("_") or "type"
            free, count = plain, 1
            while free in names.values():
                count += 1
                free = f"{plain}_{count}"
            names[name] = free
        return names

    def schemas_of(self, type: str) -> tuple[RegisteredSchema, ...]:
        """All versions of a type, the one for any version first, then the oldest."""
        return tuple(self.by_name.get(type, {}).values())


def load_types(directory: str | Path) -> Types:
    """Read and check all `*.json` of a directory; other files are left alone."""
    folder = Path(directory)
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".json")
    except OSError as exc:
        raise InvalidOption(
            f"cannot be read ({exc.strerror})", where=str(folder), next="Name a directory with TYPE@VERSION.json files"
        ) from exc
    if len(paths) > SCHEMAS_MAX:
        raise TooLarge(
            f"{len(paths)} message types, the limit is {SCHEMAS_MAX}",
            where=str(folder),
            next="Remove versions that nobody sends any more",
        )
    return Types(tuple(_load(path) for path in paths))


def _load(path: Path) -> RegisteredSchema:
    name, version = _name_and_version(path)
    text = _text(path)
    try:
        json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidOption(f"not JSON ({exc})", where=str(path), next="Write one JSON Schema in it") from exc
    try:
        compiled(text)
    except ValueError as exc:
        raise InvalidOption(
            f"not a JSON Schema that can be used ({_why(exc)})",
            where=str(path),
            next="Correct it; put what it refers to into its own $defs, for nothing is fetched from elsewhere",
        ) from exc
    return RegisteredSchema(name, version, text)


def compiled(text: str) -> jsonschema_rs.Validator:
    """A validator that reads no file and asks no network."""
    return jsonschema_rs.validator_for(text, validate_formats=True, offline=True)


def _name_and_version(path: Path) -> tuple[str, int | None]:
    name, at, version = path.stem.rpartition("@")
    if not at:
        name, version = path.stem, ""
    if not name or name.startswith("."):
        raise _bad_name(path, f"{name!r} is no type")
    if not at:
        return name, None
    if not _VERSION.fullmatch(version) or int(version) > VERSION_MAX:
        raise _bad_name(path, f"{version!r} is no version: a whole number from 0 to {VERSION_MAX}")
    return name, int(version)


def _bad_name(path: Path, why: str) -> InvalidOption:
    return InvalidOption(why, where=str(path), next="Call it TYPE@VERSION.json, or TYPE.json for any version")


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            found = file.read(SCHEMA_BYTES_MAX + 1)
    except OSError as exc:
        raise InvalidOption(f"cannot be read ({exc.strerror})", where=str(path)) from exc
    if len(found) > SCHEMA_BYTES_MAX:
        raise TooLarge(
            f"the limit of a schema is {SCHEMA_BYTES_MAX} bytes", where=str(path), next="Split the type, or shorten it"
        )
    try:
        return found.decode()
    except UnicodeDecodeError as exc:
        raise InvalidOption("not UTF-8", where=str(path), next="Save it as UTF-8 without a byte-order mark") from exc


def _why(exc: ValueError) -> str:
    return str(getattr(exc, "message", exc)).splitlines()[0][:WHY_CHARS_MAX]


def _by_age(each: RegisteredSchema) -> tuple[str, int]:
    return each.type, -1 if each.version is None else each.version
