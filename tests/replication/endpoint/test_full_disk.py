"""The server's disk is full: stored versions can be restored all the same; a refused client learns whose disk it is."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from by_hand import Hosted, rows_of, write
from small_disk import fill, small_file_system

from headwater.errors import DiskFullError
from headwater.ports.clock import SystemClock
from headwater.replication.host import disk
from headwater.replication.host.session import abort_of
from headwater.replication.host.store import ReplicaStore
from headwater.replication.host.versions import VersionRetention
from headwater.replication.names import ReplicaName

NAME = "ns/app.db"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB for the replicas."""
    with small_file_system(tmp_path / "replicas", "8m", "nr_inodes=64") as directory:
        yield directory


def leave_no_room(directory: Path, *, also_names: bool) -> None:
    """Not a byte more, and not a name of a file."""
    fill(directory, "catalogue.db-filler")
    if also_names:
        for number in range(os.statvfs(directory).f_ffree):
            (directory / f"catalogue.db-filler-{number}").touch()


@pytest.mark.parametrize(("mode", "also_names"), [("wal", False), ("wal", True), ("delete", True)])
async def test_the_newest_version_comes_from_a_full_disk_and_an_older_one_says_whose_disk_it_is(
    small_disk: Path, hosted: Callable[..., Hosted], database: Path, tmp_path: Path, mode: str, also_names: bool
) -> None:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute(f"PRAGMA journal_mode = {mode}")
    async with hosted() as server:
        await server.push(database)
        write(database, 5)
        await server.push(database, base=1, pushID="push-2")
        leave_no_room(small_disk, also_names=also_names)
        await server.pull(tmp_path / "back.db")
        assert rows_of(tmp_path / "back.db") == rows_of(database)
        async with server.session(f"pull/{NAME}@1") as session:
            await session.send({"dry": False})
            assert await session.text() == "ABORT=DISK_FULL:the server's disk is full"
        assert server.files() == ["1.pages", "2.db"]
    # Nor is there room for what the catalogue needs beside it, without the server.
    leave_no_room(small_disk, also_names=False)
    with ReplicaStore(small_disk, VersionRetention(), SystemClock()).open() as store:
        store.restore(ReplicaName.parse(NAME), 2, tmp_path / "by-hand.db")
    assert rows_of(tmp_path / "by-hand.db") == rows_of(database)


def test_a_full_disk_is_reported_as_that_of_the_server() -> None:
    no_space = disk.error_of(OSError(28, "No space left on device"), "/srv/replicas")
    for error in (no_space, DiskFullError("database or disk is full"), DiskFullError("the server's disk is full")):
        abort = abort_of(error)
        assert (abort.code, "server" in abort.why, "/srv" in abort.why) == ("DISK_FULL", True, False)
