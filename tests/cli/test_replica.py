"""`headwater replica`: looking after a data directory, also while it is served."""

from __future__ import annotations

import contextlib
import errno
import io
import re
import sqlite3
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from headwater import ManualClock
from headwater.formats import iso
from headwater.replication.host import catalogue, disk, versions
from headwater.replication.host.store import ReplicaStore
from headwater.replication.host.versions import VersionRetention
from headwater.replication.integrity import dbhash
from headwater.replication.names import ReplicaName

Run = Callable[..., Any]
NAME = ReplicaName("shop", "app.db")
FIRST_MS = 1_700_000_000_000
HOUR_MS = 3_600_000


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "events.db-replicas"


@pytest.fixture
def store(directory: Path) -> Iterator[ReplicaStore]:
    """As a server has it: three versions of shop/app.db, an hour apart."""
    clock = ManualClock(FIRST_MS)
    with ReplicaStore(directory, VersionRetention(), clock).open(serve=True) as store:
        for number in (1, 2, 3):
            clock.advance((HOUR_MS if number > 1 else 0) / 1000)
            scratch = store.begin_push(NAME, base="latest", push_id=f"push {number}", client="laptop:1")
            with contextlib.closing(sqlite3.connect(scratch.path)) as connection, connection:
                connection.execute("CREATE TABLE IF NOT EXISTS t (n)")
                connection.execute("INSERT INTO t VALUES (?)", (number,))
            store.accept_push(scratch, message=f"number {number}\nand more", dbhash=dbhash(scratch.path))
        yield store


def numbers_in(path: Path) -> list[int]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return [number for (number,) in connection.execute("SELECT n FROM t ORDER BY n")]


def damage(store: ReplicaStore, file: str = "3.db") -> None:
    path = Path(store.directory) / store.catalogue.get(NAME).id / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_ls_shows_replicas(store: ReplicaStore, directory: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    store.catalogue.create(ReplicaName("shop", "empty.db"))
    result = run("replica", "ls", directory)
    assert result.code == 0
    head, first, second = result.out.splitlines()
    assert head.split()[:2] == ["replica", "newest"]
    assert first.split()[:2] == ["shop/app.db", "3"]
    assert second.split()[:3] == ["shop/empty.db", "-", "never"]
    found, empty = run("replica", "ls", directory, "--json").items
    assert (found["replica"], found["versions"], found["newest"]["version"]) == ("shop/app.db", 3, 3)
    assert (found["id"], empty["newest"]) == (store.catalogue.get(NAME).id, None)
    assert run("replica", directory).out == result.out
    monkeypatch.chdir(directory.parent)
    assert run("replica", "ls").out == result.out


def test_ls_without_a_directory_needs_one_that_is_meant(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("replica", "ls")
    assert (result.code, "which data directory? there is none here" in result.err) == (2, True)
    assert run("replica", "ls", tmp_path / "no").code == 2
    assert list(tmp_path.iterdir()) == []


def test_the_log_in_place_of_its_directory_of_replicas_is_noticed(
    directory: Path, store: ReplicaStore, run: Run
) -> None:
    log = directory.with_name("events.db")
    log.write_text("")
    assert f"Name {directory}" in run("replica", "ls", log).err


@pytest.mark.parametrize("command", [["rm"], ["reports"], ["key", "create"], ["key", "ls"]])
def test_what_is_done_on_the_servers_machine_says_so(run: Run, command: list[str]) -> None:
    refused = run("replica", *command, "ws://localhost:1/shop/app.db")
    assert (refused.code, "on the server's machine" in refused.err) == (2, True), refused.err


def test_log_shows_versions_newest_first(store: ReplicaStore, directory: Path, run: Run) -> None:
    lines = run("replica", "log", directory, "shop/app.db").out.splitlines()
    assert [line.split()[0] for line in lines] == ["version", "3", "2", "1"]
    assert lines[1].endswith("laptop  number 3 …")
    found = run("replica", "log", directory, "shop/app.db", "--json").items
    assert [(each["version"], each["base"], each["message"]) for each in found] == [
        (number, number - 1, f"number {number}\nand more") for number in (3, 2, 1)
    ]
    result = run("replica", "log", directory, "shop/app.db", "-n", 2)
    assert (len(result.out.splitlines()), result.err) == (3, "there may be more: --before 2\n")
    assert [e["version"] for e in run("replica", "log", directory, "shop/app.db", "--before", 2, "--json").items] == [1]
    for wrong in ("shop/none.db", "shop", "shop/app.db@3", "../app.db"):
        assert run("replica", "log", directory, wrong).code != 0
    assert "which replica?" in run("replica", "log", directory).err


@pytest.mark.parametrize(
    ("version", "rows"), [("", [1, 2, 3]), ("@1", [1]), ("@latest-1", [1, 2]), ("@latest", [1, 2, 3])]
)
def test_restore_writes_a_version_to_a_file(
    store: ReplicaStore, directory: Path, tmp_path: Path, run: Run, version: str, rows: list[int]
) -> None:
    target = tmp_path / "back.db"
    result = run("replica", "restore", directory, f"shop/app.db{version}", target)
    assert result.code == 0
    assert f"restored shop/app.db@{len(rows)} to {target}" in result.out
    assert numbers_in(target) == rows


@pytest.mark.parametrize(
    ("after_ms", "rows"), [(0, [1]), (HOUR_MS - 1, [1]), (HOUR_MS, [1, 2]), (99 * HOUR_MS, [1, 2, 3])]
)
def test_restore_of_what_was_the_newest_at_a_time(
    store: ReplicaStore,
    directory: Path,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    after_ms: int,
    rows: list[int],
) -> None:
    monkeypatch.setattr(catalogue, "VERSIONS_PAGE", 1)  # it may have to leaf through them
    target = tmp_path / "back.db"
    assert run("replica", "restore", directory, "shop/app.db", target, "--at", iso(FIRST_MS + after_ms)).code == 0
    assert numbers_in(target) == rows


def test_restore_at_a_time_that_has_no_version(store: ReplicaStore, directory: Path, tmp_path: Path, run: Run) -> None:
    target = tmp_path / "back.db"
    too_old = run("replica", "restore", directory, "shop/app.db", target, "--at", iso(FIRST_MS - 1))
    assert (too_old.code, "The oldest is version 1, pushed" in too_old.err) == (2, True)
    for name, at, why in (
        ("shop/app.db@1", "now", "--at and a version exclude each other"),
        ("shop/app.db", "noon", "must be a time"),
        ("shop/app.db", "2999-01-01", "a time that has come"),
    ):
        refused = run("replica", "restore", directory, name, target, "--at", at)
        assert (refused.code, why in refused.err) == (2, True), refused.err
    store.catalogue.create(ReplicaName("shop", "empty.db"))
    assert "no version yet" in run("replica", "restore", directory, "shop/empty.db", target, "--at", "now").err
    assert not target.exists()


def test_restore_replaces_a_file_only_on_request(
    store: ReplicaStore, directory: Path, tmp_path: Path, run: Run
) -> None:
    target = tmp_path / "back.db"
    target.write_text("mine")
    result = run("replica", "restore", directory, "shop/app.db", target)
    assert (result.code, "--overwrite" in result.err, target.read_text()) == (2, True, "mine")
    damage(store)
    assert run("replica", "restore", directory, "shop/app.db", target, "--overwrite").code == 3
    assert target.read_text() == "mine"
    damage(store)  # twice is as before
    found = run("replica", "restore", directory, "shop/app.db", target, "--overwrite", "--json").json
    assert (found["version"], found["target"], numbers_in(target)) == (3, str(target), [1, 2, 3])
    for words in (
        ["shop/app.db"],
        ["shop/app.db@9", tmp_path / "x"],
        ["shop/app.db@0", tmp_path / "x"],
        ["a", "b", "c"],
    ):
        assert run("replica", "restore", directory, *words).code != 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["back.db", directory.name]


def test_rm_removes_a_replica_when_it_is_meant(
    store: ReplicaStore, directory: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    result = run("replica", "rm", directory, "shop/app.db")
    assert (result.code, "--yes" in result.err, store.catalogue.get(NAME).newest) == (2, True, 3)
    home = directory / store.catalogue.get(NAME).id
    result = run("replica", "rm", directory, "shop/app.db", "--yes")
    assert (result.code, result.out) == (0, "removed shop/app.db with 3 versions\n")
    assert (store.catalogue.find(NAME), home.exists()) == (None, False)
    assert run("replica", "rm", directory, "shop/app.db", "-y").code != 0


def test_verify_proves_all_versions_or_one(store: ReplicaStore, directory: Path, run: Run) -> None:
    result = run("replica", "verify", directory)
    assert (result.code, result.out.splitlines()) == (
        0,
        ["shop/app.db@3  ok", "shop/app.db@2  ok", "shop/app.db@1  ok", "3 versions verified"],
    )
    assert run("replica", "verify", directory, "shop/app.db").out == result.out
    one = run("replica", "verify", directory, "shop/app.db@latest-1")
    assert one.out.splitlines()[0] == "shop/app.db@2  ok"
    assert "  content: hashes equal to the pushed database" in one.out
    found = run("replica", "verify", directory, "--json").items
    assert [(each["version"], each["ok"], len(each["checks"])) for each in found] == [(n, True, 5) for n in (3, 2, 1)]


def test_verify_leaves_out_what_went_meanwhile(
    store: ReplicaStore, directory: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = ReplicaStore.verify

    def beside_a_server(self: ReplicaStore, name: ReplicaName, number: int) -> Any:
        if number == 3:
            store._catalogue.remove_versions(store.catalogue.get(NAME).id, 1)
        return verify(self, name, number)

    monkeypatch.setattr(ReplicaStore, "verify", beside_a_server)
    result = run("replica", "verify", directory)
    assert (result.code, result.out.splitlines()[-1]) == (0, "2 versions verified")
    assert run("replica", "verify", directory, "shop/app.db@1").code == 2


def test_verify_ends_with_1_when_it_finds_something(store: ReplicaStore, directory: Path, run: Run) -> None:
    damage(store, "2.pages")
    result = run("replica", "verify", directory)
    assert result.code == 1
    assert [line for line in result.out.splitlines() if not line.startswith(" ")] == [
        "shop/app.db@3  ok",
        "shop/app.db@2  bad",
        "shop/app.db@1  bad",
        "2 of 3 versions bad",
    ]
    found = run("replica", "verify", directory, "shop/app.db@1", "--json")
    assert (found.code, found.items[0]["ok"]) == (1, False)


@pytest.mark.parametrize("broken", [False, True])
def test_verify_on_a_full_disk_says_what_was_not_checked(
    store: ReplicaStore, directory: Path, run: Run, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if broken:
        damage(store)
    monkeypatch.setattr(disk, "copy", no_space)
    monkeypatch.setattr(versions, "rebuild", no_space)
    result = run("replica", "verify", directory)
    assert (result.code, result.out.splitlines()[-3:]) == (
        1 if broken else 3,
        [
            "shop/app.db@1  not checked",
            "  files: no disk space (No space left on device)",
            f"{'1 of 3 versions bad' if broken else '0 versions verified'}, {2 if broken else 3} not checked: no space",
        ],
    )
    assert result.err == "next: Free some disk space, and verify again\n"
    found = run("replica", "verify", directory, "--json")
    assert found.code == result.code
    assert [each["verdict"] for each in found.items] == ["bad" if broken else "not checked", *["not checked"] * 2]
    assert (found.items[2]["ok"], found.items[2]["next"]) == (False, "Free some disk space, and verify again")
    assert found.items[2]["checks"][0]["lacks"] == "space"


def test_a_version_without_a_hash_is_whole_and_not_proved(store: ReplicaStore, directory: Path, run: Run) -> None:
    scratch = store.begin_push(NAME, base="latest", push_id="push 4")
    with contextlib.closing(sqlite3.connect(scratch.path)) as connection, connection:
        connection.execute("INSERT INTO t VALUES (4)")
    store.accept_push(scratch)
    result = run("replica", "verify", directory)
    assert (result.code, result.out.splitlines()[0], result.out.splitlines()[-1]) == (
        0,
        "shop/app.db@4  whole, but no hash came with it",
        "3 versions verified, 1 whole but without a hash",
    )
    assert [each["verdict"] for each in run("replica", "verify", directory, "--json").items] == ["whole"] + [
        "proved"
    ] * 3
    listed = run("replica", "log", directory, "shop/app.db")
    assert [line.split()[0] for line in listed.out.splitlines()] == ["version", "*4", "3", "2", "1"]
    assert listed.err.startswith("* pushed without a hash")


def test_the_only_data_directory_here_need_not_be_named(
    store: ReplicaStore, directory: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory.parent)
    for words in (["log"], ["verify"], ["reports"], ["key", "ls"]):
        named = run("replica", *words, directory, "shop/app.db")
        assert (named.code, run("replica", *words, "shop/app.db")) == (0, named), words
    assert run("replica", "verify").out == run("replica", "verify", directory).out
    assert run("replica", "verify", "shop/app.db@2").out.startswith("shop/app.db@2  ok")
    assert run("replica", "restore", "shop/app.db@2", "back.db").code == 0
    assert numbers_in(Path("back.db")) == [1, 2]
    made = run("replica", "key", "create", "shop/app.db", "--pull", "--json").json
    assert run("replica", "key", "revoke", "shop/app.db", made["id"]).out == f"revoked {made['id']}\n"
    for words in (["restore", "shop/app.db"], ["restore", directory, "shop/app.db"], ["key", "revoke", "shop/app.db"]):
        assert run("replica", *words).code == 2
    assert run("replica", "rm", "shop/app.db", "-y").out == "removed shop/app.db with 3 versions\n"


def test_of_several_data_directories_one_has_to_be_named(
    store: ReplicaStore, directory: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory.parent)
    ReplicaStore("other.db-replicas", VersionRetention(), ManualClock(FIRST_MS)).open(serve=True).close()
    reported = run("replica", "log", "shop/app.db")
    assert (reported.code, "there are 2 of them here" in reported.err) == (2, True)
    assert "next: Name it: headwater replica log events.db-replicas shop/app.db\n" in reported.err


@pytest.mark.parametrize(
    ("place", "meant"),
    [
        ("http://127.0.0.1:8931", "Did you mean ws://127.0.0.1:8931?"),
        ("https://host/shop", "Did you mean wss://host/shop?"),
        ("ws//host/shop/app.db", "Did you mean ws://host/shop/app.db?"),
        ("ws:/host/shop/app.db", "Did you mean ws://host/shop/app.db?"),
        ("127.0.0.1:8931", "Did you mean ws://127.0.0.1:8931"),
        ("http://me:secret@host/shop", "Write it as ws://host:port/namespace/name"),
    ],
)
def test_a_slip_in_a_url_is_no_directory(run: Run, place: str, meant: str) -> None:
    for words in (["ls"], ["log"], ["verify"], ["rm"]):
        reported = run("replica", *words, place)
        assert (reported.code, meant in reported.err, "secret" in reported.err) == (2, True, False), reported.err


def test_ls_shows_those_that_were_not_pushed_for_long(store: ReplicaStore, directory: Path, run: Run) -> None:
    assert isinstance(store._clock, ManualClock)
    store._clock.advance(1_000 * 3_600)
    store.catalogue.create(ReplicaName("shop", "empty.db"))
    stale = run("replica", "ls", directory, "--stale", "1h")
    assert (stale.code, stale.out) == (1, run("replica", "ls", directory).out)
    pushed_ms = datetime.now(UTC).timestamp() * 1000 - (FIRST_MS + 2 * HOUR_MS)
    between = f"{int(pushed_ms) - 500 * HOUR_MS}ms"
    some = run("replica", "ls", directory, "--stale", between, "--json")
    assert (some.code, [each["replica"] for each in some.items]) == (1, ["shop/app.db"])
    none = run("replica", "ls", directory, "--stale", "5200w")
    assert (none.code, none.out) == (0, "no replica was last pushed longer ago than 5200w\n")
    assert run("replica", "ls", directory, "--stale", "long").code == 2


def test_restore_before_a_program_starts(store: ReplicaStore, directory: Path, tmp_path: Path, run: Run) -> None:
    target = tmp_path / "app.db"
    flags = ["--if-missing", "--if-replica-exists"]
    none = run("replica", "restore", directory, "shop/none.db", target, *flags)
    assert (none.code, none.out) == (0, "there is no version of shop/none.db yet: nothing to restore\n")
    store.catalogue.create(ReplicaName("shop", "empty.db"))
    empty = run("replica", "restore", directory, "shop/empty.db", target, *flags, "--json")
    assert (empty.code, empty.json["version"], target.exists()) == (0, None, False)
    assert run("replica", "restore", directory, "shop/app.db@9", target, *flags).code == 2
    assert run("replica", "restore", directory, "shop/none.db", target, "--if-missing").code == 2
    assert run("replica", "restore", directory, "shop/app.db", target, *flags).code == 0
    before = target.read_bytes()
    again = run("replica", "restore", directory, "shop/app.db@1", target, *flags)
    assert (again.code, again.out) == (0, f"{target} is there: nothing to restore\n")
    assert target.read_bytes() == before
    assert run("replica", "restore", directory, "shop/app.db", target, "--if-missing", "--overwrite").code == 2


def test_a_key_is_shown_once_and_can_be_revoked(store: ReplicaStore, directory: Path, run: Run) -> None:
    made = run("replica", "key", "create", directory, "shop/app.db", "--push", "--label", "laptop")
    text = made.out.strip()
    assert re.fullmatch(r"hwpush_[0-9a-f]{12}_[0-9a-f]{64}", text)
    assert "it will not be shown again" in made.err
    pull = run("replica", "key", "create", directory, "shop/app.db", "--pull", "--json").json
    assert (pull["kind"], store.catalogue.key_kind(store.catalogue.get(NAME).id, pull["key"])) == ("pull", "pull")
    listed = run("replica", "key", "ls", directory, "shop/app.db")
    assert (text not in listed.out, text.split("_")[1] in listed.out, "laptop" in listed.out) == (True, True, True)
    assert {each["kind"] for each in run("replica", "key", "ls", directory, "shop/app.db", "--json").items} == {
        "push",
        "pull",
    }
    assert run("replica", "key", "revoke", directory, "shop/app.db", text).code == 0
    assert store.catalogue.key_kind(store.catalogue.get(NAME).id, text) is None
    last = run("replica", "key", "revoke", directory, "shop/app.db", pull["id"])
    assert (last.code, "last key" in last.err) == (0, True)
    assert run("replica", "key", "revoke", directory, "shop/app.db", pull["id"]).code == 2
    assert run("replica", "key", "ls", directory, "shop/app.db").out == "no keys\n"


def test_a_key_can_be_made_before_the_first_push(store: ReplicaStore, directory: Path, run: Run) -> None:
    made = run("replica", "key", "create", directory, "shop/later.db", "--push")
    assert "made shop/later.db, which has no version yet" in made.err
    assert store.catalogue.get(ReplicaName("shop", "later.db")).newest == 0
    for flags in ([], ["--push", "--pull"]):
        assert run("replica", "key", "create", directory, "shop/app.db", *flags).code == 2
    assert run("replica", "verify", directory, "shop/later.db").out == "0 versions verified\n"
    assert run("replica", "log", directory, "shop/later.db").out == "no versions\n"
    assert run("replica", "restore", directory, "shop/later.db", directory.parent / "x").code != 0
