"""A tree of classes of the test's own, and logs to publish them to."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from served import ServedFile

import headwater
from headwater import Log
from headwater.typed import Event, Registry


@pytest.fixture
def base() -> type[Event]:
    """A base with a registry of its own."""

    class Base(Event, registry=Registry()):
        pass

    return Base


@pytest.fixture
def log() -> Iterator[Log]:
    with headwater.open("memory:", maintenance_interval=None) as log:
        yield log


@pytest.fixture(params=["local", "served"])
def any_log(request: pytest.FixtureRequest, log: Log, tmp_path: Path) -> Iterator[Log]:
    """Typed messages use the verbs of a log; the contract of stores proves those for each store."""
    if request.param == "local":
        yield log
        return
    served = ServedFile(tmp_path / "log.db", maintenance_interval=None, durability="relaxed")
    with served.open() as remote:
        yield remote
    served.stop()
