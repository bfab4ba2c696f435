"""Closing a log waits for one page of maintenance, not for a round of it."""

import threading
from typing import Any

import pytest
from eventually import eventually

import headwater
from headwater import Log
from headwater.broker import maintenance
from headwater.broker.flow import _block_on

MESSAGES = 300


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COUNT_PAGE", "PRUNE_PAGE", "IDS_PAGE", "TIMINGS_PAGE", "VACUUM_PAGES", "LOOKED_AT_MAX"):
        monkeypatch.setattr(maintenance, name, 3)


def filled(log: Log) -> Log:
    log.publish_many([("a", number, {"id": f"id-{number}"}) for number in range(MESSAGES)])
    log.retain("a", max_count=0)
    log.retain("never", max_age=1)
    return log


def steps(log: Log, stop_after: int) -> int:
    """How many steps a round takes that is asked to stop after so many."""
    engine, taken = log._core.engine, 0
    flow = maintenance.run_maintenance(engine, lambda: taken >= stop_after)
    outcome: Any = None
    try:
        while True:
            step = flow.send(outcome)
            taken += 1
            outcome = _block_on(step)
    except StopIteration:
        return taken


@pytest.mark.usefixtures("engine_here", "small_pages")
def test_a_round_ends_with_the_page_at_which_it_is_asked_to(log: Log) -> None:
    whole = steps(filled(log), 1_000_000)
    assert whole > MESSAGES // 3
    for stop_after in (*range(1, 20), *range(20, whole, 37)):
        log.publish_many([("a", number) for number in range(30)])
        # The last one gives the lease back.
        assert steps(log, stop_after) <= stop_after + 2
        with log._core.engine.store.read() as reader:
            assert not reader.lease(maintenance.LEASE).live(log._core.engine.clock.now_ms())


@pytest.mark.usefixtures("small_pages")
def test_closing_waits_for_one_page(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with headwater.open(tmp_path / "log.db", maintenance_interval=None) as log:
        filled(log)
    pages, reached = [], threading.Event()
    prune = maintenance._prune_page

    def slow_page(*args: Any, **kwargs: Any) -> Any:
        pages.append(threading.current_thread().name)
        if len(pages) == 3:
            reached.set()
            eventually(lambda: log._core._closed, True)
        return prune(*args, **kwargs)

    monkeypatch.setattr(maintenance, "_prune_page", slow_page)
    log = headwater.open(tmp_path / "log.db", maintenance_interval=0.01)
    assert reached.wait(60)
    log.close()
    assert len(pages) == 3
    monkeypatch.undo()
    with headwater.open(tmp_path / "log.db", maintenance_interval=None) as log:
        assert [topic.count for topic in log.topics()] == [MESSAGES - 9]
        report = log.run_maintenance()
        assert (report.skipped, report.pruned) == (False, {"a": MESSAGES - 9})
