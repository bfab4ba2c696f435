"""What a connection may do: each right, and the topics, names or methods it holds for. Pure: patterns in, answers
out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Literal, TypeAlias

import msgspec

from headwater.errors import InvalidOption, InvalidPattern, Unauthorized
from headwater.topics import Pattern, covers, parse_pattern

PATTERNS_PER_SCOPE_MAX = 64

Right: TypeAlias = Literal["publish", "read", "consume", "manage", "call", "admin"]
OF_TOPICS: tuple[Right, ...] = ("publish", "read", "manage", "call")  # a method's name is dotted like a topic
LISTED: tuple[Right, ...] = ("publish", "read", "consume", "manage", "call")
RIGHTS: tuple[Right, ...] = (*LISTED, "admin")

# A subscription's name, or the beginning of one and *.
_NAMES = re.compile(r"\*|[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}\*?")


class Scopes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Each right is named, or it is not there; none implies another.

    `publish`: to topics that match. `read`: look at topics that match, live or in a durable subscription. `consume`:
    have durable subscriptions of these names (`billing`, `billing-*`, `*`). `manage`: subscriptions of others,
    retention and dead letters of topics that match. `call`: methods of the application whose names match. `admin`: the
    server.
    """

    publish: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    consume: tuple[str, ...] = ()
    manage: tuple[str, ...] = ()
    call: tuple[str, ...] = ()
    admin: bool = False

    def __post_init__(self) -> None:
        for name in LISTED:
            msgspec.structs.force_setattr(self, name, _texts(name, getattr(self, name)))
        for text in self.consume:
            if not isinstance(text, str) or not _NAMES.fullmatch(text):
                raise InvalidOption(
                    f"{text!r} names no subscriptions",
                    where="consume scope",
                    next="Write a name, the beginning of names like 'billing-*', or '*'",
                )
        if not isinstance(self.admin, bool):
            raise InvalidOption(f"the admin scope is true or false, not {self.admin!r}")
        _ = self._patterns  # now, so that a pattern which cannot be read is refused here and not at the first message

    @property
    def allow_nothing(self) -> bool:
        return not any(getattr(self, name) for name in RIGHTS)

    def has(self, right: Right) -> bool:
        """For something at least."""
        return bool(getattr(self, right))

    def may_publish(self, topic: str) -> bool:
        """Whether messages may go to `topic`, which `check_topic` accepts."""
        return self._matches("publish", topic)

    def may_call(self, method: str) -> bool:
        return self._matches("call", method)

    def may_look_at(self, topic: str) -> bool:
        """By the right to read it, or to manage it."""
        return self._matches("read", topic) or self.manages(topic)

    def may_read(self, pattern: Pattern) -> bool:
        """Whether all that `pattern` asks for is allowed, and by one pattern; two halves do not add up."""
        return self._covers("read", pattern)

    def may_manage(self, pattern: Pattern) -> bool:
        """The same for managing."""
        return self._covers("manage", pattern)

    def manages(self, topic: str) -> bool:
        return self._matches("manage", topic)

    def may_consume(self, name: str) -> bool:
        return any(
            name.startswith(text[:-1]) if text.endswith("*") else name == text
            for text in self.consume  # a name holds no *
        )

    def may_use(self, name: str, pattern: Pattern, *, is_own: bool) -> bool:
        """Whether a durable subscription may be held, looked at, moved and removed: it is the token's own, or of no
        token, and has a name that it may consume; or it may manage the topics."""
        return self.may_manage(pattern) or (is_own and self.may_consume(name))

    @property
    def may_watch(self) -> bool:
        """The figures of the whole server."""
        return self.admin or self.may_manage(_ALL)

    def _matches(self, right: Right, topic: str) -> bool:
        return any(pattern.matches(topic) for pattern in self._patterns[right])

    def _covers(self, right: Right, pattern: Pattern) -> bool:
        return any(covers(allowed, pattern) for allowed in self._patterns[right])

    # `dict=True` is for this one: a frozen struct has no other place for what is worked out once.
    @cached_property
    def _patterns(self) -> dict[Right, tuple[Pattern, ...]]:
        return {name: tuple(_pattern(name, text) for text in getattr(self, name)) for name in OF_TOPICS}


def _texts(name: str, given: Iterable[str]) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidOption(
            f"the {name} scope is a list of patterns, not {type(given).__name__}", next="Write it like ['orders.>']"
        )
    texts = tuple(given)
    if len(texts) > PATTERNS_PER_SCOPE_MAX:
        raise InvalidOption(
            f"the {name} scope has {len(texts):,} patterns and the limit is {PATTERNS_PER_SCOPE_MAX}",
            next="Use wildcards, or several tokens",
        )
    return texts


def parse_any_spelling(text: str) -> Pattern:
    """No text means one thing in NATS and another in AMQP: '#' is in the one spelling only, '>' in the other."""
    return parse_pattern(text, "amqp" if isinstance(text, str) and "#" in text else "nats")


def _pattern(name: str, text: str) -> Pattern:
    try:
        return parse_any_spelling(text)
    except InvalidPattern as exc:
        raise type(exc)(exc.why, where=f"{name} scope, {exc.where}", next=exc.next) from exc


def not_allowed(right: str, what: str) -> Unauthorized:
    return Unauthorized(
        f"the token has no {right} right for this",
        where=what,
        next="Ask for a token that has it: headwater token create",
    )


_ALL = parse_pattern(">")
# What a server without tokens grants to every client.
EVERYTHING = Scopes(publish=(">",), read=(">",), consume=("*",), manage=(">",), call=(">",), admin=True)
