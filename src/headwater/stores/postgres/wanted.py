"""What to ask the database for: conditions put together, once for each selection."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from headwater.ports.records import DeadLetterQuery, Selection
from headwater.stores.postgres.conditions import (
    EVERYTHING,
    Condition,
    all_of,
    entity_condition,
    reads_json,
    topic_condition,
    where_condition,
)
from headwater.stores.postgres.queries import SQL
from headwater.stores.postgres.rows import array_of
from headwater.stores.sifting import SMALL_BYTES_MAX


class Wanted(NamedTuple):
    """All that a selection says, and parts of it: its topics, and all but the `where`, which some payload may be unfit
    for (`may_fail`). If it is not `exact`, `selection.keeps` must check what it lets through. `sieve` lets large
    messages pass unread, and `judged` tells the others."""

    condition: Condition
    exact: bool
    topics: Condition
    without_where: Condition
    may_fail: bool
    sieve: Condition = EVERYTHING
    judged: str = "TRUE"


@lru_cache(maxsize=4096)
def wanted_by(selection: Selection) -> Wanted:
    topics, topics_exact = topic_condition(selection.pattern)
    entities, entities_exact = entity_condition(selection.entities)
    exact, without_where = topics_exact and entities_exact, all_of(topics, entities)
    if selection.where is None:
        return Wanted(without_where, exact, topics, without_where, False, without_where)
    content, content_exact = where_condition(selection.where)
    condition = all_of(topics, entities, content)
    judged = f"{SQL['size']} <= {SMALL_BYTES_MAX}" if content_exact else "FALSE"
    small = Condition(f"(CASE WHEN {judged} THEN {content.sql} ELSE TRUE END)", content.params)
    return Wanted(
        condition,
        exact and content_exact,
        topics,
        without_where,
        reads_json(selection.where),
        all_of(topics, entities, small),
        judged,
    )


def letters_wanted(query: DeadLetterQuery) -> Condition:
    """What it says of errors is not in it, and of topics perhaps not all."""
    parts = [EVERYTHING if query.topic is None else topic_condition(query.topic)[0]]
    if query.ids is not None:
        parts.append(Condition("id = ANY(%s::bigint[])", (array_of(query.ids),)))
    if query.seqs is not None:
        parts.append(Condition("seq = ANY(%s::bigint[])", (array_of(query.seqs),)))
    for column, value in (
        ("subscription", query.subscription),
        ("type", query.type),
        ("reason", query.reason),
    ):
        if value is not None:
            parts.append(Condition(f"{column} = %s", (value,)))
    return all_of(*parts)
