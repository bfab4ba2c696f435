"""A driver killed with -9 again and again, and every row published once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small_logs import forget_ids, published

from headwater.stores.sqlite import SqliteStore

KILLED = Path(__file__).parent / "kills"
BATCHES, ROWS_EACH = 60, 40
KILLS = 3
SPARK_FILES, SPARK_LINES = 50, 400
SPARK_KILLS = 5
BATCHES_SEEN_MAX = 6


def kill_all(process: subprocess.Popen[str]) -> None:
    """With its JVM, which is a child with a group of its own, and without giving either a chance to tidy up."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for pid in [process.pid, *map(int, children.read_text().split())]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(KILLED / script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def ended_within(process: subprocess.Popen[str], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def test_a_driver_killed_at_any_moment_publishes_every_row_once_and_in_order(
    tmp_path: Path,
    figures: Callable[[str], None],
    pytestconfig: pytest.Config,
) -> None:
    dice = random.Random(pytestconfig.getoption("dice"))
    path, checkpoint = tmp_path / "events.db", tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "metadata").write_text('{"id": "a-query"}')
    kills = repeats = 0
    for _ in range(KILLS):
        process = start("sink_loop.py", path, checkpoint, BATCHES, ROWS_EACH)
        assert process.stdout is not None
        for _ in range(dice.randint(0, BATCHES // KILLS)):
            process.stdout.readline()
        kills += not ended_within(process, dice.uniform(0, 0.03))
        process.kill()
        process.wait()
        process.stdout.close()
        repeats += _published_but_not_done(path, checkpoint)
        forget_ids(path)
    last = start("sink_loop.py", path, checkpoint, BATCHES, ROWS_EACH)
    assert last.communicate(timeout=60)
    assert last.returncode == 0
    assert published(path) == list(range(BATCHES * ROWS_EACH))
    figures(f"sink: {kills} drivers killed, {repeats} between commit and checkpoint; {BATCHES * ROWS_EACH:,} rows once")


def _published_but_not_done(path: Path, checkpoint: Path) -> bool:
    if not path.exists():
        return False
    done = checkpoint / "done"
    store = SqliteStore(path)
    try:
        with store.read() as reader:
            stored = reader.sink_batch("a-query")
    finally:
        store.close()
    return stored is not None and (not done.exists() or int(done.read_text()) < stored)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the JVM")
@pytest.mark.timeout(900)
def test_a_spark_driver_killed_several_times_publishes_every_row_once(
    tmp_path: Path,
    figures: Callable[[str], None],
    pytestconfig: pytest.Config,
) -> None:
    dice = random.Random(pytestconfig.getoption("dice"))
    path, checkpoint, source, scratch = (tmp_path / name for name in ("events.db", "checkpoint", "source", "scratch"))
    source.mkdir()
    scratch.mkdir()
    for file in range(SPARK_FILES):
        first = file * SPARK_LINES
        (source / f"{file:04}.txt").write_text("\n".join(map(str, range(first, first + SPARK_LINES))))
    seen = []
    for _ in range(SPARK_KILLS):
        process = start("sink_driver.py", path, checkpoint, source, scratch)
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        for _ in range(dice.randint(0, BATCHES_SEEN_MAX)):
            assert process.stdout.readline().startswith("batch ")
        assert not ended_within(process, dice.uniform(0, 0.5)), "the driver came to its end; give it more files"
        kill_all(process)
        seen.append(len(published(path)))
        forget_ids(path)
    last = start("sink_driver.py", path, checkpoint, source, scratch)
    output, _ = last.communicate(timeout=300)
    assert output.endswith("finished\n")
    assert sorted(published(path)) == list(range(SPARK_FILES * SPARK_LINES))
    figures(f"sink on Spark: killed at {seen} of {SPARK_FILES * SPARK_LINES:,} rows; each published once")
