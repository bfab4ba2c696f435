"""The trie against a naive loop, and what a match visits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.topics import Pattern, TopicTrie, parse_pattern
from headwater.topics import trie as trie_module

tokens = st.sampled_from(["a", "b", "c"])
topics = st.lists(tokens, min_size=1, max_size=6).map(".".join)
amqp = st.lists(tokens | st.sampled_from(["*", "#"]), min_size=1, max_size=5).map(".".join)
nats = st.lists(tokens, max_size=3).map(lambda plain: ".".join([*plain, ">"]))
patterns = amqp.map(lambda text: parse_pattern(text, "amqp")) | nats.map(parse_pattern)
values = st.integers(0, 3)
changes = st.lists(st.tuples(st.booleans(), patterns, values), max_size=30)


@given(changes, st.lists(topics, min_size=1, max_size=5))
def test_the_trie_agrees_with_a_loop(changes: list[tuple[bool, Pattern, int]], topics: list[str]) -> None:
    trie: TopicTrie[int] = TopicTrie()
    filed: dict[tuple[Any, int], Pattern] = {}
    for is_add, pattern, value in changes:
        if is_add:
            trie.add(pattern, value)
            filed[pattern.parts, value] = pattern
        else:
            trie.remove(pattern, value)
            filed.pop((pattern.parts, value), None)
    for topic in topics:
        expected = sorted({value for (_, value), pattern in filed.items() if pattern.matches(topic)})
        assert sorted(trie.match(topic)) == expected

    for (_, value), pattern in filed.items():
        trie.remove(pattern, value)
    assert is_bare(trie)


def is_bare(trie: TopicTrie[int]) -> bool:
    root = trie._root
    return not (root.values or root.tokens or root.one or root.many)


def test_a_value_comes_once_and_stays_until_its_last_pattern_goes() -> None:
    trie: TopicTrie[str] = TopicTrie()
    wide, narrow = parse_pattern("orders.>"), parse_pattern("orders.new")
    for pattern in (wide, narrow, parse_pattern("orders.*.#", "amqp")):
        trie.add(pattern, "billing")
    assert trie.match("orders.new") == ["billing"]
    trie.remove(wide, "billing")
    trie.remove(wide, "billing")
    assert trie.match("orders.old") == [], "the pattern in the other dialect has the same parts"
    assert trie.match("orders.new") == ["billing"]
    trie.remove(narrow, "billing")
    assert trie.match("orders.new") == []


def test_removing_what_is_not_there_changes_nothing() -> None:
    trie: TopicTrie[str] = TopicTrie()
    trie.add(parse_pattern("orders.new.>"), "billing")
    trie.remove(parse_pattern("orders.new"), "billing")
    trie.remove(parse_pattern("orders.new.>"), "shipping")
    trie.remove(parse_pattern("elsewhere"), "billing")
    assert trie.match("orders.new.fast") == ["billing"]


def test_pruning_keeps_what_others_still_need() -> None:
    trie: TopicTrie[str] = TopicTrie()
    trie.add(parse_pattern("a.b.c.d"), "deep")
    trie.add(parse_pattern("a.b"), "shallow")
    trie.remove(parse_pattern("a.b.c.d"), "deep")
    assert trie.match("a.b") == ["shallow"]
    assert not trie._root.tokens["a"].tokens["b"].tokens


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many nodes each step of a match looked at."""
    counts: list[int] = []
    step = trie_module._step

    def counting_step(reached: Iterable[trie_module._Node[int]], token: str) -> Iterable[trie_module._Node[int]]:
        nodes = list(reached)
        counts.append(len(nodes))
        return step(nodes, token)

    monkeypatch.setattr(trie_module, "_step", counting_step)
    return counts


def test_unrelated_patterns_are_not_visited(visits: list[int]) -> None:
    trie: TopicTrie[int] = TopicTrie()
    for number in range(2_500):
        trie.add(parse_pattern(f"tenant{number}.orders.new"), number)
        trie.add(parse_pattern(f"tenant{number}.orders.*"), number)
        trie.add(parse_pattern(f"tenant{number}.>"), number)
        trie.add(parse_pattern(f"tenant{number}.#.new", "amqp"), number)

    assert trie.match("tenant7.orders.new") == [7]
    assert visits[0] == 1
    assert sum(visits) <= 10

    visits.clear()
    assert trie.match("elsewhere.orders.new") == []
    assert visits == [1, 0, 0]


def test_many_hashes_do_not_multiply_visits(visits: list[int]) -> None:
    trie: TopicTrie[int] = TopicTrie()
    pattern = parse_pattern(".".join(["#", "a"] * 16), "amqp")
    trie.add(pattern, 1)
    assert trie.match(".".join(["a"] * 32)) == [1]
    assert max(visits) <= len(pattern.parts) + 1
