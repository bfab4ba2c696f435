"""A server in a process of its own, to be killed and started again on the same port and file."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from server_program import free_port

PATIENCE_S = 60.0  # the machine may be busy with other things
PROGRAM = """
import json, sys, headwater
path, port, settings = sys.argv[1:]
headwater.serve(path, port=int(port), **json.loads(settings)).run(lambda server: print("ready", flush=True))
"""


class ServerProcess:
    """Runs from `start` to `kill` or `stop`, as often as you like."""

    def __init__(self, path: Path, log: str | None = None, **settings: Any) -> None:
        """`log`: the url of one that is not this file."""
        self.path = path
        self._log = log or path
        self.port = free_port()
        self._settings = json.dumps(settings)
        self._errors = path.with_name("server-stderr")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when it answers."""
        with open(self._errors, "ab") as errors:
            self._process = subprocess.Popen(
                self.command(),
                cwd=self.path.parent,  # where no headwater.toml lies
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        assert readable, "the server takes too long to start"
        assert self._process.stdout.readline() == b"ready\n", self.errors()

    def command(self) -> list[str]:
        return [sys.executable, "-c", PROGRAM, str(self._log), str(self.port), self._settings]

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self, seconds_max: float = PATIENCE_S) -> float:
        """Returns how long it took to end."""
        began = time.monotonic()
        if self._process is not None:
            assert self._end(signal.SIGTERM, seconds_max) == 0, self.errors()
        return time.monotonic() - began

    def _end(self, how: signal.Signals, seconds_max: float = PATIENCE_S) -> int:
        process, self._process = self._process, None
        assert process is not None
        assert process.stdout is not None
        process.send_signal(how)
        process.stdout.close()
        return process.wait(seconds_max)

    def errors(self) -> str:
        """The last of what it wrote to stderr."""
        return self._errors.read_text(errors="replace")[-3_000:]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            self.kill()
