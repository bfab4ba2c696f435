"""What takes minutes: a database beyond the lock page, and a hundred kills."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fault_proxy import FaultProxy
from hammered import make_books, read_books, write_books
from replica_host import AFTER_COMMIT, BEFORE_COMMIT, ReplicaHost

import headwater
from headwater.errors import ReplicationFailedError, UnreachableError
from headwater.replication.integrity import dbhash
from headwater.replication.names import ReplicaName

NAME = ReplicaName("shop", "books.db")
LOCK_PAGE_AT = 1 << 30  # SQLite never stores anything in the page with this byte
PATIENCE_S = 60.0
KILLS = 100

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_database_beyond_the_lock_page(
    host: ReplicaHost, tmp_path: Path, figures: Callable[[str], None], mode: str
) -> None:
    path, pulled, remote = tmp_path / "large.db", tmp_path / "pulled.db", host.remote(NAME)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA journal_mode = {mode}")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("CREATE TABLE item (id INTEGER PRIMARY KEY, body)")
        for blob, rows in (("zeroblob", 900), ("randomblob", 200)):
            connection.executemany(f"INSERT INTO item (body) VALUES ({blob}(1000000))", [()] * rows)
    assert path.stat().st_size > LOCK_PAGE_AT
    first = headwater.sync(path, remote)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE item SET body = randomblob(1000000) WHERE id IN (3, 1099)")
        connection.executemany("INSERT INTO item (body) VALUES (randomblob(1000000))", [()] * 20)
    second = headwater.sync(path, remote)
    assert (second.version, second.is_new) == (2, True)
    assert second.sent < 50_000_000
    third = headwater.sync(remote, pulled)
    assert dbhash(str(pulled)) == dbhash(str(path)) == second.dbhash
    host.check(NAME)
    figures(
        f"beyond the lock page ({mode}, {first.size / 1e6:.0f} MB): first push {first.seconds:.1f} s, "
        f"second {second.seconds:.1f} s with {second.sent / 1e6:.1f} MB, pull {third.seconds:.1f} s"
    )


@pytest.fixture
def roomy_host(tmp_path: Path) -> Iterator[ReplicaHost]:
    """It keeps all versions."""
    (tmp_path / "server").mkdir()
    with ReplicaHost(tmp_path / "server" / "log.db", replicas_keep_last=10 * KILLS) as made:
        yield made


def test_a_hundred_kills(
    roomy_host: ReplicaHost, tmp_path: Path, pytestconfig: pytest.Config, figures: Callable[[str], None]
) -> None:
    """Of the client or the server, at any byte or any step; each is followed by a push that succeeds."""
    dice = random.Random(pytestconfig.getoption("--dice"))
    host, path = roomy_host, make_books(tmp_path / "books.db", "wal", 3)
    accepted_before_kill = 0
    with FaultProxy("127.0.0.1", host.port) as proxy, ThreadPoolExecutor(1) as pool:
        remote = host.remote(NAME, proxy.port)
        newest = headwater.sync(path, remote).version
        assert newest == 1
        for number in range(KILLS):
            write_books(path, dice.choice([0.01, 0.3, 1.0]), seed=number)
            moment = dice.choice([*BEFORE_COMMIT, *AFTER_COMMIT, "bytes", "bytes", "bytes"])
            kill_at = proxy.counts.to_server_bytes + dice.randrange(1, 30_000)
            if moment != "bytes":
                host.stop_at(moment)
            process = None
            if kills_client := dice.random() < 0.5:
                process = subprocess.Popen(
                    [sys.executable, "-m", "headwater", "sync", str(path), remote],
                    cwd=tmp_path,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            else:
                push = pool.submit(headwater.sync, path, remote)
            if moment == "bytes":
                proxy.wait_until(lambda counts, kill_at=kill_at: counts.to_server_bytes >= kill_at, PATIENCE_S)
            else:
                host.wait_stopped()
            if kills_client:
                assert process is not None
                process.kill()
                process.wait(PATIENCE_S)
                if moment != "bytes":
                    host.go_on()
            else:
                host.restart()
                with contextlib.suppress(ReplicationFailedError, UnreachableError):
                    push.result()
            found = host.newest(NAME)
            assert found in (newest, newest + 1)
            again = headwater.sync(path, remote)
            newest += 1
            assert again.version == newest, (number, moment, kills_client)
            accepted_before_kill += not again.is_new
            if number % 20 == 19:
                host.check(NAME, verify_all=False)
    versions = host.check(NAME)
    assert len({version.dbhash for version in versions}) == len(versions)
    headwater.sync(host.remote(NAME), tmp_path / "pulled.db")
    assert read_books(tmp_path / "pulled.db") == read_books(path)
    figures(f"{KILLS} kills: {newest} versions, {accepted_before_kill} of them accepted by the push that was killed")
