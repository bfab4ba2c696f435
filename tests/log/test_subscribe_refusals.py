"""What cannot be subscribed to is refused by name, and leaves no subscription behind."""

from typing import Any

import pytest

from headwater import Log
from headwater.errors import (
    CombinedWildcardError,
    EmptyPatternError,
    InvalidFilterError,
    InvalidInputError,
    InvalidOptionError,
    InvalidWhereError,
    MixedWildcardsError,
)

PLACES = ("sqlite", "served")  # the refusal comes before the store is asked, so PostgreSQL would repeat it


@pytest.mark.parametrize("id", ["", " ", "-a", "a b", "x" * 129, "é", None, 5], ids=repr)
def test_a_bad_subscription_id(log: Log, id: Any) -> None:
    with pytest.raises(InvalidOptionError):
        log.subscribe(id, "a")


@pytest.mark.parametrize(
    ("pattern", "options", "error"),
    [
        ("", {}, EmptyPatternError),
        ("a.*.>", {}, MixedWildcardsError),
        ("ord*", {}, CombinedWildcardError),
        ("a", {"dialect": "mqtt"}, InvalidOptionError),
        ("a", {"mode": "solo"}, InvalidOptionError),
        ("a", {"order": "lifo"}, InvalidOptionError),
        ("a", {"from_": 123}, InvalidFilterError),
        ("a", {"broadcast": "yes"}, InvalidFilterError),
        ("a", {"where": "price >"}, InvalidWhereError),
        ("a", {"where": 5}, InvalidWhereError),
        ("a", {"order_key": "nope.x"}, InvalidWhereError),
        ("a", {"ack_wait": 0}, InvalidOptionError),
        ("a", {"ack_wait": -1}, InvalidOptionError),
        ("a", {"lease": "10"}, InvalidOptionError),
        ("a", {"max_in_flight": 0}, InvalidOptionError),
        ("a", {"max_in_flight": 10_001}, InvalidOptionError),
        ("a", {"max_attempts": 0}, InvalidOptionError),
        ("a", {"backoff": -1}, InvalidOptionError),
        ("a", {"backoff_factor": 0.5}, InvalidOptionError),
        ("a", {"jitter": 2}, InvalidOptionError),
        ("a", {"inactive_timeout": 0}, InvalidOptionError),
    ],
    ids=str,
)
def test_a_bad_option(log: Log, pattern: str, options: dict[str, Any], error: type[InvalidInputError]) -> None:
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
        {"dead_letter_expired": "no"},
    ],
    ids=str,
)
def test_an_option_of_the_wrong_type(log: Log, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        log.subscribe("s", "a", **options)


@pytest.mark.parametrize("n", [0, -1, 10_001])
def test_fetch_has_a_limit(log: Log, n: int) -> None:
    with pytest.raises(InvalidOptionError):
        log.subscribe("s", "a").fetch(n)
