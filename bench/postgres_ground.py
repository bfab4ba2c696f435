"""The PostgreSQL server of the measurements: one per run, on loopback, with fsync on."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import seconds

if TYPE_CHECKING:
    from postgres_server import PostgresServer

LARGE = 5_000_000  # messages in the large log
COMMITS = 200  # to measure the cost of a commit
SAID = ("fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "max_wal_size", "autovacuum_naptime")
SUPPORT = Path(__file__).parents[1] / "tests" / "support"


class Ground:
    """A server that starts when a measurement first needs it."""

    def __init__(self, large: int, stack: ExitStack) -> None:
        self.large = large
        self._stack = stack

    @cached_property
    def server(self) -> PostgresServer:
        sys.path.append(str(SUPPORT))
        from postgres_server import PostgresServer

        return self._stack.enter_context(PostgresServer())

    @contextmanager
    def database(self) -> Iterator[str]:
        """The url of an empty database, which is dropped at the end."""
        url = self.server.new_database()
        try:
            yield url
        finally:
            self.server.drop_database(url)

    def describe(self) -> str:
        import psycopg

        with self.server.administration() as connection:
            settings = {name: _only(connection, f"SHOW {name}") for name in SAID}
            version = _only(connection, "SHOW server_version")
            connection.execute("CREATE TABLE IF NOT EXISTS commits (data text)")
            costs_s = [seconds(lambda: connection.execute("INSERT INTO commits VALUES ('x')")) for _ in range(COMMITS)]
        return (
            f"PostgreSQL {version} on loopback, psycopg {psycopg.__version__} ({psycopg.pq.__impl__}); "
            f"{', '.join(f'{name} {value}' for name, value in settings.items())}; "
            f"files on {_file_system(self.server.folder)}; "
            f"a commit of one row takes {statistics.median(costs_s) * 1_000:.2f} ms; "
            f"load before {os.getloadavg()[0]:.1f}"
        )


@contextmanager
def prepared(large: int) -> Iterator[Ground]:
    with ExitStack() as stack:
        yield Ground(large, stack)


def _only(connection: Any, query: str) -> str:
    return str(connection.execute(query).fetchone()[0])


def _file_system(folder: Path) -> str:
    """A file system in memory would make fsync free."""
    done = subprocess.run(["df", "--output=fstype", folder], capture_output=True, text=True)
    return done.stdout.split()[-1] if done.returncode == 0 else "an unknown file system"
