"""Workers as real processes: a module in a directory, `headwater worker` beside it, and what both write."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import textwrap
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import HEADWATER
from eventually import eventually

PATIENCE_S = 60


class Worker:
    """`headwater worker tasks:log` in a directory that holds tasks.py."""

    def __init__(self, directory: Path, *arguments: str, target: str = "tasks:log") -> None:
        self.directory = directory
        self._stderr = directory / "stderr.txt"
        with open(self._stderr, "ab") as errors:
            self.process = subprocess.Popen(
                [*HEADWATER, "worker", target, *arguments],
                cwd=directory,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )

    def text(self) -> str:
        return self._stderr.read_text(errors="replace")

    def wait_for(self, pattern: str, count: int = 1) -> list[Any]:
        """Until its log has these lines so many times; what the groups of the pattern found."""
        try:
            eventually(lambda: len(re.findall(pattern, self.text())) >= count, True)
        except AssertionError:
            raise AssertionError(f"{pattern!r} not {count} times in:\n{self.text()}") from None
        return re.findall(pattern, self.text())

    def pids(self, count: int) -> list[int]:
        """Of the processes that have come to run, in this order."""
        return [int(pid) for pid in self.wait_for(r"\(pid (\d+)\) runs", count)]

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.text()}") from None

    def health(self) -> tuple[int, dict[str, Any]]:
        [url, *_] = self.wait_for(r"health is at (http://[\w.:]+/healthz)")
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as exc:
            return exc.code, json.load(exc)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # its processes end by themselves: a test holds that
        self.process.wait(PATIENCE_S)


Start = Callable[..., Worker]


@pytest.fixture
def module(tmp_path: Path) -> Callable[[str], Path]:
    """Write tasks.py."""

    def write(text: str) -> Path:
        path = tmp_path / "tasks.py"
        before = path.stat().st_mtime_ns if path.exists() else 0
        path.write_text(textwrap.dedent(text))
        os.utime(path, ns=(max(before + 1_000_000, path.stat().st_mtime_ns),) * 2)  # clocks of file systems are coarse
        return path

    return write


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Worker] = []

    def begin(*arguments: str, **options: Any) -> Worker:
        started.append(Worker(tmp_path, *arguments, **options))
        return started[-1]

    yield begin
    for worker in started:
        worker.kill()


def is_alive(pid: int) -> bool:
    """A zombie is none: its parent may be gone, and the machine's init slow."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def alive() -> Callable[[int], bool]:
    return is_alive
