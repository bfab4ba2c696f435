"""Messages for later, and messages that come too late."""

from datetime import timedelta
from typing import Any

import pytest
from fetched import drain_seqs, seqs

from headwater import Log, ManualClock
from headwater.errors import InvalidOptionError

# --- delayed ------------------------------------------------------------------------------------------------------


def test_a_delayed_message_comes_when_it_is_time(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish("a", 1, delay=10)
    subscription = log.subscribe("s", "a", mode=mode)
    assert subscription.fetch() == []
    clock.advance(9.999)
    assert subscription.fetch() == []
    clock.advance(0.001)
    [message] = subscription.fetch()
    assert (message.seq, message.attempt) == (1, 1), "waiting is no attempt"


def test_others_go_ahead_of_a_delayed_one(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish_many([("a", 1), ("a", 2, {"delay": 10}), ("a", 3)])
    subscription = log.subscribe("s", "a", mode=mode)
    assert drain_seqs(subscription) == [1, 3]
    log.publish("a", 4)
    assert drain_seqs(subscription) == [4]
    clock.advance(10)
    assert drain_seqs(subscription) == [2]
    assert log.subscription("s").lag == 0


def test_delayed_ones_come_in_the_order_of_their_seq_when_due_together(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish_many([("a", n, {"delay": 10 - n}) for n in range(5)])
    subscription = log.subscribe("s", "a", mode=mode)
    assert drain_seqs(subscription) == []
    clock.advance(10)
    assert drain_seqs(subscription) == [1, 2, 3, 4, 5]


def test_a_delay_that_is_over_before_the_first_fetch_has_no_effect(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish_many([("a", 1, {"delay": 10}), ("a", 2)])
    clock.advance(10)
    assert seqs(log.subscribe("s", "a", mode=mode).fetch()) == [1, 2]


def test_a_delayed_message_counts_in_the_lag_once(log: Log, mode: Any) -> None:
    log.publish("a", 1, delay=10)
    subscription = log.subscribe("s", "a", mode=mode)
    assert log.subscription("s").lag == 1
    subscription.fetch()
    assert log.subscription("s").lag == 1


def test_a_delayed_message_behind_one_in_flight_counts_once(log: Log) -> None:
    log.publish_many([("a", 1), ("a", 2, {"delay": 10})])
    log.subscribe("s", "a").fetch()
    info = log.subscription("s")
    assert (info.lag, info.in_flight, info.waiting) == (2, 1, 1)


def test_a_delayed_message_survives_reopening(open_log: Any, mode: Any, clock: ManualClock) -> None:
    with open_log() as log:
        log.publish("a", 1, delay=10)
        assert log.subscribe("s", "a", mode=mode).fetch() == []
    with open_log() as log:
        subscription = log.subscribe("s", "a", mode=mode)
        assert subscription.fetch() == []
        clock.advance(10)
        assert seqs(subscription.fetch()) == [1]


def test_a_delayed_message_that_was_acked_stays_acked_after_a_crash(open_log: Any, clock: ManualClock) -> None:
    vanished = open_log()
    vanished.publish_many([("a", 1), ("a", 2, {"delay": 5}), ("a", 3)])
    before = vanished.subscribe("s", "a", lease=10, ack_wait=3_600)
    before.fetch()
    clock.advance(5)
    [delayed] = before.fetch()
    delayed.ack()
    clock.advance(60)
    assert sorted(drain_seqs(open_log().subscribe("s", "a"))) == [1, 3]


# --- expired ------------------------------------------------------------------------------------------------------


def test_an_expired_message_goes_to_the_dead_letters(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish_many([("a", "stale", {"ttl": 10}), ("a", "fresh", {"ttl": 60}), ("a", "timeless")])
    clock.advance(10)
    subscription = log.subscribe("s", "a", mode=mode)
    assert [message.data for message in subscription.fetch()] == ["fresh", "timeless"]
    [letter] = log.dead_letters.list()
    assert (letter.reason, letter.message.data, letter.attempts) == ("expired", "stale", 0)
    info = log.subscription("s")
    assert (info.dead, info.lag) == (1, 2)


def test_a_message_is_good_until_its_last_millisecond(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish("a", 1, ttl=10)
    clock.advance(9.999)
    assert seqs(log.subscribe("s", "a", mode=mode).fetch()) == [1]


def test_each_subscription_buries_its_own(log: Log, clock: ManualClock) -> None:
    log.publish("a", 1, ttl=1)
    clock.advance(1)
    for id in ("one", "two"):
        assert log.subscribe(id, "a").fetch() == []
    assert [letter.subscription for letter in log.dead_letters.list()] == ["one", "two"]


def test_an_expired_message_may_be_left_out_quietly(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish_many([("a", "stale", {"ttl": 1}), ("a", "fresh")])
    clock.advance(1)
    subscription = log.subscribe("s", "a", mode=mode, dead_letter_expired=False)
    assert drain_seqs(subscription) == [2]
    assert log.dead_letters.list() == []
    assert log.subscription("s").lag == 0


@pytest.mark.parametrize("failing", ["delayed", "nacked"])
def test_a_message_may_expire_while_it_waits(log: Log, mode: Any, clock: ManualClock, failing: str) -> None:
    log.publish("a", 1, ttl=10, delay=5 if failing == "delayed" else 0)
    subscription = log.subscribe("s", "a", mode=mode)
    for message in subscription.fetch():
        message.nack(8)
    clock.advance(10)
    assert subscription.fetch() == []
    [letter] = log.dead_letters.list()
    assert letter.reason == "expired"
    assert letter.attempts == (0 if failing == "delayed" else 1)


@pytest.mark.parametrize("failing", ["delayed", "nacked"])
def test_a_message_that_expires_while_it_waits_may_be_left_out_quietly(
    log: Log, mode: Any, clock: ManualClock, failing: str
) -> None:
    log.publish("a", 1, ttl=10, delay=5 if failing == "delayed" else 0)
    subscription = log.subscribe("s", "a", mode=mode, dead_letter_expired=False)
    for message in subscription.fetch():
        message.nack(8)
    clock.advance(10)
    assert subscription.fetch() == []
    assert log.dead_letters.list() == []


def test_an_expired_message_is_dead_lettered_once_even_over_a_crash(open_log: Any, clock: ManualClock) -> None:
    vanished = open_log()
    vanished.publish_many([("a", 1), ("a", 2, {"ttl": 1}), ("a", 3)])
    clock.advance(1)
    vanished.subscribe("s", "a", lease=10).fetch()
    clock.advance(60)
    log = open_log()
    assert sorted(drain_seqs(log.subscribe("s", "a"))) == [1, 3]
    assert [letter.message.seq for letter in log.dead_letters.list()] == [2]


def test_an_expired_message_in_flight_may_still_be_acked(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish("a", 1, ttl=10)
    subscription = log.subscribe("s", "a", mode=mode)
    [message] = subscription.fetch()
    clock.advance(20)
    message.ack()
    assert log.dead_letters.list() == []


def test_expired_messages_by_the_hundred_do_not_stop_a_fetch(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish_many([("a", n, {"ttl": 1}) for n in range(300)])
    clock.advance(1)
    log.publish("a", "fresh")
    subscription = log.subscribe("s", "a", mode=mode, max_in_flight=10)
    assert seqs(subscription.fetch(5)) == [301]
    assert log.dead_letters.statistics().by_reason == {"expired": 300}


# --- durations as text ------------------------------------------------------------------------------------------------


def test_durations_may_be_texts(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish("a", 1, delay="5m")
    log.publish_many([("a", 2, {"ttl": "1h30m"})])
    log.retain("a", max_age="7d")
    subscription = log.subscribe(
        "s", "a", mode=mode, ack_wait="30s", lease="1d", backoff="500ms", inactive_timeout="2w"
    )
    [second] = subscription.fetch()
    assert second.expires_at - second.published_at == timedelta(minutes=90)
    second.extend("1h")
    second.nack("10m")
    clock.advance(300)
    [first] = subscription.fetch()
    assert (first.seq, first.deliver_at - first.published_at) == (1, timedelta(minutes=5))
    clock.advance(29)
    assert subscription.fetch() == []
    clock.advance(1)
    assert seqs(subscription.fetch()) == [1], "its ack_wait is over"
    clock.advance(270)
    assert 2 in seqs(subscription.fetch())
    [policy] = log.retention()
    assert policy.limits.max_age_ms == 7 * 86_400_000


def test_a_duration_that_is_no_text_of_one_names_the_option_and_an_example(log: Log) -> None:
    with pytest.raises(
        InvalidOptionError, match=r"^delay must be a duration, not '5 minutes'\. Write it like 500ms, 10s"
    ):
        log.publish("a", 1, delay="5 minutes")
    with pytest.raises(InvalidOptionError, match=r"^ack_wait must be a duration, not '30'\. Did you mean 30s"):
        log.subscribe("s", "a", ack_wait="30")
