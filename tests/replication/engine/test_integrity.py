"""Damage is reported, also where the application's own functions are missing; what is the same hashes alike."""

import os
import resource
import shutil
import subprocess
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from headwater.errors import CorruptError, LockedError, NotADatabaseError, ReplicationFailedError
from headwater.replication import integrity, sqlite_tools
from headwater.replication.integrity import check_integrity, dbhash
from headwater.replication.snapshot import snapshot
from headwater.replication.sqlite_tools import tool_path

MODES = ("wal", "delete")


@pytest.mark.parametrize("mode", MODES)
def test_a_whole_database_passes_and_nothing_is_left_beside_it(make: Any, look: Any, mode: str) -> None:
    path = make(mode=mode)
    check_integrity(path)
    assert len(dbhash(path)) == 40
    assert look.left(path) == ["app.db"]


def test_what_is_in_the_log_is_checked_and_hashed_too(make: Any) -> None:
    path, other = make(), make("other.db")
    with closing(apsw.Connection(path)) as connection:
        connection.execute("insert into moves values(1)")
        check_integrity(path)
        assert dbhash(path) != dbhash(other)
        assert dbhash(path, live=True) == dbhash(path)


def test_a_database_with_a_name_that_is_no_text_is_checked_and_hashed(make: Any, tmp_path: Path) -> None:
    odd = str(tmp_path / "no utf-8 \udcff.db")
    shutil.copy(make(mode="delete"), odd)
    check_integrity(odd)
    assert len(dbhash(odd)) == 40


def test_a_database_that_is_being_written_is_recognised(make: Any) -> None:
    path = make(mode="delete")
    with closing(apsw.Connection(path)) as writer:
        writer.execute("begin exclusive")
        with pytest.raises(LockedError, match="a program is writing"):
            dbhash(path, live=True)


def test_a_damaged_database_is_reported(make: Any) -> None:
    path = make(mode="delete")
    whole = Path(path).read_bytes()
    with closing(apsw.Connection(path)) as connection:
        (root,) = connection.execute("select rootpage from sqlite_schema where name = 'richest'").fetchone()
    for at, damage in (
        ((root - 1) * 4096 + 8, b"\xff\xff\xff\xff"),  # a page of an index points nowhere
        (4096 * 5, b"\x00" * 4096),  # a page is lost
        (100, b"\xff" * 100),  # the schema
    ):
        Path(path).write_bytes(whole[:at] + damage + whole[at + len(damage) :])
        with pytest.raises(CorruptError):
            check_integrity(path)
    Path(path).write_bytes(whole[: 4096 * 10])
    with pytest.raises(CorruptError):
        check_integrity(path)
    Path(path).write_bytes(whole)
    check_integrity(path)


def test_an_index_that_does_not_fit_its_table_is_reported(make: Any) -> None:
    path = make(mode="delete")
    with closing(apsw.Connection(path)) as connection:
        connection.config(apsw.SQLITE_DBCONFIG_WRITABLE_SCHEMA, 1)
        connection.execute("pragma writable_schema = on")
        connection.execute("update sqlite_schema set sql = replace(sql, 'balance', 'note') where name = 'richest'")
    with pytest.raises(CorruptError, match="richest"):
        check_integrity(path)


def test_functions_and_collations_of_an_application_are_done_without(tmp_path: Path) -> None:
    path = str(tmp_path / "own.db")
    with closing(apsw.Connection(path)) as connection:
        connection.create_collation("backwards", lambda one, other: (one < other) - (one > other))
        connection.create_scalar_function("twice", lambda value: value * 2, 1, deterministic=True)
        connection.execute(
            "create table t(a text collate backwards unique, b int check(twice(b) > 0), c as (twice(b)))"
        )
        connection.execute("create index doubled on t(twice(b))")
        with connection:
            connection.executemany("insert into t values(?, ?)", [(f"row {n}", n + 1) for n in range(2000)])
        (leaf,) = connection.execute("select rootpage from sqlite_schema where name = 't'").fetchone()
    check_integrity(path)
    with open(path, "r+b") as file:
        file.seek((leaf - 1) * 4096)
        file.write(b"\x00" * 100)
    with pytest.raises(CorruptError):
        check_integrity(path)


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("not a database, but a text that is longer than a header " * 20)
    for name in ("text.db", "missing.db"):
        with pytest.raises(NotADatabaseError):
            check_integrity(str(tmp_path / name))
        with pytest.raises(ReplicationFailedError, match="dbhash"):
            dbhash(str(tmp_path / name))
    assert not (tmp_path / "missing.db").exists()


def test_a_check_ends_in_time_whatever_the_database_wants_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "hostile.db")
    with closing(apsw.Connection(path)) as connection:
        connection.execute("create table t(a, b as (1)); insert into t values(x'01'); create index endless on t(b)")
        connection.config(apsw.SQLITE_DBCONFIG_WRITABLE_SCHEMA, 1)
        connection.execute("pragma writable_schema = on")
        endless = "instr(zeroblob(20000000) || a, zeroblob(10000000) || x'02')"
        connection.execute("update sqlite_schema set sql = replace(sql, '(1)', ?) where name = 't'", (f"({endless})",))
    with monkeypatch.context() as patch:
        patch.setattr(integrity, "CHECK_S_MAX", 0.5)
        with pytest.raises(ReplicationFailedError, match=r"did not end in 0\.5 s"):
            check_integrity(path)
    with monkeypatch.context() as patch:
        patch.setattr(sqlite_tools, "CPU_S_MIN", 1.0)
        with pytest.raises(ReplicationFailedError, match="1 s of a processor"):
            check_integrity(path)
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(ReplicationFailedError, match="stopped"):
        check_integrity(path, stop=stop)


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of another process are Linux's")
def test_a_check_has_so_much_memory_and_no_more(tmp_path: Path) -> None:
    path = str(tmp_path / "hostile.db")
    with closing(apsw.Connection(path)) as connection:
        connection.execute("create table t(a); create index i on t(length(hex(zeroblob(a))))")
        connection.execute("insert into t values(1)")
        connection.execute("pragma writable_schema = on")
        connection.execute("update sqlite_schema set sql = replace(sql, 'a)', 'a + 4e8)') where name = 'i'")
    assert os.path.getsize(path) == 12_288
    with pytest.raises(ReplicationFailedError, match=r"512 MiB: .*out of memory"):
        check_integrity(path)


@pytest.mark.parametrize("mode", ["wal", "delete"])
@pytest.mark.parametrize("beside", ["", "function", "collation", "module"])
def test_rows_that_break_a_constraint_are_damage(tmp_path: Path, mode: str, beside: str) -> None:
    """SQLite forgets CHECK constraints of a database that it cannot write, so the check has to be able to."""
    for constraint, value in (("a CHECK (a > 0)", "-1"), ("a NOT NULL", "NULL")):
        path = str(tmp_path / f"{value}.db")
        with closing(apsw.Connection(path)) as connection:
            connection.create_scalar_function("ours", lambda *_: 1, deterministic=True)
            connection.create_collation("ours", lambda one, other: 0)
            connection.execute(f"PRAGMA journal_mode = {mode}; CREATE TABLE t (a)").fetchall()
            if beside == "function":
                connection.execute("CREATE TABLE u (a, CHECK (ours(a) = 1)); INSERT INTO u VALUES (1)")
                connection.execute("CREATE INDEX i ON u (ours(a))")
            elif beside == "collation":
                connection.execute("CREATE TABLE u (a COLLATE ours UNIQUE); INSERT INTO u VALUES (1)")
            connection.execute(f"PRAGMA ignore_check_constraints = ON; INSERT INTO t VALUES ({value})")
            connection.execute("PRAGMA writable_schema = ON")
            connection.execute("UPDATE sqlite_schema SET sql = ? WHERE name = 't'", (f"CREATE TABLE t ({constraint})",))
            if beside == "module":
                virtual = "CREATE VIRTUAL TABLE v USING nothing_here(a)"
                connection.execute("INSERT INTO sqlite_schema VALUES ('table', 'v', 'v', 0, ?)", (virtual,))
        before = Path(path).read_bytes()
        with pytest.raises(CorruptError, match=r"CHECK constraint failed in t|NULL value in t\.a"):
            check_integrity(path, constraints=True)
        assert Path(path).read_bytes() == before
        assert os.listdir(tmp_path) == [f"{value}.db"]
        os.unlink(path)


def test_the_hash_is_that_of_the_tool_and_of_the_snapshot(make: Any, tmp_path: Path) -> None:
    path = make("a name with ? and %20.db")
    reported = subprocess.run([tool_path("sqlite3_dbhash"), path], check=True, capture_output=True, text=True).stdout
    assert dbhash(path) == reported[:40]
    assert dbhash(snapshot(path, str(tmp_path / "snapshot.db")).path) == reported[:40]
