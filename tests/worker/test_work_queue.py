"""A work queue of 10,000 jobs in four processes: one is killed at work, the others are ended by SIGTERM, and a second
worker does the rest. The jobs are counted outside the log, in a file."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eventually import eventually

import headwater

JOBS = 10_000
KILLED_AT, ENDED_AT = 2_000, 5_000
MODULE = """
    import os, time
    import headwater

    log = headwater.open("jobs.db", durability="relaxed")
    done = os.open("done.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @log.on("jobs", id="workers", mode="shared", ack_wait=5, max_in_flight=500)
    def work(message):
        time.sleep(0.003)  # the work
        os.write(done, b"%d %d\\n" % (message.data, os.getpid()))  # one write: lines of processes do not mix
"""


def test_ten_thousand_jobs_and_nothing_is_lost(
    module: Callable[[str], Path],
    start: Callable[..., Any],
    tmp_path: Path,
    figures: Callable[[str], None],
) -> None:
    module(MODULE)
    with headwater.open(tmp_path / "jobs.db") as log:
        log.publish_many([("jobs", number) for number in range(JOBS)])

    first = start("--processes", "4", "--threads", "2")
    pids = first.pids(4)
    eventually(lambda: len(lines(tmp_path)) >= KILLED_AT, True)
    os.kill(pids[0], signal.SIGKILL)
    eventually(lambda: len(lines(tmp_path)) >= ENDED_AT, True)
    first.signal(signal.SIGTERM)
    assert first.end() == 0, first.text()
    before = len(lines(tmp_path))
    assert before < JOBS, "too fast: nothing was left for the second worker"

    second = start("--processes", "4", "--threads", "2")
    eventually(lambda: len({job for job, _ in lines(tmp_path)}), JOBS)
    eventually(lambda: unsettled(tmp_path), (0, 0))
    second.signal(signal.SIGTERM)
    assert second.end() == 0, second.text()

    handled = Counter(job for job, _ in lines(tmp_path))
    again = {job for job, count in handled.items() if count > 1}
    assert handled.keys() == set(range(JOBS)), "a job was lost"
    # Only what the killed process had done and not yet acked may be done twice.
    of_the_killed = {job for job, pid in lines(tmp_path) if pid == pids[0]}
    assert again <= of_the_killed
    with headwater.open(tmp_path / "jobs.db") as log:
        assert log.subscription("workers").acked == JOBS
        assert log.dead_letters.list() == []
    workers = len({pid for _, pid in lines(tmp_path)})
    figures(
        f"work queue: {JOBS:,} jobs in {workers} processes, one killed after {KILLED_AT:,}, the rest ended by SIGTERM "
        f"at {before:,}: {len(handled):,} done, 0 lost, {len(again)} done twice"
    )


def lines(directory: Path) -> list[tuple[int, int]]:
    file = directory / "done.txt"
    text = file.read_text() if file.exists() else ""
    return [(int(job), int(pid)) for job, pid in (line.split() for line in text.splitlines())]


def unsettled(directory: Path) -> tuple[int, int]:
    with headwater.open(directory / "jobs.db") as log:
        info = log.subscription("workers")
        return info.lag, info.in_flight
