import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.delivery.retry import (
    ATTEMPTS_MAX,
    BACKOFF_MS_MAX,
    GiveUp,
    Retry,
    RetryPolicy,
    backoff_ms,
    decide_redelivery,
    decide_retry,
)
from headwater.errors import InvalidOptionError

rolls = st.floats(min_value=0.0, max_value=1.0, exclude_max=True)
nows = st.integers(min_value=0, max_value=10**13)


@st.composite
def policies(draw: st.DrawFn) -> RetryPolicy:
    base_ms = draw(st.integers(min_value=0, max_value=BACKOFF_MS_MAX))
    return RetryPolicy(
        max_attempts=draw(st.integers(min_value=1, max_value=ATTEMPTS_MAX)),
        base_ms=base_ms,
        factor=draw(st.floats(min_value=1.0, max_value=100.0)),
        cap_ms=draw(st.integers(min_value=base_ms, max_value=BACKOFF_MS_MAX)),
        jitter=draw(st.floats(min_value=0.0, max_value=1.0)),
    )


def test_the_seeds_example_doubles_up_to_the_cap() -> None:
    policy = RetryPolicy(base_ms=100, factor=2.0, cap_ms=1_000, jitter=0.0)
    assert [backoff_ms(policy, attempts, 0.0) for attempts in range(1, 7)] == [100, 200, 400, 800, 1_000, 1_000]


def test_jitter_only_ever_adds() -> None:
    policy = RetryPolicy(base_ms=1_000, jitter=0.25)
    assert backoff_ms(policy, 1, 0.0) == 1_000
    assert backoff_ms(policy, 1, 1.0) == 1_250


@given(policy=policies(), attempts=st.integers(min_value=1, max_value=ATTEMPTS_MAX), roll=rolls)
def test_backoff_stays_between_base_and_jittered_cap(policy: RetryPolicy, attempts: int, roll: float) -> None:
    delay_ms = backoff_ms(policy, attempts, roll)
    assert policy.base_ms <= delay_ms <= round(policy.cap_ms * (1 + policy.jitter))


@given(policy=policies(), attempts=st.integers(min_value=1, max_value=ATTEMPTS_MAX - 1), roll=rolls)
def test_backoff_never_shrinks_with_attempts(policy: RetryPolicy, attempts: int, roll: float) -> None:
    assert backoff_ms(policy, attempts, roll) <= backoff_ms(policy, attempts + 1, roll)


@given(policy=policies(), attempts=st.integers(min_value=1, max_value=2 * ATTEMPTS_MAX), now_ms=nows, roll=rolls)
def test_a_nack_is_retried_exactly_while_attempts_are_left(
    policy: RetryPolicy, attempts: int, now_ms: int, roll: float
) -> None:
    decision = decide_retry(policy, attempts, now_ms, roll)
    if attempts < policy.max_attempts:
        assert decision == Retry(now_ms + backoff_ms(policy, attempts, roll))
    else:
        assert decision == GiveUp("max_attempts")


@given(policy=policies(), now_ms=nows, roll=rolls, delay_ms=st.integers(min_value=0, max_value=BACKOFF_MS_MAX))
def test_an_explicit_delay_replaces_the_backoff_but_not_the_limit(
    policy: RetryPolicy, now_ms: int, roll: float, delay_ms: int
) -> None:
    if policy.max_attempts > 1:
        assert decide_retry(policy, 1, now_ms, roll, delay_ms=delay_ms) == Retry(now_ms + delay_ms)
    assert decide_retry(policy, policy.max_attempts, now_ms, roll, delay_ms=delay_ms) == GiveUp("max_attempts")


@given(policy=policies(), attempts=st.integers(min_value=0, max_value=2 * ATTEMPTS_MAX), lost=st.booleans())
def test_what_came_back_is_handed_out_again_exactly_while_attempts_are_left(
    policy: RetryPolicy, attempts: int, lost: bool
) -> None:
    decision = decide_redelivery(policy, attempts, lost)
    if attempts < policy.max_attempts:
        assert decision is None
    else:
        assert decision == GiveUp("timeout" if lost else "max_attempts")


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"max_attempts": ATTEMPTS_MAX + 1},
        {"base_ms": -1},
        {"base_ms": 2, "cap_ms": 1},
        {"cap_ms": BACKOFF_MS_MAX + 1},
        {"factor": 0.9},
        {"factor": 101.0},
        {"factor": float("nan")},
        {"jitter": -0.1},
        {"jitter": 1.1},
        {"jitter": float("nan")},
    ],
    ids=str,
)
def test_an_impossible_policy_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidOptionError):
        RetryPolicy(**wrong)  # type: ignore[arg-type]
