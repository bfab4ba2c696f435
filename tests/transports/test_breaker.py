"""The circuit breaker, as a value and before a transport."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater import ManualClock, Message
from headwater.delivery.circuit import Breaker, BreakerPolicy, ask, ended, until_ms
from headwater.errors import (
    CircuitOpenError,
    ClosedError,
    InvalidDataError,
    InvalidOptionError,
    PublishOnlyError,
    TransportFailedError,
)
from headwater.transports.breaker import BreakerTransport

MAKE = Callable[..., Message]
POLICY = BreakerPolicy()
WAIT_S = 20


def opened(at_ms: int = 0) -> Breaker:
    breaker = Breaker()
    for _ in range(POLICY.failures):
        breaker = ended(POLICY, breaker, breaker.turn, "failed", at_ms)
    assert breaker.state == "open"
    return breaker


def test_five_failures_within_two_minutes_open_it() -> None:
    breaker = Breaker()
    for at_ms in (0, 1, 2, 119_998):
        breaker = ended(POLICY, breaker, breaker.turn, "failed", at_ms)
        assert breaker.state == "closed"
    assert ended(POLICY, breaker, breaker.turn, "failed", 119_999).state == "open"
    assert ended(POLICY, breaker, breaker.turn, "failed", 120_000).state == "closed"


def test_successes_between_failures_do_not_forgive_them() -> None:
    breaker = Breaker()
    for at_ms in range(5):
        breaker = ended(POLICY, breaker, breaker.turn, "failed", at_ms)
        breaker = ended(POLICY, breaker, breaker.turn, "succeeded", at_ms)
    assert breaker.state == "open"


def test_after_its_time_one_try_goes_through() -> None:
    breaker = opened(1_000)
    assert until_ms(POLICY, breaker) == 31_000
    assert ask(POLICY, breaker, 30_999) == (breaker, None)
    trying, turn = ask(POLICY, breaker, 31_000)
    assert (trying.state, turn) == ("half-open", trying.turn)
    assert ask(POLICY, trying, 10**9) == (trying, None)


def test_the_try_closes_it_or_opens_it_again() -> None:
    trying, turn = ask(POLICY, opened(), 30_000)
    assert turn is not None
    closed = ended(POLICY, trying, turn, "succeeded", 30_001)
    assert (closed.state, closed.failed_at_ms) == ("closed", ())
    again = ended(POLICY, trying, turn, "failed", 30_001)
    assert until_ms(POLICY, again) == 60_001
    back = ended(POLICY, trying, turn, "not tried", 30_001)
    assert ask(POLICY, back, 30_001)[1] is not None


def test_what_began_before_says_nothing_about_the_try() -> None:
    breaker = opened()
    trying, turn = ask(POLICY, breaker, 30_000)
    assert ended(POLICY, trying, 0, "succeeded", 30_001) is trying
    assert ended(POLICY, trying, 0, "failed", 30_001) is trying
    assert ended(POLICY, trying, 0, "not tried", 30_001) is trying
    assert ended(POLICY, breaker, 0, "failed", 20_000) is breaker
    assert turn != 0


def test_a_clock_that_was_set_back_does_not_keep_it_open() -> None:
    assert ask(POLICY, opened(3_600_000), 0)[1] is not None


def test_failures_from_before_a_clock_was_set_back_do_not_count() -> None:
    breaker = Breaker()
    for at_ms in (3_600_000, 3_600_001, 3_600_002, 3_600_003, 0):
        breaker = ended(POLICY, breaker, breaker.turn, "failed", at_ms)
    assert (breaker.state, breaker.failed_at_ms) == ("closed", (0,))


@pytest.mark.parametrize(
    "options", [{"failures": 0}, {"failures": 1.0}, {"within_ms": 0}, {"open_ms": -1}, {"open_ms": 2**40}]
)
def test_impossible_policies_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        BreakerPolicy(**options)


class Model:
    """The same in plain words: a list of failures, the time of opening, the one try."""

    def __init__(self, policy: BreakerPolicy) -> None:
        self.policy = policy
        self.failures: list[int] = []
        self.opened_ms: int | None = None
        self.trying: object = None

    def may(self, now_ms: int) -> object:
        """A call's own mark, if it may be made."""
        if self.opened_ms is None:
            return (self.failures, "closed")
        age = now_ms - self.opened_ms
        if self.trying is None and (age < 0 or age >= self.policy.open_ms):
            self.trying = object()
            return self.trying
        return None

    def ended(self, mark: object, ok: bool, now_ms: int) -> None:
        if self.opened_ms is not None:
            if mark is not self.trying or self.trying is None:
                return
            self.trying = None
            self.opened_ms = None if ok else now_ms
            self.failures = []
        elif not ok and isinstance(mark, tuple) and mark[0] is self.failures:
            self.failures.append(now_ms)
            recent = [at for at in self.failures if 0 <= now_ms - at < self.policy.within_ms]
            self.failures[:] = recent
            if len(recent) >= self.policy.failures:
                self.opened_ms = now_ms
                self.failures = []


@given(
    policy=st.builds(BreakerPolicy, st.integers(1, 4), st.integers(1, 30), st.integers(1, 30)),
    steps=st.lists(
        st.tuples(st.sampled_from(["begin", "succeed", "fail"]), st.integers(-5, 20), st.integers(0, 5)), max_size=60
    ),
)
def test_it_does_what_the_plain_words_say(policy: BreakerPolicy, steps: list[tuple[str, int, int]]) -> None:
    model, breaker, now_ms = Model(policy), Breaker(), 1_000
    under_way: list[tuple[object, int]] = []
    for what, passed_ms, which in steps:
        now_ms += passed_ms
        if what == "begin":
            mark = model.may(now_ms)
            breaker, turn = ask(policy, breaker, now_ms)
            assert (turn is not None) == (mark is not None)
            if turn is not None:
                under_way.append((mark, turn))
        elif under_way:
            mark, turn = under_way.pop(which % len(under_way))
            model.ended(mark, what == "succeed", now_ms)
            breaker = ended(policy, breaker, turn, "succeeded" if what == "succeed" else "failed", now_ms)
        state = "closed" if model.opened_ms is None else "open" if model.trying is None else "half-open"
        assert breaker.state == state


# --- before a transport -----------------------------------------------------------------------------------------


def fail_until_open(transport: BreakerTransport, make: MAKE) -> None:
    for _ in range(POLICY.failures):
        with pytest.raises(TransportFailedError):
            transport.publish(make(0))


def test_an_open_circuit_does_not_ask_and_says_until_when(target: Any, make: MAKE, clock: ManualClock) -> None:
    states: list[str] = []
    transport = BreakerTransport(target, clock=clock, on_state=states.append)
    target.fail()
    fail_until_open(transport, make)
    with pytest.raises(CircuitOpenError, match=r"target: not tried.*at 2023-11-14T22:13:50.000Z"):
        transport.publish(make(0))
    assert target.asked == 5
    assert (transport.state, states) == ("open", ["open"])
    clock.advance(30)
    with pytest.raises(TransportFailedError):
        transport.publish(make(0))
    with pytest.raises(CircuitOpenError):
        transport.publish(make(0))
    target.failure = None
    clock.advance(30)
    transport.publish(make(1))
    transport.publish(make(2))
    assert target.data == [1, 2]
    assert states == ["open", "half-open", "open", "half-open", "closed"]


def test_while_one_tries_the_others_are_refused(target: Any, make: MAKE, clock: ManualClock) -> None:
    transport = BreakerTransport(target, clock=clock)
    target.fail()
    fail_until_open(transport, make)
    target.failure = None
    target.gate.clear()
    clock.advance(30)
    for _ in range(POLICY.failures):
        target.tried.acquire()
    trying = threading.Thread(target=transport.publish, args=[make(1)])
    trying.start()
    assert target.tried.acquire(timeout=WAIT_S)
    with pytest.raises(CircuitOpenError, match="one try is under way"):
        transport.publish(make(2))
    target.gate.set()
    trying.join(WAIT_S)
    assert transport.state == "closed"


def test_what_says_nothing_about_the_target_counts_for_nothing(target: Any, make: MAKE, clock: ManualClock) -> None:
    transport = BreakerTransport(target, BreakerPolicy(failures=1), clock=clock)
    target.failure = InvalidDataError("odd")
    with pytest.raises(InvalidDataError):
        transport.publish(make(1))
    assert transport.state == "closed"
    target.fail()
    with pytest.raises(TransportFailedError):
        transport.publish(make(1))
    clock.advance(30)
    for interruption in (InvalidDataError("odd"), KeyboardInterrupt()):  # the one try, twice without an outcome
        target.failure = interruption
        with pytest.raises(type(interruption)):
            transport.publish(make(1))
    target.failure = None
    transport.publish(make(2))
    assert transport.state == "closed"


def test_to_publish_nothing_is_no_try(target: Any, make: MAKE, clock: ManualClock) -> None:
    transport = BreakerTransport(target, BreakerPolicy(failures=1), clock=clock)
    target.fail()
    with pytest.raises(TransportFailedError):
        transport.publish(make(1))
    clock.advance(30)
    target.failure = None
    transport.publish_many([])
    assert transport.state == "open"


def test_a_failing_on_state_and_a_closed_transport(target: Any, make: MAKE, clock: ManualClock) -> None:
    def refuse(state: str) -> None:
        raise RuntimeError(state)

    transport = BreakerTransport(target, BreakerPolicy(failures=1), clock=clock, on_state=refuse)
    target.fail()
    with pytest.raises(TransportFailedError):
        transport.publish(make(1))
    assert not transport.connected
    with pytest.raises(PublishOnlyError, match="Target is publish-only"):
        transport.subscribe(">", print)
    transport.close()
    with pytest.raises(ClosedError):
        transport.publish(make(1))
