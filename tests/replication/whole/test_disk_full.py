"""The server's disk is full during a push: the client gets an error, the newest version stays, nothing is left
behind, and what fits is taken."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hammered import make_books, read_books, write_books
from replica_host import ReplicaHost
from small_disk import small_file_system

import headwater
from headwater.errors import DiskFullError, ReplicationFailedError
from headwater.replication.names import ReplicaName

NAME, OTHER = ReplicaName("shop", "books.db"), ReplicaName("shop", "other.db")
DISK = "32m"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[ReplicaHost]:
    """A server whose replicas lie on a file system of 32 MiB."""
    (tmp_path / "server").mkdir()
    host = ReplicaHost(tmp_path / "server" / "log.db")
    with small_file_system(host.directory, DISK), host:
        yield host


def test_on_a_file_system_without_room(small_disk: ReplicaHost, tmp_path: Path) -> None:
    """A push needs room for the newest version, a copy of it, and the journal of its pages."""
    path, remote = make_books(tmp_path / "books.db", "wal", 7), small_disk.remote(NAME)
    headwater.sync(path, remote)
    before = read_books(path)

    # While the pages come: too large from the beginning, and too large on top of the copy.
    large = make_books(tmp_path / "large.db", "delete", 30)
    with pytest.raises((DiskFullError, ReplicationFailedError)) as first:
        headwater.sync(large, small_disk.remote(OTHER))
    with pytest.raises((DiskFullError, ReplicationFailedError)) as second:
        headwater.sync(large, f"{remote}@latest")
    # There is room for the copy, and none for what is to change in it.
    write_books(path, 1.0)
    filler = small_disk.directory / "catalogue.db-filler"
    _fill(filler, leave=7_600_000)
    with pytest.raises((DiskFullError, ReplicationFailedError)) as third:
        headwater.sync(path, remote)
    # No room for anything.
    _fill(filler, leave=0)
    with pytest.raises((DiskFullError, ReplicationFailedError)) as fourth:
        headwater.sync(path, remote)
    for reported in (first, second, third, fourth):
        assert "full" in str(reported.value) or "no disk space" in str(reported.value), reported.value
        assert str(small_disk.directory) not in str(reported.value)

    assert small_disk.newest(NAME) == 1
    filler.unlink()
    small_disk.check(NAME)
    headwater.sync(remote, tmp_path / "pulled.db")
    assert read_books(tmp_path / "pulled.db") == before
    outcome = headwater.sync(path, remote)
    assert (outcome.version, outcome.is_new) == (2, True)
    small_disk.check(NAME)


def _fill(path: Path, leave: int) -> None:
    """Until so many bytes are free."""
    path.unlink(missing_ok=True)
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while (free := _free_bytes(path.parent) - leave) > 0:
            file.write(bytes(min(free, 1 << 20)))


def _free_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
