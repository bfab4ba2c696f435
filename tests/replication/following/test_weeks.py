"""What runs for weeks: many pushes, pulls and lost connections in a row leave nothing behind."""

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fault_proxy import FaultProxy
from followed import Database, Follow, Running
from served import RunningServer

from headwater.delivery.retry import RetryPolicy
from headwater.replication import line, pull_subscription, schedule, spans
from headwater.replication.spans import Timers

ROUNDS = [pytest.param(15), pytest.param(400, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
WARM_UP = 5  # turns that fill pools and caches
THREADS_MORE_MAX = 10  # a pool grows to its size, and not beyond
OBJECTS_MORE_MAX = 3_000  # of hundreds of thousands: caches, and what the server keeps of the versions it has


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Timers:
    """No pauses worth the name, and no log: pytest would keep all of it."""
    monkeypatch.setattr(logging.getLogger("headwater"), "disabled", True)
    monkeypatch.setattr(spans, "WAIT_IDLE_MS_MIN", 1)
    for module in (pull_subscription, line, schedule):
        monkeypatch.setattr(module, "BACKOFF", RetryPolicy(base_ms=10, factor=1.0, cap_ms=10))
    return Timers(1, 1, 1_000)


def held(tmp_path: Path) -> dict[str, int]:
    gc.collect()
    children = [
        child
        for task in os.listdir("/proc/self/task")
        for child in Path(f"/proc/self/task/{task}/children").read_text().split()
    ]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "children": len(children),
        "tasks": len(asyncio.all_tasks()),
        "files": sum(1 for name in os.listdir(tmp_path) if name != "server"),
        "objects": len(gc.get_objects()),
    }


async def steady(tmp_path: Path, rounds: int, turn: Callable[[int], Awaitable[None]]) -> None:
    """After the first few turns, the others add nothing."""
    before: dict[str, int] = {}
    for number in range(rounds + WARM_UP):
        if number == WARM_UP:
            before = held(tmp_path)
        await turn(number)
    for _ in range(100):  # threads and sockets of the last turn are still on their way out
        after = held(tmp_path)
        if all(after[kind] <= before[kind] for kind in before if kind not in ("objects", "threads")):
            break
        await asyncio.sleep(0.02)
    grown = {kind: after[kind] - before[kind] for kind in before}
    assert grown.pop("objects") <= OBJECTS_MORE_MAX
    assert grown.pop("threads") <= THREADS_MORE_MAX
    assert max(grown.values()) <= 0, grown


async def up_to(pulling: Running, version: int) -> None:
    while ((await pulling.next()).version or 0) < version:
        pass


async def new(pushing: Running) -> int:
    """The number of the next new version."""
    while not (outcome := await pushing.next()).is_new:
        pass
    return outcome.version or 0


@pytest.mark.parametrize("rounds", ROUNDS)
def test_pushes_and_pulls_leave_nothing(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path, at_once: Timers, rounds: int
) -> None:
    remote = f"{server.url}/shop/app.db"

    async def session() -> None:
        async with follow(database.path, remote, timers=at_once, coordinate=True) as pushing:
            await pushing.next()
            async with follow(remote, tmp_path / "copy.db") as pulling:
                await pulling.next()

                async def turn(number: int) -> None:
                    database.write(str(number))
                    await up_to(pulling, await new(pushing))

                await steady(tmp_path, rounds, turn)

    asyncio.run(session())


@pytest.mark.parametrize("rounds", ROUNDS)
def test_lost_connections_leave_nothing(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path, at_once: Timers, rounds: int
) -> None:
    """Also those in the middle of a push; it is made again."""

    async def session(proxy: FaultProxy) -> None:
        remote = f"ws://127.0.0.1:{proxy.port}/shop/app.db"
        async with (
            follow(database.path, remote, timers=at_once, coordinate=True) as pushing,
            follow(remote, tmp_path / "copy.db") as pulling,
        ):
            await pushing.next()

            async def turn(number: int) -> None:
                database.write(str(number))
                await asyncio.sleep(number % 7 / 200)  # somewhere on its way
                proxy.refuse()
                proxy.reset()
                proxy.accept()
                database.write(f"{number} again")
                await up_to(pulling, await new(pushing))

            await steady(tmp_path, rounds, turn)

    with FaultProxy("127.0.0.1", int(server.url.rpartition(":")[2])) as proxy:
        asyncio.run(session(proxy))
