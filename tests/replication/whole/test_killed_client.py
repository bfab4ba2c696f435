"""`headwater sync` is killed in the middle: nothing is half done, here and on the server, and the next one succeeds."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from child_processes import tools_at
from eventually import eventually
from fault_lane import Direction
from fault_proxy import FaultProxy
from hammered import make_books, read_books, write_books
from replica_host import ReplicaHost

import headwater
from headwater.replication.names import ReplicaName

NAME = ReplicaName("shop", "books.db")
PATIENCE_S = 60.0
DATABASE_BYTES = 30_000_000
KILL_BYTES_MAX = 12_000_000  # the rest does not fit into buffers on the way
PULLED_BYTES = 5_000_000
PULLED_BYTES_A_SECOND = 5_000_000
PUSH_KILLS = 3

Sync = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def sync(tmp_path: Path) -> Iterator[Sync]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: object) -> subprocess.Popen[bytes]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "headwater", "sync", *map(str, arguments)],
                cwd=tmp_path,
                stdout=subprocess.DEVNULL,  # what it complains about is shown when a test fails
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    assert process.wait(PATIENCE_S) == -9, "it was done before it was killed"


def test_in_the_middle_of_a_push(host: ReplicaHost, tmp_path: Path, sync: Sync, pytestconfig: pytest.Config) -> None:
    dice = random.Random(pytestconfig.getoption("--dice"))
    path = make_books(tmp_path / "books.db", "wal", DATABASE_BYTES / 1e6)
    with FaultProxy("127.0.0.1", host.port) as proxy:
        remote = host.remote(NAME, proxy.port)
        newest = 0
        for number in range(PUSH_KILLS):
            kill_at = proxy.counts.to_server_bytes + dice.randrange(1_000, KILL_BYTES_MAX)
            process = sync(path, remote)
            proxy.wait_until(lambda counts, kill_at=kill_at: counts.to_server_bytes >= kill_at, PATIENCE_S)
            proxy.throttle(10_000, Direction.TO_SERVER)  # it cannot send the rest while we reach for it
            kill(process)
            proxy.heal()
            read_books(path)
            proxy.wait_until(lambda counts: counts.open == 0, PATIENCE_S)
            assert host.newest(NAME) == newest
            if number:
                newest += 1
                outcome = headwater.sync(path, remote)
                assert (outcome.version, outcome.is_new) == (newest, True)
                write_books(path)
    host.check(NAME)
    assert sorted(each.name for each in tmp_path.glob("books.db-headwater/*")) == ["lock", "state.json"]


def test_after_the_server_has_accepted_and_before_it_could_say_so(
    host: ReplicaHost, tmp_path: Path, sync: Sync
) -> None:
    path, remote = make_books(tmp_path / "books.db", "wal", 0.2), host.remote(NAME)
    for version in (1, 2, 3):
        host.stop_at("committed")
        process = sync(path, remote)
        host.wait_stopped(process)
        kill(process)
        host.go_on()
        if version == 2:  # written meanwhile
            write_books(path, 0.1)
            assert headwater.sync(path, remote).version == 3
        else:
            outcome = headwater.sync(path, remote)
            assert (outcome.version, outcome.is_new) == (version if version == 1 else 4, False)
        write_books(path, 0.1)
    host.check(NAME)


@pytest.mark.parametrize(("mode", "kills"), [("wal", 2), ("delete", 2)])
def test_in_the_middle_of_a_pull(
    shared_host: ReplicaHost,
    remote: str,
    tmp_path: Path,
    sync: Sync,
    pytestconfig: pytest.Config,
    mode: str,
    kills: int,
) -> None:
    """The database is as before or as after, for every program that opens it."""
    dice = random.Random(pytestconfig.getoption("--dice"))
    path, copy = make_books(tmp_path / "books.db", mode, PULLED_BYTES / 1e6), tmp_path / "copy.db"
    headwater.sync(path, remote)
    with FaultProxy("127.0.0.1", shared_host.port) as proxy:
        through = remote.replace(str(shared_host.port), str(proxy.port))
        before = None
        for number in range(kills):
            kill_at = proxy.counts.to_client_bytes + dice.randrange(1_000, PULLED_BYTES * 3 // 4)
            proxy.throttle(PULLED_BYTES_A_SECOND, Direction.TO_CLIENT)
            process = sync(through, copy)
            proxy.wait_until(lambda counts, kill_at=kill_at: counts.to_client_bytes >= kill_at, PATIENCE_S)
            proxy.throttle(10_000, Direction.TO_CLIENT)  # the rest does not come while we reach for it
            kill(process)
            proxy.heal()
            eventually(lambda: tools_at(copy), [])  # its end takes back what it has not committed, and goes too
            if before is None:
                assert not copy.exists() or copy.stat().st_size == 0 or read_books(copy) == read_books(path)
            else:
                assert read_books(copy) in (before, read_books(path))
            headwater.sync(through, copy)
            before = read_books(copy)
            assert before == read_books(path)
            write_books(path, seed=number)
            headwater.sync(path, remote)


def test_ctrl_c_lets_a_push_finish(host: ReplicaHost, tmp_path: Path) -> None:
    """A terminal sends it to the whole group of processes; what does the work is none of its business."""
    path = make_books(tmp_path / "books.db", "wal", 1)
    host.stop_at("begun")
    command = [sys.executable, "-m", "headwater", "sync", str(path), host.remote(NAME), "--subscribe"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            host.wait_stopped()
            os.killpg(process.pid, signal.SIGINT)
            host.go_on()
            output, noted = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, noted
    assert b"as version 1 of" in output
    assert b"failed" not in noted
    assert host.newest(NAME) == 1
