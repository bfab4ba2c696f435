"""What a class of events declares beside its fields: `class OrderPlaced(Event, topic="orders.{region}", version=2)`;
and the registry of all classes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headwater.arguments import check_flag
from headwater.errors import InvalidMessageError, InvalidOptionError, InvalidTopicError
from headwater.message import NAME_CHARS_MAX, VERSION_MAX
from headwater.topics import Dialect, check_topic
from headwater.topics.topic import quoted
from headwater.typed.codec import Serializer, serializer_named

if TYPE_CHECKING:
    from headwater.typed.event import Event

TYPE_CHARS_MAX = 128
TRANSPORTS_MAX = 32

KEYWORDS = (
    "topic", "version", "type", "from_", "to", "reply_to", "serializer", "transports", "log", "dedupe", "registry",
)  # fmt: skip

Upgrader = Callable[[dict[str, Any]], dict[str, Any]]

_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_TAIL = {"nats": ">", "amqp": "#"}
_TYPE = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.:-]{{0,{TYPE_CHARS_MAX - 1}}}")


@dataclass(slots=True)
class Declaration:
    """The checked keywords of a class and its bases; `given` are its own."""

    given: dict[str, Any]
    type: str
    version: int
    topic: TopicTemplate | None
    from_: str | None
    to: str | None
    reply_to: str | None
    serializer: Serializer
    transports: tuple[str, ...]
    log: bool
    dedupe: Any
    upgraders: dict[int, Upgrader] = field(default_factory=dict)
    bindings: list[Any] = field(default_factory=list)

    def add_upgrader(self, from_version: int) -> Callable[[Upgrader], Upgrader]:
        newest = self.version - 1
        where = f"{self.type}.upgrade"
        if isinstance(from_version, bool) or not isinstance(from_version, int) or not 1 <= from_version <= newest:
            raise InvalidOptionError(
                f"from_version is a whole number from 1 to {newest}, not {from_version!r}"
                if newest
                else "the class is version 1, and there is none before it",
                where=where,
                next="Raise the version of the class when its fields change",
            )
        if from_version in self.upgraders:
            raise InvalidOptionError(
                f"there is one from version {from_version} already", where=where, next="Keep one of them"
            )

        def add(upgrader: Upgrader) -> Upgrader:
            self.upgraders[from_version] = upgrader
            return upgrader

        return add

    def missing_upgraders(self) -> list[int]:
        """The versions without an upgrader, of those above the oldest version that has one."""
        oldest = min(self.upgraders, default=self.version)
        return [version for version in range(oldest, self.version) if version not in self.upgraders]


def declare(name: str, given: Mapping[str, Any], inherited: Mapping[str, Any], fields: Sequence[str]) -> Declaration:
    """The keywords of one class over those of its bases; type and version name one class, so they are not inherited.
    Raises InvalidOptionError."""
    where = f"class {name}"
    unknown = [keyword for keyword in given if keyword not in KEYWORDS]
    if unknown:
        raise InvalidOptionError(
            f"there is no keyword {unknown[0]!r}", where=where, next=f"Known ones: {', '.join(KEYWORDS)}"
        )
    merged = {**inherited, **given}
    topic = merged.get("topic")
    return Declaration(
        given=dict(given),
        type=_type(given.get("type", name), where),
        version=_version(given.get("version", 1), where),
        topic=None if topic is None else parse_template(topic, where, fields),
        from_=_name("from_", merged.get("from_"), where),
        to=_name("to", merged.get("to"), where),
        reply_to=_reply_to(merged.get("reply_to"), where),
        serializer=serializer_named(merged.get("serializer", "json"), where),
        transports=_transports(merged.get("transports", ()), where),
        log=check_flag("log", merged.get("log", True), where),
        dedupe=_dedupe(merged.get("dedupe"), where),
    )


# --- the check of each keyword: the value as declared, or InvalidOptionError ------------------------------------------


def _type(value: object, where: str) -> str:
    if not isinstance(value, str) or not _TYPE.fullmatch(value):
        raise InvalidOptionError(
            f"{quoted(value)} cannot be a type",
            where=where,
            next=f'Use 1 to {TYPE_CHARS_MAX} letters, digits and _ . : -, like type="OrderPlaced"',
        )
    return value


def _version(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= VERSION_MAX:
        raise InvalidOptionError(
            f"version is a whole number from 1 to {VERSION_MAX:,}, not {quoted(value)}", where=where
        )
    return value


def _name(keyword: str, value: object, where: str) -> str | None:
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= NAME_CHARS_MAX):
        raise InvalidOptionError(
            f"{keyword} is text of 1 to {NAME_CHARS_MAX} characters, not {quoted(value)}",
            where=where,
            next="Leave it out to have none",
        )
    return value


def _reply_to(value: object, where: str) -> str | None:
    if value is None:
        return None
    try:
        return check_topic(value)  # type: ignore[arg-type]
    except InvalidTopicError as exc:
        raise InvalidOptionError(f"reply_to is a topic: {exc.why}", where=where, next=exc.next) from exc


def _transports(value: object, where: str) -> tuple[str, ...]:
    names = value if isinstance(value, tuple | list) else None
    if names is None or not all(isinstance(name, str) and name for name in names):
        raise InvalidOptionError(
            f"transports are names, not {quoted(value)}", where=where, next='Write them like transports=("archive",)'
        )
    if len(set(names)) != len(names) or len(names) > TRANSPORTS_MAX:
        raise InvalidOptionError(f"transports are up to {TRANSPORTS_MAX} different names", where=where)
    return tuple(names)


def _dedupe(value: Any, where: str) -> Any:
    if value is not None and not (hasattr(value, "begin") and hasattr(value, "finish")):
        raise InvalidOptionError(
            f"dedupe is a queue of handled messages, not {quoted(value)}",
            where=where,
            next="Make one with headwater.open_dedupe(), or leave it out",
        )
    return value


# --- topics -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TopicTemplate:
    """Text, or text with fields in braces: `orders.{region}.placed`."""

    text: str
    fields: tuple[str, ...]
    """The fields in braces, in their order."""

    @property
    def pattern(self) -> str:
        """Matches all topics of the class; the same in both dialects."""
        return _FIELD.sub("*", self.text)

    def fill(self, values: Mapping[str, Any], where: str) -> str:
        """The topic of one message."""
        return _FIELD.sub(lambda found: _token(values.get(found[1]), f"{where}.{found[1]}"), self.text)


def parse_template(text: object, where: str, fields: Sequence[str]) -> TopicTemplate:
    """Check the topic of a class. `{field}` may stand for a whole token; each named field must be one of `fields`."""
    if not isinstance(text, str):
        raise InvalidOptionError(
            f"topic is text, not {quoted(text)}", where=where, next='Write it like topic="orders.new"'
        )
    named = tuple(token[1] for token in map(_FIELD.fullmatch, text.split(".")) if token)
    rest = _FIELD.sub("field", text) if named else text
    if "{" in rest or "}" in rest or len(named) != len(_FIELD.findall(text)):
        raise InvalidOptionError(
            f"in topic {quoted(text)} a brace is not around a whole token",
            where=where,
            next='Fields stand between dots, like "orders.{region}.placed"',
        )
    unknown = [name for name in named if name not in fields]
    if unknown:
        raise InvalidOptionError(
            f"topic {quoted(text)} names {unknown[0]!r}, and the class has no such field",
            where=where,
            next=f"Its fields: {', '.join(fields)}" if fields else "Add the field",
        )
    try:
        check_topic(rest)
    except InvalidTopicError as exc:
        raise InvalidOptionError(f"topic {quoted(text)}: {exc.why}", where=where, next=exc.next) from exc
    return TopicTemplate(text, named)


def common_pattern(patterns: Sequence[str], dialect: Dialect) -> str:
    """The narrowest pattern that matches all of these, whose only wildcard is `*`; it may match more."""
    rows = [pattern.split(".") for pattern in patterns]
    if len({len(row) for row in rows}) == 1:
        return ".".join(column[0] if len(set(column)) == 1 else "*" for column in zip(*rows, strict=True))
    prefix: list[str] = []
    for column in zip(*(row[:-1] for row in rows), strict=False):
        # `*` and `>` may not stand together, so the tail begins at the first `*`.
        if len(set(column)) > 1 or column[0] == "*":
            break
        prefix.append(column[0])
    return ".".join([*prefix, _TAIL[dialect]])


def _token(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidMessageError(
            f"{quoted(value)} cannot be a part of a topic", where=where, next="Text and whole numbers can"
        )
    token = str(value)
    if "." in token:
        raise InvalidMessageError(
            f"{quoted(value)} has a dot and would be two tokens of the topic",
            where=where,
            next="Put something else in its place, such as '-'",
        )
    try:
        return check_topic(token)
    except InvalidTopicError as exc:
        raise InvalidMessageError(
            f"{quoted(value)} cannot be a part of a topic: {exc.why}", where=where, next=exc.next
        ) from exc


# --- registry ---------------------------------------------------------------------------------------------------


class Registry:
    """Classes with a topic, by type and version. A class is in `Event.registry` unless a base has
    `registry=Registry()`."""

    def __init__(self) -> None:
        self._classes: dict[str, dict[int, type[Event]]] = {}
        self._handlers: dict[type[Event], list[str]] = {}

    def __iter__(self) -> Iterator[type[Event]]:
        """Iterate by type, the oldest version first."""
        for _, versions in sorted(self._classes.items()):
            yield from (versions[version] for version in sorted(versions))

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def add(self, cls: type[Event]) -> None:
        """Register a class; refused if its type and version are taken."""
        type_, version = cls.__headwater__.type, cls.__headwater__.version
        there = self._classes.setdefault(type_, {}).get(version)
        # The same class again: a module was reloaded, or a notebook cell run again.
        if there is not None and _path(there) != _path(cls):
            raise InvalidOptionError(
                f"{_path(there)} has type {type_!r}, version {version} already",
                where=_path(cls),
                next="Give one of them another type= or version=, or its base registry=Registry()",
            )
        self._classes[type_][version] = cls

    def find(self, type_: str | None, version: int | None = None) -> type[Event] | None:
        """The class of this type: of this version if there is one, else the newest."""
        versions = self._classes.get(type_ or "")
        if not versions:
            return None
        return versions[version if version in versions else max(versions)]

    def note_handler(self, cls: type[Event], id: str) -> None:
        """Record a handler for the receive operations of `asyncapi`."""
        ids = self._handlers.setdefault(cls, [])
        if id not in ids:
            ids.append(id)

    def handlers_of(self, cls: type[Event]) -> list[str]:
        """The handlers declared for the class."""
        return list(self._handlers.get(cls, ()))


def _path(cls: type[Event]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
