"""Patterns against the shared vectors, a regular-expression oracle and brute force."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater import errors
from headwater.topics import (
    TOPIC_BYTES_MAX,
    TOPIC_TOKENS_MAX,
    Dialect,
    Pattern,
    Wildcard,
    check_topic,
    overlaps,
    parse_pattern,
)

VECTORS = Path(__file__).parents[1] / "vectors"
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)


def vectors(kind: str) -> list[Any]:
    return [
        pytest.param(dialect, *case, id=f"{dialect}:{case[0]}")
        for dialect in DIALECTS
        for case in json.loads((VECTORS / f"patterns_{dialect}.json").read_text())[kind]
    ]


# --- strategies -----------------------------------------------------------------------------------

tokens = st.sampled_from(["a", "b", "aa", "a+b"])
topics = st.lists(tokens, min_size=1, max_size=7).map(".".join)
amqp_texts = st.lists(tokens | st.sampled_from(["*", "#"]), min_size=1, max_size=6).map(".".join)
nats_with_one = st.lists(tokens | st.just("*"), min_size=1, max_size=6).map(".".join)
nats_with_rest = st.lists(tokens, max_size=5).map(lambda plain: ".".join([*plain, ">"]))
patterns = st.one_of(
    amqp_texts.map(lambda text: parse_pattern(text, "amqp")),
    st.one_of(nats_with_one, nats_with_rest).map(lambda text: parse_pattern(text, "nats")),
)


# --- an independent reading of the text -----------------------------------------------------------


def oracle(pattern: Pattern) -> re.Pattern[str]:
    """Reads only the text, with a dot behind every token so that `#` may take none."""
    spelled = {"*": r"[^.]+\.", "#": r"(?:[^.]+\.)*", ">": r"(?:[^.]+\.)+"}
    return re.compile("".join(spelled.get(t, re.escape(t) + r"\.") for t in pattern.text.split(".")))


def oracle_matches(pattern: Pattern, topic: str) -> bool:
    return oracle(pattern).fullmatch(topic + ".") is not None


# --- vectors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dialect", "text", "matching", "others"), vectors("match"))
def test_vectors_match(dialect: Dialect, text: str, matching: list[str], others: list[str]) -> None:
    pattern = parse_pattern(text, dialect)
    assert [topic for topic in matching if not pattern.matches(topic)] == []
    assert [topic for topic in others if pattern.matches(topic)] == []


@pytest.mark.parametrize(("dialect", "text", "error_name"), vectors("invalid"))
def test_vectors_are_refused_by_name(dialect: Dialect, text: str, error_name: str) -> None:
    with pytest.raises(errors.InvalidPatternError) as caught:
        parse_pattern(text, dialect)
    assert type(caught.value).__name__ == f"{error_name}Error"
    assert text in caught.value.where
    assert caught.value.next


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "text", "hint"),
    [
        ("nats", "orders.#", "dialect amqp"),
        ("nats", "c#.new", "dialect amqp"),
        ("amqp", "orders.>", "'*.#'"),
        ("amqp", "a->b", "'*.#'"),
    ],
)
def test_the_other_dialects_wildcard_is_refused_with_a_hint(dialect: Dialect, text: str, hint: str) -> None:
    with pytest.raises(errors.InvalidPatternError) as caught:
        parse_pattern(text, dialect)
    assert type(caught.value) is errors.InvalidPatternError
    assert hint in caught.value.next


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "text",
    [
        "two words",
        "a\n",
        "a.\x00",
        "a\ud800",
        "x" * (TOPIC_BYTES_MAX + 1),
        ".".join("t" * (TOPIC_TOKENS_MAX + 1)),
    ],
)
def test_patterns_obey_the_rules_of_topics(dialect: Dialect, text: str) -> None:
    with pytest.raises(errors.InvalidPatternError):
        parse_pattern(text, dialect)


def test_mixed_wildcards_are_reported_their_amqp_spelling() -> None:
    with pytest.raises(errors.MixedWildcardsError) as caught:
        parse_pattern("orders.*.>")
    assert "'orders.*.*.#'" in caught.value.next
    assert parse_pattern("orders.*.*.#", "amqp").matches("orders.a.b")


@pytest.mark.parametrize("text", [None, 7, b"orders", ["orders"]])
def test_what_is_not_text_is_refused(text: object) -> None:
    with pytest.raises(errors.InvalidPatternError, match=type(text).__name__):
        parse_pattern(text)  # type: ignore[arg-type]


def test_an_unknown_dialect_is_refused() -> None:
    with pytest.raises(errors.InvalidOptionError, match="mqtt"):
        parse_pattern("orders", "mqtt")  # type: ignore[arg-type]


# --- the AST --------------------------------------------------------------------------------------


def test_patterns_that_mean_the_same_have_the_same_parts() -> None:
    expected = ("a", Wildcard.ONE, Wildcard.MANY)
    assert parse_pattern("a.>", "nats").parts == expected
    for text in ("a.*.#", "a.#.*", "a.#.*.#", "a.#.#.*"):
        assert parse_pattern(text, "amqp").parts == expected


def test_patterns_are_values() -> None:
    pattern = parse_pattern("orders.*")
    assert pattern == parse_pattern("orders.*", "nats")
    assert pattern != parse_pattern("orders.*", "amqp")
    assert {pattern: 1}[parse_pattern("orders.*")] == 1
    assert pickle.loads(pickle.dumps(pattern)).parts == pattern.parts
    with pytest.raises(AttributeError):
        pattern.text = "else"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("dialect", "text", "prefix", "is_exact", "is_all", "exact_prefix_only"),
    [
        ("nats", "orders.new", "orders.new", True, False, False),
        ("nats", "orders.new.>", "orders.new.", False, False, True),
        ("nats", "orders.*", "orders.", False, False, False),
        ("nats", "*.new", "", False, False, False),
        ("nats", "*", "", False, False, False),
        ("nats", ">", "", False, True, True),
        ("amqp", "orders.#", "orders", False, False, False),
        ("amqp", "orders.*.#", "orders.", False, False, True),
        ("amqp", "orders.#.new", "orders.", False, False, False),
        ("amqp", "#.new", "", False, False, False),
        ("amqp", "#", "", False, True, True),
        ("amqp", "#.*", "", False, True, True),
        ("amqp", "*.#.*", "", False, False, False),
    ],
)
def test_what_a_pattern_tells_about_itself(
    dialect: Dialect, text: str, prefix: str, is_exact: bool, is_all: bool, exact_prefix_only: bool
) -> None:
    pattern = parse_pattern(text, dialect)
    assert pattern.literal_prefix == prefix
    assert (pattern.is_exact, pattern.is_all, pattern.exact_prefix_only) == (
        is_exact,
        is_all,
        exact_prefix_only,
    )


# --- matching -------------------------------------------------------------------------------------


@given(patterns, topics)
def test_matches_agrees_with_a_regular_expression(pattern: Pattern, topic: str) -> None:
    assert pattern.matches(topic) == oracle_matches(pattern, topic)


@given(patterns, topics)
def test_what_a_pattern_tells_about_itself_is_true(pattern: Pattern, topic: str) -> None:
    matches = oracle_matches(pattern, topic)
    starts_with_prefix = topic.startswith(pattern.literal_prefix)
    assert starts_with_prefix or not matches
    if pattern.exact_prefix_only:
        assert matches == starts_with_prefix
    if pattern.is_all:
        assert matches
    if pattern.is_exact:
        assert matches == (topic == pattern.text)


@given(patterns)
def test_no_longer_prefix_would_be_true(pattern: Pattern) -> None:
    # Between them these differ as early as any two matching topics can.
    fillings = [{"*": token, ">": token, "#": rest} for token in "xy" for rest in ("", token)]
    filled = [".".join(filter(None, (f.get(t, t) for t in pattern.text.split(".")))) for f in fillings]
    matching = [topic for topic in filled if topic]
    assert all(oracle_matches(pattern, topic) for topic in matching)
    common = os.path.commonprefix(matching)  # noqa: RUF071 - character by character is what is wanted
    assert common == pattern.literal_prefix


def test_many_hashes_do_not_blow_up() -> None:
    pattern = parse_pattern(".".join(["#", "a"] * 15 + ["b"]), "amqp")
    # Tried one way after another, this is a matter of C(31, 15) = 300 million attempts.
    assert not pattern.matches(".".join(["a"] * TOPIC_TOKENS_MAX))
    assert pattern.matches(".".join(["a"] * (TOPIC_TOKENS_MAX - 1) + ["b"]))


# --- overlaps -------------------------------------------------------------------------------------


def all_topics(alphabet: str, tokens_max: int) -> list[str]:
    return [
        ".".join(chosen) for count in range(1, tokens_max + 1) for chosen in itertools.product(alphabet, repeat=count)
    ]


small_amqp = st.lists(st.sampled_from(["a", "b", "*", "#"]), min_size=1, max_size=4).map(".".join)
small_nats = st.lists(st.sampled_from("ab"), max_size=3).map(lambda plain: ".".join([*plain, ">"]))
small_patterns = small_amqp.map(lambda t: parse_pattern(t, "amqp")) | small_nats.map(parse_pattern)
# The shortest topic in common has at most as many tokens as both patterns together.
SMALL_TOPICS = all_topics("ab", 8)


@given(small_patterns, small_patterns)
def test_overlaps_agrees_with_brute_force(a: Pattern, b: Pattern) -> None:
    in_a, in_b = oracle(a), oracle(b)
    expected = any(in_a.fullmatch(topic + ".") and in_b.fullmatch(topic + ".") for topic in SMALL_TOPICS)
    assert overlaps(a, b) == overlaps(b, a) == expected


@given(patterns, topics)
def test_an_exact_pattern_overlaps_what_matches_it(pattern: Pattern, topic: str) -> None:
    assert overlaps(pattern, parse_pattern(topic)) == pattern.matches(topic)


def test_a_common_topic_must_fit_the_limit_of_tokens() -> None:
    half = TOPIC_TOKENS_MAX // 2
    starts = parse_pattern(".".join(["a"] * half + ["#"]), "amqp")
    ends = parse_pattern(".".join(["#"] + ["b"] * half), "amqp")
    ends_longer = parse_pattern(".".join(["#"] + ["b"] * (half + 1)), "amqp")
    assert check_topic(".".join(["a"] * half + ["b"] * half))
    assert overlaps(starts, ends)
    assert not overlaps(starts, ends_longer)


def test_a_common_topic_must_fit_the_limit_of_bytes() -> None:
    half = TOPIC_BYTES_MAX // 2
    starts = parse_pattern("é" * (half // 2) + ".#", "amqp")
    ends = parse_pattern("#." + "b" * (half - 1), "amqp")
    ends_longer = parse_pattern("#." + "b" * half, "amqp")
    assert check_topic("é" * (half // 2) + "." + "b" * (half - 1))
    assert overlaps(starts, ends)
    assert not overlaps(starts, ends_longer)
