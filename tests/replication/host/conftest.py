"""Databases, and a data directory that takes them."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headwater import ManualClock
from headwater.replication.host.catalogue import Accepted
from headwater.replication.host.store import ReplicaStore, Scratch
from headwater.replication.host.versions import VersionRetention
from headwater.replication.names import ReplicaName

Edit = Callable[[sqlite3.Connection], object]


class Pusher:
    """Pushes by hand: what a client's pages would do to the scratch file, plain SQL does here."""

    name = ReplicaName("shop", "app.db")

    def write(self, path: str, edit: Edit, page_size: int = 512) -> None:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute(f"PRAGMA page_size = {page_size}")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("BEGIN")
            connection.execute("CREATE TABLE IF NOT EXISTS t (id INTEGER PRIMARY KEY, body)")
            edit(connection)
            connection.execute("COMMIT")

    def begin(self, store: ReplicaStore, base: object = "latest", **options: object) -> Scratch:
        given = {"push_id": uuid.uuid4().hex, "client": "laptop:1", "page_size": 512} | options
        return store.begin_push(self.name, base=base, **given)  # type: ignore[arg-type]

    def push(self, store: ReplicaStore, number: int, rows: int = 20, **facts: object) -> Accepted:
        """A version in which row `number` says so; the first has some rows besides."""
        scratch = self.begin(store)
        self.write(scratch.path, self.edit(number, rows))
        return store.accept_push(scratch, **facts)  # type: ignore[arg-type]

    def edit(self, number: int, rows: int = 20) -> Edit:
        def apply(connection: sqlite3.Connection) -> None:
            (there,) = connection.execute("SELECT count(*) FROM t").fetchone()
            for row in range(there, rows):
                connection.execute("INSERT INTO t VALUES (?, randomblob(300))", (row,))
            connection.execute("INSERT OR REPLACE INTO t VALUES (?, ?)", (number % rows, f"version {number}" * 20))

        return apply

    def bytes_of(self, store: ReplicaStore, number: int) -> bytes:
        with store.open_version(self.name, number) as made:
            return Path(made.path).read_bytes()

    def files(self, store_or_directory: ReplicaStore | Path) -> list[str]:
        """All that lies in the directories of replicas."""
        directory = Path(getattr(store_or_directory, "directory", store_or_directory))
        homes = [each for each in directory.iterdir() if each.is_dir()]
        return sorted(file.name for home in homes for file in home.iterdir())


@pytest.fixture
def pusher() -> Pusher:
    return Pusher()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "replicas"


@pytest.fixture
def open_store(directory: Path, clock: ManualClock) -> Iterator[Callable[..., ReplicaStore]]:
    """To be served, unless given; closed at the end of the test."""
    opened: list[ReplicaStore] = []

    def call(*, serve: bool = True, policy: VersionRetention | None = None, **options: object) -> ReplicaStore:
        store = ReplicaStore(directory, policy or VersionRetention(), clock, **options).open(serve=serve)  # type: ignore[arg-type]
        opened.append(store)
        return store

    yield call
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[..., ReplicaStore]) -> ReplicaStore:
    return open_store()


@pytest.fixture
def in_a_process() -> Callable[[Callable[[], object]], int]:
    """Run something in a child that shares nothing but files; returns how it ended: 9 means it died on the way."""

    def call(work: Callable[[], object]) -> int:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                work()
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    return call
