"""Work on threads and in tasks. A thread cannot be cancelled, so a cancelled caller waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Threads:
    """A pool for blocking work; a cancelled caller waits for its end."""

    def __init__(self, most: int) -> None:
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="headwater-replicas")

    async def do(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        return await _to_its_end(self._run(work, *args, **options))

    async def do_or_undo(
        self, undo: Callable[[T], None], work: Callable[P, T], *args: P.args, **options: P.kwargs
    ) -> T:
        """`undo` is called with the result if the caller was cancelled meanwhile."""
        doing = self._run(work, *args, **options)
        try:
            return await _to_its_end(doing)
        except asyncio.CancelledError:
            if not doing.cancelled() and doing.exception() is None:
                await wait_out(self._run(undo, doing.result()))
            raise

    def _run(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(work, *args, **options))

    def close(self) -> None:
        self._pool.shutdown(wait=False)


async def stoppable(work: Callable[[threading.Event], T]) -> T:
    """Run on a thread work that heeds an event, which is set when this is cancelled."""
    stop = threading.Event()
    working = asyncio.ensure_future(asyncio.to_thread(work, stop))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.gather(working, return_exceptions=True)
        raise


async def thread_to_its_end(work: Callable[P, T], *values: P.args, **named: P.kwargs) -> T:
    """Run work that writes on a thread: a cancelled caller waits for its end, because it then removes the files that
    the thread works with, and reports the outcome."""
    loop = asyncio.get_running_loop()
    return await _to_its_end(loop.run_in_executor(None, functools.partial(work, *values, **named)))


async def _to_its_end(working: asyncio.Future[T]) -> T:
    """The result of a thread, which is waited for however often the caller is cancelled. Not a task, which others could
    cancel."""
    try:
        await asyncio.wait({working})
    except asyncio.CancelledError:
        await wait_out(working)
        if not working.cancelled():
            working.exception()  # retrieved, so that asyncio does not log it
        raise
    return working.result()


@contextlib.asynccontextmanager
async def running(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """A task that has ended when the block ends: one that still runs then is cancelled."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def together(one: Coroutine[Any, Any, None], other: Coroutine[Any, Any, None]) -> None:
    """Run both concurrently; the first failure ends the other one."""
    async with running(one) as first, running(other) as second:
        done, _ = await asyncio.wait({first, second}, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()


async def wait_out(*doing: asyncio.Future[Any]) -> None:
    """Wait for all of them, however often the caller is cancelled: files that a thread works on must stay."""
    while left := [each for each in doing if not each.done()]:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(left)
