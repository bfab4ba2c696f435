"""A program that syncs the database it has open itself, by another copy of SQLite, keeps its locks."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from typing import Any

import pytest

from headwater.errors import Locked

INTRUDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)
try:
    connection.execute("begin immediate")
    print("got in")
except sqlite3.OperationalError as exc:
    print(exc)
"""


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_transaction_of_the_same_process_keeps_others_out_after_a_sync(client: Any, make: Any, mode: str) -> None:
    database = make(mode=mode)
    with closing(sqlite3.connect(database.path, isolation_level=None)) as own:
        own.execute("begin immediate")
        own.execute("update t set note = 'not committed' where id = 7")
        assert client.push(database).version == 1
        client.copy("app.db", "copy.db")
        with pytest.raises(Locked):
            client.pull("ns/app.db", "app.db")
        tried = subprocess.run(
            [sys.executable, "-c", INTRUDER, database.path], capture_output=True, text=True, timeout=30, check=True
        )
        assert tried.stdout == "database is locked\n"
        own.execute("commit")
    assert database.run("select note from t where id = 7") == [("not committed",)]
    assert client.push(database).version == 2
