"""Which version a push comes from: the newest, or it is refused; over the newest only with consent."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fault_lane import Direction
from fault_proxy import FaultProxy
from hammered import make_books, read_books, write_books
from replica_host import ReplicaHost

import headwater
from headwater.errors import UnknownReplicaError, UnsyncedChangesError, VersionConflictError
from headwater.replication.names import Remote, ReplicaName, place_of


def name_of(remote: str) -> ReplicaName:
    place = place_of(remote)
    assert isinstance(place, Remote)
    return place.name


def copied(path: Path, to: Path) -> Path:
    """With what is remembered of it, as when a machine is cloned."""
    shutil.copy(path, to)
    shutil.copytree(f"{path}-headwater", f"{to}-headwater")
    return to


def test_a_push_from_a_stale_base_is_refused_and_changes_nothing(
    shared_host: ReplicaHost, remote: str, tmp_path: Path
) -> None:
    first = make_books(tmp_path / "first.db", "delete", 0.1)
    headwater.sync(first, remote)
    second = copied(first, tmp_path / "second.db")
    write_books(first, 0.5)
    headwater.sync(first, remote)
    write_books(second, 0.5)
    content = second.read_bytes()
    for _ in range(2):  # refused again, however often it is asked
        with pytest.raises(VersionConflictError) as refused:
            headwater.sync(second, remote)
        assert refused.value.newest == 2
        assert "@latest" in refused.value.next
    assert second.read_bytes() == content
    assert shared_host.newest(name_of(remote)) == 2
    # To follow instead: a pull is refused too, as long as it would throw something away.
    with pytest.raises(UnsyncedChangesError):
        headwater.sync(remote, second)
    headwater.sync(remote, second, overwrite=True)
    write_books(second, 0.5)
    assert headwater.sync(second, remote).version == 3
    assert read_books(second).entries == read_books(first).entries + 1


def test_over_the_newest_with_consent_and_what_was_there_stays_a_version(
    shared_host: ReplicaHost, remote: str, tmp_path: Path
) -> None:
    first = make_books(tmp_path / "first.db", "wal", 0.1)
    stranger = make_books(tmp_path / "stranger.db", "wal", 0.1, page_size=1024)
    write_books(stranger, 1.0)
    headwater.sync(first, remote)
    with pytest.raises(VersionConflictError):
        headwater.sync(stranger, remote)
    outcome = headwater.sync(stranger, f"{remote}@latest")
    assert (outcome.base, outcome.version) == (1, 2)
    # Its base is version 2 now, so it needs no consent any more; the first one does.
    write_books(stranger, 0.5)
    assert headwater.sync(stranger, remote).version == 3
    write_books(first, 0.5)
    with pytest.raises(VersionConflictError):
        headwater.sync(first, remote)
    assert headwater.sync(first, f"{remote}@3").version == 4
    headwater.sync(f"{remote}@3", tmp_path / "third.db")
    assert read_books(tmp_path / "third.db") == read_books(stranger)
    headwater.sync(f"{remote}@latest-3", tmp_path / "oldest.db")
    assert read_books(tmp_path / "oldest.db").entries == 0


def test_a_base_that_never_was_and_one_that_is_no_more(remote: str, tmp_path: Path) -> None:
    path = make_books(tmp_path / "books.db", "delete", 0.1)
    for base in ("1", "7"):
        with pytest.raises(VersionConflictError) as refused:
            headwater.sync(path, f"{remote}@{base}")
        assert refused.value.newest == 0
    with pytest.raises(UnknownReplicaError):
        headwater.sync(remote, tmp_path / "pulled.db")
    headwater.sync(path, remote)
    write_books(path, 0.5)
    headwater.sync(path, remote)
    write_books(path, 0.5)
    for source, base in ((path, "3"), (shutil.copy(path, tmp_path / "stranger.db"), "1")):
        with pytest.raises(VersionConflictError) as refused:
            headwater.sync(source, f"{remote}@{base}")
        assert refused.value.newest == 2
    with pytest.raises(UnknownReplicaError):
        headwater.sync(f"{remote}@3", tmp_path / "pulled.db")
    assert headwater.sync(path, remote).version == 3


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


def test_two_pushes_at_once_from_one_base_make_one_version(host: ReplicaHost, tmp_path: Path) -> None:
    """The slow one has passed the question at the beginning, and is refused at the end."""
    name = ReplicaName("shop", "books.db")
    fast, remote = make_books(tmp_path / "fast.db", "delete", 0.1), host.remote(name)
    headwater.sync(fast, remote)
    slow = copied(fast, tmp_path / "slow.db")
    for path in (fast, slow):
        write_books(path, 1.0)
    with FaultProxy("127.0.0.1", host.port) as proxy, ThreadPoolExecutor(1) as pool:
        through = host.remote(name, proxy.port)
        # What is known of the remote is known by its address.
        state = Path(f"{slow}-headwater/state.json")
        state.write_text(state.read_text().replace(remote, through))
        proxy.throttle(10_000, Direction.TO_SERVER)
        push = pool.submit(headwater.sync, slow, through)
        proxy.wait_until(lambda counts: counts.to_server_bytes > 5_000)  # it was let in: pages come
        assert headwater.sync(fast, remote).version == 2
        assert not push.done()
        proxy.heal()
        with pytest.raises(VersionConflictError) as refused:
            push.result()
        assert refused.value.newest == 2
        with pytest.raises(VersionConflictError):
            headwater.sync(slow, through)
    host.check(name)
    headwater.sync(remote, tmp_path / "pulled.db")
    assert read_books(tmp_path / "pulled.db") == read_books(fast)
