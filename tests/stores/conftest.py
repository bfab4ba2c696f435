"""One contract, every store: a test that takes `store` runs over each of them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest
from postgres_server import PostgresServer

from headwater.ports.store import Store
from headwater.stores.postgres import PostgresStore
from headwater.stores.sql import OWN_TABLES
from headwater.stores.sqlite import MemoryStore, SqliteStore

OPENERS: dict[str, Callable[[pytest.FixtureRequest], Store]] = {
    "memory": lambda request: MemoryStore(),
    "sqlite": lambda request: SqliteStore(request.getfixturevalue("tmp_path") / "log.db"),
    "postgres": lambda request: PostgresStore(request.getfixturevalue("postgres_schema_url")),
}
EMPTY = "".join(f"DELETE FROM {table}; " for table in sorted(OWN_TABLES - {"headwater"}))

StoresSideBySide = Callable[[], AbstractContextManager[list[Store]]]


@pytest.fixture(params=OPENERS)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    opened = OPENERS[request.param](request)
    yield opened
    opened.close()


@pytest.fixture(params=[kind for kind in OPENERS if kind != "memory"])
def concurrent_store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """A store that reads while a write is open; in memory they take turns."""
    opened = OPENERS[request.param](request)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def side_by_side(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoresSideBySide]:
    """One new store of each kind, as often as a property needs them. That of PostgreSQL is emptied instead: to make one
    takes fifty times as long."""
    url = postgres.new_database()
    in_database = PostgresStore(url)
    emptying = psycopg.connect(url, autocommit=True, options="-c search_path=headwater")
    directory = tmp_path_factory.mktemp("side-by-side")

    @contextmanager
    def open_all() -> Iterator[list[Store]]:
        emptying.execute(f"{EMPTY} UPDATE headwater SET value = 0 WHERE name IN ('counted_to', 'last_seq')")
        path = directory / "log.db"
        with ExitStack() as closing:
            in_file = SqliteStore(path)
            closing.callback(_remove, path)
            closing.callback(in_file.close)
            yield [in_file, in_database]

    yield open_all
    emptying.close()
    in_database.close()
    postgres.drop_database(url)


def _remove(path: Path) -> None:
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()
