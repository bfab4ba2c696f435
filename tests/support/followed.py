"""Databases to push, and subscriptions of replicas whose outcomes a test can wait for."""

import asyncio
import queue
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path
from typing import Self

import apsw

from headwater.ports.clock import SystemClock
from headwater.replication.host.store import ReplicaStore
from headwater.replication.host.versions import VersionRetention
from headwater.replication.outcome import Outcome
from headwater.replication.subscription import PullSubscription, PushSubscription
from headwater.replication.timers import Timers

PATIENCE_S = 30.0
SECOND = Timers.of("1s")
QUIET_MS = 200


def _quick_timers() -> Timers:
    """Shorter than a user may choose: most tests prove what is pushed, and only those with SECOND when."""
    timers = Timers.of("1s")
    for name in ("wait_idle_ms", "min_interval_ms"):
        object.__setattr__(timers, name, QUIET_MS)
    return timers


IDLE = _quick_timers()


def store_of(server_directory: Path) -> ReplicaStore:
    """The replicas of a server, as a command beside it sees them."""
    return ReplicaStore(server_directory / "log.db-replicas", VersionRetention(), SystemClock()).open()


class Database:
    def __init__(self, path: Path, mode: str = "wal") -> None:
        self.path = path
        with closing(apsw.Connection(str(path))) as connection:
            connection.execute(f"PRAGMA journal_mode = {mode}")
            connection.execute("CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT)")

    @classmethod
    def at(cls, path: Path) -> Self:
        """One that is there already."""
        found = cls.__new__(cls)
        found.path = path
        return found

    def write(self, name: str = "x") -> None:
        with closing(apsw.Connection(str(self.path))) as connection:
            connection.set_busy_timeout(10_000)
            connection.execute("INSERT INTO item (name) VALUES (?)", (name,))


def names_in(path: Path) -> list[str]:
    with closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)) as connection:
        connection.set_busy_timeout(10_000)
        return [name for (name,) in connection.execute("SELECT name FROM item ORDER BY id")]


class Outcomes(queue.Queue[Outcome]):
    """Those of `headwater.follow`, which come from a thread."""

    def reached(self, version: int) -> Outcome:
        """As `Running.reached`."""
        while ((outcome := self.get(timeout=PATIENCE_S)).version or 0) < version:
            pass
        return outcome


class Running:
    """A subscription at work."""

    def __init__(self, subscription: PushSubscription | PullSubscription, outcomes: asyncio.Queue[Outcome]) -> None:
        self.subscription = subscription
        self.task = asyncio.create_task(subscription.run())
        self._outcomes = outcomes
        self.seen: list[Outcome] = []

    async def next(self) -> Outcome:
        """The next outcome; the error of the subscription if that ends instead."""
        getting = asyncio.create_task(self._outcomes.get())
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait({getting, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if not getting.done():
            getting.cancel()
            await self.task
            raise AssertionError("the subscription ended")
        self.seen.append(getting.result())
        return getting.result()

    async def reached(self, version: int) -> Outcome:
        """The first outcome of this version or a later one.

        A watcher may take a checkpoint while it lets go of the database for a write: that push finds nothing new, and
        is an outcome too.
        """
        while ((outcome := await self.next()).version or 0) < version:
            pass
        return outcome

    async def stop(self) -> None:
        self.subscription.stop()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(self.task, return_exceptions=True)


Follow = Callable[..., AbstractAsyncContextManager[Running]]
