"""What a subscription asks for, as SQL over the table `messages`.

`where_condition` means exactly what `delivery/filters.py` means; `tests/stores/test_conditions.py` holds the two equal.

Two things differ, which no JSON written by Headwater holds, but hand-written SQL may: of two equal keys in an
object SQLite reads the first and Python the last, and of a float SQLite reads 19 digits and Python all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from headwater.delivery.filters import JSON_FIELDS, Compare, EntityFilter, OneOf, Operator, Path, Scalar, Where
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
from headwater.stores.sqlite.connection import SQL

Param = str | int | float


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


@lru_cache(maxsize=4096)
def wanted_by(selection: Selection) -> Wanted:
    content = EVERYTHING if selection.where is None else where_condition(selection.where)
    return wanted(selection, entity_condition(selection.entities), (content, True), SQL["size"])


def where_condition(where: Where) -> Condition:
    return term_condition(where.term, _leaf_condition)


def entity_condition(filter: EntityFilter) -> tuple[Condition, bool]:
    """See `entities_condition`."""
    return entities_condition(filter, lambda column, names: Condition(f"{column} IN ({_marks(names)})", tuple(names)))


# --- where --------------------------------------------------------------------------------------------------


class _Operand(NamedTuple):
    """SQL for the kind and the value at a path, which take the same parameters.

    json_type() and typeof() name kinds in the same words.
    """

    kind: str
    value: str
    params: tuple[Param, ...]


def _leaf_condition(leaf: OneOf | Compare) -> Condition:
    if isinstance(leaf, OneOf):
        return _one_of_condition(_operand(leaf.path), leaf.values)
    test = _IS_TEXT if isinstance(leaf.value, str) else _IS_NUMBER
    return _two_valued(_typed(_operand(leaf.path), test, _COMPARISONS[leaf.operator], (leaf.value,)))


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
    return _two_valued(joined(" OR ", choices))


def _typed(operand: _Operand, kind_test: str, value_test: str, values: tuple[Param, ...]) -> Condition:
    sql = f"({kind_test.format(kind=operand.kind)} AND {value_test.format(value=operand.value)})"
    return Condition(sql, (*operand.params, *operand.params, *values))


def _two_valued(condition: Condition) -> Condition:
    """NULL becomes false at every leaf, so that NOT above it means what it says."""
    return Condition(f"({condition.sql} IS TRUE)", condition.params)


def _marks(values: Sequence[Param]) -> str:
    return ", ".join("?" * len(values))
