"""One contract, every store: a test that takes `store` runs over each of them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headwater.ports.store import Store
from headwater.stores.memory import MemoryStore
from headwater.stores.sqlite import SqliteStore

OPENERS: dict[str, Callable[[Path], Store]] = {
    "memory": lambda directory: MemoryStore(),
    "sqlite": lambda directory: SqliteStore(directory / "log.db"),
}


@pytest.fixture(params=OPENERS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened = OPENERS[request.param](tmp_path)
    yield opened
    opened.close()
