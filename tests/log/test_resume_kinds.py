"""Resuming where deliveries are not the plain ones: ordered, redriven, or deleted meanwhile; and at random."""

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resuming_client import BREAKS, Break, Client

import headwater
from headwater import Gap, Log, ManualClock
from headwater.topics import parse_pattern

pytestmark = pytest.mark.usefixtures("engine_here")

ACK_WAIT_MS = 30_000


@pytest.fixture(params=BREAKS)
def broken(request: pytest.FixtureRequest) -> Break:
    return BREAKS[request.param]


def publish_keyed(log: Any, *keys: str) -> None:
    log.publish_many([("a", {"k": key}) for key in keys])


def publish_with_priorities(log: Any, *priorities: int) -> None:
    log.publish_many([("a", None, {"priority": priority}) for priority in priorities])


# --- by key -------------------------------------------------------------------------------------------------------


def test_others_of_a_key_wait_for_the_one_in_flight(log: Log, mode: Any, broken: Break) -> None:
    publish_keyed(log, "x", "x", "y", "y")
    client = Client(log, mode=mode, order_key="data.k")
    assert client.fetch() == [(1, 1), (3, 1)]
    broken(client)
    assert client.resume() == [(1, 1), (3, 1)]
    assert client.fetch() == []
    client.ack(3)
    assert client.fetch() == [(4, 1)]
    client.ack(1, 4)
    assert client.fetch() == [(2, 1)]


def test_the_first_of_a_key_that_never_arrived_is_the_first_again(log: Log, broken: Break) -> None:
    publish_keyed(log, "x", "x", "y", "y")
    client = Client(log, order_key="data.k", max_attempts=1)
    client.fetch(arriving=1)
    broken(client)
    assert client.resume() == [(1, 1)]
    assert client.fetch() == [(3, 1)]


# --- by priority --------------------------------------------------------------------------------------------------


def test_the_rest_still_comes_by_priority(log: Log, mode: Any, broken: Break) -> None:
    publish_with_priorities(log, 1, 2, 3, 4, 5)
    client = Client(log, mode=mode, order="priority")
    assert client.fetch(2) == [(5, 1), (4, 1)]
    broken(client)
    assert sorted(client.resume()) == [(4, 1), (5, 1)]
    assert client.fetch(2) == [(3, 1), (2, 1)]
    client.ack(2, 3, 4, 5)
    assert client.fetch() == [(1, 1)]


def test_high_priorities_that_never_arrived_come_first_again(log: Log, broken: Break) -> None:
    """Before them in the log stand more that wait than may be in flight."""
    publish_with_priorities(log, *range(1, 11))
    client = Client(log, order="priority", max_in_flight=2, max_attempts=1)
    assert client.fetch(arriving=0) == [(10, 1), (9, 1)]
    broken(client)
    assert client.resume() == []
    assert client.fetch() == [(10, 1), (9, 1)]


# --- redriven -----------------------------------------------------------------------------------------------------


def redriven(log: Log, mode: Any, **options: Any) -> Client:
    """A client, and one message on its way to it for the second time."""
    log.publish("a", "dead")
    client = Client(log, mode=mode, ack_wait=ACK_WAIT_MS / 1000, **options)
    client.fetch()
    client.reject(1)
    log.dead_letters.redrive()
    return client


def test_a_redriven_dead_letter_in_flight(log: Log, mode: Any, broken: Break) -> None:
    client = redriven(log, mode)
    assert client.fetch() == [(1, 1)]
    broken(client)
    assert client.resume() == [(1, 1)]
    assert [letter.redriving for letter in log.dead_letters.list()] == [True]
    client.ack(1)
    assert log.dead_letters.list() == []


def test_a_redriven_dead_letter_whose_message_is_gone(log: Log, mode: Any, broken: Break, clock: ManualClock) -> None:
    client = redriven(log, mode)
    client.fetch()
    broken(client)
    clock.advance(ACK_WAIT_MS / 1000)
    log.retain("a", max_count=0)
    assert log.run_maintenance().pruned == {"a": 1}
    assert client.resume() == [(1, 1)]
    assert client.in_flight[1].message.data == "dead", "the letter's own copy"
    client.ack(1)
    assert log.dead_letters.list() == []


def test_a_redriven_dead_letter_that_never_arrived(log: Log, broken: Break) -> None:
    client = redriven(log, "exclusive", max_attempts=1)
    client.fetch(arriving=0)
    broken(client)
    assert client.resume() == []
    assert client.fetch() == [(1, 1)]
    client.ack(1)
    assert log.dead_letters.list() == []


# --- deleted meanwhile --------------------------------------------------------------------------------------------


def test_what_retention_took_is_reported_as_a_gap(log: Log, mode: Any, broken: Break, clock: ManualClock) -> None:
    log.publish_many([("a", n) for n in range(1, 4)])
    client = Client(log, mode=mode, ack_wait=ACK_WAIT_MS / 1000)
    client.fetch()
    broken(client)
    clock.advance(ACK_WAIT_MS / 1000)
    log.retain("a", max_count=1)
    assert log.run_maintenance().gaps == 2
    assert client.resume() == [(3, 1)]
    gaps: list[Gap] = []
    client.connection.on_gap = gaps.append
    assert client.fetch() == []
    assert [(gap.from_seq, gap.to_seq, gap.count, gap.why) for gap in gaps] == [(1, 2, 2, "retention")]
    client.ack(3)
    assert log.subscription("s").lag == 0


def test_what_is_being_handled_is_spared_also_after_a_resume(log: Log, mode: Any, broken: Break) -> None:
    log.publish_many([("a", n) for n in range(1, 4)])
    client = Client(log, mode=mode)
    client.fetch(2)
    broken(client)
    client.resume()
    log.retain("a", max_count=0)
    assert log.run_maintenance().pruned == {"a": 1}
    client.ack(1, 2)


def test_what_was_deleted_by_hand_is_reported_as_a_gap(log: Log, mode: Any) -> None:
    log.publish_many([("a", 1), ("a", 2)])
    client = Client(log, mode=mode)
    client.fetch()
    client.vanish()
    with log._core.engine.store.write() as writer:  # type: ignore[attr-defined]
        writer.delete_messages(writer.oldest(parse_pattern("a"), 0, 1))
    assert client.resume() == [(2, 1)]
    gaps: list[Gap] = []
    client.connection.on_gap = gaps.append
    assert client.fetch() == []
    assert [(gap.from_seq, gap.to_seq, gap.why) for gap in gaps] == [(1, 1, "deleted")]


# --- at random ----------------------------------------------------------------------------------------------------

some = st.sets(st.integers(0, 9), max_size=4)
steps = st.one_of(
    st.tuples(st.just("publish"), st.integers(1, 4)),
    st.tuples(st.just("fetch"), st.integers(1, 5), st.integers(0, 5)),
    st.tuples(st.just("ack"), some),
    st.tuples(st.just("nack"), some),
    st.tuples(st.just("break"), some, st.booleans()),
)


class Story:
    """One client and its exclusive subscription. The model: a message has as many attempts as nacks, and one more."""

    def __init__(self, log: Log, options: dict[str, Any]) -> None:
        self.log = log
        self.client = Client(log, max_in_flight=3, max_attempts=1_000, **options)
        self.nacks: Counter[int] = Counter()
        self.acked: set[int] = set()
        self._numbers = itertools.count()

    def publish(self, count: int) -> None:
        numbers = list(itertools.islice(self._numbers, count))
        self.log.publish_many([("a", {"k": n % 3}, {"priority": n % 4}) for n in numbers])

    def fetch(self, limit: int, arriving: int) -> None:
        before = set(self.client.in_flight)
        found = self.client.fetch(limit, arriving=arriving)
        for seq, attempt in found:
            assert attempt == self.nacks[seq] + 1
            assert seq not in self.acked | before

    def ack(self, places: set[int], *, answered: bool = True) -> None:
        seqs = self._in_flight(places)
        self.client.ack(*seqs, answered=answered)
        self.acked.update(seqs)

    def nack(self, places: set[int]) -> None:
        seqs = self._in_flight(places)
        self.client.nack(*seqs)
        self.nacks.update(seqs)

    def break_(self, unheard: set[int], noticed: bool) -> None:
        self.ack(unheard, answered=False)
        held = set(self.client.in_flight)
        if noticed:
            self.client.vanish()
        resumed = self.client.resume()
        assert sorted(resumed) == [(seq, self.nacks[seq] + 1) for seq in sorted(held - self.acked)]
        assert set(self.client.settled) == held & self.acked

    def end(self) -> None:
        """One more broken connection, and everything there is is acked."""
        self.break_(set(), noticed=True)
        while self.client.in_flight or self.client.fetch():
            self.ack(set(range(10)))
        assert self.acked == set(range(1, self.log.last_seq() + 1))
        info = self.log.subscription("s")
        assert (info.lag, info.acked, info.dead) == (0, len(self.acked), 0)

    def _in_flight(self, places: set[int]) -> list[int]:
        return [seq for at, seq in enumerate(sorted(self.client.in_flight)) if at in places]


@pytest.mark.parametrize(
    "options", [{}, {"order": "priority"}, {"order_key": "data.k"}], ids=["seq", "priority", "key"]
)
@settings(max_examples=150, deadline=None)
@given(script=st.lists(steps, max_size=25))
def test_connections_that_break_at_random(options: dict[str, Any], script: list[Any]) -> None:
    with headwater.open("memory:", clock=ManualClock(), maintenance_interval=None, heartbeats=False) as log:
        story = Story(log, options)
        for name, *arguments in script:
            getattr(story, name if name != "break" else "break_")(*arguments)
        story.end()
