"""Where a subscription begins, where it goes on, and what may change about it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fetched import seqs

from headwater import Log, ManualClock
from headwater.errors import (
    InvalidOptionError,
    SubscriptionActiveError,
    SubscriptionMismatchError,
    UnknownSubscriptionError,
)


def moment(clock: ManualClock) -> datetime:
    return datetime.fromtimestamp(clock.now_ms() / 1000, UTC)


# --- where it begins ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "expected"),
    [("first", [1, 2, 3]), ("new", []), (0, [1, 2, 3]), (1, [1, 2, 3]), (3, [3]), (4, []), (99, [])],
)
def test_a_new_subscription_begins_where_it_says(log: Log, start: Any, expected: list[int]) -> None:
    log.publish_many([("a", n) for n in range(3)])
    subscription = log.subscribe("s", "a", start=start)
    assert seqs(subscription.fetch()) == expected
    log.publish("a", "later")
    assert seqs(subscription.fetch()) == [4]


def test_a_start_in_time_is_the_first_message_at_or_after_it(log: Log, clock: ManualClock) -> None:
    log.publish("a", 1)
    clock.advance(1)
    noon = moment(clock)
    log.publish("a", 2)
    log.publish("a", 3)
    assert seqs(log.subscribe("at", "a", start=noon).fetch()) == [2, 3]
    assert seqs(log.subscribe("just-after", "a", start=noon + timedelta(milliseconds=1)).fetch()) == []
    assert seqs(log.subscribe("before", "a", start=noon - timedelta(days=365)).fetch()) == [1, 2, 3]


@pytest.mark.usefixtures("no_store_asked")
@pytest.mark.parametrize("start", ["last", -1, 1.5, True, datetime(2020, 1, 1)], ids=repr)
def test_an_impossible_start_is_refused(log: Log, start: Any) -> None:
    with pytest.raises(InvalidOptionError):
        log.subscribe("s", "a", start=start)
    assert log.subscriptions() == []


def test_nothing_there_is_an_empty_fetch(log: Log) -> None:
    assert log.subscribe("s", ">").fetch() == []


def test_a_new_subscription_resumes_from_zero(log: Log) -> None:
    assert log.subscribe("s", ">").resumed_from == 0


# --- where it goes on ---------------------------------------------------------------------------------------------


def test_the_seeds_example_resumes_after_what_was_acked(log: Log) -> None:
    log.publish_many([("orders.new", n) for n in range(5)])
    with log.subscribe("s", "orders.>") as subscription:
        subscription.ack_many(subscription.fetch(3))
    again = log.subscribe("s", "orders.>")
    assert again.resumed_from == 3
    assert seqs(again.fetch()) == [4, 5]


def test_a_subscription_survives_reopening(open_log: Any) -> None:
    with open_log() as log:
        log.publish_many([("a", n) for n in range(5)])
        subscription = log.subscribe("s", "a")
        subscription.ack_many(subscription.fetch(3))
    with open_log() as log:
        again = log.subscribe("s", "a")
        assert again.resumed_from == 3
        assert seqs(again.fetch()) == [4, 5]


def test_a_wildcard_resumes_without_losing_the_other_topics(log: Log) -> None:
    log.publish("orders.new", 1)
    log.publish("orders.shipped", 1)
    log.publish("orders.new", 2)
    with log.subscribe("s", "orders.*") as subscription:
        [first] = subscription.fetch(1)
        first.ack()
    topics = [message.topic for message in log.subscribe("s", "orders.*").fetch()]
    assert topics == ["orders.shipped", "orders.new"]


def test_start_means_nothing_to_a_subscription_that_exists(log: Log) -> None:
    log.publish_many([("a", n) for n in range(3)])
    with log.subscribe("s", "a") as subscription:
        subscription.fetch(1)[0].ack()
    assert seqs(log.subscribe("s", "a", start="new").fetch()) == [2, 3]


def test_each_subscription_has_its_own_place(log: Log) -> None:
    log.publish_many([("a", n) for n in range(3)])
    one, other = log.subscribe("one", "a"), log.subscribe("other", "a")
    one.ack_many(one.fetch())
    assert seqs(other.fetch()) == [1, 2, 3]
    assert one.fetch() == []
    assert (log.subscription("one").lag, log.subscription("other").lag) == (0, 3)


def test_iterating_gives_message_after_message(log: Log) -> None:
    log.publish_many([("a", n) for n in range(250)])
    subscription = log.subscribe("s", "a")
    received = []
    for message in subscription.messages():
        received.append(message.seq)
        message.ack()
    assert received == list(range(1, 251))


def test_what_an_iterator_fetched_ahead_is_given_back_unseen(log: Log) -> None:
    log.publish_many([("a", n) for n in range(5)])
    with log.subscribe("s", "a") as subscription:
        iterator = subscription.messages()
        next(iterator).ack()
        next(iterator)
    again = log.subscribe("s", "a")
    attempts = {}
    while found := again.fetch():
        attempts.update({message.seq: message.attempt for message in found})
    assert attempts == {2: 2, 3: 1, 4: 1, 5: 1}


def test_a_second_loop_goes_on_where_the_first_was_left(log: Log) -> None:
    log.publish_many([("a", n) for n in range(5)])
    subscription = log.subscribe("s", "a")
    for message in subscription.messages():
        message.ack()
        break
    assert seqs(subscription.messages()) == [2, 3, 4, 5]


# --- moving it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_seek_moves_back_and_forth(log: Log, mode: Any) -> None:
    log.publish_many([("a", n) for n in range(5)])
    with log.subscribe("s", "a", mode=mode) as subscription:
        subscription.ack_many(subscription.fetch(3))
    for start, expected in (("first", [1, 2, 3, 4, 5]), (5, [5]), ("new", []), (2, [2, 3, 4, 5])):
        log.seek("s", start)
        with log.subscribe("s", "a", mode=mode) as subscription:
            assert seqs(subscription.fetch()) == expected


def test_seek_returns_the_position_and_takes_a_time(log: Log, clock: ManualClock) -> None:
    log.publish("a", 1)
    clock.advance(0.01)
    log.publish("a", 2)
    log.subscribe("s", "a").close()
    assert log.seek("s", "new") == 2
    assert log.seek("s", 2) == 1
    assert log.seek("s", moment(clock)) == 1
    assert log.seek("s", "first") == 0


def test_seek_is_refused_while_it_is_held(log: Log) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a")
    subscription.fetch()[0].ack()
    with pytest.raises(SubscriptionActiveError):
        log.seek("s", "first")
    assert subscription.fetch() == []


def test_seek_of_a_bad_place_or_an_unknown_subscription(log: Log) -> None:
    log.subscribe("s", "a").close()
    with pytest.raises(InvalidOptionError):
        log.seek("s", "yesterday")  # type: ignore[arg-type]
    with pytest.raises(UnknownSubscriptionError):
        log.seek("nobody", "first")


def test_shared_consumers_follow_a_seek(log: Log) -> None:
    log.publish_many([("a", n) for n in range(3)])
    subscription = log.subscribe("s", "a", mode="shared")
    subscription.ack_many(subscription.fetch())
    assert subscription.fetch() == []
    log.seek("s", "first")
    log.publish("a", 4)
    assert seqs(subscription.fetch()) == [1, 2, 3, 4]


def test_seeking_past_a_failed_message_settles_it(log: Log, clock: ManualClock) -> None:
    log.publish_many([("a", 1), ("a", 2)])
    with log.subscribe("s", "a") as subscription:
        subscription.fetch(1)[0].nack(5)
    log.seek("s", "new")
    clock.advance(10)
    assert log.subscribe("s", "a").fetch() == []
    assert log.subscription("s").lag == 0


# --- changing and ending it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"pattern": "b"},
        {"dialect": "amqp"},
        {"mode": "shared"},
        {"from_": "x"},
        {"to": "x"},
        {"broadcast": True},
        {"where": "priority > 1"},
        {"order": "priority"},
        {"order_key": "data.k"},
    ],
    ids=str,
)
def test_what_it_is_for_may_not_change(log: Log, other: dict[str, Any]) -> None:
    log.publish("a", 1)
    log.subscribe("s", "a").close()
    with pytest.raises(SubscriptionMismatchError):
        log.subscribe("s", **{"pattern": "a", **other})
    assert seqs(log.subscribe("s", "a").fetch()) == [1]


def test_settings_may_change(log: Log, clock: ManualClock) -> None:
    log.publish_many([("a", 1), ("a", 2)])
    log.subscribe("s", "a", ack_wait=5, max_in_flight=2).close()
    subscription = log.subscribe("s", "a", ack_wait=60, max_in_flight=1)
    assert seqs(subscription.fetch()) == [1]
    clock.advance(30)
    assert subscription.fetch() == []


def test_unsubscribing_forgets_everything(log: Log) -> None:
    log.publish_many([("a", n) for n in range(3)])
    with log.subscribe("s", "a") as subscription:
        subscription.ack_many(subscription.fetch(2))
    log.delete_subscription("s")
    assert log.subscriptions() == []
    with pytest.raises(UnknownSubscriptionError):
        log.subscription("s")
    with pytest.raises(UnknownSubscriptionError):
        log.delete_subscription("s")
    again = log.subscribe("s", "a.>", mode="shared")
    assert again.resumed_from == 0


def test_unsubscribing_is_refused_while_it_is_held(log: Log) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a")
    with pytest.raises(SubscriptionActiveError):
        log.delete_subscription("s")
    assert seqs(subscription.fetch()) == [1]
