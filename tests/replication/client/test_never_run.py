"""What is given as a database is never run: whatever its name and its content, nothing in it is a command.

SQLite's shell reads a file named `.sql` or `.txt` as a script, and a script may start programs.
"""

from __future__ import annotations

import asyncio
import os
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest
from served import RunningServer

import headwater
from headwater.cli import main
from headwater.errors import HeadwaterError, NotADatabaseError
from headwater.replication.integrity import check_integrity, dbhash
from headwater.replication.local_database import Shell, remove_if_empty, settle, shape_of
from headwater.replication.rsync import RsyncProcess
from headwater.replication.snapshot import snapshot

NAMES = ("notes.sql", "notes.txt", "notes", "-notes.sql", "notes.zip", "file:notes.sql", "notes.db")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Any:
    server = RunningServer(tmp_path_factory.mktemp("server") / "log.db")
    yield server.url
    server.stop()


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Made by the script, and by the init file of SQLite's shell, if either is run."""
    marker = tmp_path / "marker"
    home = tmp_path / "home"
    (home / ".config" / "sqlite3").mkdir(parents=True)
    for init in (home / ".sqliterc", home / ".config" / "sqlite3" / "sqliterc"):
        init.write_text(f".shell touch {marker}\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return marker


@pytest.fixture
def script(marker: Path) -> Callable[[str], str]:
    def write(name: str) -> str:
        sql = f".shell touch {marker}\nATTACH '{marker}' AS m; CREATE TABLE m.t(a);\n"
        Path(name).write_text(sql)
        return name

    return write


def make(name: str, rows: int = 50) -> str:
    with closing(apsw.Connection(os.path.abspath(name))) as connection:
        connection.execute("CREATE TABLE t (a)")
        connection.executemany("INSERT INTO t VALUES (?)", ((f"row {n}" * 10,) for n in range(rows)))
    return name


def rows(name: str) -> int:
    with closing(apsw.Connection(os.path.abspath(name))) as connection:
        return int(connection.execute("SELECT count(*) FROM t").get)


def here(name: str) -> str:
    """Spelled so that it is a file of this directory and no url."""
    return f"./{name}"


def follow(source: str, target: str) -> None:
    with headwater.follow(source, target, wait_idle="1s") as follower:
        follower.join(20)


def command(*words: str) -> None:
    """Ends with 0, or with the exit code of an error: neither is what is asked here."""
    main(list(words))


ENTRIES: dict[str, Callable[[str, str], object]] = {
    "push": lambda path, url: headwater.sync(path, f"{url}/ns/other.db"),
    "push, dry": lambda path, url: headwater.sync(path, f"{url}/ns/other.db", dry=True),
    "push over": lambda path, url: headwater.sync(path, f"{url}/ns/app.db@latest"),
    "push, command": lambda path, url: command("sync", path, f"{url}/ns/other.db"),
    "push, dry command": lambda path, url: command("sync", path, f"{url}/ns/other.db", "--dry"),
    "push, followed": lambda path, url: follow(path, f"{url}/ns/other.db"),
    "pull": lambda path, url: headwater.sync(f"{url}/ns/app.db", path),
    "pull, dry": lambda path, url: headwater.sync(f"{url}/ns/app.db", path, dry=True),
    "pull over": lambda path, url: headwater.sync(f"{url}/ns/app.db", path, overwrite=True),
    "pull, command": lambda path, url: command("sync", f"{url}/ns/app.db", path, "--overwrite"),
    "pull, followed": lambda path, url: follow(f"{url}/ns/app.db", path),
    "restore from a server": lambda path, url: command("replica", "restore", f"{url}/ns/app.db", path, "--overwrite"),
    "copy": lambda path, url: headwater.sync(path, "target.db"),
    "copy, dry": lambda path, url: headwater.sync(path, "target.db", dry=True),
    "copy over": lambda path, url: headwater.sync("app.db", path),
    "copy over, dry": lambda path, url: headwater.sync("app.db", path, dry=True),
    "copy, command": lambda path, url: command("sync", path, "target.db"),
}
PARTS: dict[str, Callable[[str], object]] = {
    "shape": shape_of,
    "snapshot": lambda path: snapshot(path, "into.db"),
    "hash": dbhash,
    "hash, live": lambda path: dbhash(path, live=True),
    "check": check_integrity,
    "settle": lambda path: asyncio.run(settle(path)),
    "removed if empty": remove_if_empty,
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_no_entry_point_runs_a_file(entry: str, url: str, script: Callable[[str], str], marker: Path) -> None:
    make("app.db")
    headwater.sync("app.db", f"{url}/ns/app.db@latest")
    for name in ("notes.sql", "notes.txt", "notes"):
        path = here(script(name))
        before = Path(name).read_bytes()
        if "command" in entry or "server" in entry:
            ENTRIES[entry](path, url)
        else:
            with pytest.raises(HeadwaterError):
                ENTRIES[entry](path, url)
        assert not marker.exists(), f"{entry} ran {name}"
        assert Path(name).read_bytes() == before


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", NAMES)
def test_no_part_runs_a_file(part: str, name: str, script: Callable[[str], str], marker: Path) -> None:
    script(name)
    for beside in ("-wal", "-journal"):
        Path(name + beside).write_bytes(b"")
    if part in ("settle", "removed if empty"):
        PARTS[part](name)
        assert Path(name).exists()
    else:
        with pytest.raises(HeadwaterError):
            PARTS[part](name)
    assert not marker.exists()


def test_no_restore_runs_the_file_that_it_replaces(script: Callable[[str], str], marker: Path, tmp_path: Path) -> None:
    server = RunningServer(tmp_path / "log.db")
    try:
        headwater.sync(make("app.db"), f"{server.url}/ns/app.db")
    finally:
        server.stop()
    directory = str(tmp_path / "log.db-replicas")
    for name in ("notes.sql", "notes.txt", "notes"):
        target = here(script(name))
        assert main(["replica", "restore", directory, "ns/app.db", target, "--overwrite"]) == 0
        assert rows(name) == 50
        assert not marker.exists()
    [head] = Path(directory).glob("*/1.db")
    head.write_bytes(Path(script("bad.sql")).read_bytes())
    assert main(["replica", "verify", directory]) == 1
    assert not marker.exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_database_may_have_any_name(name: str, url: str, marker: Path) -> None:
    source, remote = here(make(name)), f"{url}/names/app.db@latest"
    assert headwater.sync(source, remote).version
    assert headwater.sync(source, f"{url}/names/app.db", dry=True).dry
    headwater.sync(source, "copy-of.db")
    headwater.sync("copy-of.db", source, dry=True)
    target = here("pulled-" + name if not name.startswith("-") else "-pulled" + name)
    headwater.sync(f"{url}/names/app.db", target)
    headwater.sync(f"{url}/names/app.db", target)
    assert [rows(name), rows("copy-of.db"), rows(target)] == [50, 50, 50]
    with closing(apsw.Connection(os.path.abspath(target))) as connection:
        connection.execute("PRAGMA page_size = 8192; VACUUM; DELETE FROM t WHERE rowid > 10")
    headwater.sync(target, source)  # of another page size: by SQLite's backup
    assert rows(name) == 10
    assert not marker.exists()


@pytest.mark.parametrize("name", ["archive.zip", "archive"])
def test_an_archive_is_no_database(name: str, marker: Path) -> None:
    with zipfile.ZipFile(name, "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(NotADatabaseError):
        shape_of(name)


@pytest.mark.parametrize("asked", [".shell touch {}", "ATTACH '{}' AS m;", ".open {}", ".output {}", ".nonce {}"])
def test_a_shell_takes_no_command_that_leaves_its_database(asked: str, marker: Path) -> None:
    with Shell(make("app.db")) as shell, pytest.raises(HeadwaterError):
        shell.ask(asked.format(marker))
    assert not marker.exists()


def test_what_begins_like_no_database_is_refused_before_sqlite_opens_it(
    script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*given: object) -> str:
        raise AssertionError("a tool was started")

    monkeypatch.setattr("headwater.replication.local_database.tool_path", opened)
    monkeypatch.setattr("headwater.replication.rsync.tool_path", opened)
    path = script("notes.sql")
    with pytest.raises(NotADatabaseError, match="no SQLite database"):
        shape_of(path)
    with pytest.raises(NotADatabaseError):
        asyncio.run(RsyncProcess.origin(path))


def test_an_empty_file_is_an_empty_database(url: str, marker: Path) -> None:
    make("app.db")
    for name in ("empty.sql", "empty.txt", "empty"):
        Path(name).touch()
        assert shape_of(name) is None
        with pytest.raises(NotADatabaseError, match="empty"):
            headwater.sync(here(name), f"{url}/ns/empty.db")
        headwater.sync("app.db", here(name))
        assert rows(name) == 50
