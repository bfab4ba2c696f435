"""A tree of classes of the test's own, and logs to publish them to."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served import ServedFile

import headwater
from headwater import Log
from headwater.typed import Event, Registry


@pytest.fixture
def base() -> type[Event]:
    """A base whose classes are known to nobody else."""

    class Base(Event, registry=Registry()):
        pass

    return Base


def _open(place: str, directory: Path) -> tuple[Log, Callable[[], None]]:
    if place == "memory":
        return headwater.open("memory:", housekeeping=None), lambda: None
    path = directory / "log.db"
    options: dict[str, Any] = {"housekeeping": None, "durability": "relaxed"}
    if place == "sqlite":
        return headwater.open(path, **options), lambda: None
    served = ServedFile(path, **options)
    return served.open(), served.stop


def _opened(request: pytest.FixtureRequest, directory: Path) -> Iterator[Log]:
    log, stop = _open(request.param, directory)
    yield log
    log.close()
    stop()


@pytest.fixture(params=["memory", "sqlite"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Log]:
    yield from _opened(request, tmp_path)


@pytest.fixture(params=["memory", "sqlite", "served"])
def any_log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Log]:
    yield from _opened(request, tmp_path)
