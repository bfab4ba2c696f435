"""Restoring over what is there: a database in the hands of a running program, and what a program left behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import sqlite3
import subprocess
from pathlib import Path

import pytest

from headwater.errors import InvalidOption, Locked
from headwater.replication.host import restoring
from headwater.replication.host.shelf import Shelf


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "in use.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript("PRAGMA page_size = 8192; CREATE TABLE mine (x); INSERT INTO mine VALUES (1)")
    return path


@pytest.mark.parametrize("journal_mode", ["DELETE", "TRUNCATE", "PERSIST"])
def test_a_program_that_has_the_database_open_sees_what_was_restored_and_goes_on_writing(
    shelf: Shelf, pusher, target: Path, journal_mode: str
) -> None:
    pusher.push(shelf, 1)
    with contextlib.closing(sqlite3.connect(target, isolation_level=None)) as program:
        program.execute(f"PRAGMA journal_mode = {journal_mode}")
        program.execute("UPDATE mine SET x = 2")
        shelf.restore(pusher.name, 1, target, overwrite=True)
        assert program.execute("SELECT count(*) FROM t").fetchall() == [(20,)]
        program.execute("DELETE FROM t")
    with contextlib.closing(sqlite3.connect(target)) as other:
        assert other.execute("SELECT count(*) FROM t").fetchall() == [(0,)]


@pytest.mark.parametrize("transaction", ["BEGIN IMMEDIATE", "BEGIN; SELECT * FROM mine"])
def test_a_program_in_the_middle_of_a_transaction_keeps_what_it_has(
    shelf: Shelf, pusher, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transaction: str
) -> None:
    monkeypatch.setattr(restoring, "LOCKED_S_MAX", 0)
    pusher.push(shelf, 1)
    before = target.read_bytes()
    with contextlib.closing(sqlite3.connect(target, isolation_level=None)) as program:
        for statement in transaction.split("; "):
            rows = program.execute(statement)
        if "SELECT" in transaction:
            assert rows.fetchone() == (1,)
        with pytest.raises(Locked):
            shelf.restore(pusher.name, 1, target, overwrite=True)
    assert target.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["in use.db", "replicas"]


def test_what_a_lost_database_left_behind_is_named_with_the_command_that_removes_it(
    shelf: Shelf, pusher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher.push(shelf, 1)
    monkeypatch.chdir(tmp_path)
    for ending in ("-wal", "-shm"):
        Path(f"my app.db{ending}").write_bytes(b"left")
    with pytest.raises(InvalidOption, match="without its database") as told:
        shelf.restore(pusher.name, 1, "my app.db")
    assert told.value.next == "Nobody uses it? rm 'my app.db-wal' 'my app.db-shm'"
    subprocess.run(shlex.split(told.value.next.partition("? ")[2]), check=True)
    shelf.restore(pusher.name, 1, "my app.db")


def test_a_log_beside_a_database_is_told_with_what_takes_it_away(shelf: Shelf, pusher, target: Path) -> None:
    pusher.push(shelf, 1)
    with contextlib.closing(sqlite3.connect(target, isolation_level=None)) as program:
        program.execute("PRAGMA journal_mode = WAL")
        program.execute("UPDATE mine SET x = 2")
        with pytest.raises(InvalidOption, match="in use") as told:
            shelf.restore(pusher.name, 1, target, overwrite=True)
        assert "opens and closes it in order takes in use.db-wal and in use.db-shm away" in told.value.next
    shelf.restore(pusher.name, 1, target, overwrite=True)  # it has closed it
