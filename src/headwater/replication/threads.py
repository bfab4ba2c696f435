"""Work on threads and in tasks. A thread cannot be called back: whoever is cancelled waits for the one it sent."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Threads:
    """Where what blocks is done; whoever is cancelled waits for it."""

    def __init__(self, most: int) -> None:
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="headwater-replicas")

    async def do(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        return await self.do_or_undo(_nothing, work, *args, **options)

    async def do_or_undo(
        self, undo: Callable[[T], None], work: Callable[P, T], *args: P.args, **options: P.kwargs
    ) -> T:
        """`undo`: what is done to the outcome when it came too late for the caller."""
        loop = asyncio.get_running_loop()
        doing = loop.run_in_executor(self._pool, lambda: work(*args, **options))
        try:
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            await wait_out(doing)
            if not doing.cancelled() and doing.exception() is None:
                await wait_out(loop.run_in_executor(self._pool, undo, doing.result()))
            raise

    def close(self) -> None:
        self._pool.shutdown(wait=False)


def _nothing(_: object) -> None:
    pass


async def stoppable(work: Coroutine[Any, Any, T], stop: threading.Event) -> T:
    """Work on a thread that heeds `stop`, which is set when this is cancelled."""
    working = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.gather(working, return_exceptions=True)
        raise


async def thread_to_its_end(work: Callable[P, T], *values: P.args, **named: P.kwargs) -> T:
    """For what writes: when this is cancelled, however often, it still waits. Whoever is cancelled takes away what the
    thread works with, and says what became of it."""
    loop = asyncio.get_running_loop()
    working = loop.run_in_executor(None, functools.partial(work, *values, **named))  # no task: only we could cancel it
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait({working})
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        working.exception()  # else it would be told as one that nobody has looked at
        raise cancelled
    return working.result()


async def together(*work: Coroutine[Any, Any, None]) -> None:
    """All of it, each beside the others; the first failure ends the rest."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Also when cancelled meanwhile, which is then heard afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await wait_out(task)
        raise


async def wait_out(*doing: asyncio.Future[Any]) -> None:
    """Until all of it is done, however often the caller is cancelled: files that a thread works on must stay."""
    while left := [each for each in doing if not each.done()]:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(left)
