"""When the database says no, memory and database still agree: nothing is lost, nothing is done twice."""

from typing import Any

import pytest
from fetched import drain
from full_disk import full_disk

from headwater import Log, ManualClock
from headwater.errors import DiskFullError


def test_a_failed_publish_took_no_seq(log: Log) -> None:
    with full_disk(log), pytest.raises(DiskFullError):
        log.publish("a", 1, id="x")
    assert log.last_seq() == 0
    assert log.publish("a", 1, id="x") == 1
    assert log.publish("a", 1, id="x") == 1


def test_a_failed_fetch_delivered_nothing(log: Log, mode: Any) -> None:
    log.publish_many([("a", 1), ("a", 2, {"delay": 0}), ("a", 3, {"ttl": 60})])
    subscription = log.subscribe("s", "a", mode=mode)
    with full_disk(log), pytest.raises(DiskFullError):
        subscription.fetch()
    assert log.subscription("s").in_flight == 0
    assert drain(subscription) == [(1, 1), (2, 1), (3, 1)]


def test_a_failed_fetch_takes_no_room(log: Log, mode: Any) -> None:
    log.publish_many([("a", 1), ("a", 2)])
    subscription = log.subscribe("s", "a", mode=mode, max_in_flight=3)
    with full_disk(log), pytest.raises(DiskFullError):
        subscription.fetch()
    log.publish("a", 3)
    assert [message.seq for message in subscription.fetch(3)] == [1, 2, 3]


@pytest.mark.parametrize("settle", ["ack", "nack", "reject"])
def test_a_failed_settling_may_be_tried_again(log: Log, mode: Any, settle: str) -> None:
    log.publish_many([("a", 1), ("a", 2)])
    subscription = log.subscribe("s", "a", mode=mode)
    first, second = subscription.fetch()
    with full_disk(log), pytest.raises(DiskFullError):
        getattr(first, settle)()
    assert not first.settled
    assert log.subscription("s").in_flight == 2
    getattr(first, settle)()
    second.ack()
    info = log.subscription("s")
    assert (info.in_flight, info.waiting, info.dead) == (0, int(settle == "nack"), int(settle == "reject"))


def test_a_failed_ack_makes_no_room(log: Log, mode: Any) -> None:
    log.publish_many([("a", 1), ("a", 2)])
    subscription = log.subscribe("s", "a", mode=mode, max_in_flight=1)
    [first] = subscription.fetch()
    with full_disk(log), pytest.raises(DiskFullError):
        first.ack()
    assert subscription.fetch() == []
    first.ack()
    assert drain(subscription) == [(2, 1)]


def test_a_message_whose_ack_failed_comes_again(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish_many([("a", 1), ("a", 2)])
    subscription = log.subscribe("s", "a", mode=mode, ack_wait=5)
    first, second = subscription.fetch()
    with full_disk(log), pytest.raises(DiskFullError):
        first.ack()
    second.ack()
    clock.advance(5)
    assert drain(subscription) == [(1, 2)]


def test_a_failed_ack_is_not_lost_with_its_holder(log: Log, clock: ManualClock) -> None:
    log.publish_many([("a", 1), ("a", 2)])
    first, second = log.subscribe("s", "a").fetch()
    with full_disk(log), pytest.raises(DiskFullError):
        first.ack()
    second.ack()
    clock.advance(15.001)
    assert drain(log.subscribe("s", "a")) == [(1, 2)], "the next holder gets what was never acked"


def test_a_failed_close_is_freed_by_the_lease(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a", mode=mode, ack_wait=5, lease=5)
    subscription.fetch()
    with full_disk(log), pytest.raises(DiskFullError):
        subscription.close()
    clock.advance(5)
    assert drain(log.subscribe("s", "a", mode=mode)) == [(1, 2)]


def test_a_failed_subscribe_is_no_subscription(log: Log, mode: Any) -> None:
    with full_disk(log), pytest.raises(DiskFullError):
        log.subscribe("s", "a", mode=mode)
    assert log.subscriptions() == []
    log.subscribe("s", "a", mode=mode)
