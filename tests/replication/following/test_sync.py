"""`headwater.sync` inside a program that uses the database itself."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from followed import Database, names_in
from intruder import GOT_IN, LOCKED, try_to_write
from served import RunningServer

import headwater
from headwater.errors import InvalidOptionError, LockedError


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_the_locks_and_the_log_of_the_program_stay(server: RunningServer, tmp_path: Path, mode: str) -> None:
    """Python's sqlite3 is another library than the one used here. Within one process they do not see each other's
    locks, and a file that one of them closes takes the locks of both: the last commits would be lost."""
    database, remote = Database(tmp_path / "app.db", mode), f"{server.url}/shop/app.db"
    with closing(sqlite3.connect(database.path, isolation_level=None)) as connection:
        connection.execute("INSERT INTO item (name) VALUES ('first')")
        assert try_to_write(database.path) == GOT_IN
        beside = set(os.listdir(tmp_path))
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO item (name) VALUES ('second')")
        headwater.sync(database.path, remote)
        headwater.sync(database.path, tmp_path / "copy.db")
        with pytest.raises(LockedError):
            headwater.sync(remote, database.path)
        assert try_to_write(database.path) == LOCKED
        assert beside <= set(os.listdir(tmp_path))
        connection.execute("COMMIT")
        headwater.sync(database.path, remote)
    headwater.sync(remote, tmp_path / "pulled.db")
    assert names_in(tmp_path / "copy.db") == ["first"]
    assert names_in(tmp_path / "pulled.db") == ["first", "second"]


def test_names_and_messages_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    for local, message in ((str(tmp_path / "app.db"), "\udcff"), (str(tmp_path / "\udcff.db"), "")):
        with pytest.raises(InvalidOptionError, match="UTF-8"):
            headwater.sync(local, "ws://127.0.0.1:1/shop/app.db", message=message)
