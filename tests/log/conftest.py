"""One contract, every log: a test that takes `log` or `open_log` runs over each store. Time is a ManualClock."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

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
}


class LogOpener:
    """Opens the log; again and again, if its store survives. Whatever is open at the end is closed."""

    def __init__(self, url: str, clock: ManualClock, *, store_survives_close: bool) -> None:
        self.url = url
        self.clock = clock
        self.store_survives_close = store_survives_close
        self._opened: list[Log] = []

    def __call__(self, **options: Any) -> Log:
        log = headwater.open(self.url, **{"clock": self.clock, "housekeeping": None, "heartbeats": False, **options})
        self._opened.append(log)
        return log

    def close_all(self) -> None:
        for log in self._opened:
            log.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=PLACES)
def open_log(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[LogOpener]:
    place = PLACES[request.param]
    opener = LogOpener(place.url_in(tmp_path), clock, store_survives_close=place.store_survives_close)
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
