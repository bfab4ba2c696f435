"""One contract, every log: a test that takes `log` or `open_log` runs over each store, and behind a server. Time is a
ManualClock."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from served import ServedFile

import headwater
from headwater import Log, ManualClock

# Under --import-mode=importlib a test cannot import its neighbour (`model`) unless the directory is on the path.
sys.path.insert(0, str(Path(__file__).parent))


class Place(NamedTuple):
    """Where a log lives, and what may be asked of it."""

    url_in: Callable[[Path], str]
    store_survives_close: bool


PLACES = {
    "memory": Place(lambda directory: "memory:", store_survives_close=False),
    "sqlite": Place(lambda directory: str(directory / "log.db"), store_survives_close=True),
    "postgres": Place(lambda directory: "", store_survives_close=True),  # the fixture knows where
    "served": Place(lambda directory: str(directory / "log.db"), store_survives_close=True),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test over each place; one that needs the engine in its own process (`engine_here`) not behind a server."""
    if "open_log" in metafunc.fixturenames:
        here = "engine_here" in metafunc.fixturenames
        metafunc.parametrize("open_log", [place for place in PLACES if not (here and place == "served")], indirect=True)


@pytest.fixture
def engine_here() -> None:
    """For tests that put their hands into the engine in ways that a client cannot."""


class LogOpener:
    """Opens the log; again and again, if its store survives. Whatever is open at the end is closed."""

    def __init__(self, url: str, clock: ManualClock, *, store_survives_close: bool, served: bool) -> None:
        self.url = url
        self.clock = clock
        self.store_survives_close = store_survives_close
        self.options: dict[str, Any] = {"clock": clock, "housekeeping": None, "heartbeats": False}
        # Behind a server the promise to survive power loss is the same code, and its fsyncs would take half the time.
        self._served = ServedFile(Path(url), **self.options, durability="relaxed") if served else None
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
    place = PLACES[request.param]
    is_database = request.param == "postgres"
    opener = LogOpener(
        request.getfixturevalue("postgres_schema_url") if is_database else place.url_in(tmp_path),
        clock,
        store_survives_close=place.store_survives_close,
        served=request.param == "served",
    )
    yield opener
    opener.close_all()


@pytest.fixture
def log(open_log: LogOpener) -> Log:
    return open_log()


@pytest.fixture
def open_again(open_log: LogOpener) -> LogOpener:
    """An opener whose store can be opened twice; tests that need one skip the others."""
    if not open_log.store_survives_close:
        pytest.skip("the store does not survive its log object")
    return open_log
