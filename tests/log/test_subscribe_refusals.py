"""What cannot be subscribed to is refused by name, and leaves no subscription behind."""

from typing import Any

import pytest

from headwater import Log
from headwater.errors import (
    CombinedWildcard,
    EmptyPattern,
    InvalidFilter,
    InvalidInput,
    InvalidOption,
    InvalidWhere,
    MixedWildcards,
)


@pytest.mark.parametrize("id", ["", " ", "-a", "a b", "x" * 129, "é", None, 5], ids=repr)
def test_a_bad_subscription_id(log: Log, id: Any) -> None:
    with pytest.raises(InvalidOption):
        log.subscribe(id, "a")


@pytest.mark.parametrize(
    ("pattern", "options", "error"),
    [
        ("", {}, EmptyPattern),
        ("a.*.>", {}, MixedWildcards),
        ("ord*", {}, CombinedWildcard),
        ("a", {"dialect": "mqtt"}, InvalidOption),
        ("a", {"mode": "solo"}, InvalidOption),
        ("a", {"order": "lifo"}, InvalidOption),
        ("a", {"from_": 123}, InvalidFilter),
        ("a", {"broadcast": "yes"}, InvalidFilter),
        ("a", {"where": "price >"}, InvalidWhere),
        ("a", {"where": 5}, InvalidWhere),
        ("a", {"order_key": "nope.x"}, InvalidWhere),
        ("a", {"ack_wait": 0}, InvalidOption),
        ("a", {"ack_wait": -1}, InvalidOption),
        ("a", {"lease": "10s"}, InvalidOption),
        ("a", {"max_in_flight": 0}, InvalidOption),
        ("a", {"max_in_flight": 10_001}, InvalidOption),
        ("a", {"max_attempts": 0}, InvalidOption),
        ("a", {"backoff": -1}, InvalidOption),
        ("a", {"backoff_factor": 0.5}, InvalidOption),
        ("a", {"jitter": 2}, InvalidOption),
        ("a", {"inactive_timeout": 0}, InvalidOption),
        ("a", {"colour": "red"}, InvalidOption),
    ],
    ids=str,
)
def test_a_bad_option(log: Log, pattern: str, options: dict[str, Any], error: type[InvalidInput]) -> None:
    with pytest.raises(error):
        log.subscribe("s", pattern, **options)
    assert log.subscriptions() == []


@pytest.mark.parametrize(
    "options",
    [
        {"max_attempts": "5"},
        {"max_attempts": 2.5},
        {"max_in_flight": True},
        {"jitter": "much"},
        {"backoff_factor": None},
        {"order_key": 5},
        {"bury_expired": "no"},
    ],
    ids=str,
)
def test_an_option_of_the_wrong_type(log: Log, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        log.subscribe("s", "a", **options)


@pytest.mark.parametrize("n", [0, -1, 10_001])
def test_fetch_has_a_limit(log: Log, n: int) -> None:
    with pytest.raises(InvalidOption):
        log.subscribe("s", "a").fetch(n)
