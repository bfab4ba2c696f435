"""Books that a process of their own writes as fast as it can.

Between two transactions three sums hold; inside of one, none of them does:
- the amounts of all accounts are zero together: what one gains another loses;
- the totals say how many entries there are and what they move;
- the stamps of all pages are, together, what the totals say.
"""

from __future__ import annotations

import json
import random
import select
import sqlite3
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

ACCOUNTS = 200
PAGE_BYTES = 4_000  # of a row that large transactions write
LARGE_PAGES = 100
LARGE_MOVES = 200
CACHE_PAGES = 20  # so few that large transactions spill into the file before they are committed
BUSY_S = 30.0
PATIENCE_S = 60.0

SCHEMA = """
CREATE TABLE account (id INTEGER PRIMARY KEY, amount INTEGER NOT NULL);
CREATE TABLE entry (id INTEGER PRIMARY KEY, source INTEGER, target INTEGER, amount INTEGER);
CREATE INDEX entry_by_target ON entry (target, amount);
CREATE TABLE page (id INTEGER PRIMARY KEY, stamp INTEGER NOT NULL, body BLOB);
CREATE TABLE total (entries INTEGER, turnover INTEGER, stamps INTEGER);
INSERT INTO total VALUES (0, 0, 0);
"""
MANY = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"


class Books(NamedTuple):
    entries: int
    turnover: int
    stamps: int


class Hammered(NamedTuple):
    transactions: int
    rolled_back: int
    longest_wait_s: float
    """That a writer waited for another: at the beginning and the end of a transaction."""


def make_books(path: Path, mode: str, megabytes: float, page_size: int = 4096) -> Path:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size = {page_size}")
        connection.execute(f"PRAGMA journal_mode = {mode}")
        connection.execute("PRAGMA synchronous = OFF")
        connection.executescript(SCHEMA)
        connection.execute(f"{MANY} INSERT INTO account SELECT i, 0 FROM n", (ACCOUNTS,))
        pages = int(megabytes * 1_000_000 / PAGE_BYTES)
        connection.execute(f"{MANY} INSERT INTO page SELECT i, 0, randomblob({PAGE_BYTES}) FROM n", (max(1, pages),))
    return path


def read_books(path: Path | str, *, is_private: bool = False) -> Books:
    """Fails if the database is damaged or not as it was between two transactions. `is_private`: no process writes it,
    nothing may be left beside it, and it was found whole already."""
    place = f"file:{urllib.parse.quote(str(path))}{'?immutable=1' if is_private else ''}"
    with closing(sqlite3.connect(place, uri=True, timeout=BUSY_S)) as connection:

        def sums(query: str) -> tuple[int, ...]:
            return tuple(connection.execute(query).fetchone())

        if not is_private:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        totals = sums("SELECT * FROM total")
        assert sums("SELECT sum(amount) FROM account") == (0,)
        assert sums("SELECT count(*), coalesce(sum(amount), 0) FROM entry") == totals[:2]
        assert sums("SELECT sum(stamp) FROM page") == totals[2:]
        return Books(*totals)


def write_books(path: Path, share: float = 1.0, seed: int = 0) -> None:
    """One transaction that writes this share of the pages anew."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=BUSY_S)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        (pages,) = connection.execute("SELECT count(*) FROM page").fetchone()
        connection.execute("BEGIN IMMEDIATE")
        _move(connection, random.Random(seed))
        _stamp(connection, range(1, 1 + int(pages * share)))
        connection.execute("COMMIT")


def _move(connection: sqlite3.Connection, dice: random.Random) -> None:
    source, target = dice.sample(range(1, ACCOUNTS + 1), 2)
    amount = dice.randint(1, 1000)
    connection.execute("UPDATE account SET amount = amount - ? WHERE id = ?", (amount, source))
    connection.execute("INSERT INTO entry (source, target, amount) VALUES (?, ?, ?)", (source, target, amount))
    connection.execute("UPDATE account SET amount = amount + ? WHERE id = ?", (amount, target))
    connection.execute("UPDATE total SET entries = entries + 1, turnover = turnover + ?", (amount,))


def _stamp(connection: sqlite3.Connection, pages: range) -> None:
    written = connection.execute(
        f"UPDATE page SET stamp = stamp + 1, body = randomblob({PAGE_BYTES}) WHERE id >= ? AND id < ?",
        (pages.start, pages.stop),
    )
    connection.execute("UPDATE total SET stamps = stamps + ?", (written.rowcount,))


class Writer:
    """What the process does: mostly small transactions, some large, some taken back, and checkpoints."""

    def __init__(self, path: str, seed: int) -> None:
        self._dice = random.Random(seed)
        self._connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_S)
        # Not to measure the disk: the test looks for writers that wait for the push.
        for pragma in ("synchronous = OFF", f"cache_size = {CACHE_PAGES}", "wal_autocheckpoint = 0"):
            self._connection.execute(f"PRAGMA {pragma}")
        (self._pages,) = self._connection.execute("SELECT count(*) FROM page").fetchone()
        self._transactions = self._rolled_back = 0
        self._longest_wait_s = 0.0

    def run(self) -> Hammered:
        """Until stdin gets a line or is closed."""
        while not select.select([sys.stdin], [], [], 0)[0]:
            chance = self._dice.random()
            if chance < 0.96:
                self._transact(moves=1, pages=0)
            elif chance < 0.97:
                self._transact(moves=LARGE_MOVES, pages=LARGE_PAGES)
            elif chance < 0.98:
                self._transact(moves=LARGE_MOVES, pages=LARGE_PAGES, take_back=True)
            else:
                how = self._dice.choice(["PASSIVE", "PASSIVE", "RESTART", "TRUNCATE"])
                self._connection.execute(f"PRAGMA wal_checkpoint({how})").fetchall()
        return Hammered(self._transactions, self._rolled_back, self._longest_wait_s)

    def _transact(self, moves: int, pages: int, take_back: bool = False) -> None:
        with self._waiting():
            self._connection.execute("BEGIN IMMEDIATE")
        for number in range(moves):
            if pages and number == moves // 2:
                first = self._dice.randint(1, self._pages)
                _stamp(self._connection, range(first, first + pages))
            _move(self._connection, self._dice)
        if take_back:
            self._connection.execute("ROLLBACK")
            self._rolled_back += 1
            return
        with self._waiting():
            self._connection.execute("COMMIT")
        self._transactions += 1

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        self._longest_wait_s = max(self._longest_wait_s, time.monotonic() - began_s)


class Hammer:
    """The process, from outside: at work while it is entered."""

    def __init__(self, path: Path, seed: int = 1) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(path), str(seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Hammer:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "at work\n"
        return self

    def stop(self) -> Hammered:
        reported, _ = self._process.communicate("stop\n", timeout=PATIENCE_S)
        assert self._process.returncode == 0
        return Hammered(*json.loads(reported))

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


if __name__ == "__main__":
    writer = Writer(sys.argv[1], int(sys.argv[2]))
    print("at work", flush=True)
    print(json.dumps(writer.run()))
