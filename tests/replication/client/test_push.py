"""A push makes a version, or changes nothing; it knows from which version the database comes."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import headwater
from headwater.errors import (
    DiskFullError,
    InvalidOptionError,
    NotADatabaseError,
    UnknownReplicaError,
    UnreachableError,
    VersionConflictError,
)
from headwater.replication import snapshot as snapshots
from headwater.replication.connection import ReplicaConnection, is_partial
from headwater.replication.integrity import dbhash
from headwater.replication.outcome import Progress
from headwater.replication.protocol import PushCommitted


def at(database: Any, path: Path) -> Any:
    """Another file with such a table."""
    other = type(database).__new__(type(database))
    other.path = str(path)
    return other


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_push_makes_a_version_and_only_a_changed_database_another(client: Any, make: Any, mode: str) -> None:
    database = make(mode=mode)
    first = client.push(database, message="the first")
    assert (first.version, first.is_new, first.base, first.dbhash) == (1, True, 0, dbhash(database.path))
    assert first.sent > first.size == os.path.getsize(database.path)
    again = client.push(database)
    assert (again.version, again.is_new) == (1, False)
    database.write()
    second = client.push(database)
    assert (second.version, second.is_new, second.base) == (2, True, 1)
    assert second.sent < second.size / 5
    assert second.speedup == pytest.approx(second.size / (second.sent + second.received), abs=0.01)
    assert client.pull("ns/app.db@1", "one.db").dbhash == first.dbhash != second.dbhash == dbhash(database.path)
    assert sorted(os.listdir(database.path + "-headwater")) == ["lock", "state.json"]


def test_a_push_from_an_older_version_is_refused_unless_the_caller_insists(client: Any, make: Any) -> None:
    mine, theirs = make(), make("theirs.db")
    client.push(mine)
    theirs.write("theirs")
    with pytest.raises(VersionConflictError, match="newest version is 1, and this database was never synced") as raised:
        client.push(theirs)
    assert raised.value.newest == 1
    assert client.push(theirs, "ns/app.db@latest").version == 2
    mine.write("mine")
    with pytest.raises(
        VersionConflictError, match="the newest version is 2, and this database comes from version 1"
    ) as raised:
        client.push(mine)
    assert raised.value.newest == 2
    with pytest.raises(VersionConflictError):
        client.push(mine, "ns/app.db@1")
    assert client.push(mine, "ns/app.db@2").version == 3
    with pytest.raises(InvalidOptionError, match="by its number"):
        client.push(mine, "ns/app.db@latest-1")


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_file_that_is_the_newest_version_is_known_as_such(client: Any, make: Any, mode: str, tmp_path: Path) -> None:
    database = make(mode=mode)
    client.push(database)
    database.write("second")
    client.push(database)
    shutil.copy(database.path, tmp_path / "moved.db")  # without what is remembered of it
    moved = at(database, tmp_path / "moved.db")
    dry = client.push(moved, dry=True)
    assert (dry.base, dry.changed_pages) == (2, 1)  # its counters of changes, of which no version is made
    assert not (tmp_path / "moved.db-headwater").exists()
    unchanged = client.push(moved)
    assert (unchanged.version, unchanged.is_new) == (2, False)
    moved.write("third")
    assert client.push(moved).version == 3


def test_a_replica_is_known_by_whatever_address(client: Any, make: Any) -> None:
    database = make()
    client.push(database)
    database.write("second")
    elsewhere = f"{client.url}/ns/app.db".replace("127.0.0.1", "localhost")
    assert headwater.sync(database.path, elsewhere, dry=True).base == 1
    assert headwater.sync(database.path, elsewhere).version == 2
    database.write("third")
    assert client.push(database).version == 3  # it is noted as version 1 here, and as version 2 there, which was later
    database.write("fourth")
    headwater.sync(make("other.db").path, f"{elsewhere}@latest")
    for remote in (elsewhere, f"{client.url}/ns/app.db"):
        with pytest.raises(
            VersionConflictError, match="the newest version is 4, and this database comes from version 3"
        ):
            headwater.sync(database.path, remote)


def test_a_lost_answer_is_made_up_for_by_the_next_push(client: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    database = make()
    real = ReplicaConnection.config_of

    def lost(link: ReplicaConnection, frame: str, kind: type) -> Any:
        if kind is PushCommitted:
            raise UnreachableError("the connection broke", where=link.url)
        return real(link, frame, kind)

    with monkeypatch.context() as broken:
        broken.setattr(ReplicaConnection, "config_of", lost)
        for _ in range(2):
            with pytest.raises(Exception, match="cut off in the middle") as raised:
                client.push(database)
            assert is_partial(raised.value)
    assert client.push(database).version == 1
    database.write()
    assert client.push(database).version == 2


def test_a_dry_push_changes_nothing_and_tells_what_would_move(client: Any, make: Any, tmp_path: Path) -> None:
    database = make()
    dry = client.push(database, dry=True)
    assert (dry.dry, dry.version, dry.changed_pages) == (True, None, dry.pages)
    assert os.listdir(tmp_path) == ["app.db"]
    with pytest.raises(UnknownReplicaError):
        client.pull("ns/app.db", "copy.db")
    earnest = client.push(database)
    assert (dry.sent, dry.received) == (earnest.sent, earnest.received)
    database.write()
    dry = client.push(database, dry=True)
    assert (dry.is_new, 1 <= dry.changed_pages <= 2) == (True, True)
    assert client.push(database).version == 2


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_dry_push_says_what_the_push_does(client: Any, make: Any, mode: str, tmp_path: Path) -> None:
    database = make(mode=mode)
    client.push(database)
    client.pull("ns/app.db", "copy.db")
    copy = at(database, tmp_path / "copy.db")
    for same in (database, copy):
        dry, earnest = client.push(same, dry=True), client.push(same)
        assert (dry.is_new, dry.changed_pages) == (earnest.is_new, earnest.changed_pages) == (False, 0)
    database.run("pragma user_version = 7")  # it is in the first page, and in no table
    dry, earnest = client.push(database, dry=True), client.push(database)
    assert (dry.is_new, dry.changed_pages) == (earnest.is_new, earnest.changed_pages) == (True, 1)


def test_a_conflict_says_what_it_needs(client: Any, make: Any, tmp_path: Path) -> None:
    database = make()
    client.push(database)
    client.pull("ns/app.db", "copy.db")
    database.write("the second")
    client.push(database)
    copy = at(database, tmp_path / "copy.db")
    for dry in (True, False):
        with pytest.raises(
            VersionConflictError, match=r"version 1 unchanged.* sync ws\S+ \S+copy\.db; to make .*@latest$"
        ) as raised:
            client.push(copy, dry=dry)
        assert raised.value.newest == 2
    with pytest.raises(VersionConflictError, match="there is no version 7: the newest is 2"):
        client.push(copy, "ns/app.db@7")
    with pytest.raises(VersionConflictError, match="there is no version 7: there is none yet"):
        client.push(copy, "ns/other.db@7")
    copy.write("mine")
    with pytest.raises(VersionConflictError, match="merge by hand"):
        client.push(copy)


def test_without_room_for_a_copy_the_live_database_is_pushed(
    client: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_free_bytes", lambda _: 0)
    database, other = make(), make("other.db", mode="delete")
    pushed = client.push(database)
    assert (pushed.version, pushed.dbhash) == (1, None)
    assert client.pull("ns/app.db", "copy.db").dbhash == dbhash(database.path)
    with pytest.raises(DiskFullError):
        client.push(other, "ns/other.db")


@pytest.mark.parametrize("page_size", [512, 65536])
def test_a_page_size_may_change_between_versions(client: Any, make: Any, page_size: int) -> None:
    database = make(mode="delete")
    client.push(database)
    client.pull("ns/app.db", "copy.db")
    database.run(f"pragma page_size = {page_size}; vacuum")
    database.write()
    assert client.push(database).page_size == page_size
    pulled = client.pull("ns/app.db", "copy.db")
    assert (pulled.version, pulled.page_size, pulled.dbhash) == (2, page_size, dbhash(database.path))


def test_progress_is_reported(client: Any, make: Any) -> None:
    reported: list[Progress] = []
    pushed = client.push(make(rows=20_000), progress=reported.append)
    assert [reported[0].phase, reported[-2].phase, reported[-1].phase] == ["preparing", "moving", "finishing"]
    assert reported[-1][:2] == (pushed.sent, pushed.received)
    assert {step.total_estimate for step in reported[1:]} == {pushed.size}


def test_what_cannot_be_pushed_is_refused_before_anything_is_left(client: Any, make: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="4096"):
        client.push(make(), message="x" * 4097)
    with pytest.raises(NotADatabaseError):
        client.push(type("Missing", (), {"path": str(tmp_path / "missing.db")}))
    assert os.listdir(tmp_path) == ["app.db"]


def test_what_is_no_database_is_reported_before_the_server_is_asked(client: Any, tmp_path: Path) -> None:
    client.url = "ws://127.0.0.1:1"  # without a listener
    (tmp_path / "text.db").write_text("no database, but a text that is longer than a header " * 20)
    (tmp_path / "empty.db").touch()
    for name, why in (("text.db", "no SQLite database"), ("empty.db", "is empty"), ("missing.db", "no such file")):
        with pytest.raises(NotADatabaseError, match=why) as raised:
            client.push(type("Wrong", (), {"path": str(tmp_path / name)}))
        assert raised.value.next
