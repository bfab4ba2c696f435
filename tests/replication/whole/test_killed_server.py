"""The server is killed in the middle of a push: its newest version is whole, nothing is half accepted, and the next
push succeeds."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fault_lane import Direction
from fault_proxy import FaultProxy
from hammered import make_books, read_books, write_books
from replica_host import AFTER_COMMIT, ReplicaHost
from server_process import PATIENCE_S

import headwater
from headwater.errors import ReplicationFailedError, UnreachableError
from headwater.replication.names import ReplicaName

KILLS = 3
DATABASE_BYTES = 12_000_000
KILL_BYTES_MAX = DATABASE_BYTES * 3 // 4
NAME = ReplicaName("shop", "books.db")


def test_in_the_midst_of_an_acceptance_it_is_all_or_nothing(host: ReplicaHost, tmp_path: Path) -> None:
    """Of the first version too. All steps, and a power cut at each, are in host/test_crashes.py."""
    path, remote = make_books(tmp_path / "books.db", "wal", 0.2), host.remote(NAME)
    newest = 0
    for step in ("version named", "committed", "directory synced", "published"):
        host.stop_at(step)
        with ThreadPoolExecutor(1) as pool:
            push = pool.submit(headwater.sync, path, remote)
            host.wait_stopped()
            host.restart()
            with pytest.raises((ReplicationFailedError, UnreachableError)):
                push.result()
        is_accepted = step in AFTER_COMMIT
        assert host.newest(NAME) == newest + is_accepted, step
        if newest + is_accepted:
            host.check(NAME, verify_all=False)
        # The same again: no conflict, and no second version of what is there already.
        again = headwater.sync(path, remote)
        newest += 1
        assert (again.version, again.is_new) == (newest, not is_accepted), step
        write_books(path, 0.1)
    assert headwater.sync(path, remote).version == newest + 1
    host.check(NAME)
    headwater.sync(remote, tmp_path / "pulled.db")
    assert read_books(tmp_path / "pulled.db") == read_books(path)


def test_while_pages_come_the_newest_version_stays(
    host: ReplicaHost, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    dice = random.Random(pytestconfig.getoption("--dice"))
    path = make_books(tmp_path / "books.db", "wal", DATABASE_BYTES / 1e6)
    with FaultProxy("127.0.0.1", host.port) as proxy, ThreadPoolExecutor(1) as pool:
        remote = host.remote(NAME, proxy.port)
        newest = 0
        for number in range(KILLS):
            before = proxy.counts.to_server_bytes
            kill_at = before + dice.randrange(1_000, KILL_BYTES_MAX)
            push = pool.submit(headwater.sync, path, remote)
            proxy.wait_until(lambda counts, kill_at=kill_at: counts.to_server_bytes >= kill_at, PATIENCE_S)
            proxy.throttle(10_000, Direction.TO_SERVER)  # it does not get the rest while we reach for it
            host.restart()
            proxy.heal()
            with pytest.raises((ReplicationFailedError, UnreachableError)):
                push.result()
            assert host.newest(NAME) == newest
            if newest:
                host.check(NAME, verify_all=False)
            else:
                host.wait_for_files({})
            if number == 1:
                newest += 1
                assert headwater.sync(path, remote).version == newest
                write_books(path)
        assert headwater.sync(path, remote).version == newest + 1
    host.check(NAME)
