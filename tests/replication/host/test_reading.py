"""Versions in private files: read, restored, and left as they are by whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.errors import CorruptError, InputOutputError, InvalidOptionError, LockedError, UnknownReplicaError
from headwater.replication.host import disk, verify, versions
from headwater.replication.host.store import ReplicaStore
from headwater.replication.host.versions import VersionRetention

Open = Callable[..., ReplicaStore]


def rows_of(path: str | Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return [text for (text,) in connection.execute("SELECT body FROM t WHERE body LIKE 'version%' ORDER BY id")]


def test_the_newest_is_linked_and_older_ones_are_rebuilt(store: ReplicaStore, pusher) -> None:
    for number in (1, 2, 3):
        pusher.push(store, number)
    home = Path(store.directory) / store.catalogue.get(pusher.name).id
    with store.open_version(pusher.name, 3) as made:
        assert os.path.samefile(made.path, home / "3.db")
        assert (made.version.number, made.replica.newest) == (3, 3)
    with store.open_version(pusher.name, 1) as made:
        assert rows_of(made.path) == ["version 1" * 20]
        assert sorted(os.listdir(made.directory)) == ["lock", "version.db"]
    assert pusher.files(store) == ["1.pages", "2.pages", "3.db"]


def test_without_hard_links_it_is_copied(store: ReplicaStore, pusher, monkeypatch: pytest.MonkeyPatch) -> None:
    pusher.push(store, 1)
    pusher.push(store, 2)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    for number in (1, 2):
        with store.open_version(pusher.name, number) as made:
            assert len(rows_of(made.path)) == number
            assert os.stat(made.path).st_nlink == 1


def test_a_file_is_copied_whole_also_without_help_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "from").write_bytes(content := os.urandom(3_000_000))
    disk.copy(str(tmp_path / "from"), str(tmp_path / "kernel"))

    def refuse(*_: object) -> int:
        raise OSError(95, "not supported")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    disk.copy(str(tmp_path / "from"), str(tmp_path / "plain"))
    monkeypatch.delattr(os, "copy_file_range")
    disk.copy(str(tmp_path / "from"), str(tmp_path / "plainer"))
    assert all((tmp_path / name).read_bytes() == content for name in ("kernel", "plain", "plainer"))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_reader_keeps_its_version_whatever_happens_meanwhile(open_store: Open, pusher, number: int) -> None:
    store = open_store(policy=VersionRetention(keep_last=1))
    for each in (1, 2, 3):
        pusher.push(store, each)
    with store.open_version(pusher.name, number) as made:
        before = Path(made.path).read_bytes()
        for replica, version in store.catalogue.unannounced():
            store.catalogue.announced(replica.id, version.number)
        pusher.push(store, 4)
        assert store.catalogue.numbers(pusher.name) == [4]
        assert Path(made.path).read_bytes() == before
        store.remove(pusher.name)  # its directory goes, and a reader may lose its file's name, but only with that
    assert [each for each in os.scandir(store.directory) if each.is_dir()] == []


@pytest.mark.parametrize("number", [1, 2])
def test_a_push_accepted_while_a_reader_reaches_for_the_files(
    open_store: Open, pusher, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = open_store()
    pusher.push(store, 1)
    pusher.push(store, 2)
    wanted = pusher.bytes_of(store, number)
    real, more = disk.link_or_copy, iter([3, 4])

    def link_late(source: str, target: str) -> None:
        for each in more:
            pusher.push(store, each)
            break
        real(source, target)

    monkeypatch.setattr(disk, "link_or_copy", link_late)
    assert pusher.bytes_of(store, number) == wanted
    assert store.catalogue.get(pusher.name).newest == 4


def test_what_is_missing_or_damaged_is_not_handed_out(store: ReplicaStore, pusher) -> None:
    for number in (1, 2, 3):
        pusher.push(store, number)
    home = Path(store.directory) / store.catalogue.get(pusher.name).id
    with pytest.raises(UnknownReplicaError, match="no version 4"):
        store.open_version(pusher.name, 4)
    with pytest.raises(UnknownReplicaError):
        store.open_version(pusher.name, 0)
    (home / "2.pages").rename(home / "away")
    with pytest.raises(CorruptError, match=r"missing: 2\.pages"):
        store.open_version(pusher.name, 1)
    (home / "away").rename(home / "2.pages")
    with open(home / "3.db", "r+b") as file:  # in a page that the older versions have too
        file.seek(os.stat(home / "3.db").st_size - 10)
        file.write(b"!")
    with pytest.raises(CorruptError, match="not as it was accepted"):
        store.open_version(pusher.name, 1)
    os.truncate(home / "3.db", 512)
    for number in (1, 3):
        with pytest.raises(CorruptError):
            store.open_version(pusher.name, number)
    with pytest.raises(CorruptError, match="verify"):
        pusher.begin(store)
    assert pusher.files(store) == ["1.pages", "2.pages", "3.db"]


def test_a_reader_that_died_leaves_nothing_and_one_that_lives_is_left_alone(
    open_store: Open, directory: Path, pusher, in_a_process: Callable[..., int]
) -> None:
    store = open_store()
    pusher.push(store, 1)
    store.close()

    def die_reading() -> None:
        store = open_store(serve=False)
        store.open_version(pusher.name, 1)
        os._exit(9)

    assert in_a_process(die_reading) == 9
    assert any(name.startswith("reading-") for name in pusher.files(directory))
    command = open_store(serve=False)
    with command.open_version(pusher.name, 1) as made:
        server = open_store()
        [removed] = server.recover().removed
        assert "/reading-" in removed
        assert rows_of(made.path) == ["version 1" * 20]
    assert pusher.files(server) == ["1.db"]


def test_a_version_is_restored_where_nothing_is_or_where_it_may(store: ReplicaStore, pusher, tmp_path: Path) -> None:
    pusher.push(store, 1)
    pusher.push(store, 2)
    target = tmp_path / "restored.db"
    assert store.restore(pusher.name, 1, target).number == 1
    assert target.read_bytes() == pusher.bytes_of(store, 1)
    with pytest.raises(InvalidOptionError, match="the file exists"):
        store.restore(pusher.name, 2, target)
    assert rows_of(target) == ["version 1" * 20]
    store.restore(pusher.name, 2, target, overwrite=True)
    assert len(rows_of(target)) == 2
    with contextlib.closing(sqlite3.connect(target)) as connection:  # only the user has access
        connection.execute("DELETE FROM t")
        connection.commit()
    assert store.verify(pusher.name, 2).ok
    Path(f"{target}-wal").write_bytes(b"")
    with pytest.raises(InvalidOptionError, match="in use"):
        store.restore(pusher.name, 1, target, overwrite=True)
    for bad, why in ((tmp_path, "directory"), (tmp_path / "no" / "file", "does not exist")):
        with pytest.raises(InvalidOptionError, match=why):
            store.restore(pusher.name, 1, bad)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["replicas", "restored.db", "restored.db-wal"]


def test_a_restored_file_is_as_private_as_the_one_it_overwrites(store: ReplicaStore, pusher, tmp_path: Path) -> None:
    pusher.push(store, 1)
    target = tmp_path / "mine.db"
    target.write_bytes(b"secret")
    target.chmod(0o600)
    link = tmp_path / "link.db"
    link.symlink_to(target)
    store.restore(pusher.name, 1, link, overwrite=True)
    assert rows_of(target) == ["version 1" * 20]
    assert (oct(target.stat().st_mode & 0o777), link.is_symlink()) == ("0o600", True)
    (tmp_path / "mine.db-wal").write_bytes(b"of a program that runs")
    with pytest.raises(InvalidOptionError, match="in use"):
        store.restore(pusher.name, 1, link, overwrite=True)


def test_a_damaged_version_is_not_restored(store: ReplicaStore, pusher, tmp_path: Path) -> None:
    pusher.push(store, 1)
    head = Path(store.directory) / store.catalogue.get(pusher.name).id / "1.db"
    with open(head, "r+b") as file:
        file.seek(-5, os.SEEK_END)
        [byte] = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    target = tmp_path / "target.db"
    target.write_bytes(b"mine")
    with pytest.raises(CorruptError):
        store.restore(pusher.name, 1, target, overwrite=True)
    assert target.read_bytes() == b"mine"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["replicas", "target.db"]


def test_a_reader_gives_up_after_some_tries(store: ReplicaStore, pusher) -> None:
    pusher.push(store, 1)
    home = Path(store.directory) / store.catalogue.get(pusher.name).id
    (home / "1.db").unlink()
    with pytest.raises(CorruptError, match=r"missing: 1\.db"):
        store.open_version(pusher.name, 1)
    assert os.listdir(home) == []
    assert versions.TRIES_MAX < 100


def test_a_version_on_its_way_has_the_permissions_of_the_file_that_it_overwrites(
    store: ReplicaStore, pusher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher.push(store, 1)
    seen: list[int] = []
    monkeypatch.setattr(verify, "check_integrity", lambda path, interactive: seen.append(os.stat(path).st_mode & 0o777))
    private, new = tmp_path / "private.db", tmp_path / "new.db"
    private.touch(0o600)
    store.restore(pusher.name, 1, private, overwrite=True)
    store.restore(pusher.name, 1, new)
    assert seen == [0o600, 0o600]
    assert private.stat().st_mode & 0o777 == 0o600
    assert new.stat().st_mode & 0o777 == 0o600


def test_a_reader_that_gets_no_lock_leaves_nothing(
    store: ReplicaStore, pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher.push(store, 1)

    def no_more_files(path: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(versions, "lock_file", no_more_files)
        with pytest.raises(InputOutputError):
            store.open_version(pusher.name, 1)
    assert pusher.files(store) == ["1.db"]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "in use.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript("PRAGMA page_size = 8192; CREATE TABLE mine (x); INSERT INTO mine VALUES (1)")
    return path


@pytest.mark.parametrize("journal_mode", ["DELETE", "TRUNCATE", "PERSIST"])
def test_a_program_that_has_the_database_open_sees_what_was_restored_and_goes_on_writing(
    store: ReplicaStore, pusher, target: Path, journal_mode: str
) -> None:
    pusher.push(store, 1)
    with contextlib.closing(sqlite3.connect(target, isolation_level=None)) as program:
        program.execute(f"PRAGMA journal_mode = {journal_mode}")
        program.execute("UPDATE mine SET x = 2")
        store.restore(pusher.name, 1, target, overwrite=True)
        assert program.execute("SELECT count(*) FROM t").fetchall() == [(20,)]
        program.execute("DELETE FROM t")
    with contextlib.closing(sqlite3.connect(target)) as other:
        assert other.execute("SELECT count(*) FROM t").fetchall() == [(0,)]


@pytest.mark.parametrize("transaction", ["BEGIN IMMEDIATE", "BEGIN; SELECT * FROM mine"])
def test_a_program_in_the_middle_of_a_transaction_keeps_what_it_has(
    store: ReplicaStore, pusher, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transaction: str
) -> None:
    monkeypatch.setattr(verify, "LOCKED_S_MAX", 0)
    pusher.push(store, 1)
    before = target.read_bytes()
    with contextlib.closing(sqlite3.connect(target, isolation_level=None)) as program:
        for statement in transaction.split("; "):
            rows = program.execute(statement)
        if "SELECT" in transaction:
            assert rows.fetchone() == (1,)
        with pytest.raises(LockedError):
            store.restore(pusher.name, 1, target, overwrite=True)
    assert target.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["in use.db", "replicas"]


def test_what_a_lost_database_left_behind_is_named_with_the_command_that_removes_it(
    store: ReplicaStore, pusher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher.push(store, 1)
    monkeypatch.chdir(tmp_path)
    for ending in ("-wal", "-shm"):
        Path(f"my app.db{ending}").write_bytes(b"left")
    with pytest.raises(InvalidOptionError, match="without its database") as raised:
        store.restore(pusher.name, 1, "my app.db")
    assert raised.value.next == "If no program uses it: rm 'my app.db-wal' 'my app.db-shm'"
    subprocess.run(shlex.split(raised.value.next.partition(": ")[2]), check=True)
    store.restore(pusher.name, 1, "my app.db")


def test_a_log_beside_a_database_is_reported_with_what_takes_it_away(store: ReplicaStore, pusher, target: Path) -> None:
    pusher.push(store, 1)
    with contextlib.closing(sqlite3.connect(target, isolation_level=None)) as program:
        program.execute("PRAGMA journal_mode = WAL")
        program.execute("UPDATE mine SET x = 2")
        with pytest.raises(InvalidOptionError, match="in use") as raised:
            store.restore(pusher.name, 1, target, overwrite=True)
        assert "opens and closes it in order removes in use.db-wal and in use.db-shm" in raised.value.next
    store.restore(pusher.name, 1, target, overwrite=True)  # it has closed it
