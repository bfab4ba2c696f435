from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater
from headwater import Log, ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite"])
def log(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Log]:
    """A log over each store, for what must not depend on it."""
    url = "memory:" if request.param == "memory" else str(tmp_path / "log.db")
    with headwater.open(url, clock=clock, housekeeping=None, heartbeats=False) as opened:
        yield opened
