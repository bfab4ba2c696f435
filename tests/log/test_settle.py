"""Ack, reject and what keeps them honest. Each runs in both modes: the promises are the same."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fetched import drain_seqs, seqs

from headwater import Log, ManualClock
from headwater.errors import InvalidStateError, LeaseLostError, NotDeliveredError


def test_acks_may_come_in_any_order(log: Log, mode: Any) -> None:
    log.publish_many([("a", n) for n in range(6)])
    with log.subscribe("s", "a", mode=mode) as subscription:
        messages = {message.seq: message for message in subscription.fetch()}
        for seq in (4, 2, 6, 1):
            messages[seq].ack()
        assert log.subscription("s").lag == 2
    assert sorted(drain_seqs(log.subscribe("s", "a", mode=mode))) == [3, 5]


def test_failing_5_and_acking_6_keeps_5(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish_many([("a", n) for n in range(6)])
    subscription = log.subscribe("s", "a", mode=mode, backoff=1, jitter=0)
    *first, fifth, sixth = subscription.fetch()
    subscription.ack_many(first)
    fifth.nack()
    sixth.ack()
    assert subscription.fetch() == []
    clock.advance(1)
    [again] = subscription.fetch()
    assert (again.seq, again.attempt) == (5, 2)


def test_failing_5_and_acking_6_keeps_5_in_the_next_life(log: Log, mode: Any) -> None:
    log.publish_many([("a", n) for n in range(6)])
    with log.subscribe("s", "a", mode=mode) as subscription:
        messages = subscription.fetch()
        subscription.ack_many([*messages[:4], messages[5]])
    assert drain_seqs(log.subscribe("s", "a", mode=mode)) == [5]


def test_acking_what_was_never_delivered_is_an_error_not_a_jump(log: Log, mode: Any) -> None:
    log.publish_many([("a", n) for n in range(5)])
    ahead, behind = log.subscribe("ahead", "a", mode=mode), log.subscribe("behind", "a", mode=mode)
    *_, last = ahead.fetch()
    behind.fetch(2)
    with pytest.raises(NotDeliveredError):
        behind.ack_many([last])
    assert seqs(behind.fetch()) == [3, 4, 5]


def test_acking_what_the_subscription_does_not_match_is_an_error(log: Log, mode: Any) -> None:
    log.publish_many([("a", 1), ("b", 2), ("a", 3)])
    everything, some = log.subscribe("all", ">", mode=mode), log.subscribe("some", "a", mode=mode)
    some.fetch()
    foreign = everything.fetch()[1]
    with pytest.raises(NotDeliveredError):
        some.ack_many([foreign])


def test_a_lower_ack_never_rewinds(log: Log, mode: Any) -> None:
    log.publish_many([("a", n) for n in range(3)])
    with log.subscribe("s", "a", mode=mode) as subscription:
        first, second, third = subscription.fetch()
        third.ack()
        second.ack()
        first.ack()
        assert subscription.fetch() == []
    assert log.subscribe("s", "a", mode=mode).fetch() == []
    assert log.subscription("s").lag == 0


def test_settling_a_handle_twice_is_quiet_unless_the_ways_differ(log: Log, mode: Any) -> None:
    log.publish_many([("a", n) for n in range(3)])
    subscription = log.subscribe("s", "a", mode=mode)
    for message, settle in zip(subscription.fetch(), ("ack", "nack", "reject"), strict=True):
        getattr(message, settle)()
        assert message.settled
        if settle == "ack":
            message.ack()
        else:
            message.nack()
            message.reject()
            with pytest.raises(InvalidStateError, match="nacked or rejected already"):
                message.ack()
    info = log.subscription("s")
    assert (info.acked, info.waiting, info.dead) == (1, 1, 1)


@pytest.mark.parametrize("verb", ["nack", "reject"])
def test_an_ack_cannot_be_taken_back(log: Log, mode: Any, verb: str) -> None:
    log.publish_many([("a", n) for n in range(4)])
    subscription = log.subscribe("s", "a", mode=mode)
    first, second, third, fourth = subscription.fetch()
    first.ack()
    second.ack(confirm=False)
    subscription.ack_many([third])
    fourth.nack()
    for message in (first, second, third):
        with pytest.raises(InvalidStateError) as refused:
            getattr(message, verb)()
        assert str(refused.value) == (
            f"a: message {message.seq} was acked already; {verb} has no effect. "
            f"Call either ack or {verb}, once the outcome is known"
        )
    info = log.subscription("s")
    assert (info.acked, info.waiting, info.dead) == (3, 1, 0)


def test_settling_through_another_handle_is_not(log: Log, mode: Any) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a", mode=mode)
    [message] = subscription.fetch()
    message.ack()
    with pytest.raises(LeaseLostError):
        subscription.ack_many([message])
    with pytest.raises(LeaseLostError):
        message.extend()


def test_ack_many_is_all_or_none(log: Log, mode: Any) -> None:
    log.publish_many([("a", n) for n in range(4)])
    subscription = log.subscribe("s", "a", mode=mode)
    messages = subscription.fetch()
    messages[2].ack()
    with pytest.raises(LeaseLostError) as refused:
        subscription.ack_many(messages)
    assert "message 3" in str(refused.value)
    assert log.subscription("s").in_flight == 3
    subscription.ack_many([messages[0], messages[1], messages[3]])
    assert log.subscription("s").lag == 0
    subscription.ack_many([])


def test_ack_many_counts_a_repeated_message_once(log: Log, mode: Any) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a", mode=mode)
    [message] = subscription.fetch()
    subscription.ack_many([message, message])
    assert log.subscription("s").acked == 1


def test_reject_buries_at_once(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish_many([("a", "poison"), ("a", "fine")])
    subscription = log.subscribe("s", "a", mode=mode)
    poison, fine = subscription.fetch()
    poison.reject("cannot be parsed")
    fine.ack()
    clock.advance(3_600)
    assert subscription.fetch() == []
    [letter] = log.dead_letters.list()
    assert (letter.reason, letter.error, letter.attempts) == ("rejected", "cannot be parsed", 1)
    assert (letter.subscription, letter.message.data, letter.message.seq) == ("s", "poison", 1)
    assert (log.subscription("s").lag, log.subscription("s").dead) == (0, 1)


def test_the_verbs_of_the_subscription_are_those_of_the_message(log: Log, mode: Any) -> None:
    log.publish_many([("a", n) for n in range(4)])
    subscription = log.subscribe("s", "a", mode=mode)
    acked, nacked, rejected, extended = subscription.fetch()
    subscription.ack(acked)
    subscription.nack(nacked, 5, error="later")
    subscription.reject(rejected, "never")
    subscription.extend(extended, 5)
    info = log.subscription("s")
    assert (info.acked, info.waiting, info.dead, info.in_flight) == (1, 1, 1, 1)


def test_nothing_in_flight_is_delivered_twice_meanwhile(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish_many([("a", n) for n in range(3)])
    subscription = log.subscribe("s", "a", mode=mode, ack_wait=30)
    assert seqs(subscription.fetch(2)) == [1, 2]
    assert seqs(subscription.fetch(2)) == [3]
    clock.advance(29.999)
    assert subscription.fetch(2) == []


def test_a_big_batch_is_settled_in_any_mix(log: Log, mode: Any) -> None:
    log.publish_many([("a", n) for n in range(500)])
    subscription = log.subscribe("s", "a", mode=mode)
    messages = subscription.fetch(500)
    assert seqs(messages) == list(range(1, 501))
    subscription.ack_many(messages[::2])
    for message in messages[1::50]:
        message.nack(0)
    info = log.subscription("s")
    assert (info.lag, info.acked, info.waiting) == (250, 250, 10)
    assert drain_seqs(subscription) == [message.seq for message in messages[1::50]]


def test_unconfirmed_acks_are_done_when_the_subscription_is_closed(log: Log, mode: Any) -> None:
    log.publish_many([("a", n) for n in range(20)])
    with log.subscribe("s", "a", mode=mode) as subscription:
        for message in subscription.fetch():
            message.ack(confirm=False)
            assert message.settled
    assert (log.subscription("s").acked, log.subscription("s").lag) == (20, 0)
    assert log.subscribe("s", "a", mode=mode).fetch() == []


def test_ack_many_need_not_be_waited_for_either(log: Log, mode: Any) -> None:
    log.publish_many([("a", n) for n in range(6)])
    with log.subscribe("s", "a", mode=mode) as subscription:
        *most, last = subscription.fetch()
        subscription.ack_many(most, confirm=False)
        assert [message.settled for message in (*most, last)] == [True] * 5 + [False]
    assert log.subscription("s").acked == 5
    assert drain_seqs(log.subscribe("s", "a", mode=mode)) == [6]


def test_a_second_ack_after_an_unconfirmed_one_is_quiet(log: Log, mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    log.publish("a", 1)
    with log.subscribe("s", "a", mode=mode) as subscription:
        [message] = subscription.fetch()
        message.ack(confirm=False)
        message.ack(confirm=False)
        subscription.ack(message, confirm=False)
        message.ack()
    assert log.subscription("s").acked == 1
    assert not [output for output in caplog.messages if " ack" in output]


def test_an_unconfirmed_ack_that_comes_too_late_is_logged(
    log: Log, mode: Any, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    log.publish_many([("a", 1), ("a", 2)])
    with log.subscribe("s", "a", mode=mode, ack_wait=60) as subscription:
        [late] = subscription.fetch(1)
        clock.advance(60)  # long, so that no heartbeat of a client comes in between
        [again] = subscription.fetch(1)
        assert (again.seq, again.attempt) == (1, 2)
        [in_time] = subscription.fetch(1)
        subscription.ack_many([late, in_time], confirm=False)
    [output] = [record for record in caplog.records if "too late to ack" in record.getMessage()]
    assert (output.levelname, output.getMessage()) == ("WARNING", "subscription s was too late to ack [1]")
    assert log.subscription("s").acked == 1
    assert drain_seqs(log.subscribe("s", "a", mode=mode)) == [1]


def test_many_threads_ack_on_one_subscription_without_waiting(log: Log, mode: Any) -> None:
    threads, each = 8, 50
    log.publish_many([("a", n) for n in range(threads * each)])
    with log.subscribe("s", "a", mode=mode) as subscription:
        messages = subscription.fetch(threads * each)
        assert len(messages) == threads * each

        def ack_share(first: int) -> None:
            for message in messages[first::threads]:
                message.ack(confirm=False)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(ack_share, range(threads)))  # raises what a thread raised
    assert (log.subscription("s").acked, log.subscription("s").lag) == (threads * each, 0)
