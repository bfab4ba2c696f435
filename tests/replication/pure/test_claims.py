"""The desk that gives out claims: examples, and a model of any traffic at it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headwater.replication.claims import CLAIM_MS_MAX, GRACE_MS, RETURN_MS, ClaimAnswer, ClaimRegistry


def test_the_first_wins_and_the_other_hears_what_remains() -> None:
    desk = ClaimRegistry()
    assert desk.join("A", 0) is None
    assert desk.claim("A", 60_000, 0) == ClaimAnswer(True, 60_000)
    assert desk.claim("B", 60_000, 1) == ClaimAnswer(False, 59_999)
    assert desk.join("C", 20_000) == 40_000
    assert desk.join("A", 20_000) is None, "one's own claim is no other's"
    assert desk.release("B", 21_000) is False
    assert desk.release("A", 21_000) is True
    assert (desk.holder(21_000), desk.remaining_ms(21_000)) == (None, 0)
    assert desk.claim("B", 1, 21_000).granted


def test_the_holder_extends_and_never_shortens() -> None:
    desk = ClaimRegistry()
    desk.join("A", 0)
    desk.claim("A", 60_000, 0)
    assert desk.claim("A", 40_000, 50_000) == ClaimAnswer(True, 40_000)
    assert desk.claim("A", 5, 50_000) == ClaimAnswer(True, 40_000)
    assert desk.claim("A", 10**15, 50_000) == ClaimAnswer(True, CLAIM_MS_MAX)


def test_a_connected_holder_keeps_it_for_the_push_and_a_dead_one_does_not() -> None:
    desk = ClaimRegistry()
    desk.join("A", 0)
    desk.claim("A", 1_000, 0)
    assert desk.claim("B", 1_000, 1_000) == ClaimAnswer(False, GRACE_MS)
    desk.push_began("A", 1_500)
    assert desk.claim("B", 1_000, 500_000) == ClaimAnswer(False, GRACE_MS), "its push goes on"
    desk.push_ended("A", 600_000)
    assert desk.holder(600_000) is None

    desk.claim("A", 1_000, 700_000)
    desk.push_began("A", 700_500)
    desk.leave("A", 700_600)
    assert desk.holder(700_999) == "A"
    assert desk.holder(701_000) is None


def test_what_ended_does_not_come_back_with_its_client() -> None:
    desk = ClaimRegistry()
    desk.join("A", 0)
    desk.claim("A", 1_000, 0)
    desk.leave("A", 10)
    desk.join("A", 1_500)
    desk.push_began("A", 1_500)
    assert desk.holder(1_500) is None


def test_a_connection_lost_late_does_not_take_the_new_one_along() -> None:
    desk = ClaimRegistry()
    desk.join("A", 0)
    desk.claim("A", 1_000, 0)
    desk.join("A", 500)
    desk.leave("A", 900)  # the old one
    assert desk.holder(1_000 + GRACE_MS - 1) == "A"
    desk.leave("A", 1_000 + GRACE_MS - 1)
    assert desk.holder(1_000 + GRACE_MS - 1) is None


def test_a_claim_dies_with_its_connection_and_a_minute_however_long_it_was() -> None:
    desk = ClaimRegistry()
    desk.join("A", 0)
    desk.claim("A", CLAIM_MS_MAX, 0)
    assert desk.leave("A", 1_000)
    assert desk.claim("B", 5, 2_000) == ClaimAnswer(False, RETURN_MS - 1_000)
    desk.join("A", 1_000 + RETURN_MS - 1)  # it comes back in time
    assert desk.holder(10 * RETURN_MS) == "A"
    desk.push_began("A", 10 * RETURN_MS)
    desk.leave("A", 10 * RETURN_MS)  # its line is lost, and its push goes on
    assert desk.holder(20 * RETURN_MS) == "A"
    desk.push_ended("A", 20 * RETURN_MS)
    assert desk.holder(20 * RETURN_MS) is None
    assert desk.claim("B", 5, 20 * RETURN_MS).granted
    assert not desk.leave("A", 20 * RETURN_MS)


AFTER = st.integers(0, 15_000)
CLIENTS = st.sampled_from("ABC")


class Desk(RuleBasedStateMachine):
    """A model beside the registry: the last claim granted, and the clients that are connected."""

    def __init__(self) -> None:
        super().__init__()
        self.claims = ClaimRegistry()
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
            heard = self.claims.join(client, self.now)
            self.connected.add(client)
            assert (heard is not None) == (self.granted is not None and self.granted[0] != client)

    @rule(after=AFTER, client=CLIENTS)
    def dies(self, after: int, client: str) -> None:
        self.pass_time(after)
        if client in self.connected:
            self.connected.remove(client)
            self.claims.leave(client, self.now)
            self.settle()

    @rule(after=AFTER, client=CLIENTS, span_ms=st.integers(-5, 30_000))
    def claims(self, after: int, client: str, span_ms: int) -> None:
        self.pass_time(after)
        if client not in self.connected:
            return
        free_or_own = self.granted is None or self.granted[0] == client
        answer = self.claims.claim(client, span_ms, self.now)
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
        assert self.claims.release(client, self.now) == held
        if held:
            self.granted = None

    @rule(after=AFTER, client=CLIENTS)
    def pushes_or_stops(self, after: int, client: str) -> None:
        self.pass_time(after)
        if client in self.pushing:
            self.pushing.remove(client)
            self.claims.push_ended(client, self.now)
        else:
            self.pushing.add(client)
            self.claims.push_began(client, self.now)
        self.settle()

    @invariant()
    def the_holder_is_the_last_one_granted(self) -> None:
        assert self.claims.holder(self.now) == (self.granted[0] if self.granted else None)
        assert (self.claims.remaining_ms(self.now) > 0) == (self.granted is not None)


TestAnyTraffic = Desk.TestCase
TestAnyTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
