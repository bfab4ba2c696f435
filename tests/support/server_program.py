"""A server of the tests' own, as a process that is started, stopped, killed and removed with its files."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

PATIENCE_S = 30.0
LOOK_EVERY_S = 0.02


class ServerProgram:
    folder: Path
    """Where its files and its output are."""
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Returns when it answers."""
        raise NotImplementedError

    def _run_until(self, answers: Callable[[], bool], *command: str | Path, user: str | None = None) -> bool:
        """Start the process, and wait until it answers; False if it ends, or never does."""
        with (self.folder / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, user=user, stdout=log, stderr=log, start_new_session=True
            )
        until = time.monotonic() + PATIENCE_S
        while self._process.poll() is None and time.monotonic() < until:
            if answers():
                return True
            time.sleep(LOOK_EVERY_S)  # there is nothing to wait for but its answer
        return False

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(PATIENCE_S)
            self._process = None

    def log(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "log.txt").read_text(errors="replace")[-4000:]
        return ""

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.remove()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
