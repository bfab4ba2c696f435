"""A server of replicas, a database to push, and subscriptions at work."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from followed import IDLE, Database, Follow, Running
from served import RunningServer

from headwater.replication.names import place_of
from headwater.replication.outcome import Outcome
from headwater.replication.sync import Keys, Sync
from headwater.replication.timers import Timers


@pytest.fixture
def follow() -> Follow:
    @asynccontextmanager
    async def begin(
        source: str | Path,
        target: str | Path,
        *,
        timers: Timers = IDLE,
        coordinate: bool = False,
        push_on_exit: bool = False,
        **options: Any,
    ) -> AsyncIterator[Running]:
        outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        keys = Keys(options.pop("push_key", None), options.pop("pull_key", None))
        work = Sync(place_of(str(source)), place_of(str(target)), keys=keys, **options)
        running = Running(
            work.follow(
                timers,
                coordinate=coordinate,
                push_on_exit=push_on_exit,
                on_outcome=outcomes.put_nowait,
            ),
            outcomes,
        )
        try:
            yield running
        finally:
            await running.stop()

    return begin


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    (tmp_path / "server").mkdir()
    running = RunningServer(tmp_path / "server" / "log.db")
    yield running
    running.stop()


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "app.db")
