"""Versions as readers get them: private, whole, and theirs until they close them."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.errors import Corrupt, InputOutput, InvalidOption, UnknownReplica
from headwater.replication.host import disk, reading, restoring
from headwater.replication.host.policy import Policy
from headwater.replication.host.shelf import Shelf

Open = Callable[..., Shelf]


def rows_of(path: str | Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return [text for (text,) in connection.execute("SELECT body FROM t WHERE body LIKE 'version%' ORDER BY id")]


def test_the_newest_is_linked_and_older_ones_are_rebuilt(shelf: Shelf, pusher) -> None:
    for number in (1, 2, 3):
        pusher.push(shelf, number)
    home = Path(shelf.directory) / shelf.get(pusher.name).id
    with shelf.open_version(pusher.name, 3) as made:
        assert os.path.samefile(made.path, home / "3.db")
        assert (made.version.number, made.replica.newest) == (3, 3)
    with shelf.open_version(pusher.name, 1) as made:
        assert rows_of(made.path) == ["version 1" * 20]
        assert sorted(os.listdir(made.directory)) == ["lock", "version.db"]
    assert pusher.files(shelf) == ["1.pages", "2.pages", "3.db"]


def test_without_hard_links_it_is_copied(shelf: Shelf, pusher, monkeypatch: pytest.MonkeyPatch) -> None:
    pusher.push(shelf, 1)
    pusher.push(shelf, 2)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    for number in (1, 2):
        with shelf.open_version(pusher.name, number) as made:
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
def test_a_reader_keeps_its_version_whatever_happens_meanwhile(open_shelf: Open, pusher, number: int) -> None:
    shelf = open_shelf(policy=Policy(keep_last=1))
    for each in (1, 2, 3):
        pusher.push(shelf, each)
    with shelf.open_version(pusher.name, number) as made:
        before = Path(made.path).read_bytes()
        for replica, version in shelf.unannounced():
            shelf.announced(replica.id, version.number)
        pusher.push(shelf, 4)
        assert shelf.numbers(pusher.name) == [4]
        assert Path(made.path).read_bytes() == before
        shelf.remove(pusher.name)  # its directory goes, and a reader may lose its file's name, but only with that
    assert [each for each in os.scandir(shelf.directory) if each.is_dir()] == []


@pytest.mark.parametrize("number", [1, 2])
def test_a_push_accepted_while_a_reader_reaches_for_the_files(
    open_shelf: Open, pusher, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    shelf = open_shelf()
    pusher.push(shelf, 1)
    pusher.push(shelf, 2)
    wanted = pusher.bytes_of(shelf, number)
    real, more = disk.link_or_copy, iter([3, 4])

    def link_late(source: str, target: str) -> None:
        for each in more:
            pusher.push(shelf, each)
            break
        real(source, target)

    monkeypatch.setattr(disk, "link_or_copy", link_late)
    assert pusher.bytes_of(shelf, number) == wanted
    assert shelf.get(pusher.name).newest == 4


def test_what_is_missing_or_damaged_is_not_handed_out(shelf: Shelf, pusher) -> None:
    for number in (1, 2, 3):
        pusher.push(shelf, number)
    home = Path(shelf.directory) / shelf.get(pusher.name).id
    with pytest.raises(UnknownReplica, match="no version 4"):
        shelf.open_version(pusher.name, 4)
    with pytest.raises(UnknownReplica):
        shelf.open_version(pusher.name, 0)
    (home / "2.pages").rename(home / "away")
    with pytest.raises(Corrupt, match=r"missing: 2\.pages"):
        shelf.open_version(pusher.name, 1)
    (home / "away").rename(home / "2.pages")
    with open(home / "3.db", "r+b") as file:  # in a page that the older versions have too
        file.seek(os.stat(home / "3.db").st_size - 10)
        file.write(b"!")
    with pytest.raises(Corrupt, match="not as it was accepted"):
        shelf.open_version(pusher.name, 1)
    os.truncate(home / "3.db", 512)
    for number in (1, 3):
        with pytest.raises(Corrupt):
            shelf.open_version(pusher.name, number)
    with pytest.raises(Corrupt, match="verify"):
        pusher.begin(shelf)
    assert pusher.files(shelf) == ["1.pages", "2.pages", "3.db"]


def test_a_reader_that_died_leaves_nothing_and_one_that_lives_is_left_alone(
    open_shelf: Open, directory: Path, pusher, in_a_process: Callable[..., int]
) -> None:
    shelf = open_shelf()
    pusher.push(shelf, 1)
    shelf.close()

    def die_reading() -> None:
        shelf = open_shelf(serve=False)
        shelf.open_version(pusher.name, 1)
        os._exit(9)

    assert in_a_process(die_reading) == 9
    assert any(name.startswith("reading-") for name in pusher.files(directory))
    command = open_shelf(serve=False)
    with command.open_version(pusher.name, 1) as made:
        server = open_shelf()
        [removed] = server.recover().removed
        assert "/reading-" in removed
        assert rows_of(made.path) == ["version 1" * 20]
    assert pusher.files(server) == ["1.db"]


def test_a_version_is_restored_where_nothing_is_or_where_it_may(shelf: Shelf, pusher, tmp_path: Path) -> None:
    pusher.push(shelf, 1)
    pusher.push(shelf, 2)
    target = tmp_path / "restored.db"
    assert shelf.restore(pusher.name, 1, target).number == 1
    assert target.read_bytes() == pusher.bytes_of(shelf, 1)
    with pytest.raises(InvalidOption, match="there is such a file"):
        shelf.restore(pusher.name, 2, target)
    assert rows_of(target) == ["version 1" * 20]
    shelf.restore(pusher.name, 2, target, overwrite=True)
    assert len(rows_of(target)) == 2
    with contextlib.closing(sqlite3.connect(target)) as connection:  # it is nobody's but the user's
        connection.execute("DELETE FROM t")
        connection.commit()
    assert shelf.verify(pusher.name, 2).ok
    Path(f"{target}-wal").write_bytes(b"")
    with pytest.raises(InvalidOption, match="in use"):
        shelf.restore(pusher.name, 1, target, overwrite=True)
    for bad, why in ((tmp_path, "directory"), (tmp_path / "no" / "file", "does not exist")):
        with pytest.raises(InvalidOption, match=why):
            shelf.restore(pusher.name, 1, bad)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["replicas", "restored.db", "restored.db-wal"]


def test_a_restored_file_is_as_private_as_the_one_it_overwrites(shelf: Shelf, pusher, tmp_path: Path) -> None:
    pusher.push(shelf, 1)
    target = tmp_path / "mine.db"
    target.write_bytes(b"secret")
    target.chmod(0o600)
    link = tmp_path / "link.db"
    link.symlink_to(target)
    shelf.restore(pusher.name, 1, link, overwrite=True)
    assert rows_of(target) == ["version 1" * 20]
    assert (oct(target.stat().st_mode & 0o777), link.is_symlink()) == ("0o600", True)
    (tmp_path / "mine.db-wal").write_bytes(b"of a program that runs")
    with pytest.raises(InvalidOption, match="in use"):
        shelf.restore(pusher.name, 1, link, overwrite=True)


def test_a_damaged_version_is_not_restored(shelf: Shelf, pusher, tmp_path: Path) -> None:
    pusher.push(shelf, 1)
    head = Path(shelf.directory) / shelf.get(pusher.name).id / "1.db"
    with open(head, "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"!")
    target = tmp_path / "target.db"
    target.write_bytes(b"mine")
    with pytest.raises(Corrupt):
        shelf.restore(pusher.name, 1, target, overwrite=True)
    assert target.read_bytes() == b"mine"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["replicas", "target.db"]


def test_a_reader_gives_up_after_some_tries(shelf: Shelf, pusher) -> None:
    pusher.push(shelf, 1)
    home = Path(shelf.directory) / shelf.get(pusher.name).id
    (home / "1.db").unlink()
    with pytest.raises(Corrupt, match=r"missing: 1\.db"):
        shelf.open_version(pusher.name, 1)
    assert os.listdir(home) == []
    assert reading.TRIES_MAX < 100


def test_nobody_reads_a_version_on_its_way_who_may_not_read_what_it_overwrites(
    shelf: Shelf, pusher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher.push(shelf, 1)
    seen: list[int] = []
    monkeypatch.setattr(restoring, "check_integrity", lambda path, by_hand: seen.append(os.stat(path).st_mode & 0o777))
    private, new = tmp_path / "private.db", tmp_path / "new.db"
    private.touch(0o600)
    shelf.restore(pusher.name, 1, private, overwrite=True)
    shelf.restore(pusher.name, 1, new)
    assert seen == [0o600, 0o600]
    assert private.stat().st_mode & 0o777 == 0o600
    assert new.stat().st_mode & 0o777 == 0o600


def test_a_reader_that_gets_no_lock_leaves_nothing(shelf: Shelf, pusher, monkeypatch: pytest.MonkeyPatch) -> None:
    pusher.push(shelf, 1)

    def no_more_files(path: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "lock", no_more_files)
        with pytest.raises(InputOutput):
            shelf.open_version(pusher.name, 1)
    assert pusher.files(shelf) == ["1.db"]
