"""Background work goes on whatever it raises."""

import queue

import pytest

from headwater.broker.keeper import Repeating
from headwater.errors import ReadOnly

WAIT_S = 10.0


def test_work_that_may_not_write_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """A role that may only read opens a log with housekeeping, as all do by default."""
    caplog.set_level("INFO", "headwater")
    calls: queue.SimpleQueue[None] = queue.SimpleQueue()

    def work() -> None:
        calls.put(None)
        raise ReadOnly("permission denied for table leases", where="the log")

    repeating = Repeating("keeper", work, lambda: 0.001)
    for _ in range(4):
        calls.get(timeout=WAIT_S)
    repeating.stop()
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("INFO", None)]
    assert "permission denied" in caplog.text
