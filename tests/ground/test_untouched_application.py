"""Loggers, signals, warnings and the environment are the application's: the library changes none of them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

import headwater

PROGRAM = Path(__file__).with_name("untouched_application.py")


def test_importing_all_and_opening_logs_leaves_the_application_as_it_was(
    tmp_path: Path, postgres_schema_url: str
) -> None:
    run = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path / "log.db"), "memory:", postgres_schema_url],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {"changed": {}, "left_out": []}


def test_a_server_that_has_stopped_leaves_the_signal_handlers_as_they_were() -> None:
    def handler(number: int, frame: FrameType | None) -> None: ...

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        server = headwater.serve("memory:", port=0)
        server.run(on_ready=lambda ready: ready.ask_to_stop())
        assert [signal.getsignal(number) for number in numbers] == [handler, handler]
    finally:
        for number, former in before.items():
            signal.signal(number, former)
