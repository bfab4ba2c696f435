"""Periodic tasks, and the read pools where sources take turns."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial

import pytest

from headwater.broker.background import SOURCE, FairThreadPool, PeriodicTask
from headwater.errors import ReadOnlyError


@pytest.fixture
def done() -> list[str]:
    return []


def held(lanes: FairThreadPool) -> Callable[[], None]:
    """Keeps the only thread busy until it is called."""
    gate, began = threading.Event(), threading.Event()
    lanes.submit_for("the gate", lambda: (began.set(), gate.wait(30)))
    assert began.wait(30)
    return gate.set


def test_a_source_with_little_to_do_does_not_wait_for_one_with_much(done: list[str]) -> None:
    with FairThreadPool(1, "test") as lanes:
        go = held(lanes)
        for source, works in (("greedy", 5), ("modest", 1), ("other", 2)):
            for number in range(works):
                lanes.submit_for(source, partial(done.append, f"{source} {number}"))
        go()
    assert done[:3] == ["greedy 0", "modest 0", "other 0"]
    assert done[3:] == ["greedy 1", "other 1", "greedy 2", "greedy 3", "greedy 4"]


def test_the_source_is_the_one_of_the_task(done: list[str]) -> None:
    with FairThreadPool(1, "test") as lanes:
        go = held(lanes)
        for source in ("greedy", "greedy", "greedy", "modest"):
            token = SOURCE.set(source)
            lanes.submit(done.append, source)
            SOURCE.reset(token)
        go()
    assert done == ["greedy", "modest", "greedy", "greedy"]


def test_a_work_gives_its_outcome_or_its_error() -> None:
    with FairThreadPool(2, "test") as lanes:
        assert lanes.submit(int, "7").result(30) == 7
        with pytest.raises(ValueError, match="seven"):
            lanes.submit(int, "seven").result(30)


def test_a_work_that_is_cancelled_while_it_waits_is_not_done(done: list[str]) -> None:
    with FairThreadPool(1, "test") as lanes:
        go = held(lanes)
        first, second = (lanes.submit(done.append, each) for each in ("first", "second"))
        assert first.cancel()
        go()
        second.result(30)
    assert done == ["second"]


def test_nothing_is_taken_after_the_end() -> None:
    lanes = FairThreadPool(1, "test")
    lanes.shutdown()
    with pytest.raises(RuntimeError):
        lanes.submit(int)


WAIT_S = 10.0


def test_work_that_may_not_write_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """A role that may only read opens a log with maintenance, as all do by default."""
    caplog.set_level("INFO", "headwater")
    calls: queue.SimpleQueue[None] = queue.SimpleQueue()

    def work() -> None:
        calls.put(None)
        raise ReadOnlyError("permission denied for table leases", where="the log")

    repeating = PeriodicTask("periodic", work, lambda: 0.001)
    for _ in range(4):
        calls.get(timeout=WAIT_S)
    repeating.stop()
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("INFO", None)]
    assert "permission denied" in caplog.text
