"""What a topic may look like: dot-separated tokens, nothing empty, nothing invisible, no wildcards."""

from __future__ import annotations

import re
from functools import lru_cache

from headwater.errors import InvalidTopicError

TOPIC_BYTES_MAX = 256
TOPIC_TOKENS_MAX = 32
CHECKED_TOPICS_MAX = 4_096
QUOTED_CHARS_MAX = 80

# `>` belongs to NATS and `#` to AMQP, but patterns of both meet the same topics, so a topic may hold neither.
WILDCARD_CHARACTERS = "*>#"

# Lone surrogates are in here because they cannot be written as UTF-8, and so neither stored nor sent.
_UNWRITABLE = re.compile(r"[\s\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def check_topic(topic: str) -> str:
    """Return `topic` as a plain string, or raise InvalidTopicError saying what is wrong with it."""
    # Outside the cache, which would answer an unhashable argument with a bare TypeError.
    if not isinstance(topic, str):
        raise InvalidTopicError(
            f"a topic is a string, not {type(topic).__name__}",
            where=f"topic {quoted(topic)}",
            next="Pass dot-separated text such as 'orders.new'",
        )
    return _checked(topic)


@lru_cache(maxsize=CHECKED_TOPICS_MAX)
def _checked(topic: str) -> str:
    if flaw := _flaw(topic):
        why, next_step = flaw
        raise InvalidTopicError(why, where=f"topic {quoted(topic)}", next=next_step)
    # A member of a (str, Enum) formats as its member name, so hand on the text alone.
    return str.__str__(topic)


def _flaw(topic: str) -> tuple[str, str] | None:
    if not topic:
        return "it is empty", "Name at least one token, such as 'orders'"
    if flaw := flaw_of_any_spelling(topic):
        return flaw
    if found := next((c for c in topic if c in WILDCARD_CHARACTERS), None):
        return (
            f"it holds {found!r}, which is kept for patterns",
            "Publish to one concrete topic; wildcards belong in subscriptions",
        )
    if "" in topic.split("."):
        return "a token is empty", "Put text before, between and after the dots, such as 'orders.new'"
    return None


def flaw_of_any_spelling(text: str) -> tuple[str, str] | None:
    """What topics and patterns are refused for alike, as (why, next); None if there is nothing."""
    # Characters first: no text has fewer bytes than characters, and a huge one is then never encoded.
    if len(text) > TOPIC_BYTES_MAX or _utf8_bytes(text) > TOPIC_BYTES_MAX:
        return (
            f"it is longer than {TOPIC_BYTES_MAX} bytes of UTF-8",
            "Shorten it; what varies per message belongs in its data or headers",
        )
    tokens = text.count(".") + 1
    if tokens > TOPIC_TOKENS_MAX:
        return (
            f"it has {tokens} tokens and the limit is {TOPIC_TOKENS_MAX}",
            "Use fewer levels; what varies per message belongs in its data or headers",
        )
    if found := _UNWRITABLE.search(text):
        return (
            f"character {found.start()} is {found[0]!a}: whitespace, control or not writable as UTF-8",
            "Use visible characters only, such as '-' or '_' in place of a space",
        )
    return None


def quoted(value: object) -> str:
    """`value` as an error message may show it: control characters escaped, never long."""
    # Cut before repr() too, so that a refused text of many megabytes costs nothing to refuse.
    shown = repr(value[:QUOTED_CHARS_MAX] if isinstance(value, str) else value)
    return shown if len(shown) <= QUOTED_CHARS_MAX else shown[: QUOTED_CHARS_MAX - 1] + "…"


def _utf8_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
