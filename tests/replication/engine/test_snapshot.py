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

from headwater.errors import DiskFull, Locked, NotADatabase, ReplicationFailed
from headwater.replication import snapshot as snapshots
from headwater.replication.database_file import remove_database, replace_content, shape_of
from headwater.replication.shell import Shell
from headwater.replication.snapshot import snapshot

MODES = ("wal", "delete")
SNAPSHOTS = 25
SELECT_MAX = 1024  # descriptors that `select` can take
BLOCKED_S_MAX = 10.0  # a shared machine is slow at times; who is locked out for good waits for 20 s


OTHERWISE = (("in steps", "delete"), ("without cp", "wal"), ("without cp", "delete"))


@pytest.fixture
def otherwise(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the database were large, or there were no `cp`."""
    if how == "without cp":
        monkeypatch.setattr(snapshots.shutil, "which", lambda _: None)
    monkeypatch.setattr(snapshots, "LOCKED_BYTES_MAX", 0)
    monkeypatch.setattr(snapshots, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(snapshots, "STEP_BYTES", 25 * 4096)


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.usefixtures("otherwise")
@pytest.mark.parametrize(("how", "mode"), OTHERWISE)
def test_so_does_one_that_is_made_otherwise(make: Any, hammer: Any, look: Any, tmp_path: Any, mode: str) -> None:
    hammered(make(mode=mode), str(tmp_path / "snapshot.db"), hammer, look)


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


@pytest.mark.usefixtures("otherwise")
@pytest.mark.parametrize(("how", "mode"), OTHERWISE)
def test_made_otherwise_it_is_the_same_with_the_cookie_of_the_schema(
    make: Any, look: Any, tmp_path: Any, mode: str
) -> None:
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
        connection.execute("insert into moves values(1); update told set moves = 1")
        assert os.path.getsize(path + "-wal") > 0
        taken = snapshot(path, str(tmp_path / "snapshot.db"))
        assert os.path.getsize(path + "-wal") > 0, "reading it has written it"
        assert look.moves(taken.path) == 1


def test_a_log_that_begins_anew_during_the_copy_makes_it_begin_anew(
    make: Any, look: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make()
    copies: list[str] = []
    real = snapshots._run
    with closing(apsw.Connection(path)) as connection:
        connection.wal_autocheckpoint(0)
        connection.execute("insert into moves values(1); update told set moves = 1")
        connection.execute("pragma wal_checkpoint").fetchall()

        def run(command: list[str], into: str, stop: threading.Event) -> None:
            if not copies:  # all of the log is in the file, so the next write is at its beginning
                connection.execute("begin; insert into moves values(2); update told set moves = 2; commit")
            copies.append(command[2])
            real(command, into, stop)

        monkeypatch.setattr(snapshots, "_run", run)
        taken = snapshot(path, str(tmp_path / "snapshot.db"))
    assert copies == [path, path + "-wal"] * 2
    assert look.moves(taken.path) == 2


@pytest.mark.usefixtures("no_room")
def test_without_room_a_wal_database_is_pushed_as_it_is_and_another_is_not(make: Any, tmp_path: Any) -> None:
    path = make()
    taken = snapshot(path, str(tmp_path / "snapshot.db"))
    assert (taken.path, taken.is_copy) == (path, False)
    with pytest.raises(DiskFull, match="no room for a copy"):
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
        with pytest.raises(NotADatabase, match=why):
            snapshot(str(tmp_path / name), into)
    assert not os.path.exists(into)
    assert shape_of(str(tmp_path / "missing.db")) is None
    assert shape_of(str(tmp_path / "empty.db")) is None


def test_a_stopped_snapshot_leaves_nothing(make: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    stop.set()
    for which in (snapshots.shutil.which, lambda _: None):
        monkeypatch.setattr(snapshots.shutil, "which", which)
        with pytest.raises(ReplicationFailed, match="stopped"):
            snapshot(make(f"{id(which)}.db"), str(tmp_path / "snapshot.db"), stop)
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
            raise Locked("somebody wrote it")

    with pytest.raises(Locked if refused else NotADatabase), Shell(target) as shell:
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
        connection.execute("insert into moves values(1); update told set moves = 1")
        path, into = os.fsdecode(bytes(tmp_path) + b"/" + name), str(tmp_path / "snapshot.db")
        os.symlink("plain.db", path)
        assert look.moves(snapshot(path, into).path) == 1
    os.rename(tmp_path / "plain.db", path)
    assert look.moves(snapshot(path, into).path) == 1
    with Shell(make("other.db", page_size=512)) as shell:
        replace_content(path, shell)
    assert look.moves(str(tmp_path / "other.db")) == 1


def test_a_full_disk_is_known_in_every_language(make: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "cp"
    own.write_text('#!/bin/sh\n[ "$LC_ALL" = C ] && echo "No space left on device" || echo "Kein Platz"; exit 1')
    own.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    with pytest.raises(DiskFull):
        snapshot(make(mode="delete"), str(tmp_path / "snapshot.db"))


def test_a_stale_number_of_pages_in_the_header_does_not_travel(make: Any, look: Any, tmp_path: Any) -> None:
    path, into = make(mode="delete"), str(tmp_path / "snapshot.db")
    with open(path, "r+b") as file:  # as SQLite 3.6 leaves it: only the counter of changes moves
        file.seek(24)
        file.write((77).to_bytes(4, "big") + (3).to_bytes(4, "big"))
    taken = snapshot(path, into)
    with open(into, "rb") as file:
        assert int.from_bytes(file.read(32)[28:], "big") == taken.pages == os.path.getsize(path) // taken.page_size


@pytest.mark.parametrize("how", ["as it lies", "in steps"])
def test_a_database_that_is_replaced_during_the_copy_is_copied_anew(
    make: Any, look: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The locks are on the old file, so the new one would be copied while somebody writes it."""
    if how == "in steps":
        monkeypatch.setattr(snapshots, "LOCKED_BYTES_MAX", 0)
    path, other = make(mode="delete"), make("other.db", mode="delete", rows=5000)
    expected = look.content(other)
    copies = []
    real = snapshots._run

    def run(command: list[str], into: str, stop: threading.Event) -> None:
        if not copies:
            os.replace(other, path)
        copies.append(command[0])
        real(command, into, stop)

    monkeypatch.setattr(snapshots, "_run", run)
    taken = snapshot(path, str(tmp_path / "snapshot.db"))
    assert len(copies) == 2
    assert look.content(taken.path) == expected


def test_a_database_that_is_replaced_all_the_time_is_given_up(
    make: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, made = make(mode="delete"), [0]
    real = snapshots._run

    def run(command: list[str], into: str, stop: threading.Event) -> None:
        made[0] += 1
        os.replace(make(f"other{made[0]}.db", mode="delete"), path)
        real(command, into, stop)

    monkeypatch.setattr(snapshots, "_run", run)
    with pytest.raises(Locked, match="in its place"):
        snapshot(path, str(tmp_path / "snapshot.db"))
    assert not (tmp_path / "snapshot.db").exists()


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_of_a_file_that_nobody_may_write_can_be_settled(make: Any, tmp_path: Any, mode: str) -> None:
    """`cp` gives the copy the mode of the original; who is not root could not write it then."""
    path = make(mode=mode)
    os.chmod(path, 0o444)
    taken = snapshot(path, str(tmp_path / "snapshot.db"))
    assert os.stat(taken.path).st_mode & 0o777 == 0o600
