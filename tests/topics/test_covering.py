"""Covering against brute force: every pair of short patterns, and longer ones by the worst topics they have."""

from __future__ import annotations

import itertools
import re
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.topics import TOPIC_TOKENS_MAX, Dialect, Pattern, Wildcard, covers, overlaps, parse_pattern


def amqp(text: str) -> Pattern:
    return parse_pattern(text, "amqp")


@cache
def oracle(text: str) -> re.Pattern[str]:
    """Reads only the text, with a dot behind every token so that `#` may take none."""
    spelled = {"*": r"[^.]+\.", "#": r"(?:[^.]+\.)*", ">": r"(?:[^.]+\.)+"}
    return re.compile("".join(spelled.get(token, re.escape(token) + r"\.") for token in text.split(".")))


def matches(pattern: Pattern, topic: str) -> bool:
    return oracle(pattern.text).fullmatch(topic + ".") is not None


# --- cases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("orders.>", "orders.new"),
        ("orders.>", "orders.*"),
        ("orders.>", "orders.new.>"),
        ("orders.>", "orders.*.new"),
        ("orders.*", "orders.new"),
        ("*.new", "orders.new"),
        (">", "*.*"),
        ("#", ">"),
        (">", "#"),
        ("orders.#", "orders.>"),
        ("orders.#", "orders"),
        ("#.new", "orders.#.new"),
        ("#.new.#", "#.a.new.b"),
        ("*.#.b", "a.#.b"),
        ("#.a.*.#.b", "a.#.c.b"),
        ("a.*.*.#", "a.#.b.#.c"),
    ],
)
def test_a_wider_pattern_covers_and_is_not_covered(wide: str, narrow: str) -> None:
    a, b = (amqp(text) if "#" in text else parse_pattern(text) for text in (wide, narrow))
    assert covers(a, b)
    assert covers(b, a) == (a.is_all and b.is_all)


@pytest.mark.parametrize(
    ("wide", "narrow", "a_topic_between"),
    [
        ("orders.>", "orders.#", "orders"),
        ("orders.*", "orders.>", "orders.a.b"),
        ("orders.*", ">", "a"),
        ("a.*.#.b", "a.#.b", "a.b"),
        ("#.a.b.#", "a.#.b", "a.z.b"),
        ("#.a.*.b.#", "a.#.b", "a.b"),
        ("#.a.*.a", "#.a.a", "a.a"),
        ("#.b", "#.b.#", "b.z"),
        ("#.a.#.a.#", "#.a.#", "a"),
        ("orders.new", "orders.ne", "orders.ne"),
    ],
)
def test_one_topic_between_them_is_enough_to_refuse(wide: str, narrow: str, a_topic_between: str) -> None:
    a, b = (amqp(text) if "#" in text else parse_pattern(text) for text in (wide, narrow))
    assert b.matches(a_topic_between)
    assert not a.matches(a_topic_between)
    assert not covers(a, b)


@pytest.mark.parametrize("dialect", ["nats", "amqp"])
def test_spelling_does_not_matter(dialect: Dialect) -> None:
    rest = {"nats": "orders.>", "amqp": "orders.*.#"}
    other: Dialect = "amqp" if dialect == "nats" else "nats"
    assert covers(parse_pattern(rest[dialect], dialect), parse_pattern(rest[other], other))


# --- every pair of short patterns ---------------------------------------------------------------------------------

# `z` is the token that no pattern spells out; seven tokens are enough to tell any two patterns of four apart.
TOPICS = [".".join(tokens) for number in range(1, 8) for tokens in itertools.product("abz", repeat=number)]
SHORT = [
    *(amqp(".".join(tokens)) for number in range(1, 5) for tokens in itertools.product("ab*#", repeat=number)),
    *(
        parse_pattern(".".join([*tokens, ">"]))
        for number in range(4)
        for tokens in itertools.product("ab", repeat=number)
    ),
]


def test_all_short_patterns_agree_with_brute_force() -> None:
    matched = {pattern: {at for at, topic in enumerate(TOPICS) if matches(pattern, topic)} for pattern in SHORT}
    as_bits = {pattern: sum(1 << at for at in places) for pattern, places in matched.items()}
    wrong = [
        (wide.text, narrow.text)
        for wide, narrow in itertools.product(SHORT, repeat=2)
        if covers(wide, narrow) != (as_bits[narrow] & ~as_bits[wide] == 0)
    ]
    assert wrong == []


# --- longer patterns ----------------------------------------------------------------------------------------------

STRETCH_MAX = 7  # longer than any run of tokens that a `wide` here could ask for side by side and not find

long_amqp = (
    st.lists(st.sampled_from(["a", "b", "*", "#"]), min_size=1, max_size=STRETCH_MAX - 1).map(".".join).map(amqp)
)
long_nats = st.lists(st.sampled_from("ab"), max_size=5).map(lambda plain: parse_pattern(".".join([*plain, ">"])))
patterns = long_amqp | long_nats


def filled(pattern: Pattern, token: str, stretches: tuple[int, ...]) -> str:
    """A topic of `pattern`: `token` for each ONE, and so many of it for each MANY."""
    left = iter(stretches)
    tokens: list[str] = []
    for part in pattern.parts:
        many = next(left) if part is Wildcard.MANY else 1
        tokens += [part if isinstance(part, str) else token] * many
    return ".".join(tokens)


def all_filled(pattern: Pattern, token: str) -> list[str]:
    manys = pattern.parts.count(Wildcard.MANY)
    stretches = itertools.product(range(STRETCH_MAX + 1), repeat=manys)
    return [topic for each in stretches if (topic := filled(pattern, token, each))]


@given(patterns, patterns)
def test_long_patterns_agree_with_their_worst_topics(wide: Pattern, narrow: Pattern) -> None:
    agree_with_worst_topics(wide, narrow)


def edits(token: str) -> st.SearchStrategy[list[str]]:
    """A token as it is, or something else in its place: patterns that are nearly alike are the hard ones."""
    return st.sampled_from([[token], [token], ["*"], ["#"], ["#", token], [token, "#"], ["*", "#"], ["b"], []])


@given(st.data(), long_amqp)
def test_patterns_that_are_nearly_alike_agree_with_their_worst_topics(data: st.DataObject, narrow: Pattern) -> None:
    edited = [data.draw(edits(token)) for token in narrow.text.split(".")]
    tokens = [token for each in edited for token in each]
    agree_with_worst_topics(amqp(".".join(tokens or ["a"])), narrow)


def agree_with_worst_topics(wide: Pattern, narrow: Pattern) -> None:
    worst = all_filled(narrow, "z")
    assert all(matches(narrow, topic) for topic in worst)
    expected = all(matches(wide, topic) for topic in worst)
    assert covers(wide, narrow) == expected
    assert overlaps(wide, narrow) or not expected


@given(st.data(), long_amqp)
def test_a_loosened_pattern_covers(data: st.DataObject, narrow: Pattern) -> None:
    tokens = narrow.text.split(".")
    looser = [data.draw(st.sampled_from(["#"] if token == "#" else [token, "*", "#", "*.#"])) for token in tokens]
    assert covers(amqp(".".join(looser)), narrow)


@given(patterns, st.lists(st.sampled_from("abz"), min_size=1, max_size=9).map(".".join))
def test_an_exact_pattern_is_covered_by_what_matches_it(pattern: Pattern, topic: str) -> None:
    assert covers(pattern, parse_pattern(topic)) == matches(pattern, topic)


@given(patterns, patterns, patterns)
def test_covering_is_an_order(a: Pattern, b: Pattern, c: Pattern) -> None:
    assert covers(a, a)
    assert covers(a, c) or not (covers(a, b) and covers(b, c))


# --- limits -------------------------------------------------------------------------------------------------------


def test_many_hashes_do_not_blow_up() -> None:
    # Kept as a set of positions, what `wide` may have read is one of 2^15 here, at every step.
    narrow = amqp(".".join(["a", "#"] * 16))
    wide = amqp(".".join(["#", "a", *["*"] * 14, "a", "#"]))
    assert not covers(wide, narrow)
    every_other = amqp(".".join(["#", "a"] * 15 + ["#"]))
    assert covers(every_other, narrow)
    assert not covers(amqp(".".join(["#", "a"] * 15 + ["b"])), narrow)


def test_where_only_the_limit_of_tokens_would_cover_the_answer_is_no() -> None:
    full = ["a"] * (TOPIC_TOKENS_MAX - 1)
    assert covers(parse_pattern(".".join([*full, ">"])), parse_pattern(".".join([*full, "*"])))
    assert not covers(parse_pattern(".".join([*full, "*"])), parse_pattern(".".join([*full, ">"])))
