"""Order by key and by priority, which subscriptions ask for; and the order by seq, which they have otherwise."""

import threading
from collections import defaultdict
from typing import Any

import pytest
from fetched import seqs

from headwater import Log, ManualClock
from headwater.broker.deliveries import KEYED_ROWS_MAX


def keyed(*keys: Any) -> list[tuple[str, dict[str, Any]]]:
    return [("a", {"k": key, "n": n}) for n, key in enumerate(keys, 1)]


# --- by key -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_one_message_of_a_key_at_a_time(log: Log, mode: Any) -> None:
    log.publish_many(keyed("x", "x", "y", "x", "y"))
    subscription = log.subscribe("s", "a", mode=mode, order_key="data.k")
    first = subscription.fetch()
    assert seqs(first) == [1, 3]
    assert subscription.fetch() == []
    first[0].ack()
    second = subscription.fetch()
    assert seqs(second) == [2]
    first[1].ack()
    assert seqs(subscription.fetch()) == [5]
    second[0].ack()
    assert seqs(subscription.fetch()) == [4]


def test_two_consumers_keep_the_order_of_each_key(log: Log) -> None:
    log.publish_many(keyed("x", "x", "y", "y"))
    one = log.subscribe("s", "a", mode="shared", order_key="data.k")
    two = log.subscribe("s", "a", mode="shared", order_key="data.k")
    [x1] = one.fetch(1)
    [y1] = two.fetch(1)
    assert (x1.seq, y1.seq) == (1, 3)
    assert one.fetch() == two.fetch() == []
    x1.ack()
    assert seqs(two.fetch()) == [2]


def test_a_redriven_message_is_in_flight_alone_of_its_key(log: Log, clock: ManualClock) -> None:
    log.publish_many(keyed("x", "x", "x"))
    one = log.subscribe("s", "a", mode="shared", order_key="data.k")
    two = log.subscribe("s", "a", mode="shared", order_key="data.k")
    one.fetch()[0].reject("broken")
    [second] = one.fetch()
    log.dead_letters.redrive()
    assert one.fetch() == two.fetch() == [], "the second is in flight"
    second.ack()
    [first] = two.fetch()
    assert (first.seq, one.fetch()) == (1, [])
    first.ack()
    assert seqs(one.fetch()) == [3]
    assert log.dead_letters.list() == []


def test_a_nack_holds_its_key_back_and_no_other(log: Log, clock: ManualClock) -> None:
    log.publish_many(keyed("x", "x", "y"))
    subscription = log.subscribe("s", "a", mode="shared", order_key="data.k")
    x1, y1 = subscription.fetch()
    x1.nack(5)
    y1.ack()
    assert subscription.fetch() == [], "the second of x waits for the first"
    log.publish("a", {"k": "y"})
    assert seqs(subscription.fetch()) == [4]
    clock.advance(5)
    [again] = subscription.fetch()
    assert (again.seq, again.attempt) == (1, 2)
    again.ack()
    assert seqs(subscription.fetch()) == [2]


def test_a_lost_lease_holds_its_key_back_too(log: Log, clock: ManualClock) -> None:
    log.publish_many(keyed("x", "x"))
    one = log.subscribe("s", "a", mode="shared", order_key="data.k", ack_wait=5)
    two = log.subscribe("s", "a", mode="shared", order_key="data.k", ack_wait=5)
    one.fetch()
    clock.advance(5)
    [again] = two.fetch()
    assert (again.seq, again.attempt) == (1, 2)
    again.ack()
    assert seqs(two.fetch()) == [2]


def test_a_dead_message_frees_its_key(log: Log) -> None:
    log.publish_many(keyed("x", "x"))
    subscription = log.subscribe("s", "a", mode="shared", order_key="data.k")
    subscription.fetch()[0].reject()
    assert seqs(subscription.fetch()) == [2]


def test_messages_without_the_key_are_not_held_back(log: Log) -> None:
    log.publish_many([("a", {"n": 1}), ("a", 2), ("a", {"k": None}), ("a", {"k": "x"})])
    subscription = log.subscribe("s", "a", mode="shared", order_key="data.k")
    assert seqs(subscription.fetch()) == [1, 2, 3, 4]


def test_keys_of_different_kinds_are_different_keys(log: Log) -> None:
    log.publish_many(keyed(1, [1], {"a": 1}, True))
    subscription = log.subscribe("s", "a", mode="shared", order_key="data.k")
    assert seqs(subscription.fetch()) == [1, 2, 3, 4]


def test_the_key_may_be_a_field_of_the_message(log: Log) -> None:
    log.publish_many([("a.x", 1), ("a.x", 2), ("a.y", 3)])
    subscription = log.subscribe("s", "a.*", mode="shared", order_key="topic")
    assert seqs(subscription.fetch()) == [1, 3]


def test_order_of_keys_survives_closing(log: Log) -> None:
    log.publish_many(keyed("x", "x", "y"))
    with log.subscribe("s", "a", order_key="data.k") as subscription:
        subscription.fetch()[1].ack()
    subscription = log.subscribe("s", "a", order_key="data.k")
    [again] = subscription.fetch()
    assert (again.seq, again.attempt) == (1, 2)


def test_every_key_in_order_under_many_consumers(log: Log) -> None:
    total, received, lock = 120, defaultdict(list), threading.Lock()
    done = threading.Event()
    log.publish_many(keyed(*(n % 5 for n in range(total))))
    subscriptions = [log.subscribe("s", "a", mode="shared", order_key="data.k") for _ in range(4)]

    def consume(subscription: Any) -> None:
        for message in subscription:
            with lock:
                received[message.data["k"]].append(message.seq)
                count = sum(map(len, received.values()))
            message.ack()
            if count == total:
                done.set()

    threads = [threading.Thread(target=consume, args=(subscription,)) for subscription in subscriptions]
    for thread in threads:
        thread.start()
    assert done.wait(30)
    for subscription in subscriptions:
        subscription.close()
    for thread in threads:
        thread.join(30)
    assert dict(received) == {key: list(range(key + 1, total + 1, 5)) for key in range(5)}


def test_a_key_with_a_long_queue_does_not_hang_the_consumer(open_log: Any) -> None:
    log = open_log()
    log.publish_many([("a", {"k": "x"})] * (KEYED_ROWS_MAX + 10))
    subscription = log.subscribe("s", "a", mode="shared", order_key="data.k")
    [first] = subscription.fetch(1)
    returned = threading.Event()

    def fetch() -> None:
        subscription.fetch(1)
        returned.set()

    threading.Thread(target=fetch, daemon=True).start()
    came_back = returned.wait(30)
    first.ack()  # frees the key, so that a fetch that goes in a circle ends too
    assert returned.wait(10)
    assert came_back


# --- by priority --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_the_highest_priority_first_then_the_oldest(log: Log, mode: Any) -> None:
    for priority in (0, 5, 1, 5, -3):
        log.publish("a", priority, priority=priority)
    subscription = log.subscribe("s", "a", mode=mode, order="priority")
    assert [seqs(subscription.fetch(1)) for _ in range(5)] == [[2], [4], [3], [1], [5]]


def test_a_late_urgent_message_overtakes_those_that_wait(log: Log) -> None:
    log.publish_many([("a", n) for n in range(3)])
    subscription = log.subscribe("s", "a", order="priority")
    assert seqs(subscription.fetch(1)) == [1]
    log.publish("a", "urgent", priority=9)
    assert seqs(subscription.fetch()) == [4, 2, 3]


def test_without_asking_priority_does_not_matter(log: Log) -> None:
    for priority in (0, 5, 1):
        log.publish("a", priority, priority=priority)
    assert seqs(log.subscribe("s", "a").fetch()) == [1, 2, 3]


def test_a_retry_keeps_its_priority(log: Log) -> None:
    for priority in (0, 5, 1):
        log.publish("a", priority, priority=priority)
    subscription = log.subscribe("s", "a", order="priority")
    subscription.fetch(1)[0].nack(0)
    assert [(message.seq, message.attempt) for message in subscription.fetch(1)] == [(2, 2)]


def test_miniqs_priorities_pop_as_there(log: Log) -> None:
    """There 1 is the most urgent; the mapping is 10 - p."""
    for urgency in (10, 1, 5):
        log.publish("queue", urgency, priority=10 - urgency)
    subscription = log.subscribe("s", "queue", mode="shared", order="priority")
    assert [message.data for message in subscription.fetch()] == [1, 5, 10]


# --- by seq -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_first_deliveries_come_in_seq_order(log: Log, mode: Any, clock: ManualClock) -> None:
    subscription = log.subscribe("s", "a", mode=mode, backoff=1, jitter=0, ack_wait=10)
    first_seen: list[int] = []
    for round in range(20):
        log.publish_many([("a", n) for n in range(round % 4)])
        for message in subscription.fetch(3):
            if message.attempt == 1:
                first_seen.append(message.seq)
            (message.nack, message.ack, lambda: None)[message.seq % 3]()
        clock.advance(0.7)
    assert first_seen == list(range(1, len(first_seen) + 1))
    assert len(first_seen) >= 10
