"""Looking at dead letters, and letting them go."""

from typing import Any

import pytest

from headwater import Log, ManualClock
from headwater.broker.deliveries import ERROR_CHARS_MAX
from headwater.broker.flow import run_blocking
from headwater.errors import InvalidFilterError, InvalidPatternError, UnknownDeadLetterError
from headwater.ports.store import LETTERS_BYTES_MAX


def dead_letter(log: Log, *letters: tuple[str, str | None, str | None], id: str = "s") -> None:
    """Rejects a message per (topic, type, error)."""
    log.publish_many([(topic, None, {"type": type}) for topic, type, _ in letters])
    with log.subscribe(id, ">") as subscription:
        messages = subscription.fetch()
        for message, (_, _, error) in zip(messages, letters, strict=True):
            message.reject(error)


@pytest.fixture
def three(log: Log) -> Log:
    dead_letter(
        log,
        ("orders.new", "TestMessage", "Redis error: connection refused"),
        ("orders.old", "TestMessage", "Redis error: timed out"),
        ("logs", "OtherMessage", "lost connection\nsecond line"),
    )
    return log


def ids(log: Log, **given: Any) -> list[int]:
    return [letter.id for letter in log.dead_letters.list(**given)]


def test_they_are_listed_in_the_order_they_died(three: Log) -> None:
    assert [letter.message.topic for letter in three.dead_letters.list()] == ["orders.new", "orders.old", "logs"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [1, 2, 3]),
        ({"topic": "orders.*"}, [1, 2]),
        ({"topic": "logs"}, [3]),
        ({"type": "TestMessage"}, [1, 2]),
        ({"reason": "rejected"}, [1, 2, 3]),
        ({"reason": "expired"}, []),
        ({"subscription": "s"}, [1, 2, 3]),
        ({"subscription": "t"}, []),
        ({"error": "connection"}, [1, 3]),
        ({"error": "(?i)redis"}, [1, 2]),
        ({"error": "^lost"}, [3]),
        ({"error": "connection", "topic": "orders.>"}, [1]),
        ({"ids": [3, 1, 99]}, [1, 3]),
        ({"ids": []}, []),
        ({"after": 1}, [2, 3]),
        ({"after": 1, "limit": 1}, [2]),
    ],
    ids=str,
)
def test_they_can_be_filtered(three: Log, given: dict[str, Any], expected: list[int]) -> None:
    assert ids(three, **given) == expected


def test_one_can_be_looked_at(three: Log) -> None:
    assert three.dead_letters.get(2).error == "Redis error: timed out"
    with pytest.raises(UnknownDeadLetterError):
        three.dead_letters.get(99)


@pytest.mark.usefixtures("no_store_asked")
@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"error": "("}, InvalidFilterError),
        ({"error": "(?=x)"}, InvalidFilterError),
        ({"error": "x" * 1_000}, InvalidFilterError),
        ({"topic": "a..b"}, InvalidPatternError),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("verb", ["list", "statistics", "redrive", "purge", "export"])
def test_an_impossible_filter_is_refused(three: Log, verb: str, given: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        getattr(three.dead_letters, verb)(**given)
    assert ids(three) == [1, 2, 3]


def test_statistics_count_by_everything(three: Log) -> None:
    statistics = three.dead_letters.statistics()
    assert (statistics.total, statistics.redriving) == (3, 0)
    assert statistics.by_type == {"TestMessage": 2, "OtherMessage": 1}
    assert statistics.by_reason == {"rejected": 3}
    assert statistics.by_subscription == {"s": 3}
    assert statistics.by_topic == {"orders.new": 1, "orders.old": 1, "logs": 1}
    assert statistics.by_error["lost connection"] == 1, "by the first line"
    assert three.dead_letters.statistics(error="Redis").total == 2


def test_none_is_none(log: Log) -> None:
    assert log.dead_letters.list() == []
    assert log.dead_letters.statistics().total == 0
    assert log.dead_letters.redrive().redriven == 0
    assert log.dead_letters.purge() == 0
    assert list(log.dead_letters.export()) == []


def test_purging_removes_some_or_all_and_says_how_many(three: Log) -> None:
    assert three.dead_letters.purge(type="TestMessage") == 2
    assert ids(three) == [3]
    assert three.dead_letters.purge() == 1
    assert ids(three) == []


def test_ids_are_not_used_again_after_purging(three: Log) -> None:
    three.dead_letters.purge()
    dead_letter(three, ("again", None, None))
    assert ids(three) == [4]


def test_they_outlive_their_message_and_their_subscription(three: Log, clock: ManualClock) -> None:
    three.retain(">", max_count=0)
    three.run_maintenance()
    three.delete_subscription("s")
    assert three.topics()[0].count == 0
    assert [letter.message.topic for letter in three.dead_letters.list()] == ["orders.new", "orders.old", "logs"]


def test_they_survive_reopening(open_log: Any) -> None:
    with open_log() as log:
        dead_letter(log, ("a", "T", "broken"))
    with open_log() as log:
        [letter] = log.dead_letters.list()
    assert (letter.message.topic, letter.message.type, letter.error) == ("a", "T", "broken")


def test_more_than_a_page_of_them(log: Log) -> None:
    count = 1_100
    log.publish_many([("a", n, {"ttl": 0}) for n in range(count)])
    log.subscribe("s", "a").fetch()
    assert log.dead_letters.statistics().total == count
    assert len(list(log.dead_letters.export())) == count
    assert log.dead_letters.redrive().redriven == count
    assert log.dead_letters.purge() == count


def test_what_is_reported_of_a_failure_is_cut(log: Log) -> None:
    log.publish("a", 1)
    [message] = log.subscribe("s", "a").fetch()
    message.reject("é" * 1_000_000)
    [letter] = log.dead_letters.list()
    assert letter.error == "é" * (ERROR_CHARS_MAX - 1) + "…"


def test_large_ones_are_listed_and_taken_out_whole(log: Log) -> None:
    large = "x" * (LETTERS_BYTES_MAX // 3)
    log.publish_many([("a", large, {"ttl": 0})] * 10)
    log.subscribe("s", "a").fetch()
    assert ids(log, limit=9) == [*range(1, 10)]
    assert ids(log, after=9) == [10]
    assert ids(log, error="never") == []
    lines = log.dead_letters.export()
    assert sum(1 for line in lines if large in line) == 10
    assert log.dead_letters.redrive(to_topic="again").redriven == 10
    assert ids(log) == []


def test_a_dead_letter_is_one_line_in_the_log_of_the_application(
    log: Log, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """At level warning, whichever way the message died; and a nack that leads to another attempt is none."""
    caplog.set_level("WARNING", "headwater")
    with log.subscribe("s", "a", max_attempts=2, backoff=0, jitter=0) as subscription:
        for number in range(3):
            log.publish("a", number)
        first, second, third = subscription.fetch(3)
        first.reject("broken\nand more")
        second.nack(0, error="not yet")
        third.ack()
        assert len(dead_lines(caplog)) == 1
        subscription.fetch(1)[0].nack(0, error="never")
        log.publish("a", "late", ttl=1)
        clock.advance(2)
        assert subscription.fetch(1) == []
    assert dead_lines(caplog) == [
        "message 1 on a is dead-lettered in subscription s: rejected, attempt 1: broken",
        "message 2 on a is dead-lettered in subscription s: max_attempts, attempt 2: never",
        "message 4 on a is dead-lettered in subscription s: expired, attempt 0",
    ]


def dead_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [each for each in caplog.records if "dead-lettered" in each.getMessage()]
    assert all((each.name, each.levelname) == ("headwater", "WARNING") for each in lines)
    return [each.getMessage() for each in lines]


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_many_dead_letters_at_once_are_not_as_many_lines(
    log: Log, clock: ManualClock, caplog: pytest.LogCaptureFixture, mode: Any
) -> None:
    caplog.set_level("WARNING", "headwater")
    log.publish_many([("a", number, {"ttl": 1}) for number in range(250)])
    clock.advance(2)
    with log.subscribe("s", "a", mode=mode) as subscription:
        assert subscription.fetch(250) == []
    lines = dead_lines(caplog)
    assert len(log.dead_letters.list(limit=1000)) == 250
    assert 100 < len(lines) < 110
    assert lines[-1].endswith("more messages are dead-lettered in subscription s")


@pytest.mark.usefixtures("engine_here")
def test_letters_that_failed_alike_are_one_group_which_can_be_selected(log: Log) -> None:
    errors = [
        "KeyError: 'order 17'\nin line 3",
        "KeyError: 'order 1804'",
        "no row 0190163d-8694-739b-aea5-966c26f8ad91",
        "no row 0190163d-8694-739b-aea5-966c26f8ad92",
        "KeyError: 'customer'",
        None,
    ]
    log.publish_many([("a", n) for n in range(len(errors))])
    with log.subscribe("s", "a", max_attempts=1) as subscription:
        for message, error in zip(subscription.fetch(10), errors, strict=True):
            message.nack(error=error)
    letters: Any = log._core.dead_letters  # type: ignore[attr-defined]
    groups = run_blocking(letters.groups())
    assert {(each.error, each.count) for each in groups} == {
        ("KeyError: 'order #'", 2),
        ("no row #", 2),
        ("KeyError: 'customer'", 1),
        ("", 1),
    }
    assert [each.count for each in groups] == [2, 2, 1, 1]
    assert run_blocking(letters.groups(topic="*")) == groups, "also where the database cannot tell alone what matches"
    assert run_blocking(letters.groups(error="order")) == [each for each in groups if "order" in each.error]
    for group in groups:
        chosen = {"subscription": "s", "reason": group.reason, "handler": group.handler, "error_kind": group.error}
        found = run_blocking(letters.find(**chosen))
        assert (len(found), found[-1].id) == (group.count, group.last_id)
        assert run_blocking(letters.statistics(**chosen)).total == group.count
        assert run_blocking(letters.redrive(dry_run=True, **chosen)).redriven == group.count
    assert run_blocking(letters.purge(error_kind="")) == 1
    assert run_blocking(letters.purge(error_kind="no row #")) == 2
    assert [each.error for each in log.dead_letters.list()] == [errors[0], errors[1], errors[4]]
