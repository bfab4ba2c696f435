"""Topic patterns as a condition for reading, in SQL that PostgreSQL understands as well. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from headwater.delivery.where_syntax import WHERE_CHARS_MAX, WHERE_TERMS_MAX
from headwater.pipeline.source.place import Condition
from headwater.stores.sqlite.conditions import topic_condition
from headwater.topics import Pattern


def topics_condition(patterns: Sequence[Pattern]) -> Condition:
    """Messages whose topic matches one of the patterns; without patterns, all."""
    if not patterns or any(pattern.is_all for pattern in patterns):
        return Condition()
    found = [topic_condition(pattern) for pattern in patterns]
    return Condition(
        " OR ".join(f"({each.sql})" for each, _ in found),
        tuple(param for each, _ in found for param in each.params),
        () if all(exact for _, exact in found) else tuple(patterns),
    )


def both(one: Condition, other: Condition) -> Condition:
    return Condition(f"({one.sql}) AND ({other.sql})", (*one.params, *other.params), one.patterns or other.patterns)


def topics_where(patterns: Sequence[Pattern]) -> str | None:
    """The patterns as a `where`, for a subscription has one pattern only. It may let more through, which is counted as
    lag, but never less. None if they are too many to be said."""
    if len(patterns) < 2 or any(pattern.is_all for pattern in patterns) or len(patterns) > WHERE_TERMS_MAX:
        return None
    text = " or ".join(map(_topic_term, patterns))
    return text if len(text) <= WHERE_CHARS_MAX else None


def _topic_term(pattern: Pattern) -> str:
    operator = "==" if pattern.is_exact else "starts with"
    return f"topic {operator} {json.dumps(pattern.literal_prefix, ensure_ascii=False)}"
