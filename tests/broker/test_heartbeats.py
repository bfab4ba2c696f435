"""What is kept alive while a handler runs, and for how long."""

import threading
from typing import Any

import pytest

from headwater import Log, ManualClock

pytestmark = pytest.mark.usefixtures("keeper_here")

TIME_LIMIT_S = 30
ACK_WAIT_MS = 5_000


class Busy:
    """A handler that is at its message until released."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.seen: list[tuple[int, int]] = []

    def __call__(self, message: Any) -> None:
        self.seen.append((message.seq, message.attempt))
        self.entered.release()
        assert self.go_on.wait(TIME_LIMIT_S)

    def begin(self, log: Log, **options: Any) -> None:
        log.on("a", id="h", ack_wait=ACK_WAIT_MS / 1000, **options)(self)
        log.start()
        assert self.entered.acquire(timeout=TIME_LIMIT_S)


@pytest.fixture
def busy(log: Log) -> Any:
    handler = Busy()
    yield handler
    handler.go_on.set()
    log.stop()


def others(log: Log) -> Any:
    return log.subscribe("h", "a", mode="shared", ack_wait=ACK_WAIT_MS / 1000)


def test_a_heartbeat_extends_what_a_handler_is_at(log: Log, busy: Busy, clock: ManualClock) -> None:
    log.publish("a", 1)
    busy.begin(log, mode="shared")
    for _ in range(10):
        clock.advance((ACK_WAIT_MS - 1) / 1000)
        log._core.heartbeat()
        assert others(log).fetch() == []
    busy.go_on.set()
    log.stop()
    assert log.subscription("h").acked == 1
    assert busy.seen == [(1, 1)]


def test_without_a_heartbeat_it_is_passed_on(log: Log, busy: Busy, clock: ManualClock) -> None:
    log.publish("a", 1)
    busy.begin(log, mode="shared")
    clock.advance(ACK_WAIT_MS / 1000)
    assert [(message.seq, message.attempt) for message in others(log).fetch()] == [(1, 2)]


def test_a_handler_that_runs_too_long_is_given_up(log: Log, busy: Busy, clock: ManualClock) -> None:
    log.publish("a", 1)
    busy.begin(log, mode="shared", extension_max=12)
    for _ in range(3):  # at 4, 8 and 12 s; the last is too late
        clock.advance(4)
        log._core.heartbeat()
    clock.advance((ACK_WAIT_MS - 4_001) / 1000)
    assert others(log).fetch() == []
    clock.advance(0.001)
    consumer = others(log)
    [message] = consumer.fetch()
    assert message.attempt == 2
    message.ack()
    busy.go_on.set()
    log.stop()
    assert log.subscription("h").acked == 1, "the late return of the first settles nothing"


def test_an_exclusive_handler_is_extended_too(log: Log, busy: Busy, clock: ManualClock) -> None:
    log.publish("a", 1)
    busy.begin(log, concurrency=2)
    for _ in range(10):
        clock.advance((ACK_WAIT_MS - 1) / 1000)
        log._core.heartbeat()
    log.publish("a", 2)
    assert busy.entered.acquire(timeout=TIME_LIMIT_S)
    busy.go_on.set()
    log.stop()
    assert sorted(busy.seen) == [(1, 1), (2, 1)]


def test_an_idle_message_of_a_fetch_is_not_extended(log: Log, clock: ManualClock) -> None:
    """Only handlers are known to be at work; a program that fetches extends by itself."""
    log.publish("a", 1)
    subscription = log.subscribe("s", "a", ack_wait=5)
    subscription.fetch()
    clock.advance(4)
    log._core.heartbeat()
    clock.advance(1)
    assert [message.attempt for message in subscription.fetch()] == [2]


def test_what_was_fetched_ahead_is_not_handled_twice(log: Log, busy: Busy, clock: ManualClock) -> None:
    log.publish_many([("a", 1), ("a", 2)])
    busy.begin(log, mode="shared")
    for _ in range(3):
        clock.advance((ACK_WAIT_MS - 1) / 1000)
        log._core.heartbeat()
    elsewhere = others(log).fetch()
    busy.go_on.set()
    assert not elsewhere or not busy.entered.acquire(timeout=1), "message 2 was handled here and elsewhere"


def test_a_heartbeat_of_one_that_was_taken_over_does_no_harm(log: Log, clock: ManualClock) -> None:
    log.subscribe("s", "a")
    clock.advance(15.001)
    successor = log.subscribe("s", "a")
    log._core.heartbeat()
    log.publish("a", 1)
    assert [message.seq for message in successor.fetch()] == [1]


def test_heartbeats_come_often_enough_for_the_shortest_lease(log: Log) -> None:
    log.subscribe("slow", "a", lease=60, ack_wait=60)
    assert log._core.heartbeat_s() <= 20
    log.subscribe("quick", "a", lease=3, ack_wait=60)
    assert log._core.heartbeat_s() <= 1
    log.subscribe("quicker", "a", mode="shared", ack_wait=0.3)
    assert log._core.heartbeat_s() <= 0.2


def test_one_impatient_subscription_does_not_set_the_pace_of_all(log: Log) -> None:
    log.subscribe("live", "a", mode="ephemeral", lease=0.001, ack_wait=0.001)
    assert log._core.heartbeat_s() == 10, "there is nothing to renew"
    log.subscribe("impatient", "a", mode="shared", lease=0.001, ack_wait=0.001)
    assert log._core.heartbeat_s() == 0.2
