"""Progress on a terminal: a bar where the end is known, a spinner where it is not; nothing elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from headwater.cli.output import console, count

LOOK_S = 1.0


class _HowFar(ProgressColumn):
    """`3 of 8` of a step that is counted; of the others there is nothing to say."""

    def render(self, task: Task) -> Text:
        counted = task.fields.get("counted")
        return Text(f"{count(int(task.completed))} of {count(int(task.total or 0))}" if counted else "", "dim")


class Bars:
    """`pipeline.jobs.progress.Progress`: one line a step; those that are done stay until the end."""

    def __init__(self) -> None:
        self._bars = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description:<12}"),
            BarColumn(),
            TimeElapsedColumn(),
            _HowFar(),
            console=console(to_stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()

    def step(self, name: str, total: int | None = None) -> None:
        self._finish()
        self._task = self._bars.add_task(name, total=total or None, counted=bool(total))

    def reached(self, done: int) -> None:
        if self._task is not None:
            self._bars.update(self._task, completed=done)

    def _finish(self) -> None:
        if self._task is not None:
            total = self._bars.tasks[self._task].total
            self._bars.update(self._task, total=total or 1, completed=total or 1)


class Following:
    """Progress of what has no end: one line that says what is being done, or how far it has come."""

    def __init__(self, upto: Callable[[], int]) -> None:
        self._upto = upto
        screen = console(to_stderr=True)
        self._line = screen.status("beginning …") if screen.is_terminal else None

    def __enter__(self) -> Following:
        if self._line is not None:
            self._line.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._line is not None:
            self._line.stop()

    def step(self, name: str, total: int | None = None) -> None:
        self._say(f"{name} …")

    def reached(self, done: int) -> None:
        pass

    def wait(self, seconds: float) -> bool:
        """Until then, or until a signal comes out of it."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._say(f"up to seq {count(self._upto())}")
            time.sleep(min(left, LOOK_S) if self._line is not None else left)
        return True

    def _say(self, what: str) -> None:
        if self._line is not None:
            self._line.update(what)
