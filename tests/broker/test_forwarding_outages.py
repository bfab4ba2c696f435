"""A forwarder at the edges: an outage that ends in the middle of a batch, and the last try of a run that is to end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode does not

from forward_target import Target, publish

import headwater
from headwater import Log
from headwater.api.forwarder import Forwarder
from headwater.errors import InvalidOptionError
from headwater.message import Message
from headwater.transports.batching import BatchingTransport

Make = Callable[..., Forwarder]


class Recovering(Target):
    """Away for so many tries, and then there."""

    tries_away = 0

    def publish_many(self, messages: Sequence[Message]) -> None:
        self.away = self.tries < self.tries_away
        super().publish_many(messages)


@pytest.fixture
def log() -> Iterator[Log]:
    with headwater.open("memory:", maintenance_interval=None, heartbeats=False) as log:
        yield log


@pytest.fixture
def target() -> Recovering:
    return Recovering()


@pytest.fixture
def make(log: Log, target: Target) -> Make:
    return lambda **options: Forwarder(log, target, **{"id": "f", "wait": 0, "backoff": 0, **options})


@pytest.mark.parametrize("tries_away", [1, 2, 3, 5])
def test_an_outage_that_ends_in_the_middle_of_a_batch_changes_no_order_and_costs_no_message(
    log: Log, target: Recovering, make: Make, tries_away: int
) -> None:
    target.tries_away = tries_away
    publish(log, *range(8))
    make(max_attempts=1).run(once=True)
    assert target.arrived == list(range(8))
    assert log.dead_letters.list() == []


def test_one_that_failed_at_the_end_of_a_long_outage_is_tried_again_before_it_is_suspected(
    log: Log, target: Recovering, make: Make
) -> None:
    target.tries_away = 8  # three rounds of two tries, then one in which the second gets through
    publish(log, *range(8))
    make(max_attempts=1).run(once=True)
    assert sorted(target.arrived) == list(range(8))
    assert log.dead_letters.list() == []


def test_once_goes_on_until_one_that_is_refused_is_given_up(log: Log, target: Target, make: Make) -> None:
    target.refused = {1}
    publish(log, 0, 1, 2)
    forwarder = make(max_attempts=3)
    forwarder.run(once=True)
    assert [letter.message.data for letter in log.dead_letters.list()] == [1]
    assert (forwarder.status().dead, log.subscription("f").lag) == (1, 0)
    assert [message.data for message in target.messages] == [0, 2]


def test_once_gives_up_none_that_failed_last_because_the_target_went_away(
    log: Log, target: Recovering, make: Make
) -> None:
    target.refused = {1}
    plain = target.publish_many

    def goes_away(messages: Any) -> None:
        plain(messages)
        if target.arrived == [0, 2]:
            target.tries_away = 1_000

    target.publish_many = goes_away  # type: ignore[method-assign]
    publish(log, 0, 1, 2)
    make(max_attempts=3).run(once=True)
    assert log.dead_letters.list() == []
    assert log.subscription("f").lag == 1


def test_once_where_nothing_shows_that_the_target_is_there_leaves_the_refused_one_for_the_next_time(
    log: Log, target: Target, make: Make
) -> None:
    target.refused, target.recognises_ids = {1}, False
    publish(log, 0, 1, 2)
    make(max_attempts=3).run(once=True)
    assert target.arrived == [0, 2], "nothing twice"
    assert (log.dead_letters.list(), log.subscription("f").lag) == ([], 1)


def test_what_is_counted_as_forwarded_is_seen_with_the_ack(log: Log, make: Make) -> None:
    publish(log, 1)
    forwarder = make()
    seen: list[int] = []
    plain = forwarder._source.ack

    def ack(arrived: Any) -> None:
        plain(arrived)
        seen.append(forwarder.status().forwarded)

    forwarder._source.ack = ack  # type: ignore[method-assign]
    forwarder.run(once=True)
    assert seen == [1]


def test_a_transport_that_keeps_messages_in_a_buffer_is_refused(log: Log, clock: headwater.ManualClock) -> None:
    transport = BatchingTransport(Target(), clock=clock)
    with pytest.raises(InvalidOptionError, match="makes batches itself"):
        Forwarder(log, transport, id="f")
    transport.close()
