"""The consumers of a shared subscription are listed while they live."""

from __future__ import annotations

from pathlib import Path

import headwater


def test_consumers_are_listed_while_they_are_open(tmp_path: Path) -> None:
    with headwater.open(tmp_path / "log.db") as log, headwater.open(tmp_path / "log.db") as other:
        assert log.subscribe("alone", ">").info().consumers == []
        first = log.subscribe("work", "jobs.>", mode="shared")
        second = other.subscribe("work", "jobs.>", mode="shared")
        names = log.subscription("work").consumers
        assert len(names) == 2
        assert log.subscription("work").holder is None
        second.close()
        assert len(log.subscription("work").consumers) == 1
        first.close()
        assert log.subscription("work").consumers == []


def test_a_consumer_that_vanished_is_listed_until_its_lease_ends_and_a_living_one_stays(tmp_path: Path) -> None:
    clock = headwater.ManualClock()
    with (
        headwater.open(tmp_path / "log.db", clock=clock, heartbeats=False) as log,
        headwater.open(tmp_path / "log.db", clock=clock, heartbeats=False) as dead,
        log.subscribe("work", "jobs.>", mode="shared"),
    ):
        dead.subscribe("work", "jobs.>", mode="shared")  # which has no heartbeat
        assert len(log.subscription("work").consumers) == 2
        clock.advance(10)
        log._core.heartbeat()  # type: ignore[attr-defined]
        clock.advance(10)
        assert len(log.subscription("work").consumers) == 1
        clock.advance(10)
        assert log.subscription("work").consumers == []
