"""What waits in the buffer of a consumer, and what waits for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import apsw
import pytest
from consumer_bench import PATIENCE_S, Api, Place, eventually_true

import headwater
from headwater import ManualClock
from headwater.broker import consumer as consumers
from headwater.errors import LockedError


def messages(count: int) -> list[tuple[str, int]]:
    return [("a", number) for number in range(count)]


def test_what_an_ephemeral_reader_has_read_ahead_does_not_grow_stale() -> None:
    clock = ManualClock()
    with headwater.open("memory:", clock=clock, maintenance_interval=None) as log:
        subscription = log.subscribe("e", "a", mode="ephemeral", ack_wait=30)
        log.publish_many(messages(5))
        iterator: Any = subscription.messages()
        assert next(iterator).data == 0
        iterator.close()
        clock.advance(60)
        assert [message.data for message in subscription.fetch(10)] == [1, 2, 3, 4]


async def test_takers_whose_time_is_up_leave_nothing_behind(api: Api, near_place: Place) -> None:
    """While another one waits for messages that do not come, for days perhaps."""
    async with api.opened(near_place) as log:
        subscription = await api.do(log.subscribe, "s", "a")
        consumer = subscription._consumer
        waiting = asyncio.create_task(api.do(subscription.fetch, 1, timeout=None))
        await eventually_true(lambda: consumer._filling, "one waits")
        for _ in range(5):
            assert await api.do(subscription.fetch, 1, timeout=0.001) == []
        assert consumer._waiting == []
        await api.do(log.publish, "a", 1)
        assert len(await asyncio.wait_for(waiting, PATIENCE_S)) == 1


async def test_what_is_put_back_goes_at_once_to_the_one_that_waits(
    api: Api, near_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "FALLBACK_POLL_S", 3_600)
    async with api.opened(near_place) as log:
        await api.do(log.publish, "a", 1)
        subscription = await api.do(log.subscribe, "s", "a")
        consumer = subscription._consumer
        [message] = await api.do(subscription.fetch, 1)
        waiting = asyncio.create_task(api.do(subscription.fetch, 1, timeout=None))
        await eventually_true(lambda: consumer._filling, "one waits")
        consumer.put_back([message._claimed])
        [again] = await asyncio.wait_for(waiting, PATIENCE_S)
        assert (again.seq, again.attempt) == (1, 1)


def test_a_message_that_came_again_is_extended_though_its_first_handling_ends() -> None:
    """The first one took longer than the ack wait, for the process was asleep."""
    clock = ManualClock()
    with headwater.open("memory:", clock=clock, maintenance_interval=None) as log:
        log.publish("a", 1)
        subscription = log.subscribe("s", "a", ack_wait=30)
        consumer, core = subscription._consumer, log._core
        [first] = subscription.fetch()
        consumer.began(first._claimed)
        clock.advance(30)
        [again] = subscription.fetch()
        assert again.attempt == 2
        consumer.began(again._claimed)
        consumer.ended(first._claimed)
        clock.advance(20)
        core.heartbeat()  # type: ignore[attr-defined]
        clock.advance(20)
        assert subscription.fetch() == []
        again.ack()


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_what_could_not_be_given_back_is_not_stranded(tmp_path: Path, mode: Any) -> None:
    """Another process held the write lock for too long."""
    path = tmp_path / "log.db"
    with headwater.open(str(path), maintenance_interval=None, busy_timeout=0.05) as log:
        log.publish_many(messages(5))
        subscription = log.subscribe("s", "a", mode=mode)
        iterator: Any = subscription.messages()
        assert next(iterator).data == 0
        other = apsw.Connection(str(path))
        other.execute("BEGIN IMMEDIATE")
        subscription._consumer.interrupt()
        releasing = subscription._consumer._releasing
        assert releasing is not None
        assert releasing.wait(PATIENCE_S)
        assert isinstance(releasing.error, LockedError)
        other.execute("ROLLBACK")
        subscription.close()
        again = log.subscribe("s", "a", mode=mode).fetch(10)
        assert sorted((message.seq, message.attempt) for message in again) == [(1, 2), (2, 1), (3, 1), (4, 1), (5, 1)]
