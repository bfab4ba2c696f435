"""A catalogue that is empty, old or damaged takes no replica with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater import ManualClock
from headwater.errors import CorruptError, InvalidOptionError
from headwater.replication.host import disk
from headwater.replication.host.store import ReplicaStore
from headwater.replication.host.versions import VersionRetention

Open = Callable[..., ReplicaStore]


def test_an_empty_catalogue_beside_replicas_is_not_filled_anew(open_store: Open, directory: Path, pusher) -> None:
    with open_store() as store:
        pusher.push(store, 1)
    (directory / "catalogue.db").write_bytes(b"")
    with pytest.raises(CorruptError, match="replicas next to it"):
        open_store()
    assert pusher.files(directory) == ["1.db"]


def test_replicas_that_an_older_catalogue_does_not_know_stay(
    open_store: Open, directory: Path, pusher, tmp_path: Path
) -> None:
    """Say the directory was copied while it was served, and the catalogue's log was not."""
    store = open_store()
    pusher.push(store, 1)
    copied = tmp_path / "copied"
    shutil.copytree(directory, copied, ignore=shutil.ignore_patterns("catalogue.db-*"))
    with ReplicaStore(copied, VersionRetention(), ManualClock()).open(serve=True) as other:
        found = other.recover()
        assert found.removed == []
        assert found.damaged == [
            f"{store.catalogue.get(pusher.name).id} has versions and is not in the catalogue; remove it if it is unused"
        ]
        assert pusher.files(copied) == ["1.db"]


def test_a_damaged_catalogue_is_refused_before_anything_is_swept_away(
    open_store: Open, directory: Path, pusher
) -> None:
    with open_store() as store:
        pusher.push(store, 1)
    with contextlib.closing(sqlite3.connect(directory / "catalogue.db")) as connection:
        (root,) = connection.execute(
            "SELECT max(rootpage) FROM sqlite_schema WHERE type = 'index' AND tbl_name = 'replicas'"
        ).fetchone()
        (page_size,) = connection.execute("PRAGMA page_size").fetchone()
    with open(directory / "catalogue.db", "r+b") as file:  # the index by name loses its only entry
        file.seek((root - 1) * page_size + 3)
        file.write(b"\0\0")
    with open_store() as store, pytest.raises(CorruptError, match="missing from index"):
        store.recover()
    assert pusher.files(directory) == ["1.db"]


def test_a_removal_that_was_cut_off_is_finished(
    open_store: Open, directory: Path, pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    pusher.push(store, 1)
    with monkeypatch.context() as patched:
        patched.setattr(disk, "remove_tree", lambda path: None)
        store.remove(pusher.name)
    found = store.recover()
    assert (len(found.removed), found.damaged) == (1, [])
    assert [each for each in os.scandir(directory) if each.is_dir()] == []


def test_a_command_leaves_no_catalogue_where_none_was(open_store: Open, directory: Path) -> None:
    directory.mkdir()
    with pytest.raises(InvalidOptionError, match="no replicas here"):
        open_store(serve=False)
    assert os.listdir(directory) == []


def test_what_is_kept_is_for_this_user_alone_also_in_a_directory_that_was_there(
    open_store: Open, directory: Path, pusher
) -> None:
    directory.mkdir(mode=0o755)
    store = open_store()
    pusher.push(store, 1)
    assert {each.name: oct(each.stat().st_mode & 0o077) for each in directory.iterdir()} == dict.fromkeys(
        (each.name for each in directory.iterdir()), "0o0"
    )


def test_new_directories_are_synced_with_those_above_them(
    tmp_path: Path, pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), fsync(file))[1])
    directory = tmp_path / "a" / "b" / "replicas"
    with ReplicaStore(directory, VersionRetention(), ManualClock()).open(serve=True) as store:
        assert {os.stat(each).st_ino for each in (tmp_path, *list(directory.parents)[:2])} <= set(synced)
        replica = store.catalogue.create(pusher.name)
        (directory / replica.id).mkdir()  # by a push that was killed before it synced anything
        synced.clear()
        pusher.push(store, 1)
        assert directory.stat().st_ino in synced
