"""Dead letters on their way again."""

import queue
from typing import Any

import pytest

from headwater import Log, ManualClock
from headwater.errors import InvalidTopicError, LeaseLostError


def dead(log: Log, mode: Any, count: int = 1, **options: Any) -> Any:
    """A subscription all of whose messages have died."""
    log.publish_many([("a", n, {"type": f"T{n % 2}"}) for n in range(1, count + 1)])
    subscription = log.subscribe("s", "a", mode=mode, **options)
    for message in subscription.fetch(count):
        message.reject("broken")
    return subscription


def drain(subscription: Any) -> list[tuple[Any, int]]:
    received = []
    while found := subscription.fetch():
        received += [(message.data, message.attempt) for message in found]
        subscription.ack_many(found)
    return received


def test_a_redriven_message_begins_anew_and_its_letter_goes_with_the_ack(log: Log, mode: Any) -> None:
    subscription = dead(log, mode)
    redriven = log.dead_letters.redrive()
    assert (redriven.redriven, redriven.failed) == (1, {})
    [letter] = log.dead_letters.list()
    assert (letter.redriving, letter.redrives) == (True, 1), "it stays until the redelivery is acked"
    assert log.subscription("s").lag == 1
    [message] = subscription.fetch()
    assert (message.data, message.attempt) == (1, 1)
    message.ack()
    assert log.dead_letters.list() == []
    assert log.subscription("s").lag == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, [1, 2, 3, 4]), ({"ids": [2]}, [2]), ({"type": "T1"}, [1, 3]), ({"error": "other"}, []), ({"topic": "b"}, [])],
    ids=str,
)
def test_one_some_or_all(log: Log, mode: Any, given: dict[str, Any], expected: list[int]) -> None:
    subscription = dead(log, mode, count=4)
    assert log.dead_letters.redrive(**given).redriven == len(expected)
    assert [data for data, _ in drain(subscription)] == expected
    assert len(log.dead_letters.list()) == 4 - len(expected)


def test_redriving_twice_is_once(log: Log, mode: Any) -> None:
    subscription = dead(log, mode)
    log.dead_letters.redrive()
    assert log.dead_letters.redrive().redriven == 0
    assert drain(subscription) == [(1, 1)]


def test_a_redrive_that_fails_again_stays_one_letter_with_its_count(log: Log, mode: Any) -> None:
    subscription = dead(log, mode)
    for redrives in (1, 2):
        log.dead_letters.redrive()
        subscription.fetch()[0].reject(f"still broken, {redrives}")
        [letter] = log.dead_letters.list()
        assert (letter.id, letter.redrives, letter.redriving) == (1, redrives, False)
        assert letter.error == letter.redrive_error == f"still broken, {redrives}"
    log.dead_letters.redrive()
    assert drain(subscription) == [(1, 1)]
    assert log.dead_letters.list() == []


def test_a_redriven_message_has_all_its_attempts_again(log: Log, mode: Any) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a", mode=mode, max_attempts=2)
    for _ in range(2):
        subscription.fetch()[0].nack(0)
    log.dead_letters.redrive()
    for attempt in (1, 2):
        [message] = subscription.fetch()
        assert message.attempt == attempt
        message.nack(0, error="still")
    [letter] = log.dead_letters.list()
    assert (letter.reason, letter.redrives, letter.attempts) == ("max_attempts", 1, 2)


def test_a_redrive_whose_holder_vanishes_comes_again(log: Log, mode: Any, clock: ManualClock) -> None:
    subscription = dead(log, mode, ack_wait=5)
    log.dead_letters.redrive()
    subscription.fetch()
    clock.advance(5)
    assert drain(subscription) == [(1, 2)]
    assert log.dead_letters.list() == []


def test_a_redrive_waits_for_a_subscription_that_is_not_held(log: Log, mode: Any) -> None:
    dead(log, mode).close()
    log.dead_letters.redrive()
    assert drain(log.subscribe("s", "a", mode=mode)) == [(1, 1)]


def test_without_its_subscription_the_letter_stays_with_its_count(log: Log, mode: Any) -> None:
    dead(log, mode).close()
    log.delete_subscription("s")
    for redrives in (1, 2):
        redriven = log.dead_letters.redrive()
        assert redriven.redriven == 0
        assert "s" in redriven.failed[1]
        [letter] = log.dead_letters.list()
        assert (letter.redrives, letter.redriving, letter.redrive_error) == (redrives, False, redriven.failed[1])


def test_a_letter_whose_message_was_pruned_is_delivered_from_its_copy(log: Log, mode: Any) -> None:
    log.publish("a", {"deep": [1]}, type="T", headers={"h": 1}, from_="me")
    subscription = log.subscribe("s", "a", mode=mode)
    subscription.fetch()[0].reject()
    log.retain(">", max_count=0)
    log.run_maintenance()
    log.dead_letters.redrive()
    [message] = subscription.fetch()
    assert (message.seq, message.data, message.type, message.headers, message.from_) == (
        1,
        {"deep": [1]},
        "T",
        {"h": 1},
        "me",
    )
    message.ack()
    assert log.dead_letters.list() == []
    assert log.subscription("s").gaps == 0


def test_a_message_pruned_while_it_is_redriven_is_delivered_from_its_copy(log: Log, mode: Any) -> None:
    subscription = dead(log, mode)
    log.dead_letters.redrive()
    log.retain(">", max_count=0)
    log.run_maintenance()
    assert drain(subscription) == [(1, 1)]
    assert log.subscription("s").gaps == 0


@pytest.mark.parametrize("meanwhile", ["seek", "delete_subscription"])
def test_a_redrive_cut_short_may_be_tried_again(log: Log, mode: Any, meanwhile: str) -> None:
    dead(log, mode).close()
    log.dead_letters.redrive()
    if meanwhile == "seek":
        log.seek("s", "new")
    else:
        log.delete_subscription("s")
    subscription = log.subscribe("s", "a", mode=mode, start="new")
    assert log.dead_letters.redrive().redriven == 1
    assert drain(subscription) == [(1, 1)]


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_a_handle_of_the_first_life_has_no_say_in_the_second(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a", mode=mode, ack_wait=5)
    [first] = subscription.fetch()
    clock.advance(5)
    subscription.fetch()[0].reject()
    log.dead_letters.redrive()
    subscription.fetch()
    with pytest.raises(LeaseLostError):
        first.ack()


def test_redriving_to_a_topic_publishes_anew(log: Log, mode: Any, clock: ManualClock) -> None:
    log.publish("a", {"n": 1}, id="given", type="T", headers={"h": 1}, from_="me", to="you", priority=3, ttl=1)
    clock.advance(1)
    log.subscribe("s", "a", mode=mode).fetch()
    repair = log.subscribe("repair", "repair.>")
    assert log.dead_letters.redrive(to_topic="repair.a").redriven == 1
    assert log.dead_letters.list() == []
    [message] = repair.fetch()
    assert (message.seq, message.topic, message.data, message.type) == (2, "repair.a", {"n": 1}, "T")
    assert (message.headers, message.from_, message.to, message.priority) == ({"h": 1}, "me", "you", 3)
    assert message.expires_at is None, "or it would be dead again at once"
    assert message.id != "given"


def test_a_letter_redriven_to_a_topic_was_published_before_the_next_live_callback(log: Log, mode: Any) -> None:
    subscription = dead(log, mode)
    log.dead_letters.redrive(to_topic="again")
    heard: queue.Queue[object] = queue.Queue()
    log.live.subscribe("x", "again", lambda message: heard.put(message.data))
    log.publish("again", "new")
    assert heard.get(timeout=30) == "new"
    subscription.close()


def test_redriving_to_a_bad_topic_keeps_the_letters(log: Log, mode: Any) -> None:
    dead(log, mode, count=2)
    with pytest.raises(InvalidTopicError):
        log.dead_letters.redrive(to_topic="repair.*")
    assert [(letter.redrives, letter.redriving) for letter in log.dead_letters.list()] == [(0, False)] * 2
    assert log.last_seq() == 2


def test_statistics_know_what_is_redriving(log: Log, mode: Any) -> None:
    dead(log, mode, count=3)
    log.dead_letters.redrive(ids=[1, 2])
    statistics = log.dead_letters.statistics()
    assert (statistics.total, statistics.redriving) == (3, 2)
    assert log.subscription("s").waiting == 2


def test_a_dry_run_says_what_would_be_redriven_and_changes_nothing(log: Log, mode: Any) -> None:
    with dead(log, mode, 3) as subscription:
        before = log.dead_letters.list()
        assert log.dead_letters.redrive(dry_run=True).redriven == 3
        assert log.dead_letters.redrive(2, dry_run=True).redriven == 1
        assert log.dead_letters.redrive(type="T0", dry_run=True).redriven == 1
        assert log.dead_letters.redrive(to_topic="again", dry_run=True).redriven == 3
        assert log.dead_letters.purge(dry_run=True, type="T1") == 2
        assert log.dead_letters.list() == before
        assert (subscription.fetch(), log.last_seq()) == ([], 3)
        log.dead_letters.redrive(1)
        assert log.dead_letters.redrive(dry_run=True).redriven == 2, "one is on its way already"
    log.delete_subscription("s")
    refused = log.dead_letters.redrive(dry_run=True)
    assert (refused.redriven, {*refused.failed.values()}) == (0, {"subscription 's' is gone"})
    assert refused == log.dead_letters.redrive()


def test_of_two_letters_of_one_delivery_one_is_redriven(log: Log, mode: Any) -> None:
    """As after an import of letters that are still there."""
    with dead(log, mode) as subscription:
        log.dead_letters.import_([*log.dead_letters.export()])
        dry = log.dead_letters.redrive(dry_run=True)
        assert (dry.redriven, dry.failed) == (1, {2: "the message is being delivered already"})
        assert log.dead_letters.redrive() == dry
        assert drain(subscription) == [(1, 1)]


@pytest.mark.parametrize("is_in_flight", [True, False])
def test_what_a_seek_delivers_again_is_not_redriven_besides(log: Log, mode: Any, is_in_flight: bool) -> None:
    dead(log, mode).close()
    log.seek("s", 1)
    subscription = log.subscribe("s", "a", mode=mode)
    in_flight = subscription.fetch() if is_in_flight else []
    redriven = log.dead_letters.redrive()
    assert (redriven.redriven, redriven.failed) == (0, {1: "the message is being delivered already"})
    [message] = in_flight or subscription.fetch()
    assert subscription.fetch() == []
    message.ack()
    assert drain(subscription) == []
    assert log.subscription("s").lag == 0
