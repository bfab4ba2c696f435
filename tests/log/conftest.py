"""One contract, every log: a test that takes `log` or `open_log` runs over each store, and behind a server. Time is a
ManualClock."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import ServedFile

import headwater
from headwater import Log, ManualClock

# Under --import-mode=importlib a test cannot import its neighbour (`model`) unless the directory is on the path.
sys.path.insert(0, str(Path(__file__).parent))


PLACES = ("sqlite", "postgres", "served")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test over each place, or over the PLACES of its module; one that needs the engine in its own process
    (`engine_here`) not behind a server, and one of what is refused before the store is asked (`no_store_asked`) not in
    PostgreSQL, which would repeat it."""
    if "open_log" in metafunc.fixturenames:
        without = {"engine_here": "served", "no_store_asked": "postgres"}
        left_out = {place for fixture, place in without.items() if fixture in metafunc.fixturenames}
        places = [place for place in getattr(metafunc.module, "PLACES", PLACES) if place not in left_out]
        metafunc.parametrize("open_log", places, indirect=True)


@pytest.fixture
def engine_here() -> None:
    """For tests that reach into the engine in ways that a client cannot."""


@pytest.fixture
def no_store_asked() -> None:
    """For tests of what is refused before the store is asked."""


class LogOpener:
    """Opens the log, any number of times. Whatever is open at the end is closed. Durability is relaxed: the crash and
    power-loss suites prove what it is about, and fsyncs would take half the time here."""

    def __init__(self, url: str, clock: ManualClock, *, served: bool) -> None:
        self.url = url
        self.clock = clock
        self.options: dict[str, Any] = {"clock": clock, "maintenance_interval": None, "heartbeats": False}
        self.options["durability"] = "relaxed"
        self.is_served = served
        self._served = ServedFile(Path(url), **self.options) if served else None
        self._opened: list[Log] = []

    def __call__(self, **options: Any) -> Log:
        if self._served is not None:
            log = self._served.open(**options)
        else:
            log = headwater.open(self.url, **{**self.options, **options})
        self._opened.append(log)
        return log

    def close_all(self) -> None:
        for log in self._opened:
            log.close()
        if self._served is not None:
            self._served.stop()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def open_log(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[LogOpener]:
    is_database = request.param == "postgres"
    url = request.getfixturevalue("postgres_schema_url") if is_database else str(tmp_path / "log.db")
    opener = LogOpener(url, clock, served=request.param == "served")
    yield opener
    opener.close_all()


@pytest.fixture
def log(open_log: LogOpener) -> Log:
    return open_log()


@pytest.fixture(params=["exclusive", "shared"])
def mode(request: pytest.FixtureRequest) -> Any:
    return request.param
