"""A database is pushed while another process writes it as fast as it can."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hammered import BUSY_S, Hammer, make_books, read_books
from replica_host import ReplicaHost

import headwater
from headwater.replication import snapshot
from headwater.replication.names import ReplicaName

PUSHES = 4  # of the large ones; the others have half as many
WAIT_S_MAX = 10.0  # a shared machine is slow at times; a writer that is locked out for good waits for 30 s

NAME = ReplicaName("shop", "books.db")
MANY_BYTES = 1 << 60


def as_a_large_one(patch: pytest.MonkeyPatch) -> None:
    """As for a database that is too large to be copied while its writers wait."""
    patch.setattr(snapshot, "LOCKED_BYTES_MAX", 0)


def without_a_copy(patch: pytest.MonkeyPatch) -> None:
    """As on a disk that has no room for one."""
    patch.setattr(snapshot, "SPARE_BYTES", MANY_BYTES)


def wait_for_a_write(path: Path) -> None:
    """However slow the machine is, the next version is another one."""
    with closing(sqlite3.connect(path, timeout=BUSY_S)) as connection:
        query = "SELECT entries FROM total"
        before = connection.execute(query).fetchone()
        while connection.execute(query).fetchone() == before:
            os.sched_yield()


@pytest.mark.parametrize(
    ("mode", "megabytes", "setting"),
    [
        ("wal", 8, None),
        ("delete", 6, None),
        ("delete", 3, as_a_large_one),
        ("wal", 3, without_a_copy),
    ],
)
def test_every_version_is_what_was_there_between_two_transactions(
    host: ReplicaHost,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    figures: Callable[[str], None],
    mode: str,
    megabytes: float,
    setting: Callable[[pytest.MonkeyPatch], None] | None,
) -> None:
    if setting is not None:
        setting(monkeypatch)
    pushes = PUSHES if setting is None else PUSHES // 2
    path = make_books(tmp_path / "books.db", mode, megabytes)
    remote = host.remote(NAME)
    with Hammer(path) as hammer:
        outcomes = []
        for number in range(pushes):
            outcomes.append(headwater.sync(path, remote, message=f"push {number}"))
            wait_for_a_write(path)
        writer = hammer.stop()
    outcomes.append(headwater.sync(path, remote))
    assert [outcome.version for outcome in outcomes] == [*range(1, pushes + 2)]
    assert all(outcome.is_new for outcome in outcomes)

    versions = host.check(NAME)
    assert [version.dbhash for version in versions] == [outcome.dbhash for outcome in outcomes]
    assert all(version.dbhash is None for version in versions) == (setting is without_a_copy)
    books = []
    with host.store() as store:
        for version in versions:
            with store.open_version(NAME, version.number) as made:
                books.append(read_books(made.path, is_private=True))
    assert books == sorted(books)
    assert len({each.entries for each in books}) == pushes + 1
    assert books[-1] == read_books(path)

    assert writer.rolled_back
    assert writer.longest_wait_s < WAIT_S_MAX
    figures(
        f"hammered ({mode}, {megabytes} MB{f', {setting.__name__}' if setting else ''}): {writer.transactions} commits "
        f"during {pushes} pushes, the longest wait of one {writer.longest_wait_s * 1000:.0f} ms"
    )
