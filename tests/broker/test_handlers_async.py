"""Handlers under asyncio: coroutine functions, and plain ones."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from served import ServedFile

import headwater
from headwater import AsyncLog, ManualClock, Reject

TIME_LIMIT_S = 30
Story = Callable[[AsyncLog], Any]


@pytest.fixture
def run(place: str, tmp_path: Path, clock: ManualClock) -> Any:
    """Runs a coroutine function with an open log, and not for ever."""
    path = tmp_path / "log.db"
    served = ServedFile(path, clock=clock, housekeeping=None, heartbeats=False)

    def opening() -> AbstractAsyncContextManager[AsyncLog]:
        if place == "served":
            return served.connect()
        url = "memory:" if place == "memory" else path
        return headwater.connect(url, clock=clock, housekeeping=None, heartbeats=False)

    async def with_log(story: Story) -> None:
        async with opening() as log:
            await asyncio.wait_for(story(log), TIME_LIMIT_S)

    yield lambda story: asyncio.run(with_log(story))
    served.stop()


def test_coroutine_handlers_run_together_and_are_acked(run: Any) -> None:
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


def test_coroutine_handlers_that_raise_and_reject(run: Any) -> None:
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


def test_plain_functions_are_handlers_too_and_run_ends_with_stop(run: Any) -> None:
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
