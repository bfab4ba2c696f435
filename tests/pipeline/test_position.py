"""A stream's place in the log is a subscription: with lag, one holder, and spared by retention while it reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import headwater
from headwater import Log, ManualClock
from headwater.errors import LeaseLostError, SubscriptionMismatchError
from headwater.pipeline.position import LEASE_MS, Position, position_name
from headwater.topics import Pattern, parse_pattern

ORDERS = [parse_pattern("orders.>")]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def log(path: str, clock: ManualClock) -> Iterator[Log]:
    with headwater.open(path, clock=clock, maintenance_interval=None, durability="relaxed") as opened:
        opened.publish_many([("orders.new" if n % 2 else "other", n) for n in range(1, 21)])
        yield opened


@pytest.fixture
def path(any_log: str) -> str:
    return any_log


def patterns(*texts: str) -> list[Pattern]:
    return [parse_pattern(text) for text in texts]


def left(log: Log) -> list[int]:
    return [message.seq for message in log.subscribe("look", ">", mode="ephemeral", start="first").fetch(1_000)]


def test_it_shows_with_its_lag(log: Log, path: str, clock: ManualClock) -> None:
    with Position.open(path, "lake", ORDERS, start=0, clock=clock) as position:
        assert log.subscription("lake").lag == 10
        position.begin(0, 8)
        info = log.subscription("lake")
        assert (info.lag, info.in_flight, info.position, info.pattern) == (10, 4, 0, "orders.>")
        assert info.holder is not None
        position.commit(8)
        info = log.subscription("lake")
        assert (info.lag, info.in_flight, info.position) == (6, 0, 8)
    assert log.subscription("lake").holder is None


def test_several_patterns_have_a_lag_of_what_they_match(log: Log, path: str, clock: ManualClock) -> None:
    with Position.open(path, "both", patterns("orders.new", "none.>"), start=0, clock=clock):
        assert log.subscription("both").lag == 10
    with Position.open(path, "all", [], start=5, clock=clock):
        assert log.subscription("all").lag == 15


def test_it_is_created_at_its_start_and_stays_where_it_was_left(log: Log, path: str, clock: ManualClock) -> None:
    with Position.open(path, "lake", ORDERS, start=20, clock=clock) as position:
        assert position.found_at is None
        position.commit(4)
    with Position.open(path, "lake", ORDERS, start=0, clock=clock) as position:
        assert position.found_at == 4
        assert log.subscription("lake").position == 4


def test_retention_spares_what_a_running_batch_reads_and_nothing_else(log: Log, path: str, clock: ManualClock) -> None:
    log.retain(">", max_count=0)
    with Position.open(path, "lake", ORDERS, start=0, clock=clock) as position:
        position.begin(6, 12)
        log.run_maintenance()
        assert left(log) == [7, 8, 9, 10, 11, 12]
        assert [(gap.from_seq, gap.to_seq, gap.count) for gap in position.gaps()] == [(13, 19, 4)]
        position.mark_gaps_reported()
        assert position.gaps() == []
        position.commit(12)
        log.run_maintenance()
        assert left(log) == []
        assert position.gaps() == [], "what was read is no loss"
        with position.read() as reader:
            assert reader.pruned(1, 20) == [(1, 20)]
    assert log.subscription("lake").gaps == 4


def test_a_lease_that_ran_out_spares_nothing_and_a_renewal_keeps_it(log: Log, path: str, clock: ManualClock) -> None:
    log.retain(">", max_count=0)
    with Position.open(path, "lake", ORDERS, start=0, clock=clock) as position:
        position.begin(0, 20)
        clock.advance((LEASE_MS - 1) / 1000)
        position.renew()
        clock.advance((LEASE_MS - 1) / 1000)
        log.run_maintenance()
        assert len(left(log)) == 20
        clock.advance(0.001)
        log.run_maintenance()
        assert left(log) == []
        assert sum(gap.count for gap in position.gaps()) == 10


def test_opening_it_takes_it_over_at_once(log: Log, path: str, clock: ManualClock) -> None:
    first = Position.open(path, "lake", ORDERS, start=0, clock=clock)
    first.begin(0, 4)
    with Position.open(path, "lake", ORDERS, start=0, clock=clock) as second:
        for step in (lambda: first.begin(4, 8), lambda: first.commit(8), first.renew, first.mark_gaps_reported):
            with pytest.raises(LeaseLostError):
                step()
        first.release()
        second.begin(4, 6)
        assert log.subscription("lake").position == 4
        assert log.subscription("lake").holder is not None, "the first one's release is none of the second's"


def test_a_restart_from_an_older_checkpoint_moves_it_back(log: Log, path: str, clock: ManualClock) -> None:
    with Position.open(path, "lake", ORDERS, start=0, clock=clock) as position:
        position.commit(18)
        position.begin(4, 10)
        assert log.subscription("lake").position == 4


def test_a_subscription_of_another_kind_is_not_taken_over(log: Log, path: str, clock: ManualClock) -> None:
    log.subscribe("worker", "orders.>").close()
    with pytest.raises(SubscriptionMismatchError, match="another name"):
        Position.open(path, "worker", ORDERS, start=0, clock=clock)


def test_a_stream_may_change_its_topics(log: Log, path: str, clock: ManualClock) -> None:
    Position.open(path, "lake", ORDERS, start=0, clock=clock).release()
    with Position.open(path, "lake", patterns("other"), start=0, clock=clock):
        assert log.subscription("lake").pattern == "other"


def test_the_name_follows_from_the_topics() -> None:
    assert position_name([]) == position_name(patterns(">"))
    assert position_name(patterns("a", "b")) == position_name(patterns("b", "a")) != position_name(patterns("a"))
    assert position_name(ORDERS).startswith("spark:")
    assert len(position_name(ORDERS)) == len("spark:") + 12
