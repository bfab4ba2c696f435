"""The `where` condition of a subscription: a safe little language over a message's fields.

priority >= 5 and data.region == 'us-west'
not (data.amount < 10 or data.tags[0] == "x")
type in ['a', 'b'] and headers.tenant starts with 'ac' and data["odd key"] != null

- A missing path is null. A bare path (`data.vip`) asks whether the value is true.
- `==`, `!=` and `in` keep types apart: '1' is not 1, true is not 1, but 1 is 1.0. An array or object equals
  nothing.
- `<`, `<=`, `>` and `>=` hold between two numbers or two strings (by code point), `starts with` and
  `contains` between two strings; otherwise they are false. `not` makes false true, always.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from headwater.delivery.where_eval import FieldLookup, term_holds
from headwater.delivery.where_syntax import WHERE_CHARS_MAX, Term, parse_term
from headwater.errors import InvalidWhere


@dataclass(frozen=True, slots=True)
class Where:
    text: str
    term: Term

    def holds(self, lookup: FieldLookup) -> bool:
        # Each field is asked for once at most: to decode `data` is the dearest part of a condition.
        return term_holds(self.term, cache(lookup))


def parse_where(text: str) -> Where:
    if not isinstance(text, str):
        raise InvalidWhere(
            f"a condition is text, not {type(text).__name__}",
            where="where",
            next="Write it like: priority >= 5",
        )
    if len(text) > WHERE_CHARS_MAX:
        raise InvalidWhere(
            f"{len(text)} characters are more than {WHERE_CHARS_MAX}",
            where="where",
            next="Shorten the condition, or split the subscription in two.",
        )
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidWhere(
            "half a surrogate pair is not text",
            where=f"where, at {exc.start + 1}",
            next="Write the whole character.",
        ) from exc
    return Where(text, parse_term(text))
