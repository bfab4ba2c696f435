"""Conditions on messages as SQL: the parts that are the same in each store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from headwater.delivery.filters import And, Compare, EntityFilter, Matcher, Not, OneOf, Or, Term
from headwater.stores.sql import first_text_after
from headwater.topics import Pattern


class Condition(NamedTuple):
    """Goes into a WHERE clause; `params` are in the order of the placeholders."""

    sql: str
    params: tuple[Any, ...] = ()


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


def topics_condition(pattern: Pattern, mark: str) -> tuple[Condition, bool]:
    """The condition, and whether it is exact; if not, `pattern.matches` must check what it lets through. `mark` is the
    placeholder of a parameter."""
    if pattern.is_all:
        return EVERYTHING, True
    if pattern.is_exact:
        return Condition(f"topic = {mark}", (pattern.text,)), True
    prefix, exact = pattern.literal_prefix, pattern.exact_prefix_only
    after = first_text_after(prefix)
    if after is None:
        return Condition(f"topic >= {mark}", (prefix,)), exact
    return Condition(f"(topic >= {mark} AND topic < {mark})", (prefix, after)), exact


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
