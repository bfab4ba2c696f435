"""A pull makes the database here the same as a version, and overwrites nothing that was never pushed."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest
from msgspec.structs import replace

from headwater.errors import (
    LockedError,
    NotADatabaseError,
    ReplicationFailedError,
    UnknownReplicaError,
    UnreachableError,
    UnsyncedChangesError,
)
from headwater.replication import pull as pull_module
from headwater.replication.connection import ReplicaConnection, is_partial
from headwater.replication.integrity import check_integrity, dbhash
from headwater.replication.protocol import PullOffer
from headwater.replication.rsync import RsyncProcess
from headwater.replication.sync_state import SyncState


@pytest.fixture
def pushed(client: Any, make: Any) -> Any:
    """Two versions of a database."""
    database = make()
    client.push(database)
    database.write("the second")
    client.push(database)
    return database


def test_a_pull_makes_a_file_and_keeps_it_up_to_date(client: Any, pushed: Any, tmp_path: Path) -> None:
    first = client.pull("ns/app.db", "copy.db")
    copy = str(tmp_path / "copy.db")
    assert (first.version, first.is_new, first.changed_pages) == (2, True, first.pages)
    assert first.dbhash == dbhash(copy) == dbhash(pushed.path)
    check_integrity(copy)
    for options in ({"dry": True}, {}, {"overwrite": True}):
        again = client.pull("ns/app.db", "copy.db", **options)
        assert (again.version, again.is_new, again.changed_pages) == (2, False, 0)
    pushed.write("the third")
    client.push(pushed)
    with closing(apsw.Connection(copy)) as reader:  # another connection has it open
        third = client.pull("ns/app.db", "copy.db")
        assert (third.version, third.is_new) == (3, True)
        assert third.received < third.size / 5
        assert reader.execute("select note from t where id = 7").fetchone() == ("the third",)
    assert client.pull("ns/app.db@latest-1", "copy.db").version == 2
    assert dbhash(copy) == first.dbhash


def test_a_change_of_a_single_page_is_new(client: Any, pushed: Any) -> None:
    """In WAL mode no counter of the first page changes with it."""
    client.pull("ns/app.db", "copy.db")
    pushed.write("something else")
    client.push(pushed)
    for dry in (True, False):
        pulled = client.pull("ns/app.db", "copy.db", dry=dry)
        assert (pulled.is_new, 1 <= pulled.changed_pages <= 2) == (True, True)


def test_a_pulled_database_can_be_pushed_from_there(client: Any, pushed: Any, make: Any, tmp_path: Path) -> None:
    client.pull("ns/app.db", "copy.db")
    pushed.path = str(tmp_path / "copy.db")
    pushed.write("from the copy")
    assert client.push(pushed).version == 3


def test_what_was_never_pushed_is_not_overwritten(client: Any, pushed: Any, make: Any) -> None:
    stranger = make("stranger.db")
    stranger.write("a stranger")
    before = dbhash(stranger.path)
    with pytest.raises(UnsyncedChangesError, match="never synced"):
        client.pull("ns/app.db", "stranger.db")
    pushed.write("not pushed")
    with pytest.raises(UnsyncedChangesError, match="changed since version 2"):
        client.pull("ns/app.db", "app.db")
    assert dbhash(stranger.path) == before
    assert client.pull("ns/app.db", "stranger.db", overwrite=True).version == 2
    assert dbhash(stranger.path) != before
    assert client.pull("ns/app.db", "app.db", overwrite=True).dbhash == dbhash(stranger.path)


def test_the_same_content_needs_no_history(client: Any, make: Any) -> None:
    client.push(make())
    make("twin.db")
    twin = client.pull("ns/app.db", "twin.db")
    assert (twin.version, twin.is_new) == (1, False)


def test_a_dry_pull_changes_nothing_and_tells_what_would_move(client: Any, pushed: Any, tmp_path: Path) -> None:
    files = sorted(os.listdir(tmp_path))
    dry = client.pull("ns/app.db", "copy.db", dry=True)
    assert (dry.changed_pages, dry.version) == (dry.pages, 2)
    assert sorted(os.listdir(tmp_path)) == files
    client.pull("ns/app.db", "copy.db")
    before = (tmp_path / "copy.db").read_bytes()
    dry = client.pull("ns/app.db@1", "copy.db", dry=True)
    assert 1 <= dry.changed_pages <= 2
    assert (tmp_path / "copy.db").read_bytes() == before


def test_what_is_not_there_is_reported_and_no_file_is_made(client: Any, pushed: Any, tmp_path: Path) -> None:
    files = sorted(os.listdir(tmp_path))
    for name in ("ns/other.db", "ns/app.db@3", "ns/app.db@latest-2"):
        with pytest.raises(UnknownReplicaError):
            client.pull(name, "copy.db")
    assert sorted(os.listdir(tmp_path)) == files
    (tmp_path / "text.db").write_text("no database, but a text that is longer than a header " * 20)
    with pytest.raises(NotADatabaseError):
        client.pull("ns/app.db", "text.db", overwrite=True)


def test_a_database_that_needs_its_application_can_be_synced(client: Any, tmp_path: Path) -> None:
    class Own:
        path = str(tmp_path / "own.db")

    with closing(apsw.Connection(Own.path)) as connection:
        connection.create_scalar_function("twice", lambda value: value * 2, 1, deterministic=True)
        connection.execute("create table t(a int, b as (twice(a))); insert into t values(21)")
    pushed = client.push(Own)
    assert (pushed.version, pushed.dbhash) == (1, None)
    client.pull("ns/app.db", "copy.db")
    with pytest.raises(UnsyncedChangesError, match="functions of its application"):
        client.pull("ns/app.db", "copy.db")


@pytest.mark.parametrize("written", ["pragma user_version = 7", "pragma page_size = 1024; vacuum"])
def test_what_was_written_before_the_comparison_counts(
    client: Any, make: Any, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    """Neither is content, so it is overwritten."""
    database = make(mode="delete")
    client.push(database)
    look = pull_module.shape_of

    def look_early(*arguments: Any) -> Any:
        found = look(*arguments)
        database.run(written)
        return found

    monkeypatch.setattr(pull_module, "shape_of", look_early)
    assert client.pull("ns/app.db", "app.db").is_new
    assert (database.run("pragma user_version"), database.run("pragma page_size")) == ([(0,)], [(4096,)])


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_what_is_written_after_the_comparison_is_not_overwritten_either(
    client: Any, make: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    database, copy = make(mode=mode), make("copy.db", mode=mode)
    client.push(database)
    client.pull("ns/app.db", "copy.db")
    database.write()
    client.push(database)
    real = RsyncProcess.replica

    async def a_moment_later(path: str) -> RsyncProcess:
        copy.write("never pushed")
        return await real(path)

    with monkeypatch.context() as late:
        late.setattr(RsyncProcess, "replica", a_moment_later)
        with pytest.raises(LockedError, match="wrote it meanwhile") as raised:
            client.pull("ns/app.db", "copy.db")
        assert not is_partial(raised.value)
    with pytest.raises(UnsyncedChangesError, match="changed since version 1"):
        client.pull("ns/app.db", "copy.db")
    assert copy.run("select note from t where id = 7") == [("never pushed",)]


def test_a_file_that_is_created_meanwhile_stays(
    client: Any, pushed: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RsyncProcess.replica

    async def a_moment_later(path: str) -> RsyncProcess:
        make("copy.db", rows=10)
        return await real(path)

    monkeypatch.setattr(RsyncProcess, "replica", a_moment_later)
    with pytest.raises(LockedError, match="wrote it meanwhile"):
        client.pull("ns/app.db", "copy.db")
    pushed.path = pushed.path.replace("app.db", "copy.db")
    assert pushed.run("select count(*) from t") == [(10,)]


def test_a_database_that_is_being_written_is_left_alone(client: Any, pushed: Any) -> None:
    with closing(apsw.Connection(pushed.path)) as writer:
        writer.execute("begin immediate")
        with pytest.raises(LockedError, match="a program is writing"):
            client.pull("ns/app.db@1", "app.db")
    pushed.write("the third")
    assert client.push(pushed).version == 3  # for it still comes from the second


def test_after_a_killed_pull_a_push_is_refused_and_a_pull_mends_it(client: Any, pushed: Any) -> None:
    """It comes from the old version or from the new one, and only its content tells."""
    with SyncState(pushed.path) as beside:
        noted = beside.load(client.remote())
        beside.save(client.remote(), replace(noted, dbhash="0" * 40, pulling=dbhash(pushed.path)))
    with pytest.raises(ReplicationFailedError, match="not known which version"):
        client.push(pushed)
    assert client.pull("ns/app.db@1", "app.db").version == 1
    assert client.pull("ns/app.db", "app.db").version == 2
    pushed.write("the third")
    assert client.push(pushed).version == 3


def test_a_pull_whose_good_bye_fails_is_remembered(
    client: Any, pushed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client.pull("ns/app.db@1", "copy.db")

    async def broken(link: ReplicaConnection, config: object) -> None:
        if config == {"complete": True}:
            raise UnreachableError("the connection broke", where=link.url)
        await real(link, config)

    real = ReplicaConnection.send_config
    with monkeypatch.context() as breaking:
        breaking.setattr(ReplicaConnection, "send_config", broken)
        with pytest.raises(ReplicationFailedError, match="cut off"):
            client.pull("ns/app.db", "copy.db")
    assert dbhash(str(tmp_path / "copy.db")) == dbhash(pushed.path)
    pushed.path = str(tmp_path / "copy.db")
    pushed.write("the third")
    assert client.push(pushed).version == 3


def test_a_pull_that_is_not_what_was_pushed_leaves_no_new_file_and_warns_of_an_old_one(
    client: Any, pushed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.pull("ns/app.db@1", "old.db")
    real = ReplicaConnection.config_of

    def another(link: ReplicaConnection, frame: str, kind: type) -> Any:
        output = real(link, frame, kind)
        return replace(output, dbhash="0" * 40) if kind is PullOffer else output

    monkeypatch.setattr(ReplicaConnection, "config_of", another)
    files = sorted(os.listdir(tmp_path))
    with pytest.raises(ReplicationFailedError, match="not the content of version 2") as raised:
        client.pull("ns/app.db", "copy.db")
    assert f"headwater replica verify {client.url}/ns/app.db@2" in raised.value.next
    assert sorted(os.listdir(tmp_path)) == files
    with pytest.raises(ReplicationFailedError, match=r"do not trust it.*replica verify.*--overwrite"):
        client.pull("ns/app.db", "old.db")


def test_what_is_made_beside_a_database_is_this_user_s_alone_and_a_target_keeps_its_mode(
    client: Any, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    before = os.umask(0o000)

    def look(_: object) -> None:
        for path in tmp_path.rglob("*"):
            if path.stat().st_mode & 0o077 and path not in others:
                seen.append(str(path))

    try:
        database = make(mode="delete")
        os.chmod(database.path, 0o644)
        shared = tmp_path / "shared.db"
        shared.touch(0o664)
        others = {Path(database.path), shared}
        client.push(database, progress=look)
        client.pull("ns/app.db", "new.db")
        client.pull("ns/app.db", "shared.db")
        client.copy("app.db", "copied.db")
        os.unlink(tmp_path / "new.db")
        other = make("other.db", page_size=8192)
        os.chmod(other.path, 0o640)
        others.add(Path(other.path))
        client.pull("ns/app.db", "other.db", overwrite=True)
        look(None)
    finally:
        os.umask(before)
    assert seen == []
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("copied.db", "shared.db", "other.db")}
    assert modes == {"copied.db": 0o600, "shared.db": 0o664, "other.db": 0o640}
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in tmp_path.glob("*-headwater"))
