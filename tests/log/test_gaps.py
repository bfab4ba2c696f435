"""Retention is never silent: what a subscription loses is counted and reported; what is being handled is spared."""

import traceback
from typing import Any

import pytest
from fetched import everything, seqs

from headwater import Gap, Log, ManualClock


def prune(log: Log, pattern: str = ">", **limits: Any) -> Any:
    log.retain(pattern, **limits)
    return log.run_maintenance()


def reported_gaps(subscription: Any) -> list[tuple[int, int, int]]:
    gaps: list[tuple[int, int, int]] = []
    subscription.on_gap(lambda gap: gaps.append((gap.from_seq, gap.to_seq, gap.count)))
    return gaps


def left(log: Log) -> list[int]:
    return seqs(everything(log))


def test_what_was_not_delivered_yet_is_reported_as_a_gap(log: Log, mode: Any, clock: ManualClock) -> None:
    subscription = log.subscribe("s", "a", mode=mode)
    gaps: list[Gap] = []
    subscription.on_gap(gaps.append)
    log.publish_many([("a", n) for n in range(5)])
    assert prune(log, max_count=2).gaps == 3
    assert [message.seq for message in subscription.fetch()] == [4, 5]
    assert gaps == [Gap("s", 1, 3, 3, "retention", clock.now_ms())]
    assert log.subscription("s").gaps == 3
    assert subscription.fetch() == []
    assert len(gaps) == 1, "reported once"


def test_an_error_of_the_callback_is_logged_from_it_on(log: Log, mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    def broken(gap: Gap) -> None:
        raise RuntimeError("no")

    subscription = log.subscribe("s", "a", mode=mode)
    subscription.on_gap(broken)
    log.publish_many([("a", n) for n in range(5)])
    prune(log, max_count=2)
    assert [message.seq for message in subscription.fetch()] == [4, 5]
    [logged] = [record for record in caplog.records if record.exc_info]
    assert logged.exc_info is not None
    assert [frame.name for frame in traceback.extract_tb(logged.exc_info[2])] == ["broken"]


def test_only_what_matches_is_a_loss(log: Log, mode: Any) -> None:
    subscription = log.subscribe("s", "a", mode=mode, where="data > 1")
    gaps = reported_gaps(subscription)
    log.publish_many([("a", 0), ("b", 9), ("a", 2), ("b", 9), ("a", 1), ("a", 3), ("a", 9)])
    prune(log, max_count=1)
    assert [message.seq for message in subscription.fetch()] == [7]
    assert gaps == [(3, 6, 2)]


def test_what_was_acked_is_no_loss(log: Log, mode: Any) -> None:
    subscription = log.subscribe("s", "a", mode=mode)
    gaps = reported_gaps(subscription)
    log.publish_many([("a", n) for n in range(4)])
    subscription.ack_many(subscription.fetch(2))
    assert prune(log, max_count=0).gaps == 2
    log.publish("a", "next")
    subscription.fetch()
    assert gaps == [(3, 4, 2)]


def test_nothing_lost_is_nothing_reported(log: Log, mode: Any) -> None:
    subscription = log.subscribe("s", "a", mode=mode)
    gaps = reported_gaps(subscription)
    log.publish_many([("a", 1), ("a", 2)])
    subscription.ack_many(subscription.fetch())
    assert prune(log, max_count=0).gaps == 0
    log.publish("a", 3)
    subscription.fetch()
    assert gaps == []
    assert log.subscription("s").gaps == 0


def test_each_subscription_has_its_own_gap(log: Log) -> None:
    ahead, behind, elsewhere = (log.subscribe(id, topic) for id, topic in (("x", "a"), ("y", "a"), ("z", "b")))
    log.publish_many([("a", n) for n in range(4)])
    ahead.ack_many(ahead.fetch(3))
    assert prune(log, max_count=0).gaps == 1 + 4
    assert [log.subscription(id).gaps for id in "xyz"] == [1, 4, 0]
    assert (behind.info().lag, elsewhere.info().lag) == (0, 0)


def test_a_gap_waits_for_a_subscription_that_is_not_held(log: Log, mode: Any) -> None:
    log.subscribe("s", "a", mode=mode).close()
    log.publish_many([("a", n) for n in range(3)])
    prune(log, max_count=1)
    subscription = log.subscribe("s", "a", mode=mode)
    gaps = reported_gaps(subscription)
    assert [message.seq for message in subscription.fetch()] == [3]
    assert gaps == [(1, 2, 2)]


def test_gaps_survive_reopening(open_log: Any, mode: Any) -> None:
    with open_log() as log:
        log.subscribe("s", "a", mode=mode)
        log.publish_many([("a", n) for n in range(3)])
        prune(log, max_count=1)
    with open_log() as log:
        subscription = log.subscribe("s", "a", mode=mode)
        gaps = reported_gaps(subscription)
        subscription.fetch()
        assert gaps == [(1, 2, 2)]
        assert log.subscription("s").gaps == 2


def test_a_gap_is_reported_even_if_nothing_is_left(log: Log, mode: Any) -> None:
    subscription = log.subscribe("s", "a", mode=mode)
    gaps = reported_gaps(subscription)
    log.publish_many([("a", 1), ("a", 2)])
    prune(log, max_count=0)
    assert subscription.fetch() == []
    assert gaps == [(1, 2, 2)]


def test_waiting_retries_and_delays_are_lost_like_the_rest(log: Log, mode: Any, clock: ManualClock) -> None:
    subscription = log.subscribe("s", "a", mode=mode)
    gaps = reported_gaps(subscription)
    log.publish_many([("a", 1), ("a", 2, {"delay": 60})])
    subscription.fetch()[0].nack(60)
    assert log.subscription("s").waiting == 2
    assert prune(log, max_count=0).gaps == 2
    assert log.subscription("s").lag == 0
    clock.advance(60)
    log.publish("a", 3)
    assert [message.seq for message in subscription.fetch()] == [3]
    assert gaps == [(1, 2, 2)]


# --- sparing ------------------------------------------------------------------------------------------------------


def test_what_is_in_flight_is_spared(log: Log, mode: Any) -> None:
    log.publish_many([("a", n) for n in range(5)])
    subscription = log.subscribe("s", "a", mode=mode)
    messages = subscription.fetch(2)
    assert prune(log, max_count=0).gaps == 3
    assert left(log) == [1, 2]
    assert [message.data for message in messages] == [0, 1]
    subscription.ack_many(messages)
    log.run_maintenance()
    assert left(log) == []
    assert log.subscription("s").gaps == 3


def test_what_is_in_flight_is_spared_on_its_second_attempt_too(log: Log, mode: Any) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a", mode=mode)
    subscription.fetch()[0].nack(0)
    [again] = subscription.fetch()
    assert prune(log, max_count=0).gaps == 0
    again.ack()
    assert log.subscription("s").gaps == 0


def test_what_a_vanished_holder_had_may_go_and_is_reported(open_log: Any, mode: Any, clock: ManualClock) -> None:
    vanished = open_log()
    vanished.publish_many([("a", n) for n in range(3)])
    vanished.subscribe("s", "a", mode=mode, lease=5, ack_wait=5).fetch(2)[0].ack()
    clock.advance(5)
    log = open_log()
    assert prune(log, max_count=0).gaps == 2
    subscription = log.subscribe("s", "a", mode=mode)
    gaps = reported_gaps(subscription)
    log.publish("a", "next")
    assert [message.data for message in subscription.fetch()] == ["next"]
    assert gaps == [(2, 3, 2)]


def test_keep_unacked_forbids_it(log: Log, mode: Any, clock: ManualClock) -> None:
    subscription = log.subscribe("s", "a", mode=mode)
    log.publish_many([("a", n) for n in range(6)])
    messages = subscription.fetch(4)
    subscription.ack_many(messages[:2])
    messages[2].nack(60)
    report = prune(log, max_count=0, keep_unacked=True)
    assert (report.pruned, report.gaps) == ({">": 2}, 0)
    assert left(log) == [3, 4, 5, 6]
    clock.advance(60)
    received = [message.seq for _ in range(3) for message in subscription.fetch()]
    assert 3 in received
    assert log.subscription("s").gaps == 0


def test_keep_unacked_waits_for_the_slowest(log: Log) -> None:
    log.publish_many([("a", n) for n in range(4)])
    quick, slow = log.subscribe("quick", "a"), log.subscribe("slow", "a")
    quick.ack_many(quick.fetch())
    slow.ack_many(slow.fetch(1))
    prune(log, max_count=0, keep_unacked=True)
    assert left(log) == [2, 3, 4]
    slow.ack_many(slow.fetch())
    log.run_maintenance()
    assert left(log) == []


def test_keep_unacked_does_not_mind_subscriptions_to_other_topics(log: Log) -> None:
    log.publish_many([("a", 1), ("b", 2), ("a", 3)])
    log.subscribe("s", "b")
    prune(log, "a", max_count=0, keep_unacked=True)
    assert left(log) == [2]
