"""What `headwater sync` shows: a bar while pages move, on a terminal, and a line for what came of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from headwater.cli.output import console, printable, say, surround_lines, write_document, write_line
from headwater.cli.times import say_size
from headwater.replication.outcome import Outcome
from headwater.replication.outcome import Progress as Moved

SPEEDUP_TOLD_MIN = 1.5  # less is no news
SPEEDUP_WHOLE_MIN = 10.0  # from here on without decimals


class Shown:
    """While entered, there is a bar from the first progress on, until any line is written: with a push or pull that
    has ended comes a line, and while nothing moves nothing is drawn."""

    def __init__(self, *, as_json: bool, dry: bool = False) -> None:
        self._as_json = as_json
        self._dry = dry
        self._is_entered = False
        self._lock = threading.RLock()  # lines also come from other threads
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Shown:
        self._is_entered = sys.stderr.isatty()
        surround_lines(self._cleared)
        return self

    def __exit__(self, *exc: object) -> None:
        with self._cleared():
            self._is_entered = False
        surround_lines()

    @contextmanager
    def _cleared(self) -> Iterator[None]:
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
            self._bar = self._task = None
            yield

    def progress(self, moved: Moved) -> None:
        with self._lock:
            if not self._is_entered:
                return
            if self._bar is None or self._task is None:
                self._bar = _bar()
                self._task = self._bar.add_task(moved.phase, total=None, moved="")
                self._bar.start()
            done, whole = moved.sent + moved.received, moved.total_estimate
            text = f"{say_size(min(done, whole))} of {say_size(whole)}" if whole else ""
            if moved.phase == "finishing" and done and not self._dry:  # before, nobody knows how many pages move
                text += speedup_text(whole / done)
                done = whole
            self._bar.update(self._task, description=moved.phase, completed=done, total=whole or None, moved=text)

    def outcome(self, outcome: Outcome, *, as_document: bool = False) -> None:
        if self._as_json:
            (write_document if as_document else write_line)(outcome)
            sys.stdout.flush()
        else:
            say(printable(sentence(outcome)))


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=28, complete_style="cyan", finished_style="green", pulse_style="cyan"),
        TextColumn("{task.fields[moved]}"),
        console=console(to_stderr=True),
        transient=True,
        redirect_stdout=False,  # all lines of ours clear it themselves
        redirect_stderr=False,
    )


def speedup_text(speedup: float) -> str:
    if speedup < SPEEDUP_TOLD_MIN:
        return ""
    return f", speed-up {speedup:,.{0 if speedup >= SPEEDUP_WHOLE_MIN else 1}f} ×"


def sentence(outcome: Outcome) -> str:
    """What came of it, on one line."""
    local, remote = outcome.local, outcome.remote
    if outcome.dry and outcome.is_new:
        way = f"{remote}@{outcome.version} to {local}" if outcome.kind == "pull" else f"{local} to {remote}"
        about = say_size(max(outcome.sent, outcome.received))
        return f"would move {outcome.changed_pages:,} of {outcome.pages:,} pages, about {about}, from {way}"
    if not outcome.is_new:
        return f"{_nothing(outcome)} ({_compared(outcome)})"
    moved = f"{say_size(outcome.size)}; {_compared(outcome)}{speedup_text(outcome.speedup)}"
    if outcome.kind == "copy":
        return f"copied {local} to {remote}: {moved}"
    if outcome.kind == "pull":
        return f"pulled version {outcome.version} of {remote} to {local}: {moved}"
    return f"pushed {local} as version {outcome.version} of {remote}: {moved}"


def _nothing(outcome: Outcome) -> str:
    if outcome.kind == "copy":
        return f"nothing to copy: {outcome.remote} has the same pages"
    if outcome.kind == "pull":
        return f"nothing new: version {outcome.version} of {outcome.remote} is in {outcome.local} already"
    version = outcome.base if outcome.version is None else outcome.version
    return f"nothing to push: version {version} of {outcome.remote} has the same pages"


def _compared(outcome: Outcome) -> str:
    return f"{say_size(outcome.sent)} sent, {say_size(outcome.received)} received, {outcome.seconds:.2f} s"
