"""How long the command line takes to start, beside Python itself."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path

import headwater
from common import MESSAGE, TOPIC, fresh_directory, seconds
from report import Line

REPEATS = 9
COMMAND = Path(sysconfig.get_path("scripts")) / "headwater"


def median_s(command: list[str], **variables: str) -> float:
    def run() -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **variables})

    run()  # so that its modules are compiled
    return statistics.median(seconds(run) for _ in range(REPEATS))


def measure() -> list[Line]:
    with fresh_directory() as directory:
        path = directory / "log.db"
        with headwater.open(path) as log:
            log.publish_many([(f"{TOPIC}.{number}", MESSAGE) for number in range(100)])
        python = median_s([sys.executable, "-c", "pass"])
        wanted = {
            "headwater --version": (0.15, median_s([str(COMMAND), "--version"])),
            "headwater topics": (0.3, median_s([str(COMMAND), "topics", str(path)])),
            "a Tab": (
                0.2,
                median_s(
                    [str(COMMAND)],
                    _HEADWATER_COMPLETE="complete_bash",
                    COMP_WORDS=f"headwater topics {path} ",
                    COMP_CWORD="3",
                ),
            ),
        }
    return [
        Line(
            what,
            f"{took_s * 1_000:.0f} ms",
            f"python -c pass {python * 1_000:.0f} ms",
            None,
            f"< {most_s} s",
            took_s < most_s,
        )
        for what, (most_s, took_s) in wanted.items()
    ]
