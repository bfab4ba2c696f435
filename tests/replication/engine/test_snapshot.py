"""A snapshot is the database between two transactions, byte for byte, and its writer hardly notices."""

import os
import resource
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from typing import Any

import apsw
import pytest

from headwater.errors import DiskFullError, LockedError, NotADatabaseError, ReplicationFailedError
from headwater.replication import snapshot as snapshots
from headwater.replication.local_database import Shell, remove_database, replace_content, shape_of
from headwater.replication.snapshot import snapshot

MODES = ("wal", "delete")
SNAPSHOTS = 25
SELECT_MAX = 1024  # descriptors that `select` can take
BLOCKED_S_MAX = 10.0  # a shared machine is slow at times; a writer that is locked out for good waits for 20 s


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the database were too large to lock out its writers while it is copied."""
    monkeypatch.setattr(snapshots, "LOCKED_BYTES_MAX", 0)


@pytest.fixture
def no_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_free_bytes", lambda _: 0)


def hammered(path: str, into: str, hammer: Any, look: Any) -> None:
    stop = hammer(path)
    seen: list[int] = []
    while len(seen) < SNAPSHOTS or len(set(seen)) < 3:  # the writer gets to write, sooner or later
        taken = snapshot(path, into)
        assert taken.size == os.path.getsize(into) == taken.pages * taken.page_size
        seen.append(look.moves(into))
    assert stop() < BLOCKED_S_MAX
    assert seen == sorted(seen)
    assert look.moves(path) >= seen[-1]


@pytest.mark.parametrize("mode", MODES)
def test_a_snapshot_under_a_hammering_writer_holds_whole_transactions(
    make: Any, hammer: Any, look: Any, tmp_path: Any, mode: str
) -> None:
    hammered(make(mode=mode), str(tmp_path / "snapshot.db"), hammer, look)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("unlocked_s", [None, 0.0])
def test_so_does_one_of_a_large_database(
    make: Any, hammer: Any, look: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, unlocked_s: float | None
) -> None:
    """Whether or not it is copied in time between the writes."""
    if unlocked_s is not None:
        monkeypatch.setattr(snapshots, "UNLOCKED_S_MIN", unlocked_s)
        monkeypatch.setattr(snapshots, "UNLOCKED_BYTES_A_SECOND", 1 << 60)
    hammered(make(mode="delete"), str(tmp_path / "snapshot.db"), hammer, look)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("page_size", [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536])
def test_a_snapshot_is_what_sqlite3_rsync_itself_copies(
    make: Any, look: Any, tmp_path: Any, mode: str, page_size: int
) -> None:
    path = make(mode=mode, page_size=page_size, rows=300)
    taken = snapshot(path, str(tmp_path / "snapshot.db"))
    assert (taken.page_size, taken.is_copy) == (page_size, True)
    assert look.content(taken.path) == look.content(look.plain(path, str(tmp_path / "plain.db")))
    assert look.left(taken.path) == ["snapshot.db"]


@pytest.mark.parametrize(("is_large", "mode"), [(False, "wal"), (False, "delete"), (True, "delete")])
def test_a_snapshot_has_the_cookie_of_the_schema(
    make: Any, look: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, is_large: bool, mode: str
) -> None:
    if is_large:
        monkeypatch.setattr(snapshots, "LOCKED_BYTES_MAX", 0)
    path = make(mode=mode)
    with closing(apsw.Connection(path)) as connection:
        for n in range(20):
            connection.execute(f"create table t{n}(a)")
        cookie = connection.pragma("schema_version")
        taken = snapshot(path, str(tmp_path / "snapshot.db"))
    assert look.content(taken.path) == look.content(look.plain(path, str(tmp_path / "plain.db")))
    with closing(apsw.Connection(taken.path)) as connection:
        assert connection.pragma("schema_version") == cookie > 20


def test_what_is_in_the_log_only_is_in_the_snapshot(make: Any, look: Any, tmp_path: Any) -> None:
    path = make()
    with closing(apsw.Connection(path)) as connection:
        connection.wal_autocheckpoint(0)
        connection.execute("insert into moves values(1); update counted_moves set moves = 1")
        assert os.path.getsize(path + "-wal") > 0
        taken = snapshot(path, str(tmp_path / "snapshot.db"))
        assert os.path.getsize(path + "-wal") > 0, "reading it has written it"
        assert look.moves(taken.path) == 1


@pytest.mark.usefixtures("no_space")
def test_without_room_a_wal_database_is_pushed_as_it_is_and_another_is_not(make: Any, tmp_path: Any) -> None:
    path = make()
    taken = snapshot(path, str(tmp_path / "snapshot.db"))
    assert (taken.path, taken.is_copy) == (path, False)
    with pytest.raises(DiskFullError, match="no disk space for a copy"):
        snapshot(make("other.db", mode="delete"), str(tmp_path / "snapshot.db"))
    assert not (tmp_path / "snapshot.db").exists()


def test_what_is_no_database_is_refused(tmp_path: Any) -> None:
    into = str(tmp_path / "snapshot.db")
    (tmp_path / "empty.db").touch()
    (tmp_path / "text.db").write_text("not a database, but a text that is longer than a header " * 20)
    for name, why in (
        ("missing.db", "no such file"),
        ("empty.db", "empty"),
        ("text.db", "no SQLite"),
        (".", "not a f"),
    ):
        with pytest.raises(NotADatabaseError, match=why):
            snapshot(str(tmp_path / name), into)
    assert not os.path.exists(into)
    assert shape_of(str(tmp_path / "missing.db")) is None
    assert shape_of(str(tmp_path / "empty.db")) is None


def test_a_stopped_snapshot_leaves_nothing(make: Any, tmp_path: Any) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(ReplicationFailedError, match="stopped"):
        snapshot(make(), str(tmp_path / "snapshot.db"), stop)
    assert not (tmp_path / "snapshot.db").exists()


@pytest.mark.parametrize("mode", MODES)
def test_content_of_another_page_size_is_put_into_a_live_database(
    make: Any, look: Any, tmp_path: Any, mode: str
) -> None:
    source, target = make("source.db", page_size=512), make("target.db", mode=mode, page_size=8192, rows=10)
    with Shell(target) as shell:
        replace_content(source, shell)
    assert shape_of(target)[:1] == (512,)
    with closing(apsw.Connection(target)) as connection:
        assert connection.execute("select count(*) from account").fetchone() == (2000,)
        assert connection.pragma("integrity_check") == "ok"
    assert look.left(target) == ["target.db"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("refused", [False, True])
def test_content_that_cannot_be_put_in_place_leaves_all_as_it_was(
    make: Any, look: Any, tmp_path: Any, mode: str, refused: bool
) -> None:
    source, target = str(tmp_path / "source.db"), make("target.db", mode=mode, page_size=8192)
    if refused:
        make("source.db", page_size=512, rows=10)
    before = look.content(target)

    def refuse() -> None:
        if refused:
            raise LockedError("another process wrote it")

    with pytest.raises(LockedError if refused else NotADatabaseError), Shell(target) as shell:
        replace_content(source, shell, refuse)
    assert os.path.exists(source) == refused  # what is not there is not made, empty, and copied
    with closing(apsw.Connection(target)) as connection:
        assert connection.pragma("journal_mode") == mode
        assert connection.execute("select count(*) from account").fetchone() == (2000,)
    assert look.content(target) == before
    assert look.left(target) == ["target.db"]


def test_a_program_with_very_many_files_open_is_served_too(make: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4 * SELECT_MAX:
        pytest.skip("this machine does not allow so many")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * SELECT_MAX), hard))
    try:
        with ExitStack() as stack:
            while stack.enter_context(open(os.devnull)).fileno() < SELECT_MAX:
                pass
            assert shape_of(make())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.long
def test_a_database_over_the_lock_page(tmp_path: Any, look: Any) -> None:
    path = str(tmp_path / "large.db")
    with closing(apsw.Connection(path)) as connection:
        connection.execute("pragma synchronous = off; pragma journal_mode = wal; create table t(a)").fetchall()
        for _ in range(11):
            connection.execute("insert into t values(zeroblob(100000000))")
        connection.execute("create table after(a); insert into after values('the end')")
    began_s = time.monotonic()
    taken = snapshot(path, str(tmp_path / "snapshot.db"))
    assert taken.size > 2**30
    assert time.monotonic() - began_s < 30
    plain = look.plain(taken.path, str(tmp_path / "plain.db"))
    with closing(apsw.Connection(plain)) as connection:
        assert connection.execute("select a from after").fetchone() == ("the end",)
        assert connection.pragma("quick_check") == "ok"
    remove_database(path)


CRASHED = """
import apsw, os, sys
connection = apsw.Connection(sys.argv[1])
connection.execute("pragma cache_size = 1; begin immediate; update account set note = '', balance = 1").fetchall()
os._exit(9)
"""


def test_what_a_crash_left_half_written_is_rolled_back_first(make: Any, look: Any, tmp_path: Any) -> None:
    path = make(mode="delete")
    subprocess.run([sys.executable, "-c", CRASHED, path], check=False, timeout=30)
    assert os.path.getsize(path + "-journal") > 0
    assert look.moves(snapshot(path, str(tmp_path / "snapshot.db")).path) == 0


@pytest.mark.parametrize("name", [b"-dash.db", b'it\'s "odd" \\ name?#%41.db', b"new\nline.db", b"no utf-8 \xff.db"])
def test_a_database_may_have_any_name_and_a_link_to_it(make: Any, look: Any, tmp_path: Any, name: bytes) -> None:
    with closing(apsw.Connection(make("plain.db"))) as connection:
        connection.wal_autocheckpoint(0)
        connection.execute("insert into moves values(1); update counted_moves set moves = 1")
        path, into = os.fsdecode(bytes(tmp_path) + b"/" + name), str(tmp_path / "snapshot.db")
        os.symlink("plain.db", path)
        assert look.moves(snapshot(path, into).path) == 1
    os.rename(tmp_path / "plain.db", path)
    assert look.moves(snapshot(path, into).path) == 1
    with Shell(make("other.db", page_size=512)) as shell:
        replace_content(path, shell)
    assert look.moves(str(tmp_path / "other.db")) == 1


def test_a_stale_number_of_pages_in_the_header_does_not_travel(make: Any, look: Any, tmp_path: Any) -> None:
    path, into = make(mode="delete"), str(tmp_path / "snapshot.db")
    with open(path, "r+b") as file:  # as SQLite 3.6 leaves it: only the counter of changes moves
        file.seek(24)
        file.write((77).to_bytes(4, "big") + (3).to_bytes(4, "big"))
    taken = snapshot(path, into)
    with open(into, "rb") as file:
        assert int.from_bytes(file.read(32)[28:], "big") == taken.pages == os.path.getsize(path) // taken.page_size


@pytest.mark.parametrize("is_large", [False, True])
def test_a_database_that_is_replaced_during_the_copy_is_copied_anew(
    make: Any, look: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    """The log of the new file could be read with the old one."""
    if is_large:
        monkeypatch.setattr(snapshots, "LOCKED_BYTES_MAX", 0)
    path, other = make(mode="delete"), make("other.db", mode="delete", rows=5000)
    expected = look.content(other)
    copies = 0
    real = snapshots._run_backup

    def run(source: Shell, into: str, timeout_s: float | None = None) -> None:
        nonlocal copies
        copies += 1
        if copies == 1:
            os.replace(other, path)
        real(source, into, timeout_s)

    monkeypatch.setattr(snapshots, "_run_backup", run)
    taken = snapshot(path, str(tmp_path / "snapshot.db"))
    assert copies == 2
    assert look.content(taken.path) == expected


def test_a_database_that_is_replaced_all_the_time_is_given_up(
    make: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, made = make(mode="delete"), [0]
    real = snapshots._run_backup

    def run(source: Shell, into: str, timeout_s: float | None = None) -> None:
        made[0] += 1
        os.replace(make(f"other{made[0]}.db", mode="delete"), path)
        real(source, into, timeout_s)

    monkeypatch.setattr(snapshots, "_run_backup", run)
    with pytest.raises(LockedError, match="replaced during each try"):
        snapshot(path, str(tmp_path / "snapshot.db"))
    assert not (tmp_path / "snapshot.db").exists()


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_of_a_read_only_file_is_private_and_writable(make: Any, tmp_path: Any, mode: str) -> None:
    path = make(mode=mode)
    os.chmod(path, 0o444)
    taken = snapshot(path, str(tmp_path / "snapshot.db"))
    assert os.stat(taken.path).st_mode & 0o777 == 0o600
