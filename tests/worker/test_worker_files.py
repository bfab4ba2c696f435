"""The examples for workers do what they say: the module, and the command lines of the unit and of the container."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually

import headwater

EXAMPLES = Path(__file__).parents[2] / "examples"
UNIT = (EXAMPLES / "systemd" / "headwater-worker.service").read_text()
CONTAINER = (EXAMPLES / "container" / "worker.Containerfile").read_text()


def of_the_unit() -> list[str]:
    [line] = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    return shlex.split(line)


def of_the_container() -> list[str]:
    [entry] = re.findall(r"^ENTRYPOINT (.*)$", CONTAINER, re.MULTILINE)
    [rest] = re.findall(r"^CMD (\[.*\])$", CONTAINER, re.MULTILINE)
    return [*json.loads(entry), *json.loads(rest)]


@pytest.mark.parametrize("command", [of_the_unit(), of_the_container()], ids=["systemd", "container"])
def test_the_command_of_an_example_runs_its_module(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    program, name, target, *options = command
    assert (program, name, target.partition(":")[2]) == ("headwater", "worker", "make_log")
    shutil.copy(EXAMPLES / "worker" / "tasks.py", tmp_path)
    monkeypatch.setenv("JOBS_LOG", str(tmp_path / "jobs.db"))
    address = options[options.index("--healthz") + 1]
    worker = start(*[option.replace(address, "127.0.0.1:0") for option in options], target="tasks:make_log")
    with headwater.open(tmp_path / "jobs.db") as log:
        log.publish("images.resize", {"image": 17})
        worker.wait_for("resized 17")
        declared = [("nightly-report", "0 3 * * * Europe/Berlin")]
        eventually(lambda: [(schedule.id, schedule.timetable) for schedule in log.schedules()], declared)
    eventually(lambda: worker.health()[0], 200)
    worker.signal()
    assert worker.end() == 0, worker.text()


def test_service_managers_wait_longer_than_the_worker_needs() -> None:
    """Its own timeout, and the 5 s after which it kills."""
    timeouts = [
        int(re.findall(r"TimeoutStopSec=(\d+)s", UNIT)[0]),
        int(re.findall(r"--stop-timeout (\d+)", CONTAINER)[0]),
    ]
    for command, seconds in zip((of_the_unit(), of_the_container()), timeouts, strict=True):
        own = int(command[command.index("--shutdown-timeout") + 1].removesuffix("s"))
        assert seconds > own + 5
    assert "KillMode=mixed" in UNIT
    assert "RestartPreventExitStatus=2" in UNIT
