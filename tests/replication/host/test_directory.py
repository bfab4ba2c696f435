"""A directory belongs to one server, or to some commands."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

import headwater
from headwater.errors import InvalidOptionError, LockedError, NewerSchemaError, NotALogError
from headwater.replication.host import catalogue
from headwater.replication.host.store import ReplicaStore

Open = Callable[..., ReplicaStore]


def test_a_directory_is_made_for_the_server_alone(open_store: Open, directory: Path) -> None:
    open_store()
    assert oct(directory.stat().st_mode & 0o777) == "0o700"


def test_a_second_server_is_refused_and_commands_are_not(
    open_store: Open, directory: Path, pusher, in_a_process: Callable[..., int]
) -> None:
    store = open_store()
    pusher.push(store, 1)
    with pytest.raises(LockedError, match="another server"):
        open_store()
    command = open_store(serve=False)
    assert [replica.newest for replica in command.catalogue.replicas()] == [1]
    pusher.push(store, 2)
    assert [replica.newest for replica in command.catalogue.replicas()] == [2]
    text = command.catalogue.create_key(pusher.name, "push")
    assert store.catalogue.key_kind(store.catalogue.get(pusher.name).id, text) == "push"
    store.close()

    def serve_and_die() -> None:
        open_store()
        os._exit(9)

    assert in_a_process(serve_and_die) == 9
    assert open_store().recover() == ([], [])


def test_a_command_makes_no_directory(open_store: Open, directory: Path) -> None:
    with pytest.raises(InvalidOptionError, match="no such directory"):
        open_store(serve=False)
    assert not directory.exists()
    directory.mkdir()
    with pytest.raises(InvalidOptionError, match="no replicas here"):
        open_store(serve=False)


@pytest.mark.parametrize("serve", [True, False])
def test_foreign_files_are_left_alone(open_store: Open, directory: Path, serve: bool) -> None:
    directory.mkdir()
    (directory / "thesis.txt").write_text("years of work")
    with pytest.raises(InvalidOptionError, match=r"other things, like thesis\.txt"):
        open_store(serve=serve)
    assert os.listdir(directory) == ["thesis.txt"]


@pytest.mark.parametrize("serve", [True, False])
def test_a_log_is_no_data_directory(open_store: Open, directory: Path, serve: bool) -> None:
    with headwater.open(directory) as log:
        log.publish("a", 1)
    with pytest.raises(InvalidOptionError, match="this is a file"):
        open_store(serve=serve)


def test_another_database_of_that_name_is_no_catalogue(open_store: Open, directory: Path) -> None:
    directory.mkdir()
    with headwater.open(directory / "catalogue.db") as log:
        log.publish("a", 1)
    with pytest.raises(InvalidOptionError, match="no catalogue"):
        open_store()
    with headwater.open(directory / "catalogue.db") as log:
        assert log.statistics().last_seq == 1
    for each in directory.iterdir():
        each.unlink()
    (directory / "catalogue.db").write_text("no database at all, but long enough to be looked at" * 30)
    with pytest.raises(NotALogError):
        open_store()
    assert not (directory / "catalogue.db-wal").exists()


def test_a_catalogue_of_a_later_headwater_is_refused(open_store: Open, directory: Path) -> None:
    open_store().close()
    with sqlite3.connect(directory / "catalogue.db") as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(NewerSchemaError, match="schema 2"):
        open_store()


def test_a_directory_half_made_is_finished(open_store: Open, directory: Path) -> None:
    directory.mkdir()
    (directory / "serving.lock").write_text("")
    (directory / "catalogue.db").write_text("")
    assert open_store().catalogue.replicas() == []


def test_only_what_looks_like_a_replica_is_swept_away(open_store: Open, directory: Path, pusher) -> None:
    store = open_store()
    pusher.push(store, 1)
    home = directory / store.catalogue.get(pusher.name).id
    store.close()
    (directory / "0123456789abcdef").mkdir()
    (directory / "notes").mkdir()
    for stray in ("scratch-1.db", "scratch-1.db-journal", "scratch-1.pages", "2.db", "1.pages"):
        (home / stray).write_bytes(b"?")
    found = open_store().recover()
    assert sorted(found.removed) == sorted(
        ["0123456789abcdef"]
        + [
            f"{home.name}/{name}"
            for name in ("1.pages", "2.db", "scratch-1.db", "scratch-1.db-journal", "scratch-1.pages")
        ]
    )
    assert found.damaged == []
    assert (directory / "notes").exists()
    assert os.listdir(home) == ["1.db"]


def test_reports_take_so_many_bytes_and_no_more(store: ReplicaStore, pusher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "REPORTS_BYTES_KEPT", 1_000)
    pusher.push(store, 1)
    replica = store.catalogue.get(pusher.name)
    for size in (300, 300, 300, 600, 2_000, 100):
        store.catalogue.add_report(replica.id, "laptop:1", json.dumps("x" * (size - 2)))
        kept = [len(each.document) for each in store.catalogue.reports(pusher.name)]
        assert sum(kept) <= 1_000 or kept == [size], kept
    assert kept == [100]
