"""Pushes and removals at the same time: each gets a true answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater import ManualClock
from headwater.errors import Corrupt, Locked, UnknownReplica, VersionConflict
from headwater.replication.host import disk, scratch, verifying
from headwater.replication.host.catalogue import Catalogue
from headwater.replication.host.policy import Policy
from headwater.replication.host.records import Facts
from headwater.replication.host.shelf import Shelf

Open = Callable[..., Shelf]


def accepted_before_the_copy(shelf: Shelf, pusher, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another push is accepted when the next one has looked at the catalogue, and not yet at the file."""
    other = pusher.begin(shelf)
    pusher.write(other.path, pusher.edit(number))
    prepare = scratch.prepare

    def late(*given: object) -> None:
        monkeypatch.setattr(scratch, "prepare", prepare)
        shelf.accept(other, Facts())
        prepare(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(scratch, "prepare", late)


def test_a_push_that_begins_while_another_is_accepted(shelf: Shelf, pusher, monkeypatch: pytest.MonkeyPatch) -> None:
    pusher.push(shelf, 1)
    accepted_before_the_copy(shelf, pusher, 2, monkeypatch)
    with pytest.raises(VersionConflict) as caught:
        pusher.begin(shelf, 1)
    assert caught.value.newest == 2
    accepted_before_the_copy(shelf, pusher, 3, monkeypatch)
    assert pusher.begin(shelf, "latest").base == 3


@pytest.mark.parametrize("step", ["checked", "delta named", "version named", "directory synced"])
def test_a_replica_removed_at_any_step_of_a_push_is_a_conflict(open_shelf: Open, pusher, step: str) -> None:
    command: list[Shelf] = []
    shelf = open_shelf(checkpoint=lambda at: command and at == step and command.pop().remove(pusher.name))
    pusher.push(shelf, 1)
    begun = pusher.begin(shelf)
    pusher.write(begun.path, pusher.edit(2))
    command.append(open_shelf(serve=False))
    with pytest.raises(VersionConflict) as caught:
        shelf.accept(begun, Facts())
    assert caught.value.newest == 0
    assert [each for each in os.scandir(shelf.directory) if each.is_dir()] == []


def test_versions_are_told_in_their_order_when_the_clock_went_back(shelf: Shelf, pusher, clock: ManualClock) -> None:
    pusher.push(shelf, 1)
    clock.advance(-60_000)
    pusher.push(shelf, 2)
    assert [each.version.number for each in shelf.unannounced()] == [1, 2]


def test_a_file_that_is_longer_than_its_header_says_is_no_version(shelf: Shelf, pusher) -> None:
    begun = pusher.begin(shelf)
    pusher.write(begun.path, pusher.edit(1))
    with open(begun.path, "ab") as file:
        file.write(bytes(512 * 3))
    with pytest.raises(Corrupt, match="its header tells of"):
        shelf.accept(begun, Facts())


def test_a_version_that_went_while_others_were_verified_is_not_bad_but_gone(open_shelf: Open, pusher) -> None:
    shelf = open_shelf(policy=Policy(keep_last=2))
    for number in (1, 2, 3):
        pusher.push(shelf, number)
        shelf.announced(shelf.get(pusher.name).id, number)
    pusher.push(shelf, 4)
    with pytest.raises(UnknownReplica, match="no version 1"):
        shelf.verify(pusher.name, 1)


def test_a_replica_removed_while_it_is_verified_is_not_bad_but_gone(
    shelf: Shelf, open_shelf: Open, pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher.push(shelf, 1)
    command = open_shelf(serve=False)

    def late(path: str, *, by_hand: bool) -> None:
        command.remove(pusher.name)
        raise Corrupt("not there any more", where=path)

    monkeypatch.setattr(verifying, "check_integrity", late)
    with pytest.raises(UnknownReplica, match="removed"):
        shelf.verify(pusher.name, 1)


def test_a_removal_that_dies_halfway_is_finished_at_the_next_start(
    shelf: Shelf, open_shelf: Open, pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher.push(shelf, 1)
    pusher.push(shelf, 2)

    def dies(*given: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(disk, "rename", dies)
        with pytest.raises(SystemExit):
            shelf.remove(pusher.name)
    assert shelf.find(pusher.name) is None
    shelf.close()
    found = open_shelf().recover()
    assert (len(found.removed), found.damaged, pusher.files(shelf)) == (1, [], [])


def test_a_removal_that_is_refused_changes_nothing(shelf: Shelf, pusher, monkeypatch: pytest.MonkeyPatch) -> None:
    pusher.push(shelf, 1)

    def locked(*given: object) -> None:
        raise Locked("by another")

    with monkeypatch.context() as patched:
        patched.setattr(Catalogue, "remove", locked)
        with pytest.raises(Locked):
            shelf.remove(pusher.name)
    assert pusher.files(shelf) == ["1.db"]


def test_a_replica_removed_when_a_push_begins_or_a_restore_runs_leaves_nothing_and_is_not_there(
    shelf: Shelf, open_shelf: Open, pusher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = open_shelf(serve=False)
    prepare, copy = scratch.prepare, disk.copy

    def before(work: Callable[..., None]) -> Callable[..., None]:
        def late(*given: object) -> None:
            monkeypatch.setattr(scratch, "prepare", prepare)
            monkeypatch.setattr(disk, "copy", copy)
            command.remove(pusher.name)
            work(*given)

        return late

    pusher.push(shelf, 1)
    monkeypatch.setattr(scratch, "prepare", before(prepare))
    with pytest.raises(VersionConflict) as caught:
        pusher.begin(shelf, 1)
    assert caught.value.newest == 0
    pusher.push(shelf, 1)
    monkeypatch.setattr(disk, "copy", before(copy))
    with pytest.raises(UnknownReplica, match="removed meanwhile"):
        shelf.restore(pusher.name, 1, tmp_path / "restored.db")
    assert [each for each in os.scandir(shelf.directory) if each.is_dir()] == []
    assert list(tmp_path.iterdir()) == [Path(shelf.directory)]
