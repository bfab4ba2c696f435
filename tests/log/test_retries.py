"""Trying again: after a nack, after a lost lease, and no more than so often."""

import logging
import threading
from typing import Any

import pytest
from eventually import eventually
from fetched import attempts
from waiting import until_it_waits

from headwater import Log, ManualClock
from headwater.errors import InvalidOptionError, LeaseLostError

# --- nack ---------------------------------------------------------------------------------------------------------


def test_a_nack_with_a_delay_comes_back_when_it_is_over(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a", mode=mode)
    subscription.fetch()[0].nack(5)
    clock.advance(4.999)
    assert subscription.fetch() == []
    clock.advance(0.001)
    assert attempts(subscription.fetch()) == [(1, 2)]


def test_a_nack_without_delay_backs_off_longer_each_time(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish("a", 1)
    subscription = log.subscribe(
        "s", "a", mode=mode, backoff=0.1, backoff_factor=2, backoff_max=0.3, jitter=0, max_attempts=9
    )
    for attempt, wait_ms in enumerate((100, 200, 300, 300), 1):
        [message] = subscription.fetch()
        assert message.attempt == attempt
        message.nack()
        clock.advance((wait_ms - 1) / 1000)
        assert subscription.fetch() == []
        clock.advance(0.001)
    assert attempts(subscription.fetch()) == [(1, 5)]


def test_jitter_spreads_the_backoff_upwards(log: Log, clock: ManualClock) -> None:
    log.publish_many([("a", n) for n in range(100)])
    subscription = log.subscribe("s", "a", mode="shared", backoff=10, jitter=1)
    for message in subscription.fetch():
        message.nack()
    clock.advance(9.999)
    assert subscription.fetch() == []
    clock.advance(5.001)
    assert 0 < len(subscription.fetch()) < 100
    clock.advance(5)
    assert log.subscription("s").waiting > 0
    assert subscription.fetch() != []
    assert log.subscription("s").waiting == 0


def test_a_nack_with_zero_delay_comes_back_at_once(log: Log, mode: Any) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a", mode=mode)
    subscription.fetch()[0].nack(0)
    assert attempts(subscription.fetch()) == [(1, 2)]


@pytest.mark.usefixtures("no_store_asked")
@pytest.mark.parametrize("delay", [-1, "5", float("nan")], ids=repr)
def test_an_impossible_delay_is_refused_and_nothing_settled(log: Log, mode: Any, delay: Any) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a", mode=mode)
    [message] = subscription.fetch()
    with pytest.raises(InvalidOptionError):
        message.nack(delay)
    message.ack()
    assert log.subscription("s").acked == 1


def test_others_go_on_while_one_waits(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish_many([("a", n) for n in range(3)])
    subscription = log.subscribe("s", "a", mode=mode)
    subscription.fetch(1)[0].nack(60)
    assert attempts(subscription.fetch()) == [(2, 1), (3, 1)]
    clock.advance(60)
    assert (1, 2) in attempts(subscription.fetch())


def test_a_waiting_retry_survives_reopening(open_log: Any, mode: Any, clock: ManualClock) -> None:
    with open_log() as log:
        log.publish("a", 1)
        log.subscribe("s", "a", mode=mode).fetch()[0].nack(60)
    with open_log() as log:
        subscription = log.subscribe("s", "a", mode=mode)
        assert subscription.fetch() == []
        clock.advance(60)
        assert attempts(subscription.fetch()) == [(1, 2)]


def test_a_retry_that_was_acked_stays_acked_after_a_crash(open_log: Any, mode: Any, clock: ManualClock) -> None:
    vanished = open_log()
    vanished.publish_many([("a", number) for number in range(1, 6)])
    before = vanished.subscribe("s", "a", mode=mode, lease=10, ack_wait=60)
    messages = before.fetch()
    messages[2].nack(0)
    [again] = before.fetch()
    assert (again.seq, again.attempt) == (3, 2)
    again.ack()
    messages[3].ack()
    clock.advance(3_600)
    left = []
    with open_log().subscribe("s", "a", mode=mode, ack_wait=60) as after:
        while found := after.fetch():
            left += [message.seq for message in found]
            after.ack_many(found)
    assert sorted(left) == [1, 2, 5]


# --- the end of attempts ------------------------------------------------------------------------------------------


def test_after_max_attempts_it_is_dead(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish("a", "poison", type="Order")
    subscription = log.subscribe("s", "a", mode=mode, max_attempts=3)
    for attempt in (1, 2, 3):
        [message] = subscription.fetch()
        assert message.attempt == attempt
        message.nack(0, error=f"failure {attempt}")
    assert subscription.fetch() == []
    [letter] = log.dead_letters.list()
    assert (letter.reason, letter.error, letter.attempts) == ("max_attempts", "failure 3", 3)
    assert (letter.message.data, letter.message.type, letter.died_ms) == ("poison", "Order", clock.now_ms())
    info = log.subscription("s")
    assert (info.lag, info.dead, info.redelivered) == (0, 1, 2)


def test_one_attempt_means_one(log: Log, mode: Any) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a", mode=mode, max_attempts=1)
    subscription.fetch()[0].nack()
    assert subscription.fetch() == []
    assert log.dead_letters.list()[0].attempts == 1


def test_a_message_that_takes_its_consumers_down_is_dead_of_timeout(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish_many([("a", "poison"), ("a", "fine")])
    subscription = log.subscribe("s", "a", mode=mode, max_attempts=3, ack_wait=5)
    for attempt in (1, 2, 3):
        assert attempts(subscription.fetch(1)) == [(1, attempt)]
        clock.advance(5)
    assert attempts(subscription.fetch(1)) == [(2, 1)]
    [letter] = log.dead_letters.list()
    assert (letter.reason, letter.attempts, letter.message.data) == ("timeout", 3, "poison")


def test_a_message_that_kills_the_process_is_dead_of_timeout(open_log: Any, mode: Any, clock: ManualClock) -> None:
    open_log().publish_many([("a", "poison"), ("a", "fine")])
    crashes = 0
    while True:
        log = open_log()  # the last one was never closed: its process is gone
        subscription = log.subscribe("s", "a", mode=mode, max_attempts=3, ack_wait=5, lease=5)
        data = [message.data for message in subscription.fetch(1)]
        if data != ["poison"]:
            break
        crashes += 1
        clock.advance(5)
    assert (crashes, data) == (3, ["fine"])
    assert [(letter.reason, letter.message.data) for letter in log.dead_letters.list()] == [("timeout", "poison")]


def test_suspects_come_one_at_a_time_among_the_others(log: Log, mode: Any, clock: ManualClock) -> None:
    """What was not settled in time may have killed its consumer, and takes no other suspect along."""
    log.publish_many([("a", n) for n in range(6)])
    subscription = log.subscribe("s", "a", mode=mode, ack_wait=5)
    *_, retried = subscription.fetch(4)
    retried.nack(5)
    clock.advance(5)
    for others, suspect in [([(4, 2), (5, 1), (6, 1)], (1, 2)), ([], (2, 2)), ([], (3, 2))]:
        found = subscription.fetch()
        assert attempts(found) == [*others, suspect], "the suspect last, when the others are probably done"
        assert subscription.fetch() == []
        found[-1].ack()
    assert subscription.fetch() == []


@pytest.mark.usefixtures("engine_here")
@pytest.mark.parametrize("reason", ["room", "suspect"])
def test_an_ack_wakes_a_fetch_that_waits_for_it(log: Log, mode: Any, clock: ManualClock, reason: str) -> None:
    """For room, or because both messages are suspects."""
    log.publish_many([("a", 1), ("a", 2)])
    subscription: Any = log.subscribe("s", "a", mode=mode, ack_wait=5, max_in_flight=1 if reason == "room" else 9)
    if reason == "suspect":
        subscription.fetch()
        clock.advance(5)
    [first] = subscription.fetch()
    waiting = subscription._consumer.take(1, None)
    bell = until_it_waits(waiting)
    first.ack()
    assert bell.done
    waiting.close()


def test_one_that_is_never_acked_does_not_hold_up_the_rest(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish_many([("a", n) for n in range(20)])
    subscription = log.subscribe("s", "a", mode=mode, ack_wait=5, max_attempts=3, max_in_flight=8)
    acked = set()
    for _ in range(40):
        for message in subscription.fetch():
            if message.seq % 5 == 0:
                message.ack()
                acked.add(message.seq)
        clock.advance(5)
    assert acked == {5, 10, 15, 20}, "a slow acker makes progress"
    letters = log.dead_letters.list()
    seen = "not acked within ack_wait, 3 times" + (", or its consumer was gone" if mode == "shared" else "")
    assert {(letter.reason, letter.error) for letter in letters} == {("timeout", seen)}
    assert sorted(letter.message.seq for letter in letters) == [n for n in range(1, 21) if n % 5]


def test_suspects_take_turns(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish_many([("a", n) for n in range(3)])
    subscription = log.subscribe("s", "a", mode=mode, ack_wait=5)
    subscription.fetch()
    came = []
    for _ in range(6):
        clock.advance(5)
        came += attempts(subscription.fetch())
    assert came == [(1, 2), (2, 2), (3, 2), (1, 3), (2, 3), (3, 3)]


def test_room_for_one_is_not_taken_by_new_messages_for_ever(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish_many([("a", n) for n in range(9)])
    subscription = log.subscribe("s", "a", mode=mode, ack_wait=5)
    subscription.fetch(1)
    clock.advance(5)
    assert attempts(subscription.fetch(1)) == [(1, 2)]


def test_a_fetch_is_filled_up_with_new_messages(log: Log, mode: Any) -> None:
    log.publish_many([("a", n) for n in range(6)])
    subscription = log.subscribe("s", "a", mode=mode)
    for message in subscription.fetch():
        message.nack(0)
    log.publish_many([("a", n) for n in range(3)])
    assert attempts(subscription.fetch(8)) == [(n, 2) for n in range(1, 7)] + [(7, 1), (8, 1)]
    assert attempts(subscription.fetch(8)) == [(9, 1)]


def test_a_message_that_ends_its_consumer_cleanly_stops_too(log: Log, mode: Any) -> None:
    """`with log.subscribe(…)` around a loop whose body raises closes cleanly, and a supervisor starts it again."""
    log.publish("a", "poison")
    for _ in range(5):
        with log.subscribe("s", "a", mode=mode, max_attempts=2) as subscription:
            subscription.fetch()
    assert len(log.dead_letters.list()) == 1


# --- the ack wait -------------------------------------------------------------------------------------------------


def test_after_the_ack_wait_it_is_delivered_again_and_the_late_ack_refused(
    log: Log, mode: Any, clock: ManualClock
) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a", mode=mode, ack_wait=30)
    [late] = subscription.fetch()
    clock.advance(29.999)
    assert subscription.fetch() == []
    clock.advance(0.001)
    [again] = subscription.fetch()
    assert (again.seq, again.attempt) == (1, 2)
    for settle in (late.ack, late.nack, late.reject, late.extend):
        with pytest.raises(LeaseLostError):
            settle()
    again.ack()
    assert (log.subscription("s").lag, log.subscription("s").redelivered) == (0, 1)


def test_an_ack_that_is_late_but_first_still_counts(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a", mode=mode, ack_wait=30)
    [message] = subscription.fetch()
    clock.advance(60)
    message.ack()
    assert subscription.fetch() == []
    assert log.subscription("s").acked == 1


def test_extend_moves_the_end_of_the_ack_wait(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish_many([("a", 1), ("a", 2)])
    subscription = log.subscribe("s", "a", mode=mode, ack_wait=30)
    extended, longer = subscription.fetch()
    clock.advance(20)
    extended.extend()
    longer.extend(100)
    clock.advance(29.999)
    assert subscription.fetch() == []
    clock.advance(0.001)
    assert attempts(subscription.fetch()) == [(1, 2)]
    clock.advance(10)
    longer.ack()


def test_extending_works_for_a_second_attempt_too(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a", mode=mode, ack_wait=30)
    subscription.fetch()[0].nack(0)
    [message] = subscription.fetch()
    message.extend(100)
    clock.advance(99)
    assert subscription.fetch() == []
    message.ack()
    assert log.subscription("s").acked == 1


# --- the window ---------------------------------------------------------------------------------------------------


def test_no_more_than_max_in_flight_are_out_at_once(log: Log, mode: Any) -> None:
    log.publish_many([("a", n) for n in range(10)])
    subscription = log.subscribe("s", "a", mode=mode, max_in_flight=3)
    first = subscription.fetch(10)
    assert attempts(first) == [(1, 1), (2, 1), (3, 1)]
    assert subscription.fetch(10) == []
    first[1].ack()
    first[2].nack(60)
    assert attempts(subscription.fetch(10)) == [(4, 1), (5, 1)]
    assert subscription.fetch(10) == []


def test_a_full_window_opens_when_the_ack_wait_is_over(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish_many([("a", n) for n in range(2)])
    subscription = log.subscribe("s", "a", mode=mode, max_in_flight=1, ack_wait=5)
    subscription.fetch()
    clock.advance(5)
    assert attempts(subscription.fetch(timeout=5)) == [(1, 2)]


def test_a_full_window_of_an_exclusive_holder_opens_without_waiting(log: Log, clock: ManualClock) -> None:
    log.publish_many([("a", n) for n in range(2)])
    subscription = log.subscribe("s", "a", max_in_flight=1, ack_wait=5)
    subscription.fetch()
    clock.advance(5)
    assert attempts(subscription.fetch()) == [(1, 2)]


def test_a_fetch_goes_on_behind_what_it_dead_lettered(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish_many([("a", "expires", {"ttl": 6}), ("a", "stays")])
    subscription = log.subscribe("s", "a", mode=mode)
    for message in subscription.fetch():
        message.nack(5)
    clock.advance(6)
    assert [message.data for message in subscription.fetch(1)] == ["stays"]


# --- failures that are hard to write down ---------------------------------------------------------------------------


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "recorded"),
    [
        (OSError("no file caf\udce9"), "OSError: no file caf\\udce9"),  # a file name that is not UTF-8
        (ValueError("a\0b"), "ValueError: a\\x00b"),
        (UnreadableError(), "UnreadableError: its text is not readable (RuntimeError)"),
    ],
    ids=["surrogate", "NUL", "unreadable"],
)
def test_whatever_an_exception_says_its_message_is_dead_lettered(log: Log, error: Exception, recorded: str) -> None:
    @log.on("a", id="s", max_attempts=1)
    def fail(message: Any) -> None:
        raise error

    logging.disable(logging.CRITICAL)  # pytest's workers cannot send half a surrogate pair to each other
    log.publish("a", 1)
    log.start()
    try:
        eventually(lambda: [letter.error for letter in log.dead_letters.list()], [recorded])
    finally:
        log.stop()
        logging.disable(logging.NOTSET)


def test_a_reason_is_stored_whatever_is_in_it(log: Log, mode: Any) -> None:
    log.publish("a", 1)
    log.subscribe("s", "a", mode=mode).fetch()[0].reject("caf\udce9\0")
    assert [letter.error for letter in log.dead_letters.list()] == ["caf\\udce9\\x00"]


def test_a_stack_begins_with_the_handler(log: Log) -> None:
    @log.on("a", id="s", max_attempts=1)
    def fail(message: Any) -> None:
        raise ValueError("no")

    log.publish("a", 1)
    log.start()
    try:
        eventually(lambda: len(log.dead_letters.list()), 1)
    finally:
        log.stop()
    [letter] = log.dead_letters.list()
    frames = [line for line in (letter.stack or "").splitlines() if line.startswith("  File ")]
    assert len(frames) == 1
    assert frames[0].endswith("in fail")


def test_the_only_attempt_is_not_spent_on_messages_ahead(open_log: Any, mode: Any) -> None:
    """After a kill, messages that no handler had begun would be dead letters."""
    log = open_log()
    log.publish_many([("a", n) for n in range(5)])
    begun, go_on = threading.Semaphore(0), threading.Event()

    @log.on("a", id="s", mode=mode, max_attempts=1, concurrency=1 if mode == "exclusive" else 2)
    def handler(message: Any) -> None:
        begun.release()
        assert go_on.wait(10)

    log.start()
    handlers = 1 if mode == "exclusive" else 2
    for _ in range(handlers):
        assert begun.acquire(timeout=10)
    assert [info.in_flight for info in log.subscriptions()] == [handlers]
    go_on.set()
    for _ in range(5 - handlers):
        assert begun.acquire(timeout=10)
    log.stop()
    assert [(info.acked, info.dead) for info in log.subscriptions()] == [(5, 0)]
