"""A paused subscription keeps its position and delivers nothing, in any process, until it is resumed."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headwater import Log, ManualClock
from headwater.errors import UnknownSubscriptionError

FOUND_S = 20.0  # how long a fetch may wait for what must come


def data(messages: Any) -> list[Any]:
    return [message.data for message in messages]


@pytest.mark.parametrize("order", ["seq", "priority"])
def test_a_pause_keeps_the_position_and_lets_what_is_in_flight_be_settled(
    log: Log, mode: Any, order: Any, clock: ManualClock
) -> None:
    log.publish_many([("a", n) for n in range(4)])
    with log.subscribe("s", "a", mode=mode, order=order, backoff=1, jitter=0) as subscription:
        first, second = subscription.fetch(2)
        log.pause("s")
        assert log.subscription("s").paused_ms == clock.now_ms()
        log.publish("a", 4)
        assert subscription.fetch() == []
        first.ack()
        second.nack()
        clock.advance(1)
        assert subscription.fetch() == []  # neither new messages nor a retry that is due
        assert (log.subscription("s").acked, log.subscription("s").lag) == (1, 4)
        log.resume("s")
        assert log.subscription("s").paused_at is None
        assert sorted(data(subscription.fetch(timeout=FOUND_S))) == [1, 2, 3, 4]


def test_a_pause_outlives_its_consumer_and_the_process(open_log: Any, mode: Any, clock: ManualClock) -> None:
    log = open_log()
    log.publish("a", 1)
    log.subscribe("s", "a", mode=mode).close()
    log.pause("s")
    since = log.subscription("s").paused_at
    log.close()
    again = open_log()
    clock.advance(1)
    with again.subscribe("s", "a", mode=mode) as subscription:
        assert subscription.fetch() == []
        again.pause("s")  # twice is harmless
        assert again.subscription("s").paused_at == since
        again.resume("s")
        again.resume("s")
        assert data(subscription.fetch(timeout=FOUND_S)) == [1]


def test_a_fetch_that_waits_is_woken_by_the_resume_and_not_by_a_publish(
    log: Log, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.broker.consumer.FALLBACK_POLL_S", 10 * FOUND_S)  # nothing but the resume wakes it
    with log.subscribe("s", "a", mode=mode) as subscription, ThreadPoolExecutor(1) as thread:
        log.pause("s")
        assert subscription.fetch() == []
        waiting = thread.submit(subscription.fetch, 10, timeout=FOUND_S)
        log.publish("a", 1)  # the transaction that publishes must not claim for it
        assert log.subscription("s").in_flight == 0
        log.resume("s")
        assert data(waiting.result(FOUND_S)) == [1]


def all_released(log: Log) -> bool:
    """Behind a server, the consumer hears of a pause a moment later."""
    until_s = time.monotonic() + FOUND_S
    while log.subscription("s").in_flight and time.monotonic() < until_s:
        pass
    return log.subscription("s").in_flight == 0


@pytest.mark.parametrize("by_another", [False, True])
def test_messages_that_were_claimed_ahead_are_released(open_log: Any, mode: Any, by_another: bool) -> None:
    log = open_log()
    log.publish_many([("a", n) for n in range(4)])
    with log.subscribe("s", "a", mode=mode) as subscription:
        messages = iter(subscription)
        first = next(messages)
        (open_log() if by_another else log).pause("s")
        first.ack()
        assert all_released(log)
        assert subscription.fetch() == []
        log.resume("s")
        again = subscription.fetch(timeout=FOUND_S)
        while len(again) < 3 and (more := subscription.fetch(timeout=FOUND_S)):  # a server may release one by one
            again += more
        assert (data(again), {message.attempt for message in again}) == ([1, 2, 3], {1})


def test_a_pause_by_another_process_holds_for_the_next_claim(open_log: Any, mode: Any) -> None:
    here, there = open_log(), open_log()
    here.publish_many([("a", n) for n in range(3)])
    with here.subscribe("s", "a", mode=mode) as subscription:
        there.pause("s")
        assert subscription.fetch() == []
        there.resume("s")
        assert data(subscription.fetch(timeout=FOUND_S)) == [0, 1, 2]


def test_another_process_notices_a_pause_with_its_next_ack(open_log: Any, mode: Any) -> None:
    here, there = open_log(), open_log()
    here.publish_many([("a", n) for n in range(3)])
    with here.subscribe("s", "a", mode=mode) as subscription:
        [first] = subscription.fetch(1)
        there.pause("s")
        first.ack()
        assert subscription.fetch() == []
        there.resume("s")
        assert data(subscription.fetch(timeout=FOUND_S)) == [1, 2]


def test_a_paused_subscription_is_not_dropped_as_idle(log: Log, clock: ManualClock) -> None:
    log.subscribe("s", "a", inactive_timeout=10).close()
    log.pause("s")
    clock.advance(11)
    assert log.run_maintenance().expired_subscriptions == []
    log.resume("s")
    clock.advance(11)
    assert log.run_maintenance().expired_subscriptions == ["s"]


def test_an_unknown_subscription_cannot_be_paused(log: Log) -> None:
    for verb in (log.pause, log.resume):
        with pytest.raises(UnknownSubscriptionError):
            verb("none")
