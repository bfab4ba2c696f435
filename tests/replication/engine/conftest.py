"""Databases of every kind, and a writer in a process of its own that only whole transactions keep in balance."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from headwater.replication.sqlite_tools import tool_path

WRITER = """
import apsw, os, random, sys, time
path, longest = sys.argv[1], 0.0
connection = apsw.Connection(path)
connection.set_busy_timeout(20_000)
connection.execute("pragma synchronous = off")
connection.wal_autocheckpoint(20)
dice = random.Random(7)
print("begun", flush=True)
while not os.path.exists(path + ".stop"):
    began = time.monotonic()
    connection.execute("begin immediate")
    for account in dice.sample(range(2000), 10):
        amount = dice.randrange(-99, 99)
        connection.execute("update account set balance = balance + ? where id = ?", (amount, account))
        connection.execute("update account set balance = balance - ? where id = ?", (amount, 1999 - account))
    connection.execute("insert into moves(n) select count(*) + 1 from moves")
    connection.execute("update counted_moves set moves = moves + 1")
    connection.execute("commit")
    longest = max(longest, time.monotonic() - began)
print(longest)
"""


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., str]:
    """A database with accounts in it: of so many bytes a page, in this journal mode."""

    def make(name: str = "app.db", *, mode: str = "wal", page_size: int = 4096, rows: int = 2000) -> str:
        path = str(tmp_path / name)
        with closing(apsw.Connection(path)) as connection:
            connection.execute(f"pragma page_size = {page_size}")
            connection.execute(f"pragma journal_mode = {mode}")
            connection.execute("create table account(id integer primary key, balance int, note text)")
            connection.execute(
                "create table moves(n int); create table counted_moves(moves int); insert into counted_moves values(0)"
            )
            connection.execute("create index richest on account(balance)")
            with connection:
                notes = ((n, f"note {n} " * 20) for n in range(rows))
                connection.executemany("insert into account values(?, 0, ?)", notes)
        return path

    return make


@pytest.fixture
def hammer() -> Iterator[Callable[[str], Callable[[], float]]]:
    """Starts a writer on a database; what it returns stops it and tells its longest transaction in seconds."""
    writers: list[subprocess.Popen[str]] = []

    def start(path: str) -> Callable[[], float]:
        writer = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True)
        writers.append(writer)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "begun\n"

        def stop() -> float:
            Path(path + ".stop").touch()
            output, _ = writer.communicate(timeout=30)
            return float(output)

        return stop

    yield start
    for writer in writers:
        writer.kill()
        writer.wait()


def moves_in(path: str) -> int:
    """How many transactions of the writer it holds; fails unless it holds them whole."""
    with closing(apsw.Connection(path)) as connection:
        assert connection.pragma("integrity_check") == "ok"
        (in_balance,) = connection.execute("select sum(balance) from account").fetchone()
        moves, reported = connection.execute(
            "select (select count(*) from moves), (select moves from counted_moves)"
        ).fetchone()
    assert in_balance == 0
    assert moves == reported
    return int(moves)


def plain_copy(origin: str, replica: str) -> str:
    """What `sqlite3_rsync` itself makes of it."""
    subprocess.run([tool_path("sqlite3_rsync"), origin, replica], check=True, timeout=60)
    return replica


def content(path: str) -> bytes:
    """All bytes but those that count commits."""
    found = bytearray(Path(path).read_bytes())
    found[24:28], found[92:100] = bytes(4), bytes(8)
    return bytes(found)


@pytest.fixture
def look() -> Any:
    class Look:
        moves = staticmethod(moves_in)
        content = staticmethod(content)
        plain = staticmethod(plain_copy)

        @staticmethod
        def left(path: str) -> list[str]:
            name = os.path.basename(path)
            return sorted(found for found in os.listdir(os.path.dirname(path)) if found.startswith(name))

    return Look
