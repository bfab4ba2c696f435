"""Every kind of dedupe queue, opened by url, so that tests can open the same one twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater import ManualClock
from headwater.ports.dedupe import DedupeQueue
from headwater.stores.dedupe import open_dedupe


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    kind = request.param
    if kind == "memory":
        return "memory:"
    if kind == "sqlite":
        return str(tmp_path / "dedupe.db")
    found: str = request.getfixturevalue(f"{kind}_url")
    return found


@pytest.fixture
def open_queue(url: str, clock: ManualClock) -> Iterator[Callable[..., DedupeQueue]]:
    """Opens the same queue each time it is called, except in memory, where there is nothing to open again."""
    opened: list[DedupeQueue] = []

    def again(**options: Any) -> DedupeQueue:
        opened.append(open_dedupe(url, clock=clock, **options))
        return opened[-1]

    yield again
    for queue in opened:
        queue.close()
