"""What a subscription asks for, as SQL over the table `messages`.

The SQL is built from fixed pieces only: whatever a user wrote is a bound parameter. `where_condition` means
exactly what `delivery/filters.py` means; `tests/stores/test_conditions.py` holds the two equal.

Two things differ, which no JSON written by Headwater holds, but hand-written SQL may: of two equal keys in an
object SQLite reads the first and Python the last, and of a float SQLite reads 19 digits and Python all.
"""

from __future__ import annotations

import json
from typing import NamedTuple, assert_never

from headwater.delivery.filters import (
    JSON_FIELDS,
    And,
    Compare,
    EntityFilter,
    Matcher,
    Not,
    OneOf,
    Operator,
    Or,
    Path,
    Scalar,
    Term,
    Where,
)
from headwater.stores.sql import first_text_after
from headwater.topics import Pattern

Param = str | int | float


class Condition(NamedTuple):
    """Goes into a WHERE clause; `params` are in the order of the question marks."""

    sql: str
    params: tuple[Param, ...] = ()


EVERYTHING = Condition("TRUE")

_COMPARISONS: dict[Operator, str] = {
    "<": "{value} < ?",
    "<=": "{value} <= ?",
    ">": "{value} > ?",
    ">=": "{value} >= ?",
    "starts with": "instr({value}, ?) = 1",
    "contains": "instr({value}, ?) > 0",
}
_IS_NUMBER = "{kind} IN ('integer', 'real')"
_IS_TEXT = "{kind} = 'text'"


def where_condition(where: Where) -> Condition:
    return _term_condition(where.term)


def entity_condition(filter: EntityFilter) -> tuple[Condition, bool]:
    """The condition, and whether it is exact; if not, `filter.keeps` must check what it lets through."""
    senders = EVERYTHING if filter.from_ is None else _matchers_condition('"from"', filter.from_)
    return _all_of(senders, _receivers_condition(filter)), not filter.has_regex


def topic_condition(pattern: Pattern) -> tuple[Condition, bool]:
    """The condition, and whether it is exact; if not, `pattern.matches` must check what it lets through."""
    if pattern.is_all:
        return EVERYTHING, True
    if pattern.is_exact:
        return Condition("topic = ?", (pattern.text,)), True
    return _prefix_condition(pattern.literal_prefix), pattern.exact_prefix_only


# --- where --------------------------------------------------------------------------------------------------


class _Operand(NamedTuple):
    """SQL for the kind and the value at a path, which take the same parameters.

    json_type() and typeof() name kinds in the same words.
    """

    kind: str
    value: str
    params: tuple[Param, ...]


def _term_condition(term: Term) -> Condition:
    match term:
        case OneOf(path, values):
            return _one_of_condition(_operand(path), values)
        case Compare(path, operator, value):
            test = _IS_TEXT if isinstance(value, str) else _IS_NUMBER
            return _two_valued(_typed(_operand(path), test, _COMPARISONS[operator], (value,)))
        case Not(inner):
            sql, params = _term_condition(inner)
            return Condition(f"(NOT {sql})", params)
        case And(terms):
            return _joined(" AND ", [_term_condition(each) for each in terms])
        case Or(terms):
            return _joined(" OR ", [_term_condition(each) for each in terms])
        case _:
            assert_never(term)


def _operand(path: Path) -> _Operand:
    column = f'"{path.field}"'  # the parser lets no other names through than those of the columns
    if path.field in JSON_FIELDS:
        way = "$" + "".join(map(_json_path_step, path.steps))
        return _Operand(f"json_type({column}, ?)", f"json_extract({column}, ?)", (way,))
    return _Operand(f"typeof({column})", column, ())


def _json_path_step(step: str | int) -> str:
    return f"[{step}]" if isinstance(step, int) else "." + json.dumps(step, ensure_ascii=False)


def _one_of_condition(operand: _Operand, values: tuple[Scalar, ...]) -> Condition:
    choices: list[Condition] = []
    if None in values:
        choices.append(Condition(f"coalesce({operand.kind}, 'null') = 'null'", operand.params))
    # By identity, since 1 == True in Python.
    if any(value is True for value in values):
        choices.append(Condition(f"{operand.kind} = 'true'", operand.params))
    if any(value is False for value in values):
        choices.append(Condition(f"{operand.kind} = 'false'", operand.params))
    if texts := tuple(value for value in values if isinstance(value, str)):
        choices.append(_typed(operand, _IS_TEXT, f"{{value}} IN ({_marks(texts)})", texts))
    if numbers := tuple(value for value in values if isinstance(value, int | float) and not isinstance(value, bool)):
        choices.append(_typed(operand, _IS_NUMBER, f"{{value}} IN ({_marks(numbers)})", numbers))
    return _two_valued(_joined(" OR ", choices))


def _typed(operand: _Operand, kind_test: str, value_test: str, values: tuple[Param, ...]) -> Condition:
    sql = f"({kind_test.format(kind=operand.kind)} AND {value_test.format(value=operand.value)})"
    return Condition(sql, (*operand.params, *operand.params, *values))


def _two_valued(condition: Condition) -> Condition:
    """NULL becomes false at every leaf, so that NOT above it means what it says."""
    return Condition(f"({condition.sql} IS TRUE)", condition.params)


# --- entities and topics ------------------------------------------------------------------------------------


def _receivers_condition(filter: EntityFilter) -> Condition:
    if filter.to is None:
        return Condition('"to" IS NULL') if filter.broadcast else EVERYTHING
    receivers = _matchers_condition('"to"', filter.to)
    return _joined(" OR ", [receivers, Condition('"to" IS NULL')]) if filter.broadcast else receivers


def _matchers_condition(column: str, matchers: tuple[Matcher, ...]) -> Condition:
    if any(matcher.regex for matcher in matchers):
        return Condition(f"{column} IS NOT NULL")
    names = tuple(matcher.spelling for matcher in matchers)
    return Condition(f"{column} IN ({_marks(names)})", names)


def _prefix_condition(prefix: str) -> Condition:
    after = first_text_after(prefix)
    if after is None:
        return Condition("topic >= ?", (prefix,))
    return Condition("topic >= ? AND topic < ?", (prefix, after))


def _all_of(left: Condition, right: Condition) -> Condition:
    if left == EVERYTHING:
        return right
    return left if right == EVERYTHING else _joined(" AND ", [left, right])


def _joined(word: str, conditions: list[Condition]) -> Condition:
    params = tuple(param for condition in conditions for param in condition.params)
    return Condition(f"({word.join(condition.sql for condition in conditions)})", params)


def _marks(values: tuple[Param, ...]) -> str:
    return ", ".join("?" * len(values))
