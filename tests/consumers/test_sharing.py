"""Any number of tasks and threads share a subscription object: each message goes to exactly one of them, and none stays
behind when one of them leaves."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing, suppress
from typing import Any

import pytest
from consumer_bench import OPTIONS, PATIENCE_S, Api, Place, Recorder, left_over, take_all

import headwater
from headwater.errors import LeaseLostError

COUNT = 300
SHARERS = 3
MODES = ["exclusive", "shared"]


def messages(count: int) -> list[tuple[str, int]]:
    return [("a", number) for number in range(count)]


def first(count: int, start: int = 1) -> list[tuple[int, int]]:
    """(seq, attempt) of messages that come for the first time."""
    return [(seq, 1) for seq in range(start, start + count)]


# --- iterating together -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_tasks_share_a_subscription(place: Place, mode: Any) -> None:
    async with headwater.open_async(place.url, **place.options) as log:
        await log.publish_many(messages(COUNT))
        subscription = await log.subscribe("s", "a", mode=mode, **OPTIONS)
        seen = Recorder()

        async def iterate() -> None:
            async for message in subscription:
                await message.ack()
                seen.message(message)

        tasks = [asyncio.create_task(iterate()) for _ in range(SHARERS)]
        assert sorted(await seen.reach(COUNT)) == first(COUNT)
        await subscription.close()
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        info = await log.subscription("s")
        assert (info.acked, info.lag, info.in_flight, info.redelivered) == (COUNT, 0, 0, 0)


@pytest.mark.parametrize("mode", MODES)
def test_threads_share_a_subscription(place: Place, mode: Any) -> None:
    with headwater.open(place.url, **place.options) as log:
        log.publish_many(messages(COUNT))
        subscription = log.subscribe("s", "a", mode=mode, **OPTIONS)
        seen = Recorder()

        def iterate() -> None:
            for message in subscription:
                message.ack()
                seen.message(message)

        threads = [threading.Thread(target=iterate, daemon=True) for _ in range(SHARERS)]
        for thread in threads:
            thread.start()
        assert sorted(seen.wait_for(COUNT)) == first(COUNT)
        subscription.close()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        info = log.subscription("s")
        assert (info.acked, info.lag, info.in_flight, info.redelivered) == (COUNT, 0, 0, 0)


async def test_each_of_several_iterators_ends_when_nothing_comes(api: Api, place: Place) -> None:
    async with api.opened(place) as log:
        await api.do(log.publish_many, messages(30))
        subscription = await api.do(log.subscribe, "s", "a", **OPTIONS)

        async def iterate() -> list[tuple[int, int]]:
            found = []
            async for message in api.each(subscription, timeout=0):
                found.append((message.seq, message.attempt))
                await api.do(message.ack)
            return found

        found = await asyncio.wait_for(asyncio.gather(*(iterate() for _ in range(SHARERS))), PATIENCE_S)
        assert sorted(pair for pairs in found for pair in pairs) == first(30)


async def test_iterators_and_fetches_share_a_subscription(api: Api, place: Place) -> None:
    async with api.opened(place) as log:
        await api.do(log.publish_many, messages(120))
        subscription = await api.do(log.subscribe, "s", "a", **OPTIONS)
        seen = Recorder()

        async def iterate() -> None:
            async for message in api.each(subscription):
                await api.do(message.ack)
                seen.message(message)

        async def fetch() -> None:
            while found := await api.do(subscription.fetch, 7, timeout=0):
                for message in found:
                    seen.message(message)
                await api.do(subscription.ack_many, found)

        iterating = [asyncio.create_task(iterate()) for _ in range(2)]
        await asyncio.wait_for(asyncio.gather(fetch(), fetch()), PATIENCE_S)
        assert sorted(await seen.reach(120)) == first(120)
        await api.do(subscription.close)
        await asyncio.wait_for(asyncio.gather(*iterating), PATIENCE_S)


# --- leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_what_an_iterator_that_leaves_was_not_given_comes_with_the_next_fetch(
    api: Api, place: Place, mode: Any
) -> None:
    async with api.opened(place) as log:
        await api.do(log.publish_many, messages(10))
        subscription = await api.do(log.subscribe, "s", "a", mode=mode, **OPTIONS)
        async with aclosing(api.each(subscription)) as iterator:
            message = await anext(iterator)
            await api.do(message.ack)
        assert sorted(await take_all(api, subscription)) == first(9, start=2)


async def test_what_a_cancelled_task_was_not_given_goes_to_the_others(place: Place) -> None:
    async with headwater.open_async(place.url, **place.options) as log:
        await log.publish_many(messages(30))
        subscription = await log.subscribe("s", "a", **OPTIONS)
        seen, kept = Recorder(), Recorder()

        async def keep_one() -> None:
            async for message in subscription:
                kept.message(message)
                await asyncio.Event().wait()

        async def iterate() -> None:
            async for message in subscription:
                await message.ack()
                seen.message(message)

        keeping = asyncio.create_task(keep_one())  # it is alone, so it is the one that fetches ahead
        [in_flight] = await kept.reach(1)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        tasks = [asyncio.create_task(iterate()) for _ in range(2)]
        assert sorted([*await seen.reach(29), in_flight]) == first(30)
        await subscription.close()
        await asyncio.gather(*tasks)
        if place.lasts:  # it was delivered, so its attempt counts
            assert await left_over(Api("async"), place, "s", "a") == [(in_flight[0], 2)]


async def test_a_task_cancelled_while_it_waits_takes_nothing_with_it(place: Place) -> None:
    async with headwater.open_async(place.url, **place.options) as log:
        subscription = await log.subscribe("s", "a", **OPTIONS)
        seen = Recorder()

        async def iterate() -> None:
            async for message in subscription:
                seen.message(message)
                with suppress(LeaseLostError):  # closed meanwhile
                    await message.ack()

        tasks = [asyncio.create_task(iterate()) for _ in range(SHARERS)]
        await asyncio.sleep(0)
        publishing = asyncio.create_task(log.publish_many(messages(40)))
        for turn in range(6):
            await asyncio.sleep(0)
            if turn % 2:
                tasks[turn // 2].cancel()
                tasks[turn // 2] = asyncio.create_task(iterate())
        await publishing
        await seen.reach(40)
        await subscription.close()
        await asyncio.gather(*tasks)
        assert sorted(seen.seen) == first(40)


async def test_what_the_last_user_of_a_shared_subscription_leaves_goes_to_other_holders(
    api: Api, lasting_place: Place
) -> None:
    """No task asks this object for messages any more, so it holds none back from those that do."""
    async with api.opened(lasting_place) as mine, api.opened(lasting_place) as other:
        await api.do(mine.publish_many, messages(4))  # what a shared consumer fetches ahead to begin with
        subscription = await api.do(mine.subscribe, "s", "a", mode="shared", **OPTIONS)
        async with aclosing(api.each(subscription)) as iterator:
            message = await anext(iterator)
            await api.do(message.ack)
        rival = await api.do(other.subscribe, "s", "a", mode="shared", **OPTIONS)
        found: list[Any] = []
        while len(found) < 3:
            more = await api.do(rival.fetch, 10, timeout=PATIENCE_S)
            assert more, f"held back: {found}"
            found += more
        assert sorted((each.seq, each.attempt) for each in found) == first(3, start=2)


async def test_closing_gives_back_what_no_iterator_was_given(api: Api, lasting_place: Place) -> None:
    async with api.opened(lasting_place) as log:
        await api.do(log.publish_many, messages(50))
        subscription = await api.do(log.subscribe, "s", "a", **OPTIONS)
        in_flight = Recorder()

        async def keep_one() -> None:
            async for message in api.each(subscription):
                in_flight.message(message)
                await closed.wait()

        closed = asyncio.Event()
        tasks = [asyncio.create_task(keep_one()) for _ in range(SHARERS)]
        kept = {seq for seq, _ in await in_flight.reach(SHARERS)}
        await api.do(subscription.close)
        closed.set()
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        assert len(in_flight.seen) == SHARERS, "handed out after the close"
        found = await left_over(api, lasting_place, "s", "a")
        assert sorted(found) == [(seq, 2 if seq in kept else 1) for seq in range(1, 51)]


# --- filling up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_a_fetch_takes_redeliveries_first_and_fills_up_with_new_messages(
    api: Api, place: Place, mode: Any
) -> None:
    async with api.opened(place) as log:
        await api.do(log.publish_many, messages(6))
        subscription = await api.do(log.subscribe, "s", "a", mode=mode, **OPTIONS)
        for message in await api.do(subscription.fetch, 100):
            await api.do(message.nack)
        await api.do(log.publish_many, messages(3))
        found = await api.do(subscription.fetch, 100)
        assert [(message.seq, message.attempt) for message in found] == [
            *((seq, 2) for seq in range(1, 7)),
            *first(3, start=7),
        ]
