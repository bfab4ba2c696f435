"""A consumer reported as vanished: its messages are free at once, but treated as after a crash."""

from typing import Any

import pytest
from fetched import attempts

from headwater import Log, Subscription
from headwater.broker.flow import run_blocking

pytestmark = pytest.mark.usefixtures("engine_here")


def close(subscription: Subscription, *, vanished: bool) -> None:
    subscriber: Any = subscription._consumer
    run_blocking(subscriber.close(vanished=vanished))


def drained(subscription: Subscription) -> list[list[tuple[int, int]]]:
    received = []
    while found := subscription.fetch():
        received.append(attempts(found))
        assert subscription.fetch() == [], "not before the suspect is settled"
        subscription.ack_many(found)
    return received


def test_what_it_had_comes_back_one_at_a_time(log: Log, mode: Any) -> None:
    """One of them may have killed it, and must take no others along."""
    log.publish_many([("a", n) for n in range(1, 5)])
    before = log.subscribe("s", "a", mode=mode)
    before.fetch(3)[1].ack()
    close(before, vanished=True)
    after = log.subscribe("s", "a", mode=mode)
    assert drained(after) == [[(4, 1), (1, 2)], [(3, 2)]]


def test_what_is_closed_politely_comes_back_together(log: Log, mode: Any) -> None:
    log.publish_many([("a", n) for n in range(1, 4)])
    before = log.subscribe("s", "a", mode=mode)
    before.fetch(3)[1].ack()
    close(before, vanished=False)
    assert attempts(log.subscribe("s", "a", mode=mode).fetch()) == [(1, 2), (3, 2)]


def test_retries_too(log: Log, mode: Any) -> None:
    log.publish_many([("a", 1), ("a", 2)])
    before = log.subscribe("s", "a", mode=mode)
    for message in before.fetch():
        message.nack(0)
    assert attempts(before.fetch()) == [(1, 2), (2, 2)]
    close(before, vanished=True)
    after = log.subscribe("s", "a", mode=mode)
    assert drained(after) == [[(1, 3)], [(2, 3)]]


@pytest.mark.parametrize(("vanished", "reason"), [(True, "timeout"), (False, "max_attempts")])
def test_the_last_attempt_is_dead_lettered_with_its_reason(log: Log, mode: Any, vanished: bool, reason: str) -> None:
    log.publish("a", "kills")
    for _ in range(3):
        subscription = log.subscribe("s", "a", mode=mode, max_attempts=2)
        subscription.fetch()
        close(subscription, vanished=vanished)
    [letter] = log.dead_letters.list()
    assert (letter.reason, letter.attempts) == (reason, 2)


def test_a_waiting_consumer_gets_it_at_once(log: Log) -> None:
    log.publish("a", 1)
    one, two = log.subscribe("s", "a", mode="shared"), log.subscribe("s", "a", mode="shared")
    one.fetch()
    assert two.fetch() == []
    close(one, vanished=True)
    assert attempts(two.fetch()) == [(1, 2)]


def test_it_is_closed_once(log: Log, mode: Any) -> None:
    log.publish("a", 1)
    before = log.subscribe("s", "a", mode=mode)
    before.fetch()
    close(before, vanished=True)
    after = log.subscribe("s", "a", mode=mode)
    [message] = after.fetch()
    close(before, vanished=True)
    before.close()
    message.ack()
    assert log.subscription("s").lag == 0


def test_an_ephemeral_one_leaves_nothing(log: Log) -> None:
    tail = log.subscribe("s", "a", mode="ephemeral")
    close(tail, vanished=True)
    assert log.subscriptions() == []
