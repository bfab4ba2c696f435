"""A forwarder feeds a transport from the log: what arrives, what waits, what is given up."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode does not

from forward_target import PATIENCE_S, Target, advance_until, drained, publish, wait_for

import headwater
from headwater import Log, ManualClock
from headwater.api import forwarder as work
from headwater.api.forwarder import Forwarder, same_log
from headwater.delivery.circuit import BreakerPolicy
from headwater.errors import (
    ClosedError,
    HeadwaterError,
    InvalidOptionError,
    InvalidStateError,
    LockedError,
    SubscriptionMismatchError,
    TransportFailedError,
)

HOUR_MS = 3_600_000
Make = Callable[..., Forwarder]


@pytest.fixture
def memory_log(clock: ManualClock) -> Iterator[Log]:
    with headwater.open("memory:", clock=clock, maintenance_interval=None, heartbeats=False) as log:
        yield log


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
def make(memory_log: Log, target: Target, clock: ManualClock) -> Iterator[Make]:
    made: list[Forwarder] = []

    def forwarder(log: Log = memory_log, **options: Any) -> Forwarder:
        options = {"id": "f", "wait": 0, "jitter": 0.0, "clock": clock, **options}
        made.append(Forwarder(log, target, **options))
        return made[-1]

    yield forwarder
    for each in made:
        with contextlib.suppress(HeadwaterError):
            each.stop()


def test_messages_arrive_in_order_with_their_ids_and_are_acked(
    log: Log, target: Target, make: Make, clock: ManualClock
) -> None:
    publish(log, *range(250))
    log.publish("notes", "not for the target")
    forwarder = make(log, pattern="orders.>", batch=100)
    forwarder.start()
    assert drained(forwarder)
    publish(log, 250)
    assert drained(forwarder)
    forwarder.stop()
    assert target.arrived == list(range(251))
    assert [message.id for message in target.messages][:2] == [
        message.id for message in log.subscribe("check", "orders.>").fetch(2)
    ]
    status = forwarder.status()
    assert (status.state, status.forwarded, status.retried, status.dead, status.lag) == ("stopped", 251, 0, 0, 0)
    assert status.breaker == "closed"
    assert log.subscription("f").holder is None


def test_an_incomplete_batch_waits_for_more_and_a_full_one_does_not(
    memory_log: Log, target: Target, make: Make
) -> None:
    forwarder = make(batch=3, wait=PATIENCE_S)
    forwarder.start()
    for number in range(4):
        publish(memory_log, number)
    target.wait_for_tries(1)
    assert target.arrived == [0, 1, 2]
    wait_for(lambda: forwarder.status().in_flight == 1, forwarder)
    assert target.arrived == [0, 1, 2]
    forwarder.stop()  # which waits no longer
    assert target.batches == [3, 1]


def test_a_target_that_is_away_for_an_hour_costs_nothing(
    memory_log: Log, target: Target, make: Make, clock: ManualClock
) -> None:
    target.away = True
    publish(memory_log, *range(250))
    forwarder = make(batch=100)
    forwarder.start()
    began_ms = clock.now_ms()
    while clock.now_ms() - began_ms < HOUR_MS:
        before = target.tries
        advance_until(lambda: target.tries > before, clock)  # noqa: B023
    status = forwarder.status()
    assert (status.state, status.forwarded, status.dead, status.breaker) == ("retrying", 0, 0, "open")
    assert "the target is away" in (status.last_error or "")
    assert target.tries < 600, "it is not to be hammered"
    target.away = False
    advance_until(lambda: forwarder.status().lag == 0, clock)
    forwarder.stop()
    assert target.arrived == list(range(250)), "nothing lost, nothing twice, nothing out of order"
    assert memory_log.dead_letters.list() == []
    info = memory_log.subscription("f")
    assert (info.redelivered, info.acked) == (0, 250), "an outage is no attempt"


def test_one_that_is_refused_does_not_keep_the_others_back_and_is_given_up_in_the_end(
    memory_log: Log, target: Target, make: Make, clock: ManualClock
) -> None:
    target.refused = {2}
    publish(memory_log, *range(5))
    forwarder = make(max_attempts=3, backoff=1)
    forwarder.start()
    wait_for(lambda: forwarder.status().refused == 1, forwarder)
    assert target.arrived == [0, 1, 3, 4]
    number = 5
    while not memory_log.dead_letters.list():
        assert number < 50
        clock.advance(5)
        publish(memory_log, number)  # others go on
        wait_for(lambda: target.arrived[-1] == number, forwarder)  # noqa: B023
        number += 1
    assert number >= 7, "not before it failed three times"
    (letter,) = memory_log.dead_letters.list()
    assert (letter.message.data, letter.reason, letter.handler) == (2, "processing_error", "forward to target")
    assert letter.error == "target: the target refuses this"
    assert drained(forwarder)
    assert target.arrived == [0, 1, 3, 4, *range(5, number)]
    forwarder.stop()
    assert (forwarder.status().dead, forwarder.status().refused) == (1, 0)


def test_one_that_is_refused_only_for_a_while_arrives(
    memory_log: Log, target: Target, make: Make, clock: ManualClock
) -> None:
    target.refused = {0}
    publish(memory_log, 0, 1)
    forwarder = make()
    forwarder.start()
    wait_for(lambda: forwarder.status().refused == 1, forwarder)
    assert target.arrived == [1]
    target.refused = set()
    clock.advance(2)
    publish(memory_log, 2)
    assert drained(forwarder)
    assert sorted(target.arrived) == [0, 1, 2]
    assert memory_log.dead_letters.list() == []


def test_what_is_unfit_for_the_target_is_given_up_at_once_with_its_reason(
    memory_log: Log, target: Target, make: Make
) -> None:
    target.unfit = {1, 3}
    publish(memory_log, 0, 1, 2, 3)
    forwarder = make()
    forwarder.start()
    assert drained(forwarder)
    assert target.arrived == [0, 2]
    assert [letter.message.data for letter in memory_log.dead_letters.list()] == [1, 3]
    assert memory_log.dead_letters.list()[0].error == "target: this is too large for the target"


def test_a_target_that_refuses_everything_makes_no_dead_letters(
    memory_log: Log, target: Target, make: Make, clock: ManualClock
) -> None:
    target.refused = set(range(20))
    publish(memory_log, *range(20))
    forwarder = make(max_attempts=2)
    forwarder.start()
    advance_until(lambda: target.tries > 200, clock)
    assert memory_log.dead_letters.list() == []
    target.refused = set()
    advance_until(lambda: forwarder.status().lag == 0, clock)
    assert target.arrived == list(range(20))


def test_many_refused_ones_at_the_front_do_not_keep_the_others_back_for_ever(
    memory_log: Log, target: Target, make: Make, clock: ManualClock
) -> None:
    target.refused = set(range(30))
    publish(memory_log, *range(60))
    forwarder = make(max_attempts=2)
    forwarder.start()
    advance_until(lambda: sorted(target.arrived) == list(range(30, 60)), clock)


def test_a_lone_message_that_is_refused_lets_those_pass_that_come_later(
    memory_log: Log, target: Target, make: Make, clock: ManualClock
) -> None:
    target.refused = {0}
    publish(memory_log, 0)
    forwarder = make()
    forwarder.start()
    advance_until(lambda: target.tries >= 3, clock)
    publish(memory_log, 1, 2)
    advance_until(lambda: target.arrived == [1, 2], clock)
    assert memory_log.dead_letters.list() == []


def test_stopping_lets_the_batch_arrive_that_is_on_its_way(memory_log: Log, target: Target, make: Make) -> None:
    under_way, go_on = threading.Event(), threading.Event()
    plain = target.publish_many

    def slow(messages: Any) -> None:
        under_way.set()
        assert go_on.wait(PATIENCE_S)
        plain(messages)

    target.publish_many = slow  # type: ignore[method-assign]
    publish(memory_log, *range(10))
    forwarder = make(batch=5)
    forwarder.start()
    assert under_way.wait(PATIENCE_S)
    assert memory_log.subscription("f").acked == 0, "not before it has arrived"
    forwarder.ask_to_stop()
    go_on.set()
    forwarder.stop()
    assert target.arrived == [0, 1, 2, 3, 4]
    info = memory_log.subscription("f")
    assert (info.acked, info.lag, info.holder) == (5, 5, None)


def test_stopping_in_an_outage_gives_the_batch_back_untouched(memory_log: Log, target: Target, make: Make) -> None:
    target.away = True
    publish(memory_log, 1, 2)
    forwarder = make()
    forwarder.start()
    target.wait_for_tries(1)
    forwarder.stop()
    with memory_log.subscribe("f", ">") as subscription:
        assert [(message.data, message.attempt) for message in subscription.fetch()] == [(1, 1), (2, 1)]


def test_once_ends_when_all_is_forwarded_that_was_there(memory_log: Log, target: Target, make: Make) -> None:
    publish(memory_log, *range(12))
    make(batch=5).run(once=True)
    assert target.arrived == list(range(12))
    make(batch=5).run(once=True)
    assert memory_log.subscription("f").holder is None


def test_once_gives_up_when_the_target_is_away_and_loses_nothing(memory_log: Log, target: Target, make: Make) -> None:
    target.away = True
    publish(memory_log, 1)
    forwarder = make(backoff=0, breaker=BreakerPolicy(failures=3))
    with pytest.raises(TransportFailedError, match="away"):
        forwarder.run(once=True)
    assert forwarder.status().state == "failed"
    assert memory_log.subscription("f").lag == 1
    assert target.tries == 3


def test_a_log_that_cannot_be_asked_for_a_while_costs_nothing(
    memory_log: Log, target: Target, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "LOG_RETRY_S", 0.001)
    forwarder = make(batch=3, wait=PATIENCE_S)
    source = forwarder._source

    def fails_at(name: str, calls: set[int]) -> None:
        plain, count = getattr(source, name), itertools.count(1)

        def sometimes(*given: Any) -> Any:
            if next(count) in calls:
                raise LockedError("the log is locked", where="log")
            return plain(*given)

        monkeypatch.setattr(source, name, sometimes)

    fails_at("acquire", {1})
    fails_at("fetch", {1, 3, 5})
    fails_at("extend", {2})
    fails_at("ack", {1})
    publish(memory_log, *range(2))  # so that a batch is in the making when the log goes away
    forwarder.start()
    target.wait_for_tries(1)
    publish(memory_log, *range(2, 5))
    wait_for(lambda: forwarder.status().forwarded >= 5, forwarder)
    forwarder.stop()
    assert target.arrived == list(range(5))
    assert memory_log.subscription("f").redelivered == 0
    assert memory_log.subscription("f").lag == 0


def test_the_other_forwarder_of_the_same_id_takes_over(
    memory_log: Log, target: Target, make: Make, clock: ManualClock
) -> None:
    first, second = make(), make()
    first.start()
    publish(memory_log, 1)
    assert drained(first)
    second.start()
    wait_for(lambda: second.status().state == "waiting", second)
    first.stop()
    publish(memory_log, 2)
    assert drained(second)
    assert target.arrived == [1, 2]
    assert (first.status().forwarded, second.status().forwarded) == (1, 1)


def test_a_forwarder_whose_subscription_was_taken_over_waits_for_it(
    memory_log: Log, target: Target, make: Make
) -> None:
    target.away = True
    publish(memory_log, 1)
    forwarder = make(backoff=0, breaker=BreakerPolicy(failures=1_000))
    forwarder.start()
    target.wait_for_tries(1)
    with memory_log.subscribe("f", ">", takeover=True) as subscription:
        wait_for(lambda: forwarder.status().state == "waiting", forwarder)
        assert [message.data for message in subscription.fetch()] == [1]
        target.away = False
    assert drained(forwarder)
    assert target.arrived == [1]


def test_an_error_of_its_own_ends_it_and_is_raised_to_the_caller(memory_log: Log, target: Target, make: Make) -> None:
    memory_log.subscribe("f", "other.>").close()
    forwarder = make()
    forwarder.start()
    wait_for(lambda: forwarder.status().state == "failed", forwarder)
    with pytest.raises(SubscriptionMismatchError):
        forwarder.drain(1)
    with pytest.raises(SubscriptionMismatchError):
        forwarder.stop()


def test_a_closed_transport_ends_it(memory_log: Log, target: Target, make: Make) -> None:
    target.close()
    publish(memory_log, 1)
    forwarder = make()
    with pytest.raises(ClosedError):
        forwarder.run()
    assert memory_log.subscription("f").lag == 1


def test_errors_of_the_target_are_reported(memory_log: Log, target: Target, make: Make) -> None:
    reported: list[Exception] = []
    target.away = True
    publish(memory_log, 1)
    forwarder = make(on_error=reported.append, backoff=0, breaker=BreakerPolicy(failures=2))
    with pytest.raises(TransportFailedError):
        forwarder.run(once=True)
    assert [str(error) for error in reported] == ["target: the target is away"] * 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch": 0},
        {"batch": 5_001},
        {"max_attempts": 0},
        {"wait": -1},
        {"jitter": 2.0},
        {"id": "-f"},
        {"pattern": "a..b"},
        {"where": "data.x ="},
    ],
)
def test_options_that_cannot_be_are_refused_at_once(make: Make, wrong: dict[str, Any]) -> None:
    with pytest.raises((InvalidOptionError, ValueError)):
        make(**wrong)


def test_it_is_started_once(make: Make) -> None:
    forwarder = make()
    forwarder.start()
    with pytest.raises(InvalidStateError):
        forwarder.start()
    forwarder.stop()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("postgres://a@db/shop", "postgresql://b@DB:5432/shop?schema=headwater", True),
        ("postgres://a@db/shop", "postgres://a@db/shop?schema=other", False),
        ("postgres:///shop?host=db", "postgres://db/shop", True),
        ("postgres://one:1,two:2/shop", "postgres://one:1,two:2/shop", True),
        ("ws://localhost:8765", "ws://127.0.0.1:8765/", True),
        ("ws://host:8765", "ws://host:8766", False),
        ("memory", "memory", False),
        ("/a/../b.db", "/b.db", True),
        ("/b.db", "ws://host/b.db", False),
    ],
)
def test_a_log_is_known_by_other_names(one: str, other: str, same: bool) -> None:
    assert same_log(one, other) is same
