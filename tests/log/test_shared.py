"""Competing consumers: each message to one of them, passed on when that one is gone."""

import os
import threading
from typing import Any

import pytest
from fetched import drain, seqs

from headwater import Log, ManualClock, Subscription
from headwater.errors import LeaseLostError


def test_two_consumers_get_disjoint_messages(log: Log) -> None:
    log.publish_many([("a", n) for n in range(10)])
    one, two = log.subscribe("s", "a", mode="shared"), log.subscribe("s", "a", mode="shared")
    assert seqs(one.fetch(3)) == [1, 2, 3]
    assert seqs(two.fetch(4)) == [4, 5, 6, 7]
    assert seqs(one.fetch()) == [8, 9, 10]
    assert two.fetch() == []


def test_two_consumers_in_two_logs_get_disjoint_messages(open_log: Any) -> None:
    one = open_log().subscribe("s", "a", mode="shared")
    other_log = open_log()
    two = other_log.subscribe("s", "a", mode="shared")
    other_log.publish_many([("a", n) for n in range(6)])
    assert [seqs(one.fetch(2)), seqs(two.fetch(2)), seqs(one.fetch(2)), two.fetch(2)] == [[1, 2], [3, 4], [5, 6], []]


@pytest.mark.parametrize("consumers", [2, 8])
def test_many_consumers_at_once_lose_nothing_and_double_nothing(log: Log, consumers: int) -> None:
    total = 400
    received: list[int] = []
    all_there = threading.Event()
    subscriptions = [log.subscribe("s", "a", mode="shared") for _ in range(consumers)]

    def consume(subscription: Subscription) -> None:
        for message in subscription:
            message.ack()
            received.append(message.seq)
            if len(received) >= total:
                all_there.set()

    threads = [threading.Thread(target=consume, args=(subscription,)) for subscription in subscriptions]
    for thread in threads:
        thread.start()
    for start in range(0, total, 20):
        log.publish_many([("a", n) for n in range(start, start + 20)])
    assert all_there.wait(30)
    for subscription in subscriptions:
        subscription.close()
    for thread in threads:
        thread.join(30)
    assert sorted(received) == list(range(1, total + 1))


def test_an_expired_lease_passes_the_message_on(log: Log, clock: ManualClock) -> None:
    log.publish("a", 1)
    one = log.subscribe("s", "a", mode="shared", ack_wait=5)
    two = log.subscribe("s", "a", mode="shared", ack_wait=5)
    [late] = one.fetch()
    clock.advance(4.999)
    assert two.fetch() == []
    clock.advance(0.001)
    [again] = two.fetch()
    assert (again.seq, again.attempt) == (1, 2)
    with pytest.raises(LeaseLostError):
        late.ack()
    again.ack()
    assert log.subscription("s").lag == 0


def test_the_same_consumer_may_get_it_again_and_only_the_newest_handle_counts(log: Log, clock: ManualClock) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a", mode="shared", ack_wait=5)
    [first] = subscription.fetch()
    clock.advance(5)
    [second] = subscription.fetch()
    clock.advance(5)
    [third] = subscription.fetch()
    for old in (first, second):
        with pytest.raises(LeaseLostError):
            old.ack()
    third.ack()


def test_closing_one_consumer_gives_its_messages_to_the_other(log: Log) -> None:
    log.publish_many([("a", n) for n in range(4)])
    one, two = log.subscribe("s", "a", mode="shared"), log.subscribe("s", "a", mode="shared")
    one.fetch(2)[0].ack()
    mine = two.fetch(2)
    one.close()
    assert [(message.seq, message.attempt) for message in two.fetch()] == [(2, 2)]
    two.ack_many(mine)


def test_a_nack_may_go_to_another_consumer(log: Log) -> None:
    log.publish("a", 1)
    one, two = log.subscribe("s", "a", mode="shared"), log.subscribe("s", "a", mode="shared")
    one.fetch()[0].nack(0)
    assert [(message.seq, message.attempt) for message in two.fetch()] == [(1, 2)]


def test_closing_leaves_alone_what_was_passed_on(log: Log, clock: ManualClock) -> None:
    log.publish("a", 1)
    one = log.subscribe("s", "a", mode="shared", ack_wait=5)
    two = log.subscribe("s", "a", mode="shared", ack_wait=5)
    one.fetch()
    clock.advance(5)
    two.fetch()[0].nack(60)
    one.close()
    assert two.fetch() == [], "the nack's delay still holds"
    clock.advance(60)
    assert [message.attempt for message in two.fetch()] == [3]


def test_each_consumer_has_its_own_window(log: Log) -> None:
    log.publish_many([("a", n) for n in range(5)])
    one = log.subscribe("s", "a", mode="shared", max_in_flight=2)
    two = log.subscribe("s", "a", mode="shared", max_in_flight=2)
    assert seqs(one.fetch()) == [1, 2]
    assert one.fetch() == []
    assert seqs(two.fetch()) == [3, 4]


def test_two_shared_subscriptions_each_get_everything(log: Log) -> None:
    log.publish_many([("a", n) for n in range(3)])
    one, two = log.subscribe("one", "a", mode="shared"), log.subscribe("two", "a", mode="shared")
    assert seqs(one.fetch()) == seqs(two.fetch()) == [1, 2, 3]


def test_consumers_survive_each_other_over_a_reopen(open_log: Any, clock: ManualClock) -> None:
    vanished = open_log()
    vanished.publish_many([("a", n) for n in range(4)])
    vanished.subscribe("s", "a", mode="shared", ack_wait=5).fetch(2)[0].ack()
    subscription = open_log().subscribe("s", "a", mode="shared", ack_wait=5)
    assert seqs(subscription.fetch()) == [3, 4]
    clock.advance(5)
    assert drain(subscription) == [(2, 2), (3, 2), (4, 2)]


def test_a_consumer_behind_a_server_has_the_name_that_its_client_chose(open_log: Any) -> None:
    log = open_log()
    with log.subscribe("s", "a", mode="shared"):
        [name] = log.subscription("s").consumers
        assert str(os.getpid()) in name
        assert (":" in name) is not open_log.is_served, "a server's own names have colons"
