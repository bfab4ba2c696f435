"""Pushes and removals at the same time: each gets a true answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater import ManualClock
from headwater.errors import CorruptError, LockedError, UnknownReplicaError, VersionConflictError
from headwater.replication.host import disk, verify
from headwater.replication.host.catalogue import Catalogue
from headwater.replication.host.store import ReplicaStore
from headwater.replication.host.versions import VersionRetention

Open = Callable[..., ReplicaStore]


def accepted_before_the_copy(store: ReplicaStore, pusher, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another push is accepted when the next one has looked at the catalogue, and not yet at the file."""
    other = pusher.begin(store)
    pusher.write(other.path, pusher.edit(number))
    prepare = ReplicaStore._prepare

    def late(*given: object) -> None:
        monkeypatch.setattr(ReplicaStore, "_prepare", prepare)
        store.accept_push(other)
        prepare(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(ReplicaStore, "_prepare", late)


def test_a_push_that_begins_while_another_is_accepted(
    store: ReplicaStore, pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher.push(store, 1)
    accepted_before_the_copy(store, pusher, 2, monkeypatch)
    with pytest.raises(VersionConflictError) as caught:
        pusher.begin(store, 1)
    assert caught.value.newest == 2
    accepted_before_the_copy(store, pusher, 3, monkeypatch)
    assert pusher.begin(store, "latest").base == 3


@pytest.mark.parametrize("step", ["checked", "delta named", "version named", "directory synced"])
def test_a_replica_removed_at_any_step_of_a_push_is_a_conflict(open_store: Open, pusher, step: str) -> None:
    command: list[ReplicaStore] = []
    store = open_store(checkpoint=lambda at: command and at == step and command.pop().remove(pusher.name))
    pusher.push(store, 1)
    begun = pusher.begin(store)
    pusher.write(begun.path, pusher.edit(2))
    command.append(open_store(serve=False))
    with pytest.raises(VersionConflictError) as caught:
        store.accept_push(begun)
    assert caught.value.newest == 0
    assert [each for each in os.scandir(store.directory) if each.is_dir()] == []


def test_versions_are_reported_in_their_order_when_the_clock_went_back(
    store: ReplicaStore, pusher, clock: ManualClock
) -> None:
    pusher.push(store, 1)
    clock.advance(-60)
    pusher.push(store, 2)
    assert [version.number for _, version in store.catalogue.unannounced()] == [1, 2]


def test_a_file_that_is_longer_than_its_header_says_is_no_version(store: ReplicaStore, pusher) -> None:
    begun = pusher.begin(store)
    pusher.write(begun.path, pusher.edit(1))
    with open(begun.path, "ab") as file:
        file.write(bytes(512 * 3))
    with pytest.raises(CorruptError, match="its header says"):
        store.accept_push(begun)


def test_a_version_that_went_while_others_were_verified_is_not_bad_but_gone(open_store: Open, pusher) -> None:
    store = open_store(policy=VersionRetention(keep_last=2))
    for number in (1, 2, 3):
        pusher.push(store, number)
        store.catalogue.announced(store.catalogue.get(pusher.name).id, number)
    pusher.push(store, 4)
    with pytest.raises(UnknownReplicaError, match="no version 1"):
        store.verify(pusher.name, 1)


def test_a_replica_removed_while_it_is_verified_is_not_bad_but_gone(
    store: ReplicaStore, open_store: Open, pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher.push(store, 1)
    command = open_store(serve=False)

    def late(path: str, *, interactive: bool) -> None:
        command.remove(pusher.name)
        raise CorruptError("not there any more", where=path)

    monkeypatch.setattr(verify, "check_integrity", late)
    with pytest.raises(UnknownReplicaError, match="removed"):
        store.verify(pusher.name, 1)


def test_a_removal_that_dies_halfway_is_finished_at_the_next_start(
    store: ReplicaStore, open_store: Open, pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher.push(store, 1)
    pusher.push(store, 2)

    def dies(*given: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", dies)
        with pytest.raises(SystemExit):
            store.remove(pusher.name)
    assert store.catalogue.find(pusher.name) is None
    store.close()
    found = open_store().recover()
    assert (len(found.removed), found.damaged, pusher.files(store)) == (1, [], [])


def test_a_removal_that_is_refused_changes_nothing(
    store: ReplicaStore, pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher.push(store, 1)

    def locked(*given: object) -> None:
        raise LockedError("by another")

    with monkeypatch.context() as patched:
        patched.setattr(Catalogue, "remove", locked)
        with pytest.raises(LockedError):
            store.remove(pusher.name)
    assert pusher.files(store) == ["1.db"]


def test_a_replica_removed_when_a_push_begins_or_a_restore_runs_leaves_nothing_and_is_not_there(
    store: ReplicaStore, open_store: Open, pusher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = open_store(serve=False)
    prepare, copy = ReplicaStore._prepare, disk.copy

    def before(work: Callable[..., None]) -> Callable[..., None]:
        def late(*given: object) -> None:
            monkeypatch.setattr(ReplicaStore, "_prepare", prepare)
            monkeypatch.setattr(disk, "copy", copy)
            command.remove(pusher.name)
            work(*given)

        return late

    pusher.push(store, 1)
    monkeypatch.setattr(ReplicaStore, "_prepare", before(prepare))
    with pytest.raises(VersionConflictError) as caught:
        pusher.begin(store, 1)
    assert caught.value.newest == 0
    pusher.push(store, 1)
    monkeypatch.setattr(disk, "copy", before(copy))
    with pytest.raises(UnknownReplicaError, match="removed meanwhile"):
        store.restore(pusher.name, 1, tmp_path / "restored.db")
    assert [each for each in os.scandir(store.directory) if each.is_dir()] == []
    assert list(tmp_path.iterdir()) == [Path(store.directory)]
