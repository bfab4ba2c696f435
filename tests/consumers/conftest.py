"""Places where a log lives, and the two APIs. A test that is a coroutine function runs in an event loop of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode does not

from consumer_bench import Api, Place, place_of


@pytest.fixture(params=["sqlite", "postgres", "ws"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Every store, and a server."""
    yield from _made(request, tmp_path)


@pytest.fixture(params=["sqlite", "postgres", "ws"])
def lasting_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Where a log can be opened twice, at the same time or one after the other."""
    yield from _made(request, tmp_path)


@pytest.fixture(params=["sqlite", "ws"])
def near_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """For what takes long and does not depend on the kind of database."""
    yield from _made(request, tmp_path)


def _made(request: pytest.FixtureRequest, directory: Path) -> Iterator[Place]:
    database = request.getfixturevalue("postgres_schema_url") if request.param == "postgres" else None
    with place_of(request.param, directory, database) as place:
        yield place


@pytest.fixture(params=["sync", "async"])
def api(request: pytest.FixtureRequest) -> Iterator[Api]:
    made = Api(request.param)
    yield made
    made.close()
