"""The topic of a class: text, or text with fields in braces (`orders.{region}.placed`); and one pattern for the topics
of several classes. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.errors import InvalidMessage, InvalidOption, InvalidTopic
from headwater.topics import Dialect, check_topic
from headwater.topics.topic import quoted

_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_TAIL = {"nats": ">", "amqp": "#"}


@dataclass(frozen=True, slots=True)
class TopicTemplate:
    text: str
    fields: tuple[str, ...]
    """The fields that stand in braces, in their order."""

    @property
    def pattern(self) -> str:
        """What subscribes to all topics of the class; the same in both spellings of patterns."""
        return _FIELD.sub("*", self.text)

    def fill(self, values: Mapping[str, Any], where: str) -> str:
        """The topic of one message."""
        return _FIELD.sub(lambda found: _token(values.get(found[1]), f"{where}.{found[1]}"), self.text)


def parse_template(text: object, where: str, fields: Sequence[str]) -> TopicTemplate:
    if not isinstance(text, str):
        raise InvalidOption(f"topic is text, not {quoted(text)}", where=where, next='Write it like topic="orders.new"')
    named = tuple(token[1] for token in map(_FIELD.fullmatch, text.split(".")) if token)
    rest = _FIELD.sub("field", text) if named else text
    if "{" in rest or "}" in rest or len(named) != len(_FIELD.findall(text)):
        raise InvalidOption(
            f"in topic {quoted(text)} a brace is not around a whole token",
            where=where,
            next='Fields stand between dots, like "orders.{region}.placed"',
        )
    unknown = [name for name in named if name not in fields]
    if unknown:
        raise InvalidOption(
            f"topic {quoted(text)} names {unknown[0]!r}, and the class has no such field",
            where=where,
            next=f"Its fields: {', '.join(fields)}" if fields else "Add the field",
        )
    try:
        check_topic(rest)
    except InvalidTopic as exc:
        raise InvalidOption(f"topic {quoted(text)}: {exc.why}", where=where, next=exc.next) from exc
    return TopicTemplate(text, named)


def common_pattern(patterns: Sequence[str], dialect: Dialect) -> str:
    """The narrowest that has all of these (`*` is their only wildcard); it may have more than they."""
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
        raise InvalidMessage(
            f"{quoted(value)} cannot be a part of a topic", where=where, next="Text and whole numbers can"
        )
    token = str(value)
    if "." in token:
        raise InvalidMessage(
            f"{quoted(value)} has a dot and would be two tokens of the topic",
            where=where,
            next="Put something else in its place, such as '-'",
        )
    try:
        return check_topic(token)
    except InvalidTopic as exc:
        raise InvalidMessage(
            f"{quoted(value)} cannot be a part of a topic: {exc.why}", where=where, next=exc.next
        ) from exc
