"""What a class says beside its fields: `class OrderPlaced(Event, topic="orders.placed", version=2)`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater.errors import InvalidOption, InvalidTopic
from headwater.message import NAME_CHARS_MAX, VERSION_MAX
from headwater.topics import check_topic
from headwater.topics.topic import quoted
from headwater.typed.serializers import Serializer, serializer_named
from headwater.typed.topic_template import TopicTemplate, parse_template

TYPE_CHARS_MAX = 128
TRANSPORTS_MAX = 32

KEYWORDS = (
    "topic",
    "version",
    "type",
    "from_",
    "to",
    "reply_to",
    "serializer",
    "transports",
    "log",
    "dedupe",
    "registry",
)

Upgrader = Callable[[dict[str, Any]], dict[str, Any]]

_TYPE = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.:-]{{0,{TYPE_CHARS_MAX - 1}}}")


@dataclass(slots=True)
class Declared:
    """All that is known of a class; `given` is what it said itself."""

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
    bound: list[Any] = field(default_factory=list)

    @property
    def where(self) -> str:
        return self.type


def declare(name: str, given: Mapping[str, Any], inherited: Mapping[str, Any], fields: Sequence[str]) -> Declared:
    """Check the keywords of one class over those of its bases; type and version name one class, so they are not
    inherited. Raises InvalidOption."""
    where = f"class {name}"
    unknown = [keyword for keyword in given if keyword not in KEYWORDS]
    if unknown:
        raise InvalidOption(
            f"there is no keyword {unknown[0]!r}", where=where, next=f"Known ones: {', '.join(KEYWORDS)}"
        )
    said = {**inherited, **given}
    topic = said.get("topic")
    return Declared(
        given=dict(given),
        type=_type(given.get("type", name), where),
        version=_version(given.get("version", 1), where),
        topic=None if topic is None else parse_template(topic, where, fields),
        from_=_name("from_", said.get("from_"), where),
        to=_name("to", said.get("to"), where),
        reply_to=_reply_to(said.get("reply_to"), where),
        serializer=serializer_named(said.get("serializer", "json"), where),
        transports=_transports(said.get("transports", ()), where),
        log=_truth("log", said.get("log", True), where),
        dedupe=_dedupe(said.get("dedupe"), where),
    )


def _type(value: object, where: str) -> str:
    if not isinstance(value, str) or not _TYPE.fullmatch(value):
        raise InvalidOption(
            f"{quoted(value)} cannot be a type",
            where=where,
            next=f'Use 1 to {TYPE_CHARS_MAX} letters, digits and _ . : -, like type="OrderPlaced"',
        )
    return value


def _version(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= VERSION_MAX:
        raise InvalidOption(f"version is a whole number from 1 to {VERSION_MAX:,}, not {quoted(value)}", where=where)
    return value


def _name(keyword: str, value: object, where: str) -> str | None:
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= NAME_CHARS_MAX):
        raise InvalidOption(
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
    except InvalidTopic as exc:
        raise InvalidOption(f"reply_to is a topic: {exc.why}", where=where, next=exc.next) from exc


def _transports(value: object, where: str) -> tuple[str, ...]:
    names = value if isinstance(value, tuple | list) else None
    if names is None or not all(isinstance(name, str) and name for name in names):
        raise InvalidOption(
            f"transports are names, not {quoted(value)}", where=where, next='Write them like transports=("archive",)'
        )
    if len(set(names)) != len(names) or len(names) > TRANSPORTS_MAX:
        raise InvalidOption(f"transports are up to {TRANSPORTS_MAX} different names", where=where)
    return tuple(names)


def _truth(keyword: str, value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidOption(f"{keyword} is True or False, not {quoted(value)}", where=where)
    return value


def _dedupe(value: Any, where: str) -> Any:
    if value is not None and not (hasattr(value, "begin") and hasattr(value, "finish")):
        raise InvalidOption(
            f"dedupe is a queue of handled messages, not {quoted(value)}",
            where=where,
            next="Make one with headwater.open_dedupe(), or leave it out",
        )
    return value
