"""Whose directory it is: one server's, some commands', and nobody else's."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

import headwater
from headwater.errors import InvalidOption, Locked, NewerSchema, NotALog
from headwater.replication.host import catalogue
from headwater.replication.host.shelf import Shelf

Open = Callable[..., Shelf]


def test_a_directory_is_made_for_the_server_alone(open_shelf: Open, directory: Path) -> None:
    open_shelf()
    assert oct(directory.stat().st_mode & 0o777) == "0o700"


def test_a_second_server_is_refused_and_commands_are_not(
    open_shelf: Open, directory: Path, pusher, in_a_process: Callable[..., int]
) -> None:
    shelf = open_shelf()
    pusher.push(shelf, 1)
    with pytest.raises(Locked, match="another server"):
        open_shelf()
    command = open_shelf(serve=False)
    assert [replica.newest for replica in command.list()] == [1]
    pusher.push(shelf, 2)
    assert [replica.newest for replica in command.list()] == [2]
    text = command.create_key(pusher.name, "push")
    assert shelf.key_kind(shelf.get(pusher.name), text) == "push"
    shelf.close()

    def serve_and_die() -> None:
        open_shelf()
        os._exit(9)

    assert in_a_process(serve_and_die) == 9
    assert open_shelf().recover() == ([], [])


def test_a_command_makes_no_directory(open_shelf: Open, directory: Path) -> None:
    with pytest.raises(InvalidOption, match="no such directory"):
        open_shelf(serve=False)
    assert not directory.exists()
    directory.mkdir()
    with pytest.raises(InvalidOption, match="no replicas here"):
        open_shelf(serve=False)


@pytest.mark.parametrize("serve", [True, False])
def test_what_belongs_to_somebody_else_is_left_alone(open_shelf: Open, directory: Path, serve: bool) -> None:
    directory.mkdir()
    (directory / "thesis.txt").write_text("years of work")
    with pytest.raises(InvalidOption, match=r"other things, like thesis\.txt"):
        open_shelf(serve=serve)
    assert os.listdir(directory) == ["thesis.txt"]


@pytest.mark.parametrize("serve", [True, False])
def test_a_log_is_no_data_directory(open_shelf: Open, directory: Path, serve: bool) -> None:
    with headwater.open(directory) as log:
        log.publish("a", 1)
    with pytest.raises(InvalidOption, match="this is a file"):
        open_shelf(serve=serve)


def test_another_database_of_that_name_is_no_catalogue(open_shelf: Open, directory: Path) -> None:
    directory.mkdir()
    with headwater.open(directory / "catalogue.db") as log:
        log.publish("a", 1)
    with pytest.raises(InvalidOption, match="no catalogue"):
        open_shelf()
    with headwater.open(directory / "catalogue.db") as log:
        assert log.statistics().last_seq == 1
    for each in directory.iterdir():
        each.unlink()
    (directory / "catalogue.db").write_text("no database at all, but long enough to be looked at" * 30)
    with pytest.raises(NotALog):
        open_shelf()
    assert not (directory / "catalogue.db-wal").exists()


def test_a_catalogue_of_a_later_headwater_is_refused(open_shelf: Open, directory: Path) -> None:
    open_shelf().close()
    with sqlite3.connect(directory / "catalogue.db") as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(NewerSchema, match="schema 2"):
        open_shelf()


def test_a_directory_half_made_is_finished(open_shelf: Open, directory: Path) -> None:
    directory.mkdir()
    (directory / "serving.lock").write_text("")
    (directory / "catalogue.db").write_text("")
    assert open_shelf().list() == []


def test_only_what_looks_like_a_replica_is_swept_away(open_shelf: Open, directory: Path, pusher) -> None:
    shelf = open_shelf()
    pusher.push(shelf, 1)
    home = directory / shelf.get(pusher.name).id
    shelf.close()
    (directory / "0123456789abcdef").mkdir()
    (directory / "notes").mkdir()
    for stray in ("scratch-1.db", "scratch-1.db-journal", "scratch-1.pages", "2.db", "1.pages"):
        (home / stray).write_bytes(b"?")
    found = open_shelf().recover()
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


def test_reports_take_so_many_bytes_and_no_more(shelf: Shelf, pusher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "REPORTS_BYTES_KEPT", 1_000)
    pusher.push(shelf, 1)
    replica = shelf.get(pusher.name)
    for size in (300, 300, 300, 600, 2_000, 100):
        shelf.add_report(replica, "laptop:1", json.dumps("x" * (size - 2)))
        kept = [len(each.document) for each in shelf.reports(pusher.name)]
        assert sum(kept) <= 1_000 or kept == [size], kept
    assert kept == [100]
