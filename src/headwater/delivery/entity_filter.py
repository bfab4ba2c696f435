"""Whose messages a subscription keeps: `from` AND (`to` OR `broadcast`).

A string matches exactly, a `/regex/` by search (`regex.py`), a list if any of its parts does. A message without `to`
is a broadcast. What is not set does not narrow, so a filter with nothing set keeps everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwater.delivery.regex import Regex, parse_regex
from headwater.errors import InvalidFilter
from headwater.message import NAME_CHARS_MAX

ENTITIES_MAX = 64
REGEXES_MAX = 16  # of these, regexes

_HOW_TO_SPELL = "Give a name, a /regex/, or a list of those; leave it out to keep everyone."


@dataclass(frozen=True, slots=True)
class Matcher:
    """One name as it was spelled; `regex` is set if that spelling was a `/regex/`."""

    spelling: str
    regex: Regex | None = None

    def matches(self, entity: str) -> bool:
        return self.regex.finds(entity) if self.regex else entity == self.spelling


@dataclass(frozen=True, slots=True)
class EntityFilter:
    from_: tuple[Matcher, ...] | None = None
    to: tuple[Matcher, ...] | None = None
    broadcast: bool = False

    @property
    def has_regex(self) -> bool:
        return any(matcher.regex for matcher in (*(self.from_ or ()), *(self.to or ())))

    @property
    def is_everything(self) -> bool:
        return self.from_ is None and self.to is None and not self.broadcast

    def keeps(self, from_: str | None, to: str | None) -> bool:
        return self._keeps_sender(from_) and self._keeps_receiver(to)

    def _keeps_sender(self, from_: str | None) -> bool:
        return self.from_ is None or _any_matches(self.from_, from_)

    def _keeps_receiver(self, to: str | None) -> bool:
        if self.to is None and not self.broadcast:
            return True
        if to is None:
            return self.broadcast
        return self.to is not None and _any_matches(self.to, to)

    def to_json(self) -> dict[str, Any]:
        """Only what is set, as it was spelled; a list of one is written as its one part."""
        document: dict[str, Any] = {}
        if self.from_ is not None:
            document["from"] = _spelled(self.from_)
        if self.to is not None:
            document["to"] = _spelled(self.to)
        if self.broadcast:
            document["broadcast"] = True
        return document

    @classmethod
    def from_json(cls, document: object) -> EntityFilter:
        if not isinstance(document, dict):
            raise InvalidFilter(
                f"a filter is an object, not {type(document).__name__}",
                where="filter",
                next='Write it like {"from": "admin", "broadcast": true}.',
            )
        unknown = [str(key) for key in document if key not in ("from", "to", "broadcast")]
        if unknown:
            raise InvalidFilter(
                f"no such setting: {', '.join(unknown)}",
                where="filter",
                next="A filter has from, to and broadcast.",
            )
        return parse_entity_filter(
            from_=document.get("from"), to=document.get("to"), broadcast=document.get("broadcast", False)
        )


def parse_entity_filter(
    from_: str | list[str] | None = None, to: str | list[str] | None = None, broadcast: bool = False
) -> EntityFilter:
    if not isinstance(broadcast, bool):
        raise InvalidFilter(
            f"broadcast is true or false, not {type(broadcast).__name__}",
            where="filter.broadcast",
            next="Say true to get messages that are addressed to nobody.",
        )
    return EntityFilter(_parse_matchers(from_, "from"), _parse_matchers(to, "to"), broadcast)


def _parse_matchers(spelled: object, setting: str) -> tuple[Matcher, ...] | None:
    where = f"filter.{setting}"
    if spelled is None:
        return None
    if not isinstance(spelled, list | tuple):
        return (_parse_matcher(spelled, where),)
    if not spelled:
        raise InvalidFilter("an empty list would match nobody", where=where, next=_HOW_TO_SPELL)
    if len(spelled) > ENTITIES_MAX:
        raise InvalidFilter(
            f"{len(spelled)} entities are more than {ENTITIES_MAX}",
            where=where,
            next="Say them in fewer parts, for example with one /regex/.",
        )
    if sum(map(_is_regex, spelled)) > REGEXES_MAX:
        raise InvalidFilter(
            f"more than {REGEXES_MAX} regexes",
            where=where,
            next="Join them with | into fewer, or give names, which cost less",
        )
    return tuple(_parse_matcher(part, f"{where}[{index}]") for index, part in enumerate(spelled))


def _is_regex(spelling: object) -> bool:
    return isinstance(spelling, str) and len(spelling) > 2 and spelling.startswith("/") and spelling.endswith("/")


def _parse_matcher(spelling: object, where: str) -> Matcher:
    if not isinstance(spelling, str):
        raise InvalidFilter(f"an entity is text, not {type(spelling).__name__}", where=where, next=_HOW_TO_SPELL)
    if spelling in ("", "//"):
        raise InvalidFilter("it is empty", where=where, next=_HOW_TO_SPELL)
    if len(spelling) > NAME_CHARS_MAX + len("//"):
        raise InvalidFilter(
            f"{len(spelling)} characters are more than the {NAME_CHARS_MAX} of a name", where=where, next=_HOW_TO_SPELL
        )
    if not _is_unicode(spelling):
        raise InvalidFilter("half a surrogate pair is not text", where=where, next=_HOW_TO_SPELL)
    if _is_regex(spelling):
        return Matcher(spelling, parse_regex(spelling[1:-1], where))
    return Matcher(spelling)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _any_matches(matchers: tuple[Matcher, ...], entity: str | None) -> bool:
    return entity is not None and any(matcher.matches(entity) for matcher in matchers)


def _spelled(matchers: tuple[Matcher, ...]) -> str | list[str]:
    spellings = [matcher.spelling for matcher in matchers]
    return spellings[0] if len(spellings) == 1 else spellings
