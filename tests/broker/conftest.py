from collections.abc import Iterator
from pathlib import Path

import pytest
from served import ServedFile

import headwater
from headwater import Log, ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["sqlite", "served"])
def place(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def log(place: str, tmp_path: Path, clock: ManualClock) -> Iterator[Log]:
    """A log over each store and behind a server, for what must not depend on it."""
    if place == "served":
        served = ServedFile(tmp_path / "log.db", clock=clock, maintenance_interval=None, heartbeats=False)
        with served.open() as opened:
            yield opened
        served.stop()
        return
    url = str(tmp_path / "log.db")
    with headwater.open(url, clock=clock, maintenance_interval=None, heartbeats=False) as opened:
        yield opened


@pytest.fixture
def keeper_here(place: str) -> None:
    """For tests of what keeps a handler's messages alive: clients do that themselves, by their own watch."""
    if place == "served":
        pytest.skip("what is being handled is kept by the client, in real time")
