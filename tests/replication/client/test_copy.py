"""A copy from file to file."""

import asyncio
import errno
import os
import select
import subprocess
import tempfile
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from headwater.errors import InvalidOptionError, LockedError, NotADatabaseError
from headwater.replication import local_database, rsync, sync
from headwater.replication.integrity import dbhash
from headwater.replication.local_database import Shell
from headwater.replication.names import place_of
from headwater.replication.outcome import Progress
from headwater.replication.sqlite_tools import start
from headwater.replication.sync import copy
from headwater.replication.sync_state import SyncRecord, SyncState


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_copy_is_the_same_and_the_next_one_moves_only_what_changed(
    client_without_server: Any, make: Any, mode: str
) -> None:
    database = make(mode=mode)
    copied = client_without_server.copy("app.db", "copy.db")
    assert (copied.changed_pages, copied.version) == (copied.pages, None)
    for dry in (True, False):
        unchanged = client_without_server.copy("app.db", "copy.db", dry=dry)
        assert (unchanged.is_new, unchanged.changed_pages) == (False, 0)
    database.run("pragma user_version = 7")  # it is in the first page, and in no table
    for dry in (True, False):
        small = client_without_server.copy("app.db", "copy.db", dry=dry)
        assert (small.is_new, small.changed_pages) == (True, 1)
    database.write()
    dry = client_without_server.copy("app.db", "copy.db", dry=True)
    again = client_without_server.copy("app.db", "copy.db")
    for each in (dry, again):  # the first page may have the same counters in both
        assert (1 <= each.changed_pages <= 2, each.is_new) == (True, True)
    assert dbhash(again.remote) == dbhash(database.path)


def test_a_copy_takes_another_page_size(client_without_server: Any, make: Any) -> None:
    database, other = make(), make("other.db", page_size=1024, rows=10)
    assert (
        client_without_server.copy("app.db", "other.db", dry=True).changed_pages
        == client_without_server.copy("app.db", "other.db").pages
    )
    assert dbhash(other.path) == dbhash(database.path)
    assert other.run("pragma page_size") == [(4096,)]


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_dry_copy_leaves_nothing_beside_either_of_the_two(client_without_server: Any, make: Any, mode: str) -> None:
    source, target = make(rows=2000), make("copy.db", mode=mode)
    assert client_without_server.copy("app.db", "copy.db", dry=True).changed_pages > 10
    assert (source.beside, target.beside) == ([], [])


@pytest.mark.parametrize("mode", ["wal", "delete"])
async def test_a_copy_that_is_cancelled_leaves_nothing_beside_either_of_the_two(
    make: Any, children: Any, mode: str
) -> None:
    source, target = make(rows=50_000), make("copy.db", mode=mode)

    is_moving = asyncio.Event()

    def progress(moved: Progress) -> None:
        if moved.sent > 1_000_000:
            is_moving.set()

    copying = asyncio.create_task(copy(source.path, target.path, progress))
    await is_moving.wait()
    copying.cancel()
    await asyncio.wait({copying})
    assert copying.cancelled()
    assert not children()
    assert (source.beside, target.beside) == ([], [])
    assert target.run("select count(*) from t") == [(1000,)]


async def test_a_copy_with_another_page_size_that_is_cancelled_is_made_or_not_made(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is made from lies beside the source, and goes when the copy ends: were it still to be read then, it would
    be an empty database."""
    source, target = make(), make("copy.db", page_size=1024, rows=10)
    remote: Any = place_of("ws://host/ns/app.db")
    with SyncState(source.path) as beside:
        beside.save(remote, SyncRecord(base=1))  # so that the directory beside it stays
    is_begun, may_go_on = threading.Event(), threading.Event()
    ask = Shell.ask

    def slowly(shell: Shell, sql: str, timeout_s: float | None = None) -> list[str]:
        if ".restore" in sql:
            is_begun.set()
            assert may_go_on.wait(60)
        return ask(shell, sql, timeout_s)

    monkeypatch.setattr(Shell, "ask", slowly)

    copying = asyncio.create_task(copy(source.path, target.path))
    assert await asyncio.to_thread(is_begun.wait, 60)
    for _ in range(2):  # as a user does
        copying.cancel()
        for _ in range(100):
            await asyncio.sleep(0)
    may_go_on.set()
    await asyncio.wait({copying})
    assert copying.cancelled()
    assert target.run("select count(*) from t") == [(1000,)]
    assert target.run("pragma journal_mode") == [("wal",)]
    assert sorted(os.listdir(source.path + "-headwater")) == ["lock", "state.json"]


def test_what_cannot_be_copied_is_refused_and_leaves_nothing(
    client_without_server: Any, make: Any, tmp_path: Path
) -> None:
    make()
    (tmp_path / "link.db").symlink_to(tmp_path / "app.db")
    with pytest.raises(InvalidOptionError, match="same file"):
        client_without_server.copy("app.db", "link.db")
    with pytest.raises(NotADatabaseError, match="no such file"):
        client_without_server.copy("missing.db", "copy.db")
    assert client_without_server.copy("app.db", "copy.db", dry=True).changed_pages > 10
    assert sorted(os.listdir(tmp_path)) == ["app.db", "link.db"]


def test_a_missing_source_is_reported_also_when_there_is_a_target(client_without_server: Any, make: Any) -> None:
    make()
    with pytest.raises(NotADatabaseError, match="no such file"):
        client_without_server.copy("missing.db", "app.db")


@pytest.mark.parametrize("fails_at", [1, 2])
@pytest.mark.parametrize("dry", [False, True])
def test_a_machine_without_descriptors_or_processes_keeps_what_it_has(
    client_without_server: Any, make: Any, children: Any, monkeypatch: pytest.MonkeyPatch, fails_at: int, dry: bool
) -> None:
    make("source.db")
    started: list[subprocess.Popen[bytes]] = []
    pipes: set[int] = set()

    def scarce(*command: Any, **options: Any) -> subprocess.Popen[bytes]:
        if len(started) + 1 == fails_at:
            if started:  # the origin has opened its database when it says something
                assert select.select([started[0].stdout], [], [], 10)[0]
            raise OSError(errno.EMFILE, "Too many open files")
        started.append(start(*command, **options))
        pipes.update(os.fstat(pipe.fileno()).st_ino for pipe in (started[-1].stdin, started[-1].stdout) if pipe)
        return started[-1]

    monkeypatch.setattr(rsync, "start", scarce)
    monkeypatch.setenv("TMPDIR", str(client_without_server._directory))
    monkeypatch.setattr(tempfile, "tempdir", None)
    there = sorted(os.listdir(client_without_server._directory))
    with pytest.raises(OSError, match="Too many"):
        client_without_server.copy("source.db", "target.db", dry=dry)
    monkeypatch.undo()
    assert len(started) == fails_at - 1
    assert children() == []
    places = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [place for place in places if place in {f"pipe:[{number}]" for number in pipes}]
    assert not [place for place in places if place.startswith(str(client_without_server._directory))]
    assert sorted(os.listdir(client_without_server._directory)) == there


def test_a_dry_copy_that_cannot_read_the_source_does_not_say_that_nothing_is_new(
    client_without_server: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = make("source.db", mode="delete"), make("target.db", mode="delete", rows=10)
    with closing(apsw.Connection(source.path)) as writer:

        def lock_it(target: str, stop: threading.Event) -> object:
            """After the first look at the source, and before its origin."""
            writer.execute("BEGIN EXCLUSIVE")
            return local_database.shape_of(target, stop)

        monkeypatch.setattr(sync, "shape_of", lock_it)
        monkeypatch.setattr(local_database, "BUSY_S_MAX", 0.1)
        with pytest.raises(LockedError):
            client_without_server.copy("source.db", "target.db", dry=True)
