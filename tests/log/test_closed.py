"""After close(): everything says so, nothing hangs. And readers that keep nothing at all."""

import threading
from typing import Any

import pytest

from headwater import Log
from headwater.errors import ClosedError, LeaseLostError

PLACES = ("sqlite", "served")  # the log refuses before its store is asked, so PostgreSQL would repeat it


@pytest.mark.parametrize(
    "verb",
    [
        lambda log: log.publish("a", 1),
        lambda log: log.publish_many([("a", 1)]),
        lambda log: log.subscribe("t", "a"),
        lambda log: log.subscribe("t", "a", mode="ephemeral"),
        lambda log: log.delete_subscription("s"),
        lambda log: log.seek("s", "first"),
        lambda log: log.subscriptions(),
        lambda log: log.subscription("s"),
        lambda log: log.topics(),
        lambda log: log.last_seq(),
        lambda log: log.statistics(),
        lambda log: log.health(),
        lambda log: log.retain("a", max_count=1),
        lambda log: log.run_maintenance(),
        lambda log: log.dead_letters.list(),
        lambda log: log.dead_letters.redrive(),
        lambda log: log.live.subscribe("x", "a", print),
    ],
)
def test_a_closed_log_says_so(log: Log, verb: Any) -> None:
    log.subscribe("s", "a")
    log.close()
    with pytest.raises(ClosedError) as refused:
        verb(log)
    assert refused.value.next


def test_closing_twice_is_quiet(log: Log) -> None:
    log.subscribe("s", "a")
    log.live.subscribe("x", ">", lambda message: None)
    log.close()
    log.close()


def test_the_live_feed_of_a_closed_log_says_so_even_if_it_was_used(log: Log) -> None:
    log.live.subscribe("x", ">", lambda message: None)
    log.close()
    with pytest.raises(ClosedError):
        log.live.subscribe("y", ">", lambda message: None)


def test_a_closed_log_closes_its_subscriptions(log: Log) -> None:
    subscription = log.subscribe("s", "a")
    log.close()
    with pytest.raises(ClosedError):
        subscription.fetch()
    subscription.close()


@pytest.mark.parametrize("mode", ["exclusive", "shared", "ephemeral"])
def test_a_closed_subscription_says_so(log: Log, mode: Any) -> None:
    log.publish("a", 1)
    with log.subscribe("s", "a", mode=mode) as subscription:
        pass
    with pytest.raises(ClosedError):
        subscription.fetch()
    assert list(subscription) == []
    subscription.close()


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_a_message_of_a_closed_subscription_has_been_given_back(log: Log, mode: Any) -> None:
    log.publish("a", 1)
    with log.subscribe("s", "a", mode=mode) as subscription:
        [message] = subscription.fetch()
    with pytest.raises(LeaseLostError):
        message.ack()
    assert log.subscription("s").lag == 1


@pytest.mark.parametrize("closing", ["subscription", "log"])
@pytest.mark.parametrize("mode", ["exclusive", "shared", "ephemeral"])
def test_closing_ends_a_fetch_that_waits(engine_here: None, log: Log, mode: Any, closing: str) -> None:
    subscription = log.subscribe("s", "a", mode=mode)
    ended = threading.Event()
    subscription._consumer._waiter.arm()

    def wait() -> None:
        with pytest.raises(ClosedError):
            subscription.fetch(timeout=None)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    (subscription if closing == "subscription" else log).close()
    assert ended.wait(30)
    thread.join()


@pytest.mark.parametrize("closing", ["subscription", "log"])
def test_closing_ends_an_iteration_that_waits(log: Log, closing: str) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a")
    received: list[int] = []
    first, ended = threading.Event(), threading.Event()

    def iterate() -> None:
        for message in subscription:
            message.ack()
            received.append(message.seq)
            first.set()
        ended.set()

    threading.Thread(target=iterate, daemon=True).start()
    assert first.wait(30)
    (subscription if closing == "subscription" else log).close()
    assert ended.wait(30)
    assert received == [1]


# --- ephemeral ----------------------------------------------------------------------------------------------------


def test_an_ephemeral_reader_sees_the_log_go_by_and_leaves_no_trace(log: Log) -> None:
    log.publish("a", 1)
    reader = log.subscribe("live", ">", mode="ephemeral", start="new")
    log.publish_many([("a", 2), ("b", 3)])
    messages = reader.fetch()
    assert [message.data for message in messages] == [2, 3]
    reader.ack_many(messages)
    for settle in (messages[0].nack, messages[0].reject, messages[0].extend):
        settle()
    assert reader.fetch() == []
    assert log.subscriptions() == []
    assert log.dead_letters.list() == []


def test_two_ephemeral_readers_of_one_name_do_not_disturb_each_other(log: Log) -> None:
    one = log.subscribe("live", ">", mode="ephemeral")
    two = log.subscribe("live", ">", mode="ephemeral")
    log.publish("a", 1)
    assert [message.data for message in one.fetch()] == [message.data for message in two.fetch()] == [1]


def test_an_ephemeral_reader_skips_what_has_expired(log: Log, clock: Any) -> None:
    log.publish_many([("a", 1, {"ttl": 1}), ("a", 2)])
    clock.advance(1)
    assert [message.data for message in log.subscribe("live", ">", mode="ephemeral", start="first").fetch()] == [2]
