"""`verify` says of each version whether it is what was pushed, and what is wrong if not."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from headwater.errors import DiskFullError
from headwater.replication.host import disk, versions
from headwater.replication.host.store import ReplicaStore
from headwater.replication.host.verify import VersionVerdict
from headwater.replication.integrity import dbhash


def findings(verdict: VersionVerdict) -> dict[str, str]:
    return {check.what: check.details for check in verdict.checks if not check.ok}


@pytest.fixture
def home(store: ReplicaStore, pusher) -> Path:
    """Of a replica with three versions, each with the hash of what was pushed."""
    for number in (1, 2, 3):
        scratch = pusher.begin(store)
        pusher.write(scratch.path, pusher.edit(number))
        store.accept_push(scratch, dbhash=dbhash(scratch.path))
    return Path(store.directory) / store.catalogue.get(pusher.name).id


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_what_is_as_it_was_passes_every_check(store: ReplicaStore, pusher, home: Path) -> None:
    for number in (1, 2, 3):
        verdict = store.verify(pusher.name, number)
        assert (verdict.ok, verdict.finding) == (True, "proved"), verdict
        assert [check.what for check in verdict.checks] == ["files", "bytes", "integrity", "content", "restore"]
    assert pusher.files(store) == ["1.pages", "2.pages", "3.db"]


def test_a_push_without_a_hash_says_so_and_passes(store: ReplicaStore, pusher) -> None:
    pusher.push(store, 1)
    verdict = store.verify(pusher.name, 1)
    assert (verdict.ok, verdict.finding) == (True, "whole")
    assert [check.details for check in verdict.checks if check.what == "content"] == ["no hash came with it"]


def test_a_push_with_the_hash_of_something_else_is_found(store: ReplicaStore, pusher) -> None:
    pusher.push(store, 1, dbhash="0" * 40)
    verdict = store.verify(pusher.name, 1)
    assert set(findings(verdict)) == {"content"}
    assert "0" * 40 in findings(verdict)["content"]


def refuse(error: int) -> Callable[..., NoReturn]:
    def refused(*_: object) -> NoReturn:
        raise OSError(error, os.strerror(error))

    return refused


@pytest.mark.parametrize(("error", "lacks"), [(errno.ENOSPC, "space"), (errno.EACCES, "rights")])
def test_what_cannot_be_checked_is_not_called_bad(
    store: ReplicaStore, pusher, home: Path, monkeypatch: pytest.MonkeyPatch, error: int, lacks: str
) -> None:
    monkeypatch.setattr(disk, "copy", refuse(error))  # of the drill
    verdict = store.verify(pusher.name, 3)
    assert (verdict.ok, verdict.finding, verdict.missing, set(findings(verdict))) == (
        False,
        "not checked",
        lacks,
        {"restore"},
    )
    monkeypatch.setattr(versions, "rebuild", refuse(error))
    verdict = store.verify(pusher.name, 1)
    assert (verdict.finding, verdict.missing, set(findings(verdict))) == ("not checked", lacks, {"files"})
    flip(home / "3.db", 4096 * 2 - 20)
    assert store.verify(pusher.name, 3).finding == "bad"  # that much could be seen


def test_the_newest_is_read_as_it_lies_when_there_is_no_room_for_a_name(
    store: ReplicaStore, pusher, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(os.listdir(home))
    with monkeypatch.context() as full:
        full.setattr(os, "mkdir", refuse(errno.ENOSPC))
        verdict = store.verify(pusher.name, 3)
        assert (verdict.finding, set(findings(verdict))) == ("not checked", {"restore"})
        store.restore(pusher.name, 3, tmp_path / "elsewhere.db")
        with pytest.raises(DiskFullError):
            store.restore(pusher.name, 2, tmp_path / "older.db")
    assert (tmp_path / "elsewhere.db").read_bytes() == pusher.bytes_of(store, 3)
    assert sorted(os.listdir(home)) == before


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 3 // 4)


@pytest.mark.parametrize(
    ("file", "damage", "bad", "whole"),
    [
        # The last bytes of the newest lie in a page that all three have alike.
        ("3.db", lambda path: flip(path, path.stat().st_size - 20), [1, 2, 3], []),
        ("3.db", truncate, [1, 2, 3], []),
        ("3.db", Path.unlink, [1, 2, 3], []),
        ("2.pages", lambda path: flip(path, 22), [1, 2], [3]),
        ("2.pages", truncate, [1, 2], [3]),
        ("1.pages", lambda path: flip(path, path.stat().st_size // 2), [1], [2, 3]),
        ("1.pages", Path.unlink, [1], [2, 3]),
    ],
)
def test_damage_is_found_where_it_is(
    store: ReplicaStore,
    pusher,
    home: Path,
    file: str,
    damage: Callable[[Path], None],
    bad: list[int],
    whole: list[int],
) -> None:
    damage(home / file)
    assert [number for number in (1, 2, 3) if not store.verify(pusher.name, number).ok] == bad
    assert [number for number in (1, 2, 3) if store.verify(pusher.name, number).ok] == whole
    assert all(findings(store.verify(pusher.name, number)) for number in bad)


def test_a_byte_in_an_unused_page_is_found_too(store: ReplicaStore, pusher) -> None:
    """Neither the integrity check nor the hash of the content sees a free page."""
    scratch = pusher.begin(store)
    pusher.write(scratch.path, pusher.edit(1))
    pusher.write(scratch.path, lambda connection: connection.execute("DELETE FROM t"))
    accepted = store.accept_push(scratch)
    head = Path(store.directory) / store.catalogue.get(pusher.name).id / "1.db"
    flip(head, accepted.version.size - 20)
    assert "bytes" in findings(store.verify(pusher.name, 1))
    assert "integrity" not in findings(store.verify(pusher.name, 1))


def test_what_is_missing_at_a_start_is_reported_and_nothing_is_thrown_away(
    open_store: Callable[..., ReplicaStore], store: ReplicaStore, pusher, home: Path
) -> None:
    store.close()
    (home / "2.pages").rename(home / "7.pages")
    (home / "scratch-0.db").write_bytes(b"left")
    found = open_store().recover()
    assert found.damaged == ["shop/app.db: 2.pages is missing"]
    assert sorted(os.listdir(home)) == ["1.pages", "3.db", "7.pages"]
