"""Python functions in Spark's workers: results, errors, progress, interruption."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lake_world import spark_of
from pyspark.sql import SparkSession

from headwater.errors import InvalidOptionError, StoreError
from headwater.pipeline.session import Spark
from headwater.pipeline.tasks import run_tasks

WAIT_S = 60.0


@pytest.fixture
def started(spark: SparkSession) -> Spark:
    return spark_of(spark)


def waiter(file: Path) -> Callable[[], None]:
    """A function that waits for a file of another process. It is a local one, which is pickled by its code: workers do
    not have this module."""

    def wait() -> None:
        until = time.monotonic() + WAIT_S
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.02)  # the file is the only signal between the processes

    return wait


def test_results_come_in_the_order_of_the_tasks_from_other_processes(started: Spark) -> None:
    def call(task: tuple[int, str]) -> tuple[int, str, int]:
        return task[0] * 2, task[1].upper(), os.getpid()

    results = run_tasks(started, call, [(3, "a"), (1, "b"), (2, "c")])
    assert [result[:2] for result in results] == [(6, "A"), (2, "B"), (4, "C")]
    assert os.getpid() not in {result[2] for result in results}
    assert run_tasks(started, call, []) == []


def test_an_error_of_ours_is_raised_as_it_was_there_and_is_not_tried_again(started: Spark, tmp_path: Path) -> None:
    def call(task: int) -> int:
        with (tmp_path / "attempts").open("a") as file:
            file.write("x")
        raise InvalidOptionError("it cannot be", where=f"task {task}", next="Try another")

    with pytest.raises(InvalidOptionError) as caught:
        run_tasks(started, call, [7])
    assert (caught.value.why, caught.value.where, caught.value.next) == ("it cannot be", "task 7", "Try another")
    assert (tmp_path / "attempts").read_text() == "x"


def test_a_passing_error_is_tried_again(started: Spark, tmp_path: Path) -> None:
    def call(task: int) -> int:
        with (tmp_path / "attempts").open("a") as file:
            file.write("x")
        if (tmp_path / "attempts").stat().st_size < 2:
            raise OSError("a hiccup")
        return task

    assert run_tasks(started, call, [7]) == [7]


def test_a_lasting_error_has_its_trace(started: Spark) -> None:
    def call(task: int) -> int:
        raise OSError(f"no such device: {task}")

    with pytest.raises(StoreError, match=r"a task failed 4 times: OSError: no such device: 7") as caught:
        run_tasks(started, call, [7])
    assert "in call" in caught.value.__notes__[0]


def test_an_error_outside_the_function_names_the_error_of_python(
    started: Spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers do not have the module of the function."""
    (tmp_path / "only_here.py").write_text("def call(task):\n    return task\n")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        call = importlib.import_module("only_here").call
    with pytest.raises(StoreError, match=r"\(ModuleNotFoundError: No module named 'only_here'\)") as caught:
        run_tasks(started, call, [7])
    assert "Spark's workers" in caught.value.next
    assert caught.value.__cause__ is None  # its text would be gone with the JVM


def test_progress_moves_while_tasks_run(started: Spark, tmp_path: Path) -> None:
    """The second task ends only after the first one was reported."""
    wait = waiter(tmp_path / "seen")

    def call(task: int) -> int:
        if task == 1:
            wait()
        return task

    seen: list[tuple[int, int]] = []

    def on_progress(done: int, total: int) -> None:
        seen.append((done, total))
        if done == 1:
            (tmp_path / "seen").touch()

    began = time.monotonic()
    assert run_tasks(started, call, [0, 1], on_progress) == [0, 1]
    assert time.monotonic() - began < WAIT_S
    assert seen == sorted(set(seen))
    assert (1, 2) in seen
    assert seen[-1] == (2, 2)


def test_an_interruption_cancels_the_tasks_and_the_session_goes_on(started: Spark, tmp_path: Path) -> None:
    wait = waiter(tmp_path / "never")

    def call(task: int) -> int:
        (tmp_path / "begun").touch()
        wait()
        return task

    def on_progress(done: int, total: int) -> None:
        waiter(tmp_path / "begun")()
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_tasks(started, call, [0, 1], on_progress)
    assert run_tasks(started, lambda task: task + 1, [1, 2]) == [2, 3]  # there are two cores: they are free again
    assert time.monotonic() - began < WAIT_S
