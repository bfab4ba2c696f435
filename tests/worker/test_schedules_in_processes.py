"""A schedule of a second in three processes that are killed in turn: every occurrence once, none left out."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from eventually import eventually

import headwater

KILLS = 3
MODULE = """
    import os
    import headwater

    def log():
        log = headwater.open("jobs.db")

        @log.every("1s", id="tick", topic="ticks", missed="all")
        def tick(occurrence):
            return os.getpid()

        return log
"""


def test_each_occurrence_is_stored_once_whatever_is_killed(
    module: Callable[[str], Path], start: Callable[..., Any], tmp_path: Path, figures: Callable[[str], None]
) -> None:
    module(MODULE)
    worker = start("--processes", "3")
    worker.pids(3)
    with headwater.open(tmp_path / "jobs.db") as log:

        def stored() -> list[Any]:
            with log.subscribe("reader", "ticks", mode="ephemeral", start="first") as reader:
                return reader.fetch(1_000)

        for kill in range(KILLS):
            before = len(stored())
            eventually(lambda before=before: len(stored()) > before, True)
            os.kill(worker.pids(3 + kill)[-1], signal.SIGKILL)
            worker.pids(4 + kill)
        before = len(stored())
        eventually(lambda: len(stored()) > before + 1, True)
        worker.signal()
        assert worker.end() == 0, worker.text()
        messages = stored()
    times = [datetime.fromisoformat(message.headers["scheduled_at"]) for message in messages]
    assert all(after - before == timedelta(seconds=1) for before, after in pairwise(times)), times
    publishers = len({message.data for message in messages})
    figures(
        f"schedule of a second: {len(times)} occurrences, each once, by {publishers} processes, {KILLS} of 6 killed"
    )
