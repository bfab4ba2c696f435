"""A lake made from a log without Spark: the tasks of a run in one other process, for a process that has a log open must
not read it through the other copy of SQLite, which ADBC has."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from headwater.pipeline.lake import Lake
from headwater.pipeline.run import Run, Task, TaskResult, run_task
from headwater.pipeline.types import Types, load_types

_elsewhere = ProcessPoolExecutor(1, get_context("spawn"))


class RunHere(Run):
    def _run(self, tasks: list[Task], done: int | None) -> list[TaskResult]:
        return list(_elsewhere.map(run_task, tasks))

    def _spark_for(self, seqs: int) -> Any:
        return None


def make_lake(log: Path, folder: Path, types: Path | None = None) -> Lake:
    """Bring the lake up to the log."""
    lake = Lake.open(folder, create=True)
    registered = Types() if types is None else load_types(types)
    with RunHere(lake, str(log), registered, lambda short: nullcontext(None)) as run:  # type: ignore[arg-type]
        run.once()
    return lake
