"""Replication by hand: real `sqlite3_rsync` ends and the `websockets` library, and no line of our own client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

import apsw
import apsw.sqlite_extra
from child_processes import children_of
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from headwater.ports.clock import Clock
from headwater.replication.host.endpoint import ReplicaEndpoint
from headwater.replication.host.session import IDLE_S
from headwater.replication.host.store import ReplicaStore
from headwater.replication.host.versions import VersionRetention
from headwater.replication.names import ReplicaName
from headwater.server.auth import Scopes, TokenFile
from headwater.server.server import Server
from headwater.settings import load_settings
from headwater.wiring import open_core

PATIENCE_S = 20.0
NAME = "ns/app.db"
REPLICA = ReplicaName.parse(NAME)
ALL_REPLICAS = Scopes(publish=("replica.>",), read=("replica.>",))
FRAME_BYTES = 256 * 1024
Json = Any


class Hosted:
    """A server, a log, and replicas."""

    def __init__(
        self,
        directory: Path,
        *,
        bytes_max: int = 1 << 30,
        pushes_max: int = 4,
        checkpoint: Any = None,
        tokens: TokenFile | None = None,
        shutdown_timeout: float = 10.0,
        idle_s: float = IDLE_S,
    ) -> None:
        self.directory = directory
        self.replicas = directory / "replicas"
        log = directory / "log.db"
        flags: dict[str, Any] = {
            "server.log": str(log),
            "server.port": 0,
            "server.shutdown_timeout": shutdown_timeout,
            "log.durability": "relaxed",
        }
        if tokens is not None:
            flags["server.tokens"] = str(tokens.path)
        settings = load_settings(config=None, profile=None, flags=flags, environment={}, directory=str(directory))

        def make_store(clock: Clock) -> ReplicaStore:
            more = {} if checkpoint is None else {"checkpoint": checkpoint}
            return ReplicaStore(self.replicas, VersionRetention(), clock, bytes_max=bytes_max, **more)

        self.endpoint = ReplicaEndpoint(make_store, bytes_max=bytes_max, pushes_max=pushes_max, idle_s=idle_s)
        self.server = Server(lambda: open_core(log), settings, mounts=[self.endpoint])

    async def __aenter__(self) -> Self:
        await self.server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.server.stop()

    @property
    def store(self) -> ReplicaStore:
        assert self.endpoint._context is not None
        return self.endpoint._context.store

    def files(self) -> list[str]:
        """What lies in the data directory of replicas, but for the catalogue."""
        return sorted(path.name for path in self.replicas.glob("*/**/*") if path.is_file())

    def messages(self) -> list[tuple[str, str, Json]]:
        """Of the log: topic, id, data."""
        # Not with the other SQLite of this process, which would take the locks of the server away.
        with contextlib.closing(apsw.Connection(str(self.directory / "log.db"))) as connection:
            rows = connection.execute("SELECT topic, id, data FROM messages ORDER BY seq").fetchall()
        return [(str(topic), str(id), json.loads(str(data))) for topic, id, data in rows]

    @contextlib.asynccontextmanager
    async def session(self, path: str, *, key: str | None = None, client: str = "hand:1") -> AsyncIterator[Session]:
        headers = {"X-ClientID": client} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        url = f"{self.server.url}/sapi/{path}"
        async with connect(url, additional_headers=headers, compression=None, proxy=None) as socket:
            yield Session(socket)

    async def refused(self, path: str, key: str | None = None) -> int:
        """The status that a WebSocket is refused with."""
        try:
            async with self.session(path, key=key):
                return 101
        except InvalidStatus as exc:
            return int(exc.response.status_code)

    async def push(self, database: Path, name: str = NAME, **words: Any) -> Json:
        """The last word of the server: a CONFIG, or the text of an ABORT."""
        key, client = words.pop("key", None), words.pop("client", "hand:1")
        async with self.session(f"push/{name}", key=key, client=client) as session:
            last = await session.push(database, **words)
            await session.closed()  # only then its slot is free again
            return last

    async def pull(self, database: Path, name: str = NAME, *, key: str | None = None) -> Json:
        """What the server says of the version; the file is the same then."""
        async with self.session(f"pull/{name}", key=key) as session:
            return await session.pull(database)


StartHost = Callable[..., Hosted]


class Session:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def send(self, what: str | bytes | dict[str, Json]) -> None:
        await self.socket.send(f"CONFIG={json.dumps(what)}" if isinstance(what, dict) else what)

    async def recv(self) -> str | bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self.socket.recv()

    async def text(self) -> str:
        """The next text, whatever frames come before it."""
        while isinstance(frame := await self.recv(), bytes):
            pass
        return frame

    async def config(self) -> Json:
        text = await self.text()
        assert text.startswith("CONFIG="), text
        return json.loads(text.removeprefix("CONFIG="))

    async def closed(self) -> int:
        """The code that the server closes with; what it says before is not heard."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.recv()
        assert self.socket.close_code is not None
        return self.socket.close_code

    def vanish(self) -> None:
        self.socket.transport.abort()

    # --- pushing ------------------------------------------------------------------------------------------------

    async def begin(self, database: Path, *, message: str | None = None, **words: Any) -> Json:
        if message is not None:
            await self.send(f"MESSAGE={message}")
        await self.send({**announcement(database), **words})
        text = await self.text()
        return json.loads(text.removeprefix("CONFIG=")) if text.startswith("CONFIG=") else text

    async def push(self, database: Path, **words: Any) -> Json:
        begun = await self.begin(database, **words)
        if isinstance(begun, str):
            return begun
        sent, received = await self.move("--origin", str(database), "x")
        return await self.complete(sent=sent, received=received)

    async def complete(self, **words: Any) -> Json:
        await self.send({"complete": True, "dbhash": None, **words})
        text = await self.text()
        return json.loads(text.removeprefix("CONFIG=")) if text.startswith("CONFIG=") else text

    async def move(self, *arguments: str, in_vain: bool = False) -> tuple[int, int]:
        """Run an end of `sqlite3_rsync` here, until it has gone. `in_vain`: and the server has sent the reason."""
        end = await asyncio.create_subprocess_exec(
            apsw.sqlite_extra.path("sqlite3_rsync"),
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert end.stdin is not None
        assert end.stdout is not None
        assert end.stderr is not None
        hearing = asyncio.create_task(self._hear(end))
        sent, tail = 0, b""
        try:
            while data := await end.stdout.read(FRAME_BYTES):
                with contextlib.suppress(ConnectionClosed):
                    await self.send(data)
                sent += len(data)
                tail = (tail + data[-6:])[-6:]
                if arguments[0] == "--origin" and tail[:1] + tail[-1:] == b"\x45\x42":  # it has sent all
                    end.stdin.close()
            code, problem = await end.wait(), await end.stderr.read()
            if in_vain:
                async with asyncio.timeout(PATIENCE_S):
                    await hearing
            else:
                assert (code, problem, self.aborted) == (0, b"", "")
        finally:
            if end.returncode is None:
                end.kill()
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
        return sent, self._heard

    async def _hear(self, end: asyncio.subprocess.Process) -> None:
        self._heard = 0
        assert end.stdin is not None
        while isinstance(frame := await self.socket.recv(), bytes):
            self._heard += len(frame)
            if not end.stdin.is_closing():
                end.stdin.write(frame)
        self.aborted = frame
        with contextlib.suppress(ProcessLookupError):
            end.kill()

    _heard = 0
    aborted = ""
    """What the server sent in the middle of the pages."""

    # --- pulling ------------------------------------------------------------------------------------------------

    async def pull(self, database: Path) -> Json:
        await self.send({})
        offer = await self.config()
        await self.move("--replica", "x", str(database))
        await self.send({"complete": True})
        assert await self.closed() == 1000
        return offer


def announcement(database: Path) -> dict[str, Json]:
    page_size, pages = shape(database)
    return {"base": 0, "pushID": "push-1", "lastPushID": None, "pageSize": page_size, "pages": pages, "dry": False}


def shape(database: Path) -> tuple[int, int]:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        [(page_size,)], [(pages,)] = connection.execute("PRAGMA page_size"), connection.execute("PRAGMA page_count")
    return page_size, pages


def make_database(path: Path, rows: int = 500, *, page_size: int = 4096, wal: bool = False) -> Path:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size = {page_size}")
        if wal:
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, text TEXT)")
        write(path, rows, connection)
    return path


def write(path: Path, rows: int, connection: sqlite3.Connection | None = None, text: str = "some text ") -> None:
    opened = connection or sqlite3.connect(path, isolation_level=None)
    opened.execute("BEGIN")
    opened.executemany("INSERT INTO t (text) VALUES (?)", ((f"{text * 10}{n}",) for n in range(rows)))
    opened.execute("COMMIT")
    if connection is None:
        opened.close()


def rows_of(path: Path) -> list[tuple[int, str]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return connection.execute("SELECT * FROM t").fetchall()


def children() -> int:
    """`sqlite3_rsync` processes that this one has started and that were not waited for."""
    return len(children_of(os.getpid(), "sqlite3_rsync"))


async def until(condition: Any, what: str = "it") -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)
