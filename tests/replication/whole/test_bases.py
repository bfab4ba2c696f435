"""A replica that was removed, and perhaps made anew: where a push comes from then. All else of the base of a push is in
client/test_push.py, endpoint/test_push.py and host/test_store.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from hammered import make_books, read_books, write_books
from replica_host import ReplicaHost

import headwater
from headwater.errors import VersionConflictError
from headwater.replication.names import Remote, ReplicaName, place_of


def name_of(remote: str) -> ReplicaName:
    place = place_of(remote)
    assert isinstance(place, Remote)
    return place.name


@pytest.mark.parametrize("pushes", [1, 2, 3])
def test_a_replica_that_was_removed_and_made_anew_is_another_one(
    shared_host: ReplicaHost, remote: str, tmp_path: Path, pushes: int
) -> None:
    """Also if it has as many versions by now as the old one had."""
    old, new = make_books(tmp_path / "old.db", "wal", 0.1), make_books(tmp_path / "new.db", "wal", 0.1)
    for _ in range(2):
        write_books(old, 0.5)
        headwater.sync(old, remote)
    headwater.sync(remote, tmp_path / "copy.db")
    with shared_host.store() as store:
        store.remove(name_of(remote))
    for _ in range(pushes):
        write_books(new, 0.5)
        headwater.sync(new, remote)
    for _ in range(2):
        write_books(old, 0.5)
        with pytest.raises(VersionConflictError) as refused:
            headwater.sync(old, remote)
        assert refused.value.newest == pushes
    assert shared_host.newest(name_of(remote)) == pushes
    # A copy of the old one may follow the new one: it has nothing of its own to lose.
    headwater.sync(remote, tmp_path / "copy.db")
    assert read_books(tmp_path / "copy.db") == read_books(new)
    assert headwater.sync(old, f"{remote}@latest").version == pushes + 1
    write_books(old, 0.5)
    assert headwater.sync(old, remote).version == pushes + 2


def test_a_replica_that_is_gone_is_pushed_anew(shared_host: ReplicaHost, remote: str, tmp_path: Path) -> None:
    """Where nothing is, nothing can be overwritten: a server that lost its disk is filled again."""
    path = make_books(tmp_path / "books.db", "wal", 0.1)
    for _ in range(2):
        write_books(path, 0.5)
        headwater.sync(path, remote)
    with shared_host.store() as store:
        store.remove(name_of(remote))
    outcome = headwater.sync(path, remote)
    assert (outcome.version, outcome.base) == (1, 0)
    write_books(path, 0.5)
    assert headwater.sync(path, remote).version == 2
