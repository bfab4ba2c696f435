"""What all sessions share: the shelf, the threads that work on it, and who is to hear of new versions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, ParamSpec, TypeVar

from headwater.errors import ReplicationFailed
from headwater.ports.clock import Clock
from headwater.replication.host.announcing import Announcer
from headwater.replication.host.figures import Figures
from headwater.replication.host.gathering import Gatherings
from headwater.replication.host.room import Room
from headwater.replication.host.shelf import Shelf
from headwater.replication.tools import End

T = TypeVar("T")
P = ParamSpec("P")


class Threads:
    """Where what blocks is done. A thread cannot be called back, so whoever is cancelled waits for the one it sent."""

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


class Hosting(NamedTuple):
    shelf: Shelf
    clock: Clock
    threads: Threads
    announcer: Announcer
    gatherings: Gatherings
    figures: Figures
    room: Room
    bytes_max: int
    """Of one database."""


def end_is_well(end: End) -> None:
    """Raises what our end complained about, as soon as it does: it prints whatever the client lets it, without end."""
    if complaint := end.complaint():
        raise ReplicationFailed(complaint)


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
