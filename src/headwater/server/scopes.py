"""What a connection may do: publish here, subscribe there, look after the log. Pure: patterns in, answers out."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import msgspec

from headwater.errors import InvalidOption, InvalidPattern
from headwater.topics import Pattern, covers, parse_pattern

PATTERNS_PER_SCOPE_MAX = 64


class Scopes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Patterns of topics to publish to and to subscribe to, in either spelling; and `admin`.

    `admin` is for what concerns the log and not a topic (dead letters, retention, other people's subscriptions).
    It gives no right to publish or to subscribe: each right is named, or it is not there.
    """

    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()
    admin: bool = False

    def __post_init__(self) -> None:
        for name in ("publish", "subscribe"):
            msgspec.structs.force_setattr(self, name, _texts(name, getattr(self, name)))
        if not isinstance(self.admin, bool):
            raise InvalidOption(f"the admin scope is true or false, not {self.admin!r}")
        # Now, so that a pattern which cannot be read is refused here and not at the first message.
        _ = self._may_publish, self._may_subscribe

    @property
    def allow_nothing(self) -> bool:
        return not (self.publish or self.subscribe or self.admin)

    def may_publish(self, topic: str) -> bool:
        """Whether messages may go to `topic`, which `check_topic` accepts."""
        return any(pattern.matches(topic) for pattern in self._may_publish)

    def may_subscribe(self, pattern: Pattern) -> bool:
        """Whether all that `pattern` asks for is allowed, and by one pattern; two halves do not add up."""
        return any(covers(allowed, pattern) for allowed in self._may_subscribe)

    # `dict=True` is for these two: a frozen struct has no other place for what is worked out once.
    @cached_property
    def _may_publish(self) -> tuple[Pattern, ...]:
        return tuple(_pattern("publish", text) for text in self.publish)

    @cached_property
    def _may_subscribe(self) -> tuple[Pattern, ...]:
        return tuple(_pattern("subscribe", text) for text in self.subscribe)


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


def _pattern(name: str, text: str) -> Pattern:
    # No text means one thing in NATS and another in AMQP: '#' is in the one spelling only, '>' in the other.
    try:
        return parse_pattern(text, "amqp" if isinstance(text, str) and "#" in text else "nats")
    except InvalidPattern as exc:
        raise type(exc)(exc.why, where=f"{name} scope, {exc.where}", next=exc.next) from exc


# What a server without tokens grants to everybody who reaches it.
EVERYTHING = Scopes(publish=(">",), subscribe=(">",), admin=True)
