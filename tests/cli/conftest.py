"""Commands are run in this process where that tells the same, and as real processes for signals and pipes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import headwater
from headwater.cli import main

HEADWATER = [sys.executable, "-m", "headwater"]


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def json_lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run a command in this process."""

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Result(code, *capsys.readouterr())

    before = signal.getsignal(signal.SIGTERM)
    yield call
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.db"


@pytest.fixture
def log(path: Path) -> Iterator[headwater.Log]:
    """A log with three orders and a note."""
    with headwater.open(path, housekeeping=None) as opened:
        for number in (1, 2, 3):
            opened.publish("orders.new", {"order": number}, from_="shop", type="order")
        opened.publish("notes.made", "hello")
        yield opened


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a command as a process; what still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def call(*arguments: object, **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*HEADWATER, *map(str, arguments)],
            stdin=options.get("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **options.get("env", {})},
        )
        started.append(process)
        return process

    yield call
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def finish(start: Callable[..., subprocess.Popen[str]]) -> Run:
    """Run a command as a process to its end."""

    def call(*arguments: object, input: str | None = None, **options: Any) -> Result:
        process = start(*arguments, stdin=subprocess.PIPE, **options)
        out, err = process.communicate(input, timeout=60)
        return Result(process.returncode, out, err)

    return call
