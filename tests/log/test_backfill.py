"""Messages of the past, published with their own times: on every store, and behind a server."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fetched import everything

from headwater import Log, ManualClock
from headwater.errors import InvalidOptionError
from headwater.formats import datetime_of

YEAR = timedelta(days=365)


def now_of(clock: ManualClock) -> datetime:
    return datetime_of(clock.now_ms())


def test_a_message_has_the_time_it_was_given(log: Log, clock: ManualClock) -> None:
    at = now_of(clock) - YEAR
    log.publish("a", 1, published_at=at)
    log.publish("a", 2, published_at=at.timestamp() + 0.001, id="mine", type="t")
    log.publish_many([("a", 3, {"published_at": at}), {"topic": "a", "data": 4, "published_at": at}, ("a", 5)])
    found = everything(log)
    later = at + timedelta(milliseconds=1)
    assert [message.published_at for message in found] == [at, later, at, at, now_of(clock)]
    assert (found[1].id, found[1].type) == ("mine", "t")
    assert len({message.id for message in found}) == 5


def test_in_a_transaction(log: Log, clock: ManualClock, engine_here: None) -> None:
    at = now_of(clock) - YEAR
    with log.transaction() as tx:
        tx.publish("a", 1, published_at=at)
    assert [message.published_at for message in everything(log)] == [at]


@pytest.mark.usefixtures("no_store_asked")
@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (datetime(2020, 1, 1), "time zone"),
        ("2020-01-01", "datetime or seconds"),
        (-1, "1970"),
        (datetime(2100, 1, 1, tzinfo=UTC), "lies in the future"),
    ],
)
def test_what_is_no_time_of_the_past_is_refused(log: Log, given: Any, complaint: str) -> None:
    with pytest.raises(InvalidOptionError, match=complaint):
        log.publish("a", 1, published_at=given)
    with pytest.raises(InvalidOptionError, match="message 1 of the batch"):
        log.publish_many([("a", 1), ("a", 2, {"published_at": given})])
    assert log.last_seq() == 0


def test_a_time_that_is_a_little_ahead_is_found_too(log: Log, clock: ManualClock) -> None:
    """The clocks of two machines differ: what the log's own clock stamps next is older."""
    began = now_of(clock)
    log.publish("a", 0, published_at=began + timedelta(seconds=50))
    for number in range(1, 21):
        clock.advance(1)
        log.publish("a", number)
    assert len(everything(log, start=began + timedelta(seconds=15))) == 21
    assert [message.data for message in everything(log, start=began + timedelta(seconds=51))] == []


def test_an_id_is_remembered_from_when_it_came_not_from_its_time(log: Log, clock: ManualClock) -> None:
    at = now_of(clock) - YEAR
    assert log.publish("a", 1, id="x", published_at=at) == log.publish("a", 1, id="x", published_at=at) == 1


def test_delay_and_ttl_count_from_now(log: Log, clock: ManualClock) -> None:
    log.publish("a", 1, published_at=now_of(clock) - YEAR, delay=60, ttl=120)
    with log.subscribe("s", "a") as subscription:
        assert subscription.fetch() == []
        clock.advance(61)
        assert [message.data for message in subscription.fetch()] == [1]


def test_retention_by_age_deletes_from_the_front(log: Log, clock: ManualClock) -> None:
    """By `published_at`, the lowest seq first, up to the first message that is young enough."""
    log.retain("a", max_age=timedelta(days=1))
    at = now_of(clock) - YEAR
    log.publish_many([("a", "old", {"published_at": at}), ("a", "new"), ("a", "old again", {"published_at": at})])
    log.run_maintenance()
    assert [message.data for message in everything(log)] == ["new", "old again"]
    clock.advance(86_401)
    log.run_maintenance()
    assert everything(log) == []


def test_history_in_order_before_anything_else(log: Log, clock: ManualClock) -> None:
    """An import into an empty log: times ascend, and a search by time stays a binary one."""
    began = now_of(clock) - YEAR
    log.publish_many([("a", day, {"published_at": began + timedelta(days=day)}) for day in range(300)])
    log.publish("a", "now")
    start = began + timedelta(days=100)
    assert [message.data for message in everything(log, start=start)] == [*range(100, 300), "now"]
    assert [message.data for message in everything(log, start=now_of(clock))] == ["now"]


def test_start_at_a_time_leaves_out_nothing_that_is_as_new(log: Log, clock: ManualClock) -> None:
    before = now_of(clock)
    log.publish("a", "first")
    clock.advance(3600)
    log.publish_many([("a", day, {"published_at": before - timedelta(days=day)}) for day in (9, 5, 7)])
    log.publish("a", "between")
    log.publish_many([("a", day, {"published_at": before - timedelta(days=day)}) for day in (3, 2)])
    clock.advance(3600)
    log.publish("a", "last")

    def from_(start: datetime) -> list[Any]:
        return [message.data for message in everything(log, start=start)]

    assert from_(before - timedelta(days=8)) == ["first", 9, 5, 7, "between", 3, 2, "last"]
    assert from_(before + timedelta(seconds=1)) == ["between", 3, 2, "last"]
    assert from_(before + timedelta(seconds=3601)) == ["last"]
    assert from_(before + timedelta(seconds=7201)) == []


@pytest.mark.parametrize("dice", range(6))
def test_start_at_any_time_among_any_messages(log: Log, clock: ManualClock, dice: int) -> None:
    """Compared with a look at every message: what begins is the first that was published at the time or later."""
    rolled = random.Random(dice)
    began = clock.now_ms()
    clock.advance(1000)
    for _ in range(12):
        clock.advance(rolled.randrange(1, 50))
        count = rolled.randrange(1, 6)
        if rolled.random() < 0.5:
            log.publish_many([("a", 0) for _ in range(count)])
        else:
            times = [rolled.randrange(began, clock.now_ms()) / 1000 for _ in range(count)]
            times = sorted(times) if rolled.random() < 0.5 else times
            log.publish_many([("a", 0, {"published_at": at}) for at in times])
    if rolled.random() < 0.5:
        log.retain("a", max_count=15)
        log.run_maintenance()
    all_of_it = [(message.seq, message.published_at) for message in everything(log)]
    for at_ms in (began, clock.now_ms() + 1, *(rolled.randrange(began, clock.now_ms()) for _ in range(20))):
        at = datetime_of(at_ms)
        first = next((seq for seq, published_at in all_of_it if published_at >= at), None)
        expected = [] if first is None else [seq for seq, _ in all_of_it if seq >= first]
        assert [message.seq for message in everything(log, start=at)] == expected, at_ms - began
