"""A run brings every table up to the log, once, whatever is killed when. Tasks run in one other process, without Spark;
every table is compared with what plain Python makes of the log's rows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from lake_world import ORDER, STRICT, RunHere, World
from small_logs import prune

from headwater.errors import CorruptError, InvalidOptionError
from headwater.pipeline import run as running
from headwater.pipeline.lake import BRONZE, SILVER


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several slices of several tasks, and no syncs: what is proved here is not what a disk does."""
    monkeypatch.setattr(running, "SLICE_SEQS", 12)
    monkeypatch.setattr(running, "TASK_SEQS_MIN", 5)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# --- what a run does --------------------------------------------------------------------------------------------------


def test_a_run_is_whole_incremental_and_repeatable(world: World) -> None:
    world.register({"order@1": ORDER})
    for messages in (23, 22):  # the log refuses the id that it has
        world.publish_all_kinds()
        assert world.run().messages == messages
        world.assert_exact()
        assert world.run().messages == 0
        world.assert_exact()
    assert len(world.lake.table(BRONZE).files) > 3  # several slices, several tasks, and two days


def test_messages_of_the_past_go_to_their_own_days(world: World) -> None:
    """Also into days that were derived before: their sums are those of all runs."""
    days = [datetime(2020, 1, 1, 23, 59, tzinfo=UTC), datetime(2020, 1, 2, tzinfo=UTC)]
    for _ in range(2):
        with world.open() as log:
            log.publish("orders.x", {"n": 0}, from_="shop")
            log.publish_many([("orders.x", {"n": 1}, {"published_at": at, "from_": "shop"}) for at in (*days, *days)])
        assert world.run().messages == 5
        world.assert_exact()
    found = {file.day for file in world.lake.table(BRONZE).files}
    assert {"2020-01-01", "2020-01-02"} < found
    assert len(found) in (3, 4)  # and today, which may end meanwhile


def test_an_empty_log_makes_an_empty_lake(world: World) -> None:
    assert world.run() == (0, 0)
    assert world.lake.table(BRONZE).rows == 0


def test_seqs_that_are_far_apart_take_no_longer(world: World) -> None:
    with world.open() as log:
        log.publish("orders.x", {"n": 1})
    world.insert("orders.x", "2", seq=10**12)
    world.insert("orders.x", "3", seq=2 * 10**12)
    before = RunHere.tasks_run
    assert world.run() == (3, 2 * 10**12)
    assert RunHere.tasks_run - before < 20
    world.assert_exact()


def test_bronze_alone_then_what_is_derived(world: World) -> None:
    """As `--continuous` does between two refreshes."""
    world.register({"order@1": ORDER})
    for _ in range(2):
        world.publish_all_kinds()
        world.run(derive=False)
    assert not world.lake.table(SILVER).exists
    world.run()
    world.assert_exact()
    world.publish_all_kinds()
    world.run(derive=False)
    world.publish_all_kinds()
    world.run()
    world.assert_exact()


def test_a_continuous_run_follows_the_log(world: World) -> None:
    clock = iter(range(0, 1000, 25))
    turns = iter([True, True, False])

    def wait(seconds: float) -> bool:
        world.publish_all_kinds()
        return next(turns)

    with world.new_run() as run:
        run.continuously(wait, trigger_s=5, refresh_s=60, monotonic=lambda: next(clock))
        assert run.result.messages == 23 + 22
        assert world.lake.table(SILVER).transaction() < world.lake.table(BRONZE).transaction()
        assert world.lake.table("gold/lag").exists
    world.run()
    world.assert_exact()


def test_what_retention_takes_is_left_out_and_counted_right(world: World) -> None:
    with world.open() as log:
        log.publish_many([("logs.x", {"n": n}) for n in range(20)])
        prune(log, "logs.>", max_count=5)
        world.run()
        assert world.seqs() == list(range(16, 21))
        log.publish_many([("logs.x", {"n": n}) for n in range(30)])
        world.run(derive=False)
        log.run_maintenance()
        world.run()
        log.publish_many([("logs.x", {"n": n}) for n in range(30)])
        log.run_maintenance()
        assert world.run().messages == 5
    expected = [*range(16, 51), *range(76, 81)]
    assert world.seqs() == world.seqs(SILVER) == expected
    assert world.lake.table(BRONZE).transaction("rows") == len(expected)


def test_retention_spares_what_a_lake_has_not_read(world: World) -> None:
    with world.open() as log:
        log.publish("orders.x", {"n": 0})
        world.run()
        log.retain("orders.>", max_count=1, keep_unacked=True)
        log.publish_many([("orders.x", {"n": n}) for n in range(20)])
        log.run_maintenance()
        world.run()
    assert world.seqs() == list(range(1, 22))


def test_nothing_new_needs_no_spark(world: World) -> None:
    world.publish_all_kinds()
    world.run()
    script = """
import sys
from headwater.pipeline.lake import Lake
from headwater.pipeline.run import Run
from headwater.pipeline.types import Types
def start(short): raise AssertionError("Spark is started")
with Run(Lake.open(sys.argv[2]), sys.argv[1], Types(), start) as run:
    assert run.once().messages == 0
assert "pyspark" not in sys.modules, "pyspark is imported"
"""
    subprocess.run([sys.executable, "-c", script, world.log, str(world.lake_path)], check=True)
    assert world.lake.table("metrics/subscriptions").rows == 1
    world.assert_exact()


# --- kills ------------------------------------------------------------------------------------------------------------


def test_killed_after_any_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "SLICE_SEQS", 23)  # two slices, the second of which repeats ids of the first
    monkeypatch.setattr(running, "TASK_SEQS_MIN", 12)
    original = World(tmp_path)
    original.publish_all_kinds()
    original.publish_all_kinds()
    kills = 0
    while True:
        folder = tmp_path / str(kills)
        folder.mkdir()
        world = World(folder)
        shutil.copy(original.log, world.log)
        world.register({"order@1": ORDER})
        if not world.killed_run(kills + 1):
            break
        kills += 1
        world.run()
        world.assert_exact()
        shutil.rmtree(folder)
    assert kills == 15  # bronze, typed, quarantine, explicit ids, three sums, silver; then the same without new ids


def test_killed_while_it_comes_back_from_kills(world: World) -> None:
    world.register({"order@1": ORDER})
    world.publish_all_kinds()
    world.publish_all_kinds()
    kills = 0
    while world.killed_run(1 + kills % 2):
        kills += 1
        if kills == 9:
            world.publish_all_kinds()
    assert kills > 20
    world.assert_exact()


def test_a_rebuild_killed_at_any_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "SLICE_SEQS", 100)
    world.register({"order@1": ORDER})
    world.publish_all_kinds()
    world.run()
    kills = 0
    while world.killed_run(kills + 1, lambda run: run.rebuild()):  # type: ignore[attr-defined]
        kills += 1
        world.register({"order@1": STRICT if kills % 2 else ORDER})
        world.run()
        world.assert_exact(3 if kills % 2 else None)
    assert kills >= 8


@pytest.mark.parametrize("commits", range(2, 8))
def test_types_that_changed_while_a_table_was_ahead_are_refused(world: World, commits: int) -> None:
    """The tables that have the slice already counted by other types."""
    world.register({"order@1": ORDER})
    with world.open() as log:
        for n in range(6):
            log.publish("orders.new", {"n": n}, type="order", version=1, from_="shop", to="post", id=f"id {n}")
        log.publish("replica.eu.users", {"version": 3, "bytes": 100})
        log.publish("orders.new", {"n": "one"}, type="order", version=1)
    assert world.killed_run(commits)
    world.register({"order@1": STRICT})
    with pytest.raises(InvalidOptionError, match="types have changed"):
        world.run()
    with world.new_run() as run:
        run.rebuild()
    world.run()
    world.assert_exact(3)


def test_types_that_changed_while_only_sums_were_ahead_are_refused(world: World) -> None:
    with world.open() as log:
        log.publish("orders.new", {"n": "one"}, type="order", version=1, from_="shop")
    assert world.killed_run(3)  # bronze, volume, traffic
    world.register({"order@1": ORDER})
    with pytest.raises(InvalidOptionError, match="types have changed"):
        world.run()


# --- two at once, as an object store allows ---------------------------------------------------------------------------


@pytest.mark.parametrize("slice_seqs", [12, 100])
@pytest.mark.parametrize("kept_bronze", [False, True])
def test_of_two_runs_at_once_one_is_refused(
    world: World, kept_bronze: bool, slice_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "SLICE_SEQS", slice_seqs)
    world.register({"order@1": ORDER})
    world.publish_all_kinds()
    if kept_bronze:
        world.run(derive=False)
    world.assert_refused("meanwhile", world.run)
    world.assert_exact()


def test_of_two_runs_with_other_slices_one_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.register({"order@1": ORDER})
    world.publish_all_kinds()
    world.run(derive=False)

    def run_with_smaller_slices() -> None:
        monkeypatch.setattr(running, "SLICE_SEQS", 16)
        assert world.killed_run(1)  # typed/order has a part of the other's slice

    monkeypatch.setattr(running, "SLICE_SEQS", 100)
    world.assert_refused("typed/order meanwhile", run_with_smaller_slices)
    world.run()
    world.assert_exact()


def test_a_rebuild_beside_a_run_leaves_no_table_with_a_hole(world: World) -> None:
    world.register({"order@1": ORDER})
    world.publish_all_kinds()
    world.run()
    world.publish_all_kinds()
    world.run(derive=False)

    def empty_tables() -> None:
        with world.new_run() as other:
            other.rebuild()

    world.assert_refused("taken over", empty_tables)
    world.run()
    world.assert_exact()


# --- logs and lakes that do not fit -----------------------------------------------------------------------------------


def test_another_log_is_refused(world: World, tmp_path: Path) -> None:
    world.publish_all_kinds()
    world.run()
    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other", world.lake_path)
    with pytest.raises(InvalidOptionError, match="another log"):
        other.run()
    moved = World(tmp_path / "other", world.lake_path)
    shutil.move(world.log, moved.log)
    assert moved.run().messages == 0


def test_a_log_that_was_put_back_is_refused(world: World, tmp_path: Path) -> None:
    world.publish_all_kinds()
    shutil.copy(world.log, tmp_path / "backup.db")
    world.publish_all_kinds()
    world.run()
    shutil.copy(tmp_path / "backup.db", world.log)
    with pytest.raises(InvalidOptionError, match="ends at seq 23"):
        world.run()


def test_a_lake_that_was_put_back_reads_again_what_the_log_still_has(world: World, tmp_path: Path) -> None:
    world.publish_all_kinds()
    world.run()
    shutil.copytree(world.lake_path, tmp_path / "backup")
    world.publish_all_kinds()
    world.run()
    shutil.rmtree(world.lake_path)
    shutil.copytree(tmp_path / "backup", world.lake_path)
    world.run()
    world.assert_exact()
    shutil.rmtree(world.lake_path)
    shutil.copytree(tmp_path / "backup", world.lake_path)
    with world.open() as log:
        prune(log, max_count=1)
    with pytest.raises(InvalidOptionError, match="position in the log is 45, and retention deleted"):
        world.run()


def test_bronze_behind_silver_is_refused(world: World) -> None:
    world.publish_all_kinds()
    world.run()
    bronze = world.lake.table(BRONZE)
    for version in range(3, bronze.version + 1):
        Path(world.lake_path, BRONZE, "_delta_log", f"{version:020d}.json").unlink()
    with pytest.raises(CorruptError, match="silver has messages up to 23, and bronze only up to 12"):
        world.run()
