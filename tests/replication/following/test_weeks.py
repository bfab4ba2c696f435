"""What runs for weeks: many pushes, pulls and lost connections in a row leave nothing behind."""

import asyncio
import contextlib
import gc
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from child_processes import children_of
from fault_proxy import FaultProxy
from followed import PATIENCE_S, Database, Follow, Running
from served import RunningServer

from headwater.delivery.retry import RetryPolicy
from headwater.replication import schedule, subscription, timers
from headwater.replication.timers import Timers

ROUNDS = [pytest.param(15), pytest.param(400, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
WARM_UP = 5  # turns that fill pools and caches
POOLED_MORE_MAX = 10  # threads, and the log's readers: a pool grows to its size, and not beyond
OBJECTS_MORE_MAX = 8  # of one class: what the server lets go of a few seconds later; a leak has one for each round
LOOK_S = 0.02
OURS = ("headwater", "websockets")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Timers:
    """No pauses worth the name, and no log: pytest would keep all of it."""
    monkeypatch.setattr(logging.getLogger("headwater"), "disabled", True)
    monkeypatch.setattr(timers, "WAIT_IDLE_MS_MIN", 1)
    for module in (subscription, schedule):
        monkeypatch.setattr(module, "BACKOFF", RetryPolicy(base_ms=10, factor=1.0, cap_ms=10))
    return Timers(1, 1, 1_000)


def held(tmp_path: Path) -> Counter[str]:
    gc.collect()
    found = Counter(_kind(type(each)) for each in gc.get_objects())
    del found[""]
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it has just been closed, as that of this directory is
            place = os.readlink(descriptor)
            found[place if place.startswith("/") else place.partition(":[")[0]] += 1
    found["threads"] = threading.active_count()
    found["children"] = len(children_of(os.getpid()))
    found["tasks"] = len(asyncio.all_tasks())
    found["files"] = sum(1 for name in os.listdir(tmp_path) if name != "server")
    return found


def _kind(of: type) -> str:
    """Of a class of ours; all others come and go with caches and with other threads."""
    module = of.__module__
    return f"{module}.{of.__qualname__}" if isinstance(module, str) and module.startswith(OURS) else ""


async def steady(tmp_path: Path, rounds: int, turn: Callable[[int], Awaitable[None]]) -> None:
    """After the first few turns, the others add nothing."""
    most: Counter[str] = Counter()
    for number in range(rounds + WARM_UP):
        await turn(number)
        if number < WARM_UP:
            most |= held(tmp_path)  # a connection may be down just then
    log = tmp_path / "server" / "log.db"
    for pooled in ("threads", f"{log}", f"{log}-wal"):
        most[pooled] += POOLED_MORE_MAX
    until_s = time.monotonic() + PATIENCE_S
    while more := _too_many(held(tmp_path) - most):  # what the last turn had is still on its way out
        assert time.monotonic() < until_s, more
        await asyncio.sleep(LOOK_S)


def _too_many(more: Counter[str]) -> dict[str, int]:
    return {kind: count for kind, count in more.items() if count > (OBJECTS_MORE_MAX if kind.startswith(OURS) else 0)}


async def new(pushing: Running) -> int:
    """The number of the next new version."""
    while not (outcome := await pushing.next()).is_new:
        pass
    return outcome.version or 0


@pytest.mark.parametrize("rounds", ROUNDS)
async def test_pushes_and_pulls_leave_nothing(
    server: RunningServer, database: Database, follow: Follow, tmp_path: Path, at_once: Timers, rounds: int
) -> None:
    remote = f"{server.url}/shop/app.db"
    async with follow(database.path, remote, timers=at_once, coordinate=True) as pushing:
        await pushing.next()
        async with follow(remote, tmp_path / "copy.db") as pulling:
            await pulling.next()

            async def turn(number: int) -> None:
                database.write(str(number))
                await pulling.reached(await new(pushing))

            await steady(tmp_path, rounds, turn)


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
                await pulling.reached(await new(pushing))

            await steady(tmp_path, rounds, turn)

    with FaultProxy("127.0.0.1", int(server.url.rpartition(":")[2])) as proxy:
        asyncio.run(session(proxy))
