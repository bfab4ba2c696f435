"""Conditions on messages as SQL: the parts that are the same in each store. The SQL is built from fixed pieces only:
whatever a user wrote is a bound parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from headwater.delivery.filters import And, Compare, EntityFilter, Matcher, Not, OneOf, Or, Term
from headwater.ports.records import Selection
from headwater.topics import Pattern

SMALL_BYTES_MAX = 4_096  # of data; up to here the database is asked whether a condition holds


class Condition(NamedTuple):
    """Goes into a WHERE clause; `params` are in the order of the placeholders."""

    sql: str
    params: tuple[Any, ...] = ()

    def into(self, query: str) -> str:
        return query.replace("{condition}", self.sql)


EVERYTHING = Condition("TRUE")


def all_of(*parts: Condition) -> Condition:
    telling = [part for part in parts if part != EVERYTHING]
    return joined(" AND ", telling) if telling else EVERYTHING


def joined(word: str, conditions: list[Condition]) -> Condition:
    params = tuple(param for condition in conditions for param in condition.params)
    return Condition(f"({word.join(condition.sql for condition in conditions)})", params)


def term_condition(term: Term, leaf: Callable[[OneOf | Compare], Condition]) -> Condition:
    """`leaf` must be true or false and never NULL, so that NOT above it means what it says."""
    match term:
        case Not(inner):
            sql, params = term_condition(inner, leaf)
            return Condition(f"(NOT {sql})", params)
        case And(terms):
            return joined(" AND ", [term_condition(each, leaf) for each in terms])
        case Or(terms):
            return joined(" OR ", [term_condition(each, leaf) for each in terms])
        case _:
            return leaf(term)


def topic_condition(pattern: Pattern) -> tuple[Condition, bool]:
    """The condition, and whether it is exact; if not, `pattern.matches` must check what it lets through."""
    if pattern.is_all:
        return EVERYTHING, True
    if pattern.is_exact:
        return Condition("topic = ?", (pattern.text,)), True
    prefix, exact = pattern.literal_prefix, pattern.exact_prefix_only
    after = _first_text_after(prefix)
    if after is None:
        return Condition("topic >= ?", (prefix,)), exact
    return Condition("(topic >= ? AND topic < ?)", (prefix, after)), exact


def _first_text_after(prefix: str) -> str | None:
    """The least text above all that start with `prefix`; None if there is none."""
    stem = prefix.rstrip("\U0010ffff")
    if not stem:
        return None
    after = ord(stem[-1]) + 1
    return stem[:-1] + chr(0xE000 if after == 0xD800 else after)  # surrogates are not characters


def entities_condition(
    filter: EntityFilter, is_one_of: Callable[[str, list[str]], Condition]
) -> tuple[Condition, bool]:
    """The condition, and whether it is exact; if not, `filter.keeps` must check what it lets through. `is_one_of`
    compares a column with texts."""

    def matches(column: str, matchers: tuple[Matcher, ...]) -> Condition:
        if any(matcher.regex for matcher in matchers):
            return Condition(f"{column} IS NOT NULL")
        return is_one_of(column, [matcher.spelling for matcher in matchers])

    senders = EVERYTHING if filter.from_ is None else matches('"from"', filter.from_)
    to_all = [Condition('"to" IS NULL')] if filter.broadcast else []
    receivers = to_all if filter.to is None else [matches('"to"', filter.to), *to_all]
    return all_of(senders, joined(" OR ", receivers) if receivers else EVERYTHING), not filter.has_regex


class Wanted(NamedTuple):
    """All that a selection says, and parts of it: its topics, and all but the `where`, which some payload may be unfit
    for. If it is not `exact`, `selection.keeps` must check what it lets through: topics, entities and, unless it
    `judges_content`, the `where`. `sieve` lets large messages pass unread, and `judged` tells the others."""

    condition: Condition
    exact: bool
    topics: Condition
    without_where: Condition
    judges_content: bool
    sieve: Condition
    judged: str


def wanted(
    selection: Selection, entities: tuple[Condition, bool], content: tuple[Condition, bool], size: str
) -> Wanted:
    """`entities` and `content` with whether they are exact; `size` is that of the data, in SQL."""
    topics, topics_exact = topic_condition(selection.pattern)
    entity, entity_exact = entities
    where, judges_content = content
    without_where, exact = all_of(topics, entity), topics_exact and entity_exact and judges_content
    if selection.where is None:
        return Wanted(without_where, exact, topics, without_where, True, without_where, "TRUE")
    judged = f"{size} <= {SMALL_BYTES_MAX}" if judges_content else "FALSE"
    small = Condition(f"(CASE WHEN {judged} THEN {where.sql} ELSE TRUE END)", where.params)
    return Wanted(
        all_of(topics, entity, where),
        exact,
        topics,
        without_where,
        judges_content,
        all_of(topics, entity, small),
        judged,
    )
