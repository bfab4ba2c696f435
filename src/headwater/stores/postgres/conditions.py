"""What a subscription asks for, as SQL over the table `messages`.

`where_condition` means exactly what `delivery/filters.py` means; `tests/stores/test_conditions.py` holds the two equal.

`data` and `headers` are read as `json`: `jsonb` keeps of a number only its decimal value, and forgets whether it was an
integer or a double. A value that PostgreSQL cannot hold at all (the character NUL, half a surrogate pair, a number
beyond any double) makes the statement fail; the reader then leaves `where` to Python.
"""

from __future__ import annotations

import math
from decimal import Decimal
from functools import lru_cache
from typing import assert_never

from headwater.delivery.filters import (
    JSON_FIELDS,
    And,
    Compare,
    EntityFilter,
    Not,
    OneOf,
    Operator,
    Or,
    Path,
    Scalar,
    Term,
    Where,
)
from headwater.ports.records import Selection
from headwater.stores.conditions import (
    EVERYTHING,
    Condition,
    Wanted,
    entities_condition,
    joined,
    term_condition,
    wanted,
)
from headwater.stores.postgres.connection import SQL

NOTHING = Condition("FALSE")

_TEXT_COMPARISONS: dict[Operator, str] = {
    "<": '{text} < ? COLLATE "C"',
    "<=": '{text} <= ? COLLATE "C"',
    ">": '{text} > ? COLLATE "C"',
    ">=": '{text} >= ? COLLATE "C"',
    "starts with": "starts_with({text}, ?)",
    "contains": "strpos({text}, ?) > 0",
}
_NUMBER_COLUMNS = {
    "version": "version",
    "priority": "priority",
    "seq": "seq",
    "published_at": "published_at",
    "size": SQL["size"],
}

# `text` is a number as it stands in the JSON. With a point or an exponent it is a double, and with less than 16
# characters it may be taken for one. A longer integer is compared by all its digits, and one of more than 64 bits is
# read as SQLite reads it: as a double of its leading digits (where_eval._float_as_sqlite_reads).
_AS_DOUBLE, _AS_INTEGER = "text::float8", "text::numeric"
_AS_FAR_INTEGER = (
    "(left(text, length(text) - length(ltrim(text, '-'))) || rpad("
    "left(ltrim(text, '-'), CASE WHEN left(ltrim(text, '-'), 19)::numeric < 1844674407370955161 THEN 20 ELSE 19 END),"
    " length(ltrim(text, '-')), '0'))::float8"
)
_NUMBER_TEST = (
    "CASE WHEN length(text) < 16 OR text ~ '[.eE]' THEN {double}"
    " WHEN text::numeric BETWEEN -9223372036854775808 AND 9223372036854775807 THEN {integer} ELSE {far} END"
)
# `at` is evaluated once, for OFFSET 0 keeps the planner from putting it in the place of each mention.
_AT_PATH = (
    "(SELECT CASE kind {cases} ELSE {otherwise} END FROM"
    " (SELECT coalesce(json_typeof(at), 'null') AS kind, at #>> '{{}}' AS text"
    " FROM (SELECT {path} AS at OFFSET 0) AS found OFFSET 0) AS value)"
)


def where_condition(where: Where) -> tuple[Condition, bool]:
    """The condition, and whether it is exact; if not, `where.holds` must check what it lets through."""
    if _names_nul(where.term):
        return EVERYTHING, False  # PostgreSQL has no such text, not even as a parameter
    return term_condition(where.term, _leaf_condition), True


@lru_cache(maxsize=4096)
def reads_json(where: Where | None) -> bool:
    """Whether it looks into `data` or `headers`, some of which PostgreSQL may not be able to read."""
    return where is not None and any(leaf.path.field in JSON_FIELDS for leaf in _leaves(where.term))


def entity_condition(filter: EntityFilter) -> tuple[Condition, bool]:
    """See `entities_condition`."""

    def is_one_of(column: str, names: list[str]) -> Condition:
        possible = [name for name in names if "\0" not in name]  # no stored text has a NUL
        return Condition(f"{column} = ANY(?::text[])", (possible,))

    return entities_condition(filter, is_one_of)


# --- where --------------------------------------------------------------------------------------------------


def _leaves(term: Term) -> list[OneOf | Compare]:
    match term:
        case OneOf() | Compare():
            return [term]
        case Not(inner):
            return _leaves(inner)
        case And(terms) | Or(terms):
            return [leaf for each in terms for leaf in _leaves(each)]
        case _:
            assert_never(term)


def _names_nul(term: Term) -> bool:
    for leaf in _leaves(term):
        values = leaf.values if isinstance(leaf, OneOf) else (leaf.value,)
        if any(isinstance(text, str) and "\0" in text for text in (*leaf.path.steps, *values)):
            return True
    return False


def _leaf_condition(leaf: OneOf | Compare) -> Condition:
    path = leaf.path
    if isinstance(leaf, OneOf) and path.field in JSON_FIELDS:
        return _one_of_in_json(path, leaf.values)
    if isinstance(leaf, OneOf):
        return _one_of_in_column(path.field, leaf.values)
    if path.field in JSON_FIELDS:
        return _comparison_in_json(path, leaf.operator, leaf.value)
    return _comparison_in_column(path.field, leaf.operator, leaf.value)


def _one_of_in_json(path: Path, values: tuple[Scalar, ...]) -> Condition:
    cases: list[Condition] = []
    if texts := _texts(values):
        cases.append(Condition("WHEN 'string' THEN text = ANY(?::text[])", (texts,)))
    if numbers := _numbers(values):
        # An integer that no double equals is left out there: two numbers may not become equal by rounding.
        doubles = [float(number) for number in numbers if _is_double(number)]
        cases.append(
            _number_case(
                Condition("{number} = ANY(?::float8[])", (doubles,)),
                Condition("{number} = ANY(?::numeric[])", ([Decimal(number) for number in numbers],)),
            )
        )
    # By identity, since 1 == True in Python.
    if booleans := [spelled for spelled, value in (("true", True), ("false", False)) if _holds(values, value)]:
        cases.append(Condition("WHEN 'boolean' THEN text = ANY(?::text[])", (booleans,)))
    if None in values:
        cases.append(Condition("WHEN 'null' THEN TRUE"))
    return _at_path(path, cases)


def _comparison_in_json(path: Path, operator: Operator, value: str | int | float) -> Condition:
    if isinstance(value, str):
        return _at_path(path, [Condition(f"WHEN 'string' THEN {_text_test('text', operator)}", (value,))])
    nearest = value if isinstance(value, float) else _nearest_double(operator, value)
    number_case = _number_case(
        Condition(f"{{number}} {operator} ?::float8", (nearest,)),
        Condition(f"{{number}} {operator} ?::numeric", (Decimal(value),)),
    )
    return _at_path(path, [number_case])


def _number_case(as_double: Condition, as_integer: Condition) -> Condition:
    sql = _NUMBER_TEST.format(
        double=as_double.sql.replace("{number}", _AS_DOUBLE),
        integer=as_integer.sql.replace("{number}", _AS_INTEGER),
        far=as_double.sql.replace("{number}", _AS_FAR_INTEGER),
    )
    return Condition(f"WHEN 'number' THEN {sql}", (*as_double.params, *as_integer.params, *as_double.params))


def _at_path(path: Path, cases: list[Condition]) -> Condition:
    if not cases:
        return NOTHING
    steps = "".join(" -> ?::int" if isinstance(step, int) else " -> ?::text" for step in path.steps)
    sql = _AT_PATH.format(
        cases=" ".join(case.sql for case in cases),
        otherwise="FALSE",
        path=f'"{path.field}"{steps}',  # the parser lets no other names through than those of the columns
    )
    return Condition(sql, (*(param for case in cases for param in case.params), *path.steps))


def _one_of_in_column(field: str, values: tuple[Scalar, ...]) -> Condition:
    column = _NUMBER_COLUMNS.get(field, f'"{field}"')
    choices: list[Condition] = []
    if None in values:
        choices.append(Condition(f"{column} IS NULL"))
    if field in _NUMBER_COLUMNS:
        if numbers := _numbers(values):
            exact = [Decimal(number) for number in numbers]
            choices.append(Condition(f"coalesce({column}::numeric = ANY(?::numeric[]), FALSE)", (exact,)))
    elif texts := _texts(values):
        choices.append(Condition(f"coalesce({column} = ANY(?::text[]), FALSE)", (texts,)))
    return joined(" OR ", choices) if choices else NOTHING


def _comparison_in_column(field: str, operator: Operator, value: str | int | float) -> Condition:
    column = _NUMBER_COLUMNS.get(field)
    if isinstance(value, str):
        if column is not None:
            return NOTHING
        test = _text_test(f'"{field}"', operator)
        return Condition(f"coalesce({test}, FALSE)", (value,))
    if column is None:
        return NOTHING
    return Condition(f"coalesce({column}::numeric {operator} ?::numeric, FALSE)", (Decimal(value),))


def _text_test(text: str, operator: Operator) -> str:
    return _TEXT_COMPARISONS[operator].format(text=text)


def _texts(values: tuple[Scalar, ...]) -> list[str]:
    return [value for value in values if isinstance(value, str)]


def _numbers(values: tuple[Scalar, ...]) -> list[int | float]:
    return [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def _holds(values: tuple[Scalar, ...], wanted: bool) -> bool:
    return any(value is wanted for value in values)


def _is_double(number: int | float) -> bool:
    return isinstance(number, float) or int(float(number)) == number


def _nearest_double(operator: Operator, number: int) -> float:
    """The double to compare doubles with, so that the outcome is that of a comparison with the integer itself."""
    near = float(number)
    if operator in ("<", ">="):  # the least that is not below
        return near if int(near) >= number else math.nextafter(near, math.inf)
    return near if int(near) <= number else math.nextafter(near, -math.inf)


# --- selections ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def wanted_by(selection: Selection) -> Wanted:
    content = (EVERYTHING, True) if selection.where is None else where_condition(selection.where)
    return wanted(selection, entity_condition(selection.entities), content, SQL["size"])
