"""Handlers under asyncio: coroutine functions, and plain ones."""

import asyncio
from collections.abc import Callable
from typing import Any

import headwater
from headwater import AsyncLog, ManualClock, Reject

TIME_LIMIT_S = 30


def run(story: Callable[[AsyncLog], Any]) -> None:
    async def with_log() -> None:
        async with headwater.connect("memory:", clock=ManualClock(), housekeeping=None, heartbeats=False) as log:
            await asyncio.wait_for(story(log), TIME_LIMIT_S)

    asyncio.run(with_log())


def test_coroutine_handlers_run_together_and_are_acked() -> None:
    async def story(log: AsyncLog) -> None:
        at_it, together, done = 0, asyncio.Event(), asyncio.Event()

        @log.on("a", concurrency=2)
        async def handle(message: Any) -> None:
            nonlocal at_it
            at_it += 1
            if at_it == 2:
                together.set()
            await together.wait()
            if message.data == "last":
                done.set()

        await log.publish_many([("a", 1), ("a", "last")])
        await log.start()
        await done.wait()
        await log.stop()
        info = await log.subscription("handle")
        assert (info.acked, info.lag) == (2, 0)

    run(story)


def test_coroutine_handlers_that_raise_and_reject() -> None:
    async def story(log: AsyncLog) -> None:
        @log.on("a", id="h", max_attempts=2, backoff=0)
        async def handle(message: Any) -> None:
            raise (Reject if message.data == "reject" else ValueError)("no")

        await log.publish_many([("a", "reject"), ("a", "raise")])
        await log.start()
        while (await log.subscription("h")).dead < 2:
            await asyncio.sleep(0)
        assert {letter.reason for letter in await log.dead_letters.list()} == {"rejected", "max_retries"}

    run(story)


def test_plain_functions_are_handlers_too_and_run_ends_with_stop() -> None:
    async def story(log: AsyncLog) -> None:
        seen: asyncio.Queue[int] = asyncio.Queue()
        log.on("a", id="h")(lambda message: seen.put_nowait(message.data))
        running = asyncio.create_task(log.run())
        await log.publish("a", 1)
        assert await seen.get() == 1
        await log.stop()
        await running
        assert (await log.subscription("h")).acked == 1

    run(story)
