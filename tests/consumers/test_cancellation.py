"""A coroutine is cancelled at its first await, at its second, and so on until it is through. Each time CancelledError
comes out, nothing is stranded or doubled, and what it was called on goes on."""

from __future__ import annotations

import asyncio
import itertools
import types
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from consumer_bench import OPTIONS, PATIENCE_S, Api, Place, left_over, take_all

import headwater
from headwater import AsyncLog
from headwater.errors import LeaseLostError

STEPS_MAX = 200
COUNT = 5
MODES = ["exclusive", "shared"]
API = Api("async")

Work = Coroutine[Any, Any, Any]
Play = Callable[[Callable[[AsyncLog, str, Any], Any]], Coroutine[Any, Any, None]]


@pytest.fixture(params=["at once", "late"])
def moment(request: pytest.FixtureRequest) -> str:
    """When the cancellation comes: while what is awaited is still under way, or when it is done and the coroutine has
    not gone on yet."""
    found: str = request.param
    return found


@types.coroutine
def _struck(work: Work, step: int, moment: str) -> Generator[Any, Any, tuple[bool, Any]]:
    """Runs it, and cancels the task that it runs in at the so-manyeth await. Returns whether that was reached."""
    task = asyncio.current_task()
    assert task is not None
    steps = work.__await__()
    advance: Callable[[], Any] = lambda: steps.send(None)  # noqa: E731
    for count in itertools.count(1):
        try:
            awaited = advance()
        except StopIteration as stop:
            return count > step, stop.value
        if count == step and moment == "late" and awaited is not None:
            awaited.add_done_callback(lambda _: task.cancel())  # comes before the task's own
        elif count == step:
            task.cancel()
        try:
            value = yield awaited
        except BaseException as exc:
            advance = lambda error=exc: steps.throw(error)  # type: ignore[misc]  # noqa: E731
        else:
            advance = lambda sent=value: steps.send(sent)  # type: ignore[misc]  # noqa: E731
    raise AssertionError


async def cancelled_at(step: int, moment: str, work: Work) -> bool:
    """Whether the coroutine was cancelled at this step; False if it came through before."""

    async def strike() -> tuple[bool, Any]:
        return await _struck(work, step, moment)

    task = asyncio.create_task(strike())
    done, _ = await asyncio.wait([task], timeout=PATIENCE_S)
    assert done, f"cancelled at await {step}, it does not end"
    if task.cancelled():
        return True
    error = task.exception()
    assert error is None, f"cancelled at await {step}, it raises {error!r}"
    struck, _ = task.result()
    assert not struck, f"cancelled at await {step}, it returns as if nothing had been"
    return False


async def every_step(moment: str, story: Callable[[str, Callable[[Work], Coroutine[Any, Any, bool]]], Any]) -> None:
    """Play the story with a cancellation at each step in turn, each time under another name."""
    step, missed = 1, 0
    while step < STEPS_MAX:
        struck: list[bool] = []

        async def strike(work: Work, step: int = step, struck: list[bool] = struck) -> bool:
            struck.append(await cancelled_at(step, moment, work))
            return struck[-1]

        await story(f"{step}-{missed}", strike)
        if any(struck):
            step += 1
        elif step > 1:
            return
        else:  # the thread may have committed before its caller waited
            missed += 1
            assert missed < 3, "it never awaits anything, so this proves nothing"
    raise AssertionError("it never comes through")


@pytest.fixture
def play(place: Place, moment: str) -> Play:
    """Opens a log, and plays the story on it with a cancellation at each step."""

    async def play(story: Callable[[AsyncLog, str, Any], Any]) -> None:
        async with headwater.open_async(place.url, **place.options) as log:
            await every_step(moment, partial(story, log))

    return play


async def published(log: AsyncLog, name: str, count: int = COUNT) -> list[int]:
    return await log.publish_many([(f"a.{name}", number) for number in range(count)])


def first(seqs: list[int]) -> list[tuple[int, int]]:
    return [(seq, 1) for seq in seqs]


# --- publishing -------------------------------------------------------------------------------------------------------


async def test_publish(play: Play) -> None:
    async def story(log: AsyncLog, name: str, strike: Any) -> None:
        struck = await strike(log.publish(f"a.{name}", "cancelled"))
        after = await log.publish(f"a.{name}", "after")
        async with log.subscribe(name, f"a.{name}", **OPTIONS) as subscription:
            found = await subscription.fetch(100)
        reported = [message.data for message in found]
        assert reported in ([["after"], ["cancelled", "after"]] if struck else [["cancelled", "after"]])
        assert found[-1].seq == after

    await play(story)


async def test_publish_many(play: Play) -> None:
    async def story(log: AsyncLog, name: str, strike: Any) -> None:
        struck = await strike(log.publish_many([(f"a.{name}", number) for number in range(COUNT)]))
        await log.publish(f"a.{name}", "after")
        async with log.subscribe(name, f"a.{name}", **OPTIONS) as subscription:
            reported = [message.data for message in await subscription.fetch(100)]
        assert reported in ([["after"], [*range(COUNT), "after"]] if struck else [[*range(COUNT), "after"]])

    await play(story)


# --- receiving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wait", [0, None])
async def test_fetch(play: Play, mode: Any, wait: float | None) -> None:
    async def story(log: AsyncLog, name: str, strike: Any) -> None:
        seqs = await published(log, name)
        async with log.subscribe(name, f"a.{name}", mode=mode, **OPTIONS) as subscription:
            if await strike(subscription.fetch(3, timeout=wait)):
                assert sorted(await take_all(API, subscription)) == first(seqs)

    await play(story)


@pytest.mark.parametrize("mode", MODES)
async def test_fetch_that_waits(play: Play, mode: Any) -> None:
    """What it waits for comes while it waits; another object gets it if the fetch does not."""

    async def story(log: AsyncLog, name: str, strike: Any) -> None:
        async with log.subscribe(name, f"a.{name}", mode=mode, **OPTIONS) as subscription:
            fetching = asyncio.create_task(strike(subscription.fetch(3, timeout=None)))
            await asyncio.sleep(0)
            seqs = await published(log, name)
            if await fetching:
                assert sorted(await take_all(API, subscription)) == first(seqs)

    await play(story)


@pytest.mark.parametrize("mode", MODES)
async def test_fetch_with_another_one_waiting(play: Play, mode: Any) -> None:
    """The other one gets what the cancelled one does not."""

    async def story(log: AsyncLog, name: str, strike: Any) -> None:
        async with log.subscribe(name, f"a.{name}", mode=mode, **OPTIONS) as subscription:
            fetching = asyncio.create_task(strike(subscription.fetch(COUNT, timeout=None)))
            await asyncio.sleep(0)
            other = asyncio.create_task(subscription.fetch(COUNT, timeout=None))
            await asyncio.sleep(0)
            seqs = await published(log, name)
            await asyncio.wait([fetching, other], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            if not fetching.done() or not fetching.result():  # only one of them was served
                seqs += await published(log, name)
            struck = await fetching
            found = [(message.seq, message.attempt) for message in await asyncio.wait_for(other, PATIENCE_S)]
            if struck:
                assert sorted([*found, *await take_all(API, subscription)]) == first(seqs)

    await play(story)


@pytest.mark.parametrize("mode", MODES)
async def test_iteration(play: Play, mode: Any) -> None:
    async def story(log: AsyncLog, name: str, strike: Any) -> None:
        seqs = await published(log, name)
        seen: list[tuple[int, int]] = []

        async def iterate() -> None:
            async for message in subscription.messages(timeout=0):
                seen.append((message.seq, message.attempt))
                await message.ack()

        async with log.subscribe(name, f"a.{name}", mode=mode, **OPTIONS) as subscription:
            struck = await strike(iterate())
            left = await take_all(API, subscription)
            assert sorted([*seen, *left]) == first(seqs)  # one may be in hand, if it was cancelled while it acked
            assert struck or not left

    await play(story)


# --- settling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_ack(play: Play, mode: Any) -> None:
    async def story(log: AsyncLog, name: str, strike: Any) -> None:
        seqs = await published(log, name)
        async with log.subscribe(name, f"a.{name}", mode=mode, **OPTIONS) as subscription:
            [message] = await subscription.fetch(1)
            await strike(message.ack())
            await message.ack()  # whether it was acked or not, it is now, and once
            assert await take_all(API, subscription) == first(seqs[1:])
            info = await subscription.info()
            assert (info.acked, info.lag, info.in_flight, info.redelivered) == (COUNT, 0, 0, 0)

    await play(story)


@pytest.mark.parametrize("mode", MODES)
async def test_ack_many(play: Play, mode: Any) -> None:
    """All of them are acked, or none is."""

    async def story(log: AsyncLog, name: str, strike: Any) -> None:
        seqs = await published(log, name)
        async with log.subscribe(name, f"a.{name}", mode=mode, **OPTIONS) as subscription:
            struck = await strike(subscription.ack_many(await subscription.fetch(100)))
        async with log.subscribe(name, f"a.{name}", mode=mode, **OPTIONS) as subscription:
            found = sorted(await take_all(API, subscription))
            assert found in ([[], [(seq, 2) for seq in seqs]] if struck else [[]])
            assert (await subscription.info()).acked == COUNT

    await play(story)


@pytest.mark.parametrize("how", ["nack", "reject"])
@pytest.mark.parametrize("mode", MODES)
async def test_nack_and_reject(play: Play, mode: Any, how: str) -> None:
    async def story(log: AsyncLog, name: str, strike: Any) -> None:
        seqs = await published(log, name)
        async with log.subscribe(name, f"a.{name}", mode=mode, **OPTIONS) as subscription:
            [message] = await subscription.fetch(1)
            struck = await strike(message.nack(0) if how == "nack" else message.reject("no"))
            if struck:
                with suppress(LeaseLostError):  # it may have been settled before
                    await (message.nack(0) if how == "nack" else message.reject("no"))
            found = sorted(await take_all(API, subscription))
            again = [(seqs[0], 2)] if how == "nack" else []
            assert found == sorted([*again, *first(seqs[1:])])
            info = await subscription.info()
            assert (info.dead, info.lag, info.in_flight) == (how == "reject", 0, 0)

    await play(story)


# --- beginning and ending ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_subscribe(play: Play, mode: Any) -> None:
    async def story(log: AsyncLog, name: str, strike: Any) -> None:
        seqs = await published(log, name)
        options = {**OPTIONS, "mode": mode}
        if not await strike(log.subscribe(name, f"a.{name}", **options)):
            return
        async with log.subscribe(name, f"a.{name}", **options) as subscription:
            assert await take_all(API, subscription) == first(seqs)

    await play(story)


async def test_subscribe_that_waits_for_another_holder(play: Play) -> None:
    async def story(log: AsyncLog, name: str, strike: Any) -> None:
        seqs = await published(log, name)
        holder = await log.subscribe(name, f"a.{name}", **OPTIONS)
        waiting = asyncio.create_task(strike(log.subscribe(name, f"a.{name}", timeout=PATIENCE_S, **OPTIONS)))
        await asyncio.sleep(0.01)  # so that it has found the other one there
        await holder.close()
        if not await waiting:
            return
        async with log.subscribe(name, f"a.{name}", **OPTIONS) as subscription:
            assert await take_all(API, subscription) == first(seqs)

    await play(story)


@pytest.mark.parametrize("mode", MODES)
async def test_closing_a_subscription(play: Play, mode: Any) -> None:
    async def story(log: AsyncLog, name: str, strike: Any) -> None:
        seqs = await published(log, name)
        subscription = await log.subscribe(name, f"a.{name}", mode=mode, **OPTIONS)
        [in_flight, soon_acked] = await subscription.fetch(2)
        await soon_acked.ack(confirm=False)
        await anext(aiter(subscription.messages()))  # so that some are fetched ahead
        await strike(subscription.close())
        await subscription.close()
        async with log.subscribe(name, f"a.{name}", mode=mode, **OPTIONS) as subscription:
            found = sorted(await take_all(API, subscription))
            assert found == [(in_flight.seq, 2), (seqs[2], 2), *first(seqs[3:])]
            assert (await subscription.info()).acked == COUNT

    await play(story)


async def test_closing_a_log(place: Place, moment: str) -> None:
    async def story(name: str, strike: Any) -> None:
        log = await headwater.open_async(place.url, **place.options)
        seqs = await published(log, name)
        subscription = await log.subscribe(name, f"a.{name}", **OPTIONS)
        await anext(aiter(subscription.messages()))
        await strike(log.close())
        await log.close()
        if place.lasts:
            assert sorted(await left_over(API, place, name, f"a.{name}")) == [(seqs[0], 2), *first(seqs[1:])]

    await every_step(moment, story)


async def test_closing_a_log_whose_handlers_run(lasting_place: Place, moment: str) -> None:
    async def story(name: str, strike: Any) -> None:
        log = await headwater.open_async(lasting_place.url, **lasting_place.options)
        seqs = await published(log, name)
        began, gate = asyncio.Event(), asyncio.Event()

        @log.on(f"a.{name}", id=name, **OPTIONS)
        async def handle(message: Any) -> None:
            began.set()
            await gate.wait()

        await log.start()
        await began.wait()
        closing = asyncio.create_task(strike(log.close()))
        await asyncio.sleep(0)
        gate.set()
        struck = await closing
        await log.close()
        found = sorted(await left_over(API, lasting_place, name, f"a.{name}"))
        acked, given_up = first(seqs[1:]), [(seqs[0], 2), *first(seqs[1:])]
        assert found in ([acked, given_up] if struck else [acked])

    await every_step(moment, story)
