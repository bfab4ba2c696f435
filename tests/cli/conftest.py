"""Commands are run in this process where that tells the same, and as real processes for signals and pipes."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command_line import HEADWATER

import headwater
from headwater.cli import main


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def items(self) -> list[Any]:
        """Of a command that lists."""
        found: list[Any] = self.json["items"]
        return found

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
    with headwater.open(path, maintenance_interval=None) as opened:
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
            stdout=options.get("stdout", subprocess.PIPE),
            stderr=options.get("stderr", subprocess.PIPE),
            text=True,
            cwd=options.get("cwd"),
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

    def call(*arguments: object, input: str | None = None, timeout: float = 60, **options: Any) -> Result:
        process = start(*arguments, stdin=subprocess.PIPE, **options)
        out, err = process.communicate(input, timeout=timeout)
        return Result(process.returncode, out, err)

    return call


class Served(NamedTuple):
    """A `headwater serve` that has printed its url."""

    process: subprocess.Popen[str]
    url: str
    first: dict[str, Any]

    def stop(self, number: int = signal.SIGTERM) -> list[dict[str, Any]]:
        """End it in order; what it logged since it began to serve."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=30)
        assert self.process.returncode == 0, err
        return [json.loads(line) for line in err.splitlines()]


def first_words(process: subprocess.Popen[str]) -> Served:
    assert process.stderr is not None
    line = process.stderr.readline()
    assert '"url"' in line, line + process.stderr.read()
    output = json.loads(line)
    return Served(process, output["url"], output)


@pytest.fixture
def serve(start: Callable[..., subprocess.Popen[str]], path: Path) -> Callable[..., Served]:
    """Serve the log of the test or another one, on any free port, with JSON logs."""

    def call(*arguments: object, log: object = path, **options: Any) -> Served:
        return first_words(start("serve", log, "--port", 0, "--log-format", "json", *arguments, **options))

    return call


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all the tests of a file; each has topics and subscriptions of its own."""
    file = tmp_path_factory.mktemp("served") / "events.db"
    command = [*HEADWATER, "serve", str(file), "--port", "0", "--log-format", "json"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield first_words(process)
        finally:
            process.terminate()
