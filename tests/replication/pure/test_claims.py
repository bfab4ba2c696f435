"""The registry that gives out claims: examples, and a model of any traffic at it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headwater.replication.claims import CLAIM_MS_MAX, GRACE_MS, RETURN_MS, ClaimAnswer, ClaimRegistry


def test_the_first_wins_and_the_other_hears_what_remains() -> None:
    registry = ClaimRegistry()
    assert registry.join("A", 0) is None
    assert registry.claim("A", 60_000, 0) == ClaimAnswer(True, 60_000)
    assert registry.claim("B", 60_000, 1) == ClaimAnswer(False, 59_999)
    assert registry.join("C", 20_000) == 40_000
    assert registry.join("A", 20_000) is None, "one's own claim is no other's"
    assert registry.release("B", 21_000) is False
    assert registry.release("A", 21_000) is True
    assert (registry.holder(21_000), registry.remaining_ms(21_000)) == (None, 0)
    assert registry.claim("B", 1, 21_000).granted


def test_the_holder_extends_and_never_shortens() -> None:
    registry = ClaimRegistry()
    registry.join("A", 0)
    registry.claim("A", 60_000, 0)
    assert registry.claim("A", 40_000, 50_000) == ClaimAnswer(True, 40_000)
    assert registry.claim("A", 5, 50_000) == ClaimAnswer(True, 40_000)
    assert registry.claim("A", 10**15, 50_000) == ClaimAnswer(True, CLAIM_MS_MAX)


def test_a_connected_holder_keeps_it_for_the_push_and_a_dead_one_does_not() -> None:
    registry = ClaimRegistry()
    registry.join("A", 0)
    registry.claim("A", 1_000, 0)
    assert registry.claim("B", 1_000, 1_000) == ClaimAnswer(False, GRACE_MS)
    registry.push_began("A", 1_500)
    assert registry.claim("B", 1_000, 500_000) == ClaimAnswer(False, GRACE_MS), "its push goes on"
    registry.push_ended("A", 600_000)
    assert registry.holder(600_000) is None

    registry.claim("A", 1_000, 700_000)
    registry.push_began("A", 700_500)
    registry.leave("A", 700_600)
    assert registry.holder(700_999) == "A"
    assert registry.holder(701_000) is None


def test_what_ended_does_not_come_back_with_its_client() -> None:
    registry = ClaimRegistry()
    registry.join("A", 0)
    registry.claim("A", 1_000, 0)
    registry.leave("A", 10)
    registry.join("A", 1_500)
    registry.push_began("A", 1_500)
    assert registry.holder(1_500) is None


def test_a_connection_lost_late_does_not_take_the_new_one_along() -> None:
    registry = ClaimRegistry()
    registry.join("A", 0)
    registry.claim("A", 1_000, 0)
    registry.join("A", 500)
    registry.leave("A", 900)  # the old one
    assert registry.holder(1_000 + GRACE_MS - 1) == "A"
    registry.leave("A", 1_000 + GRACE_MS - 1)
    assert registry.holder(1_000 + GRACE_MS - 1) is None


def test_a_claim_dies_with_its_connection_and_a_minute_however_long_it_was() -> None:
    registry = ClaimRegistry()
    registry.join("A", 0)
    registry.claim("A", CLAIM_MS_MAX, 0)
    assert registry.leave("A", 1_000)
    assert registry.claim("B", 5, 2_000) == ClaimAnswer(False, RETURN_MS - 1_000)
    registry.join("A", 1_000 + RETURN_MS - 1)  # it comes back in time
    assert registry.holder(10 * RETURN_MS) == "A"
    registry.push_began("A", 10 * RETURN_MS)
    registry.leave("A", 10 * RETURN_MS)  # its line is lost, and its push goes on
    assert registry.holder(20 * RETURN_MS) == "A"
    registry.push_ended("A", 20 * RETURN_MS)
    assert registry.holder(20 * RETURN_MS) is None
    assert registry.claim("B", 5, 20 * RETURN_MS).granted
    assert not registry.leave("A", 20 * RETURN_MS)


AFTER = st.integers(0, 15_000)
CLIENTS = st.sampled_from("ABC")


class AnyTraffic(RuleBasedStateMachine):
    """A model beside the registry: the last claim granted, and the clients that are connected."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = ClaimRegistry()
        self.now = 0
        self.connected: set[str] = set()
        self.pushing: set[str] = set()
        self.granted: tuple[str, int] | None = None  # to whom, until when; None: given back

    def pass_time(self, by: int) -> None:
        """The registry is not called meanwhile, so it has to notice ended claims by itself."""
        self.now += by
        self.settle()

    def settle(self) -> None:
        if self.granted is None:
            return
        holder, ends_ms = self.granted
        goes_on = holder in self.connected and (holder in self.pushing or self.now < ends_ms + GRACE_MS)
        if self.now >= ends_ms and not goes_on:
            self.granted = None

    @rule(after=AFTER, client=CLIENTS)
    def joins(self, after: int, client: str) -> None:
        self.pass_time(after)
        if client not in self.connected:
            heard = self.registry.join(client, self.now)
            self.connected.add(client)
            assert (heard is not None) == (self.granted is not None and self.granted[0] != client)

    @rule(after=AFTER, client=CLIENTS)
    def dies(self, after: int, client: str) -> None:
        self.pass_time(after)
        if client in self.connected:
            self.connected.remove(client)
            self.registry.leave(client, self.now)
            self.settle()

    @rule(after=AFTER, client=CLIENTS, span_ms=st.integers(-5, 30_000))
    def claims(self, after: int, client: str, span_ms: int) -> None:
        self.pass_time(after)
        if client not in self.connected:
            return
        free_or_own = self.granted is None or self.granted[0] == client
        answer = self.registry.claim(client, span_ms, self.now)
        assert answer.granted == free_or_own
        assert answer.remaining_ms > 0
        if answer.granted:
            ends_ms = self.now + max(span_ms, 1)
            self.granted = (client, ends_ms if self.granted is None else max(ends_ms, self.granted[1]))
            assert answer.remaining_ms == self.granted[1] - self.now

    @rule(after=AFTER, client=CLIENTS)
    def releases(self, after: int, client: str) -> None:
        self.pass_time(after)
        held = self.granted is not None and self.granted[0] == client
        assert self.registry.release(client, self.now) == held
        if held:
            self.granted = None

    @rule(after=AFTER, client=CLIENTS)
    def pushes_or_stops(self, after: int, client: str) -> None:
        self.pass_time(after)
        if client in self.pushing:
            self.pushing.remove(client)
            self.registry.push_ended(client, self.now)
        else:
            self.pushing.add(client)
            self.registry.push_began(client, self.now)
        self.settle()

    @invariant()
    def the_holder_is_the_last_one_granted(self) -> None:
        assert self.registry.holder(self.now) == (self.granted[0] if self.granted else None)
        assert (self.registry.remaining_ms(self.now) > 0) == (self.granted is not None)


TestAnyTraffic = AnyTraffic.TestCase
TestAnyTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
