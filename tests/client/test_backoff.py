"""When a client tries again: pure."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.options import JITTER, Backoff, Strategy
from headwater.errors import InvalidOptionError

rolls = st.floats(0, 1)
attempts = st.integers(1, 10_000)
spans_s = st.floats(0.001, 1_000)


def test_delays_double_up_to_the_most() -> None:
    backoff = Backoff(first_s=0.1, most_s=30)
    delays = [backoff.delay_s(attempt, 0) for attempt in range(1, 12)]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30])


def test_chance_adds_up_to_a_quarter() -> None:
    assert Backoff(first_s=0.1).delay_s(3, 1) == pytest.approx(0.5)
    assert Backoff("fixed", first_s=2).delay_s(7, 0.5) == pytest.approx(2.25)


def test_a_fixed_delay_stays() -> None:
    assert {Backoff("fixed", first_s=0.3).delay_s(attempt, 0) for attempt in range(1, 100)} == {0.3}


def test_after_the_last_attempt_there_is_none() -> None:
    backoff = Backoff(attempts=3)
    assert [backoff.delay_s(attempt, 0) is None for attempt in range(1, 6)] == [False, False, False, True, True]


@pytest.mark.parametrize("backoff", [Backoff("none"), Backoff(attempts=0), Backoff("none", attempts=5)])
def test_without_reconnect_there_is_no_second_try(backoff: Backoff) -> None:
    assert backoff.delay_s(1, 0) is None


@given(st.sampled_from(["exponential", "fixed"]), spans_s, spans_s, attempts, rolls)
def test_a_delay_lies_between_what_is_due_and_a_quarter_more_and_never_above_the_most(
    strategy: Strategy, one_s: float, other_s: float, attempt: int, roll: float
) -> None:
    first_s, most_s = sorted((one_s, other_s))
    delay_s = Backoff(strategy, first_s, most_s).delay_s(attempt, roll)
    due_s = first_s if strategy == "fixed" else min(most_s, first_s * 2.0 ** min(attempt - 1, 1_000))
    assert delay_s is not None
    assert due_s <= delay_s <= min(most_s, due_s * (1 + JITTER)) * (1 + 1e-9)


@given(spans_s, attempts, rolls)
def test_a_later_attempt_never_waits_less_without_luck(first_s: float, attempt: int, roll: float) -> None:
    backoff = Backoff(first_s=first_s, most_s=10_000)
    sooner, later = backoff.delay_s(attempt, 0), backoff.delay_s(attempt + 1, roll)
    assert sooner is not None
    assert later is not None
    assert math.isfinite(later)
    assert sooner <= later


@given(st.integers(0, 100), attempts)
def test_attempts_are_counted(most: int, attempt: int) -> None:
    assert (Backoff(attempts=most).delay_s(attempt, 0) is None) == (attempt > most)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "sometimes"},
        {"first_s": 0},
        {"first_s": -1},
        {"first_s": 2, "most_s": 1},
        {"first_s": float("nan")},
        {"attempts": -1},
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidOptionError):
        Backoff(**options)  # type: ignore[arg-type]
