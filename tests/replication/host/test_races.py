"""Pushes and removals at the same time: each gets a true answer."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from headwater import ManualClock
from headwater.errors import Corrupt, VersionConflict
from headwater.replication.host import scratch
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
