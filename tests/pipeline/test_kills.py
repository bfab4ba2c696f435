"""`headwater pipeline run` killed with −9 in the middle of its work, on a disk and on S3, while a writer publishes and
retention prunes: the lake has every message once, silver each id of a topic once, and the audit says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from lake_world import ORDER, World, assert_derived, spark_of
from pyspark.sql import SparkSession

import headwater
from headwater.pipeline import run as running
from headwater.pipeline.audit import audit
from headwater.pipeline.delta import UPTO
from headwater.pipeline.lake import BRONZE, QUARANTINE, SILVER, Lake
from headwater.pipeline.logs import log_identity, open_reader
from headwater.pipeline.run import Run, RunResult
from headwater.pipeline.storage import Storage
from headwater.pipeline.types import Types, load_types

WRITER = Path(__file__).with_name("log_writer.py")
KILL_S_MAX = 120.0
PROGRESS_KILLS = 10
GROWTH_SEQS = 300
STAGES = (f"{BRONZE}/day=", f"{BRONZE}/_delta_log", "gold/volume/_delta_log", f"{SILVER}/_delta_log")
"""A run is killed when something new is there: a data file of bronze, its commit, a commit of a sum, silver's."""
Say = Callable[[str], None]


@contextmanager
def writer_process(log: Path) -> Iterator[None]:
    with headwater.open(log, maintenance_interval=None):
        pass  # it is there before a run looks
    stop = log.with_suffix(".stop")
    process = subprocess.Popen([sys.executable, str(WRITER), str(log), str(stop)])
    try:
        yield
    finally:
        stop.touch()
        assert process.wait(60) == 0


def wait_for_growth(log: Path) -> None:
    """Until the writer has published for more turns than lie between an id and its repeat."""
    target, until = last_seq(log) + GROWTH_SEQS, time.monotonic() + KILL_S_MAX
    while last_seq(log) < target:
        assert time.monotonic() < until, "the writer does not publish"
        time.sleep(0.02)  # the log is written by another process: there is no other signal


def last_seq(log: Path) -> int:
    with open_reader(str(log)) as reader:
        return reader.last_seq()


def run_command(log: Path, lake: str, types: Path) -> list[str]:
    named = ["--log", str(log), "--lake", lake, "--types", str(types), "--conf", "spark.master=local[2]"]
    return [sys.executable, "-m", "headwater", "pipeline", "run", *named]


def paths(storage: Storage, stage: str) -> set[str]:
    """What is there of a table: data files in folders of days, or log entries."""
    return {path for path in storage.paths(stage.partition("/day=")[0]) if path.startswith(stage)}


def is_work(storage: Storage, path: str) -> bool:
    """The entry of a commit has to add files: those that make a table are none of the stages."""
    return not path.endswith(".json") or b'"add"' in storage.read(path)


def kill_when_new(command: list[str], storage: Storage, stage: str) -> None:
    """With its group; the JVM, if it is not in it, notices by itself and goes a moment later, as after any kill."""
    before = paths(storage, stage)
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, text=True
    )
    until = time.monotonic() + KILL_S_MAX
    try:
        while not any(is_work(storage, path) for path in paths(storage, stage) - before):
            assert process.poll() is None, f"it ended by itself: {process.communicate()[1][-2000:]}"
            assert time.monotonic() < until, f"nothing new in {stage}"
            time.sleep(0.002)  # the lake is written by another process: there is no other signal
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run_on(spark: SparkSession, lake: Lake, log: str, types: Types) -> RunResult:
    with Run(lake, log, types, lambda short: nullcontext(spark_of(spark))) as run:
        run.ingest(run._last_seq)
        return run.result


def assert_whole_after_kills(
    spark: SparkSession, folder: Path, lake: str, kills: int, say: Say, stages: Sequence[str] = STAGES
) -> None:
    log, types = folder / "events.db", folder / "types"
    types.mkdir()
    (types / "order@1.json").write_text(json.dumps(ORDER))
    storage, command = Storage(lake), run_command(log, lake, types)
    with writer_process(log):
        wait_for_growth(log)
        began = time.monotonic()
        for kill in range(kills):
            kill_when_new(command, storage, stages[kill % len(stages)])
            if (kill + 1) % PROGRESS_KILLS == 0:
                print(f"{kill + 1} of {kills} runs killed in {time.monotonic() - began:.0f} s", flush=True)
        wait_for_growth(log)
    opened = Lake.open(lake)
    with opened.lock():
        run_on(spark, opened, str(log), load_types(types))
    document = audit(spark, opened, str(log))
    assert document["whole"], document["checks"]
    assert document["not_yet"] == 0
    assert document["gaps"], "retention took nothing: this proved less than it should"
    assert {check["status"] for check in document["checks"]} == {"ok"}
    assert_derived(opened, opened.table(BRONZE).read().sort_by("seq").to_pylist(), log_identity(str(log))[0], True)
    within, between = assert_each_id_once(opened)
    say(f"{kills} kills of runs on {'S3' if '://' in lake else 'a disk'}; the audit after them:")
    say(f"  silver has each id once: {within:,} repeats within a slice, {between:,} of an id in an earlier slice")
    for check in document["checks"]:
        say(f"  {check['status']:<7} {check['name']}: {check['what']}")


def assert_each_id_once(lake: Lake) -> tuple[int, int]:
    """Of messages with the same id on a topic silver has the first; returns how many repeat one of the same slice of a
    run, and how many one of an earlier slice."""
    bronze, silver, quarantine = (lake.table(name) for name in (BRONZE, SILVER, QUARANTINE))
    rows = bronze.read(columns=("seq", "topic", "id")).sort_by("seq").to_pylist()
    kept = {(row["topic"], row["id"]): row["seq"] for row in silver.read(columns=("seq", "topic", "id")).to_pylist()}
    assert len(kept) == silver.rows, "silver has an id of a topic twice"
    ends = sorted(int(commit[UPTO]) for commit in silver.history() if UPTO in commit)
    unfit = set(quarantine.read(columns=("seq",))["seq"].to_pylist())
    within = between = 0
    for row in rows:
        first = row["seq"] if row["seq"] in unfit else kept[row["topic"], row["id"]]
        assert first <= row["seq"]
        if first < row["seq"]:
            is_of_this_slice = bisect_left(ends, first) == bisect_left(ends, row["seq"])
            within, between = within + is_of_this_slice, between + (not is_of_this_slice)
    assert within + between == silver.transaction("repeated") == bronze.rows - silver.rows - quarantine.rows
    assert min(within, between) > 0, "no id was repeated: this proved less than it should"
    return within, between


# States that a kill can leave: files without a commit, bronze ahead of the log's position, sums ahead of silver. After
# silver's commit a run is complete; the long tests kill there too, and `test_run` after every commit, without Spark.


def test_a_run_on_spark_continues_one_that_was_killed(
    spark: SparkSession, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "SLICE_SEQS", 12)
    monkeypatch.setattr(running, "TASK_SEQS_MIN", 5)
    world.register({"order@1": ORDER})
    world.publish_all_kinds()
    world.publish_all_kinds()
    assert run_on(spark, world.lake, world.log, world.types).messages == 45
    world.assert_exact()
    world.publish_all_kinds()
    assert world.killed_run(3)
    assert run_on(spark, world.lake, world.log, world.types).messages == 22 - 12
    world.assert_exact()


def test_runs_killed_on_a_disk(spark: SparkSession, tmp_path: Path) -> None:
    assert_whole_after_kills(spark, tmp_path, str(tmp_path / "lake"), 2, print, (STAGES[0], STAGES[2]))


def test_runs_killed_on_an_object_store(spark: SparkSession, tmp_path: Path, s3_lake: str) -> None:
    assert_whole_after_kills(spark, tmp_path, s3_lake, 1, print, STAGES[1:2])


@pytest.mark.long
@pytest.mark.timeout(7_200)
def test_a_hundred_runs_killed_on_a_disk(spark: SparkSession, tmp_path: Path, figures: Say) -> None:
    assert_whole_after_kills(spark, tmp_path, str(tmp_path / "lake"), 100, figures)


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_twenty_runs_killed_on_an_object_store(spark: SparkSession, tmp_path: Path, s3_lake: str, figures: Say) -> None:
    assert_whole_after_kills(spark, tmp_path, s3_lake, 20, figures)
