"""What a `where` condition means, in Python.

`stores/sqlite/conditions.py` says the same in SQL, and `tests/stores/test_conditions.py` holds the two equal.
The rules are chosen to make that possible: two truth values only, types never convert, missing is null.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, assert_never

from headwater.delivery.regex import is_in
from headwater.delivery.where_syntax import INT64, And, Compare, Not, OneOf, Operator, Or, Path, Scalar, Term

FieldLookup = Callable[[str], object]
"""Gives a field's value by name; for `headers` and `data` the decoded JSON.

It is asked only for the fields that the condition names and reaches, so it should decode `data` when asked,
not before.
"""

_COMPARISONS: dict[Operator, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "starts with": str.startswith,
    "contains": lambda found, text: is_in(text, found) if len(found) > LARGE_CHARS else text in found,
}
LARGE_CHARS = 16_384
_FLOAT_BITS_MAX = 1024
_UINT64_MAX = 2**64 - 1


def term_holds(term: Term, lookup: FieldLookup) -> bool:
    match term:
        case OneOf(path, values):
            found = value_at(path, lookup)
            return any(_equal(found, value) for value in values)
        case Compare(path, comparison, value):
            found = value_at(path, lookup)
            return _same_kind(found, value) and _COMPARISONS[comparison](found, value)
        case Not(inner):
            return not term_holds(inner, lookup)
        case And(terms):
            return all(term_holds(each, lookup) for each in terms)
        case Or(terms):
            return any(term_holds(each, lookup) for each in terms)
        case _:
            assert_never(term)


def value_at(path: Path, lookup: FieldLookup) -> object:
    value = lookup(path.field)
    for step in path.steps:
        if isinstance(value, dict) and isinstance(step, str):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return None
    if isinstance(value, int) and value not in INT64:
        return _float_as_sqlite_reads(value)
    return value


def _equal(found: object, value: Scalar) -> bool:
    if value is None or isinstance(value, bool):
        return found is value
    return _same_kind(found, value) and found == value


def _same_kind(found: object, value: str | int | float) -> bool:
    if isinstance(value, str):
        return isinstance(found, str)
    return isinstance(found, int | float) and not isinstance(found, bool)


def _float_as_sqlite_reads(number: int) -> float:
    """SQLite's JSON makes a double of it, from as many leading digits as are sure to fit a uint64."""
    sign = "-" if number < 0 else ""
    if number.bit_length() > _FLOAT_BITS_MAX:
        return float(f"{sign}inf")
    digits = str(abs(number))
    leading = digits[:20] if int(digits[:19]) < _UINT64_MAX // 10 else digits[:19]
    return float(f"{sign}{leading}e{len(digits) - len(leading)}")
