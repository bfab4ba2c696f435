"""Killed with −9 in the middle of micro-batches, while a writer publishes and retention prunes: bronze has every seq
once, and what it lacks the log recorded as deleted."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from sealing_loop import fenced_publisher, seal_elsewhere

import headwater
from headwater.pipeline.audit.auditing import audit
from headwater.pipeline.datasets.types import Types
from headwater.pipeline.jobs.running import bind, run_once
from headwater.pipeline.lake.lake import Lake, now_ms
from headwater.pipeline.lake.layout import BRONZE
from headwater.pipeline.lake.manifest import Manifest
from headwater.pipeline.lake.segments import SegmentOptions, SegmentReader
from headwater.pipeline.lake.sweeping import vacuum
from headwater.stores.sqlite import SqliteStore

HERE = Path(__file__).parent
PROGRESS_S_MAX = 120.0


@contextmanager
def writer_process(log: Path) -> Iterator[None]:
    with headwater.open(log, housekeeping=None):
        pass  # it is there before anybody looks
    stop = log.with_suffix(".stop")
    process = subprocess.Popen([sys.executable, str(HERE / "writing.py"), str(log), str(stop)])
    try:
        yield
    finally:
        stop.touch()
        assert process.wait(60) == 0


def kill_all_of(process: subprocess.Popen[bytes]) -> None:
    """With its workers, which are in its group; a JVM notices by itself and goes a moment later, as after any kill."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def start(script: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)


def wait_for_mark(lake: Path, above: int, process: subprocess.Popen[bytes]) -> int:
    until = time.monotonic() + PROGRESS_S_MAX
    with closing(Manifest(lake)) as manifest:
        while (mark := manifest.mark(BRONZE)) <= above:
            assert process.poll() is None, "it ended by itself"
            assert time.monotonic() < until, f"no progress beyond {mark}"
            time.sleep(0.002)  # progress is in another process's commit: there is no signal to wait for
    return mark


def assert_whole(log: Path, lake: Lake) -> None:
    """By plain counting, beside the audit: every seq up to the mark once, or recorded as pruned."""
    mark = lake.manifest.mark(BRONZE)
    seqs = Counter(row["seq"] for row in lake.rows(BRONZE))
    assert [seq for seq, count in seqs.items() if count > 1] == []
    store = SqliteStore(log)
    with closing(store), store.read() as reader:
        pruned = {seq for low, high in reader.pruned(1, mark) for seq in range(low, high + 1)}
        assert reader.last_seq() == mark
    assert set(range(1, mark + 1)) - set(seqs) - pruned == set()
    on_disk = {path.relative_to(lake.path).as_posix() for path in lake.path.rglob("*.parquet")}
    assert {file.path for file in lake.manifest.files(BRONZE)} <= on_disk


def test_killed_between_any_two_steps_of_a_batch(tmp_path: Path) -> None:
    log, lake_path = tmp_path / "events.db", tmp_path / "lake"
    dice = random.Random(4)
    landed = 0
    with writer_process(log), Lake(lake_path, create=True) as lake:
        bind(lake, str(log))
        for _ in range(8):
            mark = lake.manifest.mark(BRONZE)
            process = start("sealing_loop.py", log, lake_path, 97)
            try:
                reached = wait_for_mark(lake_path, mark + 500, process)
                time.sleep(dice.random() * 0.05)  # the moment of the kill is what is tried
            finally:
                kill_all_of(process)
            landed += reached > mark
    assert landed == 8
    with Lake(lake_path) as lake:
        orphans = vacuum(lake_path, lake.manifest, now_ms()).files
        finish_without_spark(log, lake)
        assert_whole(log, lake)
    print(f"{orphans} orphaned files swept")


def finish_without_spark(log: Path, lake: Lake) -> None:
    reader = SegmentReader(SegmentOptions(str(log), lake.path, "lake:test", 1_000_000, 1))
    publisher = fenced_publisher(lake.path, lake.manifest)
    begin = reader.initialOffset()
    end = reader.latestOffset(begin, reader.getDefaultReadLimit())
    publisher.commit([publisher.write(iter(seal_elsewhere(reader, each))) for each in reader.partitions(begin, end)], 0)
    reader.stop()


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_a_driver_killed_in_micro_batches(spark: SparkSession, tmp_path: Path) -> None:
    log, lake_path = tmp_path / "events.db", tmp_path / "lake"
    dice = random.Random(7)
    kills = 6
    with writer_process(log), Lake(lake_path, create=True) as lake:
        bind(lake, str(log))
        for _ in range(kills):
            mark = lake.manifest.mark(BRONZE)
            process = start("spark_loop.py", log, lake_path, 1_000)
            try:
                wait_for_mark(lake_path, mark + 3_000, process)
                time.sleep(dice.random())
            finally:
                kill_all_of(process)
    with Lake(lake_path) as lake:
        run_once(spark, lake, str(log), Types())
        assert_whole(log, lake)
        document = audit(spark, lake, str(log))
    assert document["whole"], document["checks"]
    assert document["gaps"], "retention took nothing: this proved less than it should"
