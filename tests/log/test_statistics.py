"""How far behind each subscription is."""

from typing import Any

import pytest
from rows_looked_at import rows_looked_at

from headwater import Log, ManualClock
from headwater.broker import statistics
from headwater.errors import InvalidTopicError, UnknownSubscriptionError


def test_a_message_on_its_way_through(log: Log, mode: Any, clock: ManualClock) -> None:
    subscription = log.subscribe("s", "a", mode=mode)

    def counts() -> tuple[int, int, int, int, int]:
        info = subscription.info()
        return info.lag, info.in_flight, info.waiting, info.acked, info.redelivered

    assert counts() == (0, 0, 0, 0, 0)
    log.publish_many([("a", 1), ("b", 2), ("a", 3)])
    assert counts() == (2, 0, 0, 0, 0)
    [first] = subscription.fetch(1)
    assert counts() == (2, 1, 0, 0, 0)
    first.nack(5)
    assert counts() == (2, 0, 1, 0, 0)
    clock.advance(5)
    [again] = subscription.fetch(1)
    assert counts() == (2, 1, 0, 0, 1)
    again.ack()
    assert counts() == (1, 0, 0, 1, 1)
    subscription.fetch()[0].reject()
    assert counts() == (0, 0, 0, 1, 1)
    assert subscription.info().dead == 1


def test_acks_out_of_order_are_not_counted_as_in_flight(log: Log, mode: Any) -> None:
    log.publish_many([("a", n) for n in range(5)])
    subscription = log.subscribe("s", "a", mode=mode)
    messages = subscription.fetch(4)
    subscription.ack_many([messages[1], messages[3]])
    info = subscription.info()
    assert (info.lag, info.in_flight) == (3, 2)


def test_how_old_the_oldest_unacked_is(log: Log, mode: Any, clock: ManualClock) -> None:
    subscription = log.subscribe("s", "a", mode=mode)
    assert subscription.info().oldest_unacked_ms is None
    for topic in ("a", "b", "a", "a"):
        log.publish(topic, None)
        clock.advance(0.1)
    assert subscription.info().oldest_unacked_ms == 400
    messages = subscription.fetch()
    messages[1].ack()
    assert subscription.info().oldest_unacked_ms == 400
    messages[0].ack()
    assert subscription.info().oldest_unacked_ms == 100
    messages[2].nack(60)
    clock.advance(1)
    assert subscription.info().oldest_unacked_ms == 1_100


def test_the_position_is_the_floor_below_which_all_is_settled(log: Log) -> None:
    log.publish_many([("a", n) for n in range(4)])
    subscription = log.subscribe("s", "a")
    messages = subscription.fetch()
    subscription.ack_many([messages[0], messages[2]])
    assert subscription.info().position == 1
    messages[1].ack()
    assert subscription.info().position == 3


def test_info_says_what_the_subscription_is(log: Log, mode: Any, clock: ManualClock) -> None:
    created_ms = clock.now_ms()
    subscription = log.subscribe("s", "a.>", mode=mode)
    clock.advance(0.5)
    log.publish("a.b", 1)
    subscription.fetch()
    info = subscription.info()
    assert (info.id, info.pattern, info.mode, info.created_ms, info.active_ms) == (
        "s",
        "a.>",
        mode,
        created_ms,
        created_ms + 500,
    )
    assert info == log.subscription("s")
    assert log.subscriptions() == [info]


def test_counting_what_waits_looks_at_a_bounded_number_of_messages(log: Log, mode: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(statistics, "LAG_LOOKED_AT_MAX", 50)
    store = log._core.engine.store
    subscription = log.subscribe("s", "a", mode=mode)
    log.publish("a", 1)
    subscription.fetch()  # in flight, so that the window stays open
    log.publish_many([("b", n) for n in range(60)])
    log.topics()  # counts what is new
    few = rows_looked_at(store, lambda reader: statistics.log_statistics(reader, 0))
    log.publish_many([("b", n) for n in range(3_000)])
    log.publish("a", 2)
    log.topics()

    info = subscription.info()
    assert (info.lag, info.lag_is_least, info.in_flight) == (1, True, 1)
    assert rows_looked_at(store, lambda reader: statistics.log_statistics(reader, 0)) <= few + 200
    monkeypatch.undo()
    info = subscription.info()
    assert (info.lag, info.lag_is_least, info.in_flight) == (2, False, 1)


def test_what_retention_deleted_does_not_count_as_looked_at(log: Log, monkeypatch: Any) -> None:
    monkeypatch.setattr(statistics, "LAG_LOOKED_AT_MAX", 50)
    subscription = log.subscribe("s", "a")
    log.publish_many([("b", n) for n in range(100)])
    log.publish("a", 1)
    log.retain("b", max_count=10)
    log.run_maintenance()
    info = subscription.info()
    assert (info.lag, info.lag_is_least) == (1, False)


def test_an_unknown_subscription_has_no_info(log: Log) -> None:
    with pytest.raises(UnknownSubscriptionError):
        log.subscription("nobody")


def test_topics_are_counted_by_name(log: Log, clock: ManualClock) -> None:
    log.publish("b", "xx")
    clock.advance(0.01)
    log.publish_many([("a", 1), ("b", "yyy")])
    assert [(t.topic, t.count, t.bytes, t.last_seq, t.last_published_ms) for t in log.topics()] == [
        ("a", 1, 1, 2, clock.now_ms()),
        ("b", 2, 9, 3, clock.now_ms()),
    ]
    assert log.topic_max_seq("b") == 3
    with pytest.raises(InvalidTopicError):
        log.topic_max_seq("b.*")


def test_the_statistics_of_a_log_hold_all_of_it(log: Log) -> None:
    log.publish_many([("a", n) for n in range(3)])
    log.subscribe("s", "a")
    statistics = log.statistics()
    assert (statistics.last_seq, statistics.messages, statistics.bytes) == (3, 3, 3)
    assert [topic.topic for topic in statistics.topics] == ["a"]
    assert [info.id for info in statistics.subscriptions] == ["s"]


def test_the_lag_of_one_that_is_not_held_grows(log: Log, mode: Any) -> None:
    log.publish_many([("a", n) for n in range(3)])
    with log.subscribe("s", "a", mode=mode) as subscription:
        subscription.fetch(2)[0].ack()
    assert (log.subscription("s").lag, log.subscription("s").in_flight) == (2, 0)
    log.publish("a", 4)
    assert log.subscription("s").lag == 3


def test_health_says_that_all_is_well(log: Log) -> None:
    log.publish("a", 1)
    assert log.health()["store"] in ("memory", "sqlite", "postgres")
