"""A real server of replicas, databases to sync with it, and a server that misbehaves."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import apsw
import pytest
from child_processes import children_of
from served import RunningServer
from websockets.asyncio.server import ServerConnection, serve

from headwater.replication.names import Remote, place_of
from headwater.replication.outcome import Outcome, TransferOptions
from headwater.replication.pull import pull
from headwater.replication.push import push
from headwater.replication.sync import copy

CLIENT = "here:1"


class Database:
    def __init__(self, path: Path, *, mode: str = "wal", page_size: int = 4096, rows: int = 1000) -> None:
        self.path = str(path)
        table = "create table t(id integer primary key, note text)"  # with the first page, the page size stays
        self.run(f"pragma page_size = {page_size}; pragma journal_mode = {mode}; {table}")
        counted = "with recursive n(i) as (select 1 union all select i + 1 from n where i < ?)"
        self.run(f"{counted} insert into t select i, printf('%0200d', i) from n", rows)

    @property
    def beside(self) -> list[str]:
        """What SQLite has left beside it."""
        name = os.path.basename(self.path)
        return [end for end in ("-wal", "-shm", "-journal") if name + end in os.listdir(os.path.dirname(self.path))]

    def run(self, sql: str, *values: object) -> list[Any]:
        with closing(apsw.Connection(self.path)) as connection:
            connection.set_busy_timeout(10_000)
            return connection.execute(sql, values).fetchall()

    def write(self, note: str = "written") -> None:
        self.run("update t set note = ? where id = 7", note)


class Client:
    """The three verbs, run to their end; a path is of this test's directory."""

    def __init__(self, directory: Path, url: str) -> None:
        self._directory = directory
        self.url = url

    def remote(self, name: str = "ns/app.db") -> Remote:
        place = place_of(f"{self.url}/{name}")
        assert isinstance(place, Remote)
        return place

    def push(self, database: Database, name: str = "ns/app.db", **options: Any) -> Outcome:
        progress = options.pop("progress", None)
        return asyncio.run(
            push(database.path, self.remote(name), TransferOptions(client_id=CLIENT, **options), progress)
        )

    def pull(self, name: str, path: str, **options: Any) -> Outcome:
        target = str(self._directory / path)
        return asyncio.run(pull(self.remote(name), target, TransferOptions(client_id=CLIENT, **options)))

    def copy(self, source: str, target: str, **options: Any) -> Outcome:
        places = (str(self._directory / source), str(self._directory / target))
        return asyncio.run(copy(*places, **options))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Database]:
    return lambda name="app.db", **options: Database(tmp_path / name, **options)


@pytest.fixture
def client(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    server = RunningServer(tmp_path_factory.mktemp("server") / "log.db")
    yield Client(tmp_path, server.url)
    server.stop()


@pytest.fixture
def client_without_server(tmp_path: Path) -> Client:
    return Client(tmp_path, "")


Answer = Callable[[ServerConnection], Awaitable[None]]


@pytest.fixture
def misbehaving() -> Callable[[Answer], Any]:
    """A server that does with each session what the test says; gives the remote of a replica there."""

    @asynccontextmanager
    async def start(answer: Answer, **options: Any) -> AsyncIterator[Remote]:
        async with serve(answer, "127.0.0.1", 0, compression=None, max_size=None, **options) as server:
            (port,) = {socket.getsockname()[1] for socket in server.sockets}
            place = place_of(f"ws://127.0.0.1:{port}/ns/app.db")
            assert isinstance(place, Remote)
            yield place

    return start


@pytest.fixture
def children() -> Callable[[], list[str]]:
    """Which of SQLite's tools, and `cp`, run as children of this process. The servers of other tests are its, too."""

    def running() -> list[str]:
        found = [child.name for child in children_of(os.getpid())]
        return [name for name in found if name.startswith("sqlite3_") or name in ("cp", "dd")]

    return running
