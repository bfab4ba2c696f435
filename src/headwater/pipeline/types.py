"""Registered message types: JSON Schemas in a directory, as `TYPE@VERSION.json`, or `TYPE.json` for any version.

A message must fit the schema of its type and version, and the properties that the schemas name become the columns of
the type's own table. A schema is self-contained: `$ref` points inside the document, and nothing is ever fetched from a
file or an address that it names.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, lru_cache, reduce
from itertools import accumulate, chain, count, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headwater.errors import InvalidOptionError, TooLargeError
from headwater.message import VERSION_MAX
from headwater.pipeline.columns import DAY, TIME, TYPED_SCHEMA

if TYPE_CHECKING:
    import jsonschema_rs

SCHEMAS_MAX = 1_000
SCHEMA_BYTES_MAX = 256 * 1024
REASON_CHARS_MAX = 300
PROBLEM_CHARS_MAX = 500
VERSIONS_SHOWN_MAX = 20
COLUMNS_MAX = 1_000
NESTING_MAX = 16

_FILE_NAME = re.compile(r"(?!\.)(?:(?P<type>.+)@(?P<version>0|[1-9][0-9]{0,6})|(?P<any>[^@]+))")
_NOT_IN_TABLE_NAMES = re.compile(r"[^a-z0-9_]+")
# Delta without column mapping refuses ` ,;{}()\n\t=`; other blanks and control characters are as unreadable.
_NOT_IN_COLUMN_NAMES = re.compile(r"[\s,;{}()=\x00-\x1f\x7f]")


# The registry


class RegisteredSchema(NamedTuple):
    """The JSON Schema of one version of a type; version None is for every version that has none of its own."""

    type: str
    version: int | None
    text: str


@dataclass(frozen=True)
class Types:
    """All registered schemas, by type and version. Texts only, so that it can be sent to executors."""

    schemas: tuple[RegisteredSchema, ...] = ()

    @cached_property
    def by_name(self) -> dict[str, dict[int | None, RegisteredSchema]]:
        """The schemas by type: that for any version first, then the oldest version."""
        found: dict[str, dict[int | None, RegisteredSchema]] = {}
        for each in sorted(self.schemas, key=lambda each: (each.type, -1 if each.version is None else each.version)):
            found.setdefault(each.type, {})[each.version] = each
        return found

    @cached_property
    def table_names(self) -> dict[str, str]:
        """The table of each type, `typed/<name>`: lower case. Types whose names would be alike get a part of their hash
        each, so that one that is registered later never takes the table of another."""
        plain = {name: _NOT_IN_TABLE_NAMES.sub("_", name.lower()).strip("_") or "type" for name in self.by_name}
        counts = Counter(plain.values())
        return {
            name: f"typed/{each}" if counts[each] == 1 else f"typed/{each}_{_hash(name)[:8]}"
            for name, each in plain.items()
        }

    @cached_property
    def digest(self) -> str:
        """The same for the same schemas, whatever their order; commits say by it which types made them."""
        schemas = [list(versions.values()) for versions in self.by_name.values()]
        return _hash(json.dumps(schemas))[:16]

    def __hash__(self) -> int:
        return hash(self.digest)  # not over all texts at each lookup


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def load_types(directory: str | Path) -> Types:
    """Read and check all `*.json` of a directory; other files are ignored."""
    folder = Path(directory)
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".json")
        if len(paths) > SCHEMAS_MAX:
            why = f"{len(paths)} message types, the limit is {SCHEMAS_MAX}"
            raise TooLargeError(why, where=str(folder), next="Remove versions that are no longer sent")
        types = Types(tuple(map(_load, paths)))
    except OSError as exc:
        why, next = f"cannot be read ({exc.strerror})", "Name a directory with TYPE@VERSION.json files"
        raise InvalidOptionError(why, where=str(exc.filename), next=next) from exc
    for name in types.by_name:
        typed_columns(name, types)
    return types


def compiled(text: str) -> jsonschema_rs.Validator:
    """A validator that reads no file and no address."""
    import jsonschema_rs  # takes a while to load, and most lakes have no types

    return jsonschema_rs.validator_for(text, validate_formats=True, offline=True)


def _load(path: Path) -> RegisteredSchema:
    def refused(why: str, next: str) -> InvalidOptionError:
        return InvalidOptionError(why, where=str(path), next=next)

    name = _FILE_NAME.fullmatch(path.stem)
    if name is None or int(name["version"] or 0) > VERSION_MAX:
        why = f"{path.stem!r} is not a type, nor a type with a version from 0 to {VERSION_MAX}"
        raise refused(why, "Call it TYPE@VERSION.json, or TYPE.json for any version")
    with path.open("rb") as file:
        content = file.read(SCHEMA_BYTES_MAX + 1)
    if len(content) > SCHEMA_BYTES_MAX:
        why = f"the limit of a schema is {SCHEMA_BYTES_MAX // 1024} KiB"
        raise TooLargeError(why, where=str(path), next="Split the type, or shorten it")
    try:
        text = content.decode()
        json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise refused(f"not JSON in UTF-8 ({exc})", "Write one JSON Schema in it, without a byte-order mark") from exc
    try:
        compiled(text)
    except ValueError as exc:
        reason = str(getattr(exc, "message", exc)).splitlines()[0][:REASON_CHARS_MAX]
        next = "Correct it; put what it refers to into its own $defs, for nothing is fetched from elsewhere"
        raise refused(f"not a JSON Schema that can be used ({reason})", next) from exc
    return RegisteredSchema(name["type"] or name["any"], int(name["version"]) if name["version"] else None, text)


# Problems of messages

_decode = msgspec.json.Decoder().decode


def check(
    types: Types, type: pa.Array, version: pa.Array, data: pa.Array
) -> tuple[dict[int, str], dict[str, dict[int, Any]]]:
    """Whether each message is JSON, as strictly as the log itself reads it, and fits the schema of its type: by row the
    first thing that is wrong, and by registered type and row the decoded data of the messages that are right."""
    problems: dict[int, str] = {}
    values: dict[str, dict[int, Any]] = {}
    validators = _validators(types)
    keys = zip(type.to_pylist(), version.to_pylist(), strict=True) if validators else repeat((None, None), len(data))
    for row, ((name, number), text) in enumerate(zip(keys, data.to_pylist(), strict=True)):
        try:
            value = _decode(text)
        except (ValueError, RecursionError, TypeError) as exc:
            problems[row] = "there is no data" if text is None else f"data is not JSON: {exc}"
            continue
        if (versions := validators.get(name)) is None:
            continue
        validator = versions.get(number) or versions.get(None)
        if validator is None:
            problems[row] = _unknown_version(name, number, versions)
        elif validator.is_valid(value):
            values.setdefault(name, {})[row] = value
        else:
            problems[row] = _violation(validator, value)
    longest = PROBLEM_CHARS_MAX
    return {row: each if len(each) <= longest else each[: longest - 1] + "…" for row, each in problems.items()}, values


@lru_cache(maxsize=4)
def _validators(types: Types) -> dict[str, dict[int | None, jsonschema_rs.Validator]]:
    """Compiled once in each worker, not once for each batch."""
    return {
        name: {version: compiled(schema.text) for version, schema in versions.items()}
        for name, versions in types.by_name.items()
    }


def _violation(validator: jsonschema_rs.Validator, value: Any) -> str:
    error = next(validator.iter_errors(value), None)
    if error is None:
        return "the message does not fit its schema"
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path)
    return f"${path}: {error.message}"


def _unknown_version(type: str, version: int | None, known: Collection[int | None]) -> str:
    newest = ["…"] if len(known) > VERSIONS_SHOWN_MAX else []
    newest += [str(each) for each in known][-VERSIONS_SHOWN_MAX:]
    which = f"{type} without a version" if version is None else f"version {version} of {type}"
    return f"{which} is not registered; known: {', '.join(newest)}"


# From JSON Schema to columns
#
# What a property is: a plain Arrow type, [what its elements are], or {name: what that is}. A property that is none of
# these, or whose versions contradict each other, is TEXT: objects and arrays as JSON, other values as they are.

TEXT, WHOLE, NUMBER, TRUTH = pa.string(), pa.int64(), pa.float64(), pa.bool_()
_PLAIN = {"string": TEXT, "integer": WHOLE, "number": NUMBER, "boolean": TRUTH}

Kind: TypeAlias = "pa.DataType | list[Kind] | dict[str, Kind]"


class TypedColumn(NamedTuple):
    """A column of a typed table and the property of the JSON that it shows."""

    column: str
    name: str
    kind: Kind

    @property
    def field(self) -> pa.Field:
        return pa.field(self.column, _arrow(self.kind))


def typed_schema(type: str, types: Types) -> pa.Schema:
    """The columns of a type's table: those of every typed table, and one for each property of any version."""
    return pa.schema([*TYPED_SCHEMA, *(column.field for column in typed_columns(type, types))])


@lru_cache(maxsize=SCHEMAS_MAX)
def typed_columns(type: str, types: Types) -> tuple[TypedColumn, ...]:
    """The oldest version first, so that a new version never renames an old column."""
    paths: set[tuple[str, ...]] = set()
    documents = [json.loads(schema.text) for schema in types.by_name.get(type, {}).values()]
    kinds: dict[str, Kind] = reduce(_merged_fields, (_Walk(type, each, paths).fields(each) for each in documents), {})
    return tuple(_named(kinds, taken=(*TYPED_SCHEMA.names, DAY.name)))


def _named(kinds: Mapping[str, Kind], taken: Iterable[str] = ()) -> list[TypedColumn]:
    """Columns with names that Delta accepts and that differ in more than case. A name that is taken, or none at all,
    gets a prefix; one like an earlier one gets a number."""
    reserved = {name.lower() for name in taken}
    plain = [_NOT_IN_COLUMN_NAMES.sub("_", name) for name in kinds]
    wanted = ["data_" + name if not name or name.lower() in reserved else name for name in plain]
    columns = _unique(wanted, reserved)
    return [TypedColumn(column, *item) for column, item in zip(columns, kinds.items(), strict=True)]


def _unique(names: Iterable[str], taken: Iterable[str]) -> list[str]:
    used, found = set(taken), []
    for name in names:
        numbered = chain([name], (f"{name}_{number}" for number in count(2)))
        found.append(next(each for each in numbered if each.lower() not in used))
        used.add(found[-1].lower())
    return found


@dataclass
class _Walk:
    """From one schema document to the kinds of its properties. It was compiled, so each keyword has a value that the
    standard allows, also where a `$ref` leads. `paths` are those of all versions of the type."""

    type: str
    root: object
    paths: set[tuple[str, ...]]

    def fields(self, schema: Any, references: tuple[str, ...] = ("#",), path: tuple[str, ...] = ()) -> dict[str, Kind]:
        plain, references = self._plain(schema, references)
        found = plain.get("properties", {})
        self.paths.update((*path, name) for name in found)
        if len(self.paths) > COLUMNS_MAX:  # also where references multiply
            why = f"more than {COLUMNS_MAX} properties, the limit of a typed table"
            raise TooLargeError(why, where=f"type {self.type}", next="Leave some out of the schema")
        return {name: self._kind(each, references, (*path, name)) for name, each in found.items()}

    def _kind(self, schema: Any, references: tuple[str, ...], path: tuple[str, ...]) -> Kind:
        if len(path) >= NESTING_MAX:
            return TEXT
        plain, references = self._plain(schema, references)
        declared = plain.get("type", "")
        names = {declared} if isinstance(declared, str) else {*declared} - {"null"}
        name = names.pop() if len(names) == 1 else ""
        if name == "array" and "items" in plain:
            return [self._kind(plain["items"], references, (*path, "[]"))]
        if name == "object":
            return self.fields(plain, references, path) or TEXT
        return TIME if (name, plain.get("format")) == ("string", "date-time") else _PLAIN.get(name, TEXT)

    def _plain(self, schema: Any, references: tuple[str, ...]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """The schema behind `$ref` and behind "this or null", and the references that led to it; one that leads to
        itself ends there. `true` and `false` say nothing of columns."""
        while isinstance(schema, dict):
            listed: list[Any] = next(
                (schema[keyword] for keyword in ("anyOf", "oneOf", "allOf") if keyword in schema), []
            )
            choices = [each for each in listed if each != {"type": "null"}]
            if "$ref" in schema:
                if schema["$ref"] in references:
                    break
                references = (*references, schema["$ref"])
                schema = _at_pointer(self.root, references[-1])
            elif len(choices) == 1 and not {"type", "properties"} & schema.keys():
                schema = choices[0]
            else:
                return schema, references
        return {}, references


def _at_pointer(root: object, reference: str) -> object:
    beginning, *steps = reference.split("/")
    found: object = root if beginning == "#" else None
    for step in steps:
        key = step.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _merged_fields(old: Mapping[str, Kind], new: Mapping[str, Kind]) -> dict[str, Kind]:
    return {**old, **{name: _merged(old.get(name, kind), kind) for name, kind in new.items()}}


def _merged(old: Kind, new: Kind) -> Kind:
    if isinstance(old, list) and isinstance(new, list):
        return [_merged(old[0], new[0])]
    if isinstance(old, dict) and isinstance(new, dict):
        return _merged_fields(old, new)
    if old == new:
        return old
    return NUMBER if old in (WHOLE, NUMBER) and new in (WHOLE, NUMBER) else TEXT


def _arrow(kind: Kind) -> pa.DataType:
    if isinstance(kind, list):
        return pa.list_(_arrow(kind[0]))
    return pa.struct([column.field for column in _named(kind)]) if isinstance(kind, dict) else kind


# From decoded JSON to the values of columns, a whole column at a time

_STRICT: dict[pa.DataType, Any] = {
    WHOLE: list[Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None],
    NUMBER: list[float | None],
    TRUTH: list[bool | None],
    TIME: list[Annotated[datetime, msgspec.Meta(tz=True)] | None],  # RFC 3339, also with `t` and `z`
}


def array(kind: Kind, values: Sequence[Any]) -> pa.Array:
    """Decoded values as a column; null where one is null or of another kind."""
    if isinstance(kind, list | dict):
        is_null = pa.array([not isinstance(value, type(kind)) for value in values], pa.bool_())
    if isinstance(kind, list):
        lists = [value if isinstance(value, list) else [] for value in values]
        offsets = pa.array([0, *accumulate(map(len, lists))], pa.int32())
        return pa.ListArray.from_arrays(offsets, array(kind[0], list(chain.from_iterable(lists))), mask=is_null)
    if isinstance(kind, dict):
        columns = _named(kind)
        fields = [column.field for column in columns]
        return pa.StructArray.from_arrays(typed_arrays(columns, values), fields=fields, mask=is_null)
    if kind == TEXT:
        texts = [v if v is None or isinstance(v, str) else msgspec.json.encode(v).decode() for v in values]
        return pa.array(texts, TEXT)
    try:
        found = pa.array(msgspec.convert(values, _STRICT[kind]), kind)
    except msgspec.ValidationError:
        found = pa.array([_lenient(kind, value) for value in values], kind)
    if kind == TIME:  # an offset may lead out of the years 1 to 9999
        first, last = (each.replace(tzinfo=UTC) for each in (datetime.min, datetime.max))
        found = pc.if_else(pc.and_(pc.greater_equal(found, first), pc.less_equal(found, last)), found, None)
    return found


def typed_arrays(columns: Iterable[TypedColumn], values: Sequence[Any]) -> list[pa.Array]:
    """The columns for decoded messages or objects; null where a property is missing, null or of another kind."""
    objects = [value if isinstance(value, dict) else {} for value in values]
    return [array(column.kind, [each.get(column.name) for each in objects]) for column in columns]


def _lenient(kind: pa.DataType, value: Any) -> Any:
    if kind == WHOLE and isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON Schema counts 1.0 among the whole numbers
    try:
        return msgspec.convert([value], _STRICT[kind])[0]
    except msgspec.ValidationError:
        return None
