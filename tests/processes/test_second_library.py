"""The `sqlite3` module on the file of an open log: refused, without a touch of the file, and nothing else is."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

import headwater
from headwater.errors import SecondLibraryError, SecondLibraryWarning
from headwater.stores.sqlite import second_library


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log #1.db"


@pytest.fixture(autouse=True)
def only_what_is_expected() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecondLibraryWarning)
        yield


def test_what_it_is_about(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second library takes itself for the only one, and removes the write-ahead log of the first."""
    with headwater.open(path) as log:
        log.publish("a", 1)
        assert os.path.exists(f"{path}-wal")
        monkeypatch.setattr(second_library, "_open_logs", {})
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("SELECT * FROM messages").fetchall()
        assert not os.path.exists(f"{path}-wal")
        monkeypatch.undo()


@pytest.mark.parametrize(
    "named",
    [
        lambda path: path,
        lambda path: str(path),
        lambda path: os.fsencode(path),
        lambda path: os.path.relpath(path),
        lambda path: f"{path.parent}/../{path.parent.name}/{path.name}",
    ],
    ids=["path", "text", "bytes", "relative", "roundabout"],
)
def test_every_spelling_of_the_file_is_refused(path: Path, named: Any) -> None:
    with headwater.open(path) as log:
        for _ in range(2):
            with pytest.raises(SecondLibraryError, match=r"docs/howto/frameworks\.md"):
                sqlite3.connect(named(path))
        log.publish("a", 1)
        assert os.path.exists(f"{path}-wal")


def test_uris_and_links_are_refused(path: Path, tmp_path: Path) -> None:
    os.symlink(path, tmp_path / "link.db")
    os.mkdir(tmp_path / "elsewhere")
    with headwater.open(path):
        os.link(path, tmp_path / "elsewhere" / "hard.db")
        for name in (f"{path.as_uri()}?mode=ro", tmp_path / "link.db", tmp_path / "elsewhere" / "hard.db"):
            with pytest.raises(SecondLibraryError):
                sqlite3.connect(name, uri=True)


def test_nothing_else_is_noticed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "memory").touch()
    with headwater.open(path), headwater.open("memory:"):
        sqlite3.connect(":memory:").close()
        sqlite3.connect("").close()
        sqlite3.connect(tmp_path / "other.db").close()
        sqlite3.connect(tmp_path / "memory").close()
        sqlite3.connect("file::memory:?cache=shared", uri=True).close()
        with pytest.raises((TypeError, ValueError)):
            sqlite3.connect("a\0b")
        apsw.Connection(str(path)).close()
        with headwater.open(path) as again:
            again.publish("a", 1)
    sqlite3.connect(path).close()  # the log is closed


def test_two_logs_of_one_file(path: Path) -> None:
    with headwater.open(path):
        headwater.open(path).close()
        with pytest.raises(SecondLibraryError):
            sqlite3.connect(path)


def test_a_file_that_could_not_be_opened_as_a_log(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE mine (id)")
    with pytest.raises(headwater.errors.NotALogError):
        headwater.open(path)
    sqlite3.connect(path).close()


def test_what_was_open_before_the_log_is_noticed(path: Path) -> None:
    headwater.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("SELECT * FROM messages").fetchall()
        with pytest.warns(SecondLibraryWarning, match="before the log") as caught:
            headwater.open(path).close()
        assert [warning.filename for warning in caught] == [__file__]
    headwater.open(path).close()
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("SELECT * FROM messages").fetchall()
        headwater.open(path).close()


def test_a_child_process_has_locks_of_its_own(path: Path) -> None:
    with headwater.open(path):
        insert = "INSERT INTO messages (topic, data) VALUES ('a', '1')"
        program = f"import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute({insert!r}); c.commit()"
        subprocess.run([sys.executable, "-W", "error", "-c", program, path], check=True)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                sqlite3.connect(path).close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0


def test_the_file_is_never_opened_to_tell(path: Path) -> None:
    """In a process of its own, since a hook cannot be removed: every `open` of the file would be an event."""
    program = """
import sqlite3, sys, warnings
import headwater
from pathlib import Path
path, opened = Path(sys.argv[1]), []
sys.addaudithook(lambda event, given: opened.append(given) if event == "open" and str(path) == str(given[0]) else None)
warnings.simplefilter("ignore")
headwater.open(path).close()
before = sqlite3.connect(path)
before.execute("SELECT 1 FROM messages").fetchall()
with headwater.open(path) as log:
    log.publish("a", 1)
    try:
        sqlite3.connect(path)
    except headwater.errors.SecondLibraryError:
        log.publish("a", 2)
assert not opened, opened
"""
    subprocess.run([sys.executable, "-c", program, path], check=True)


def test_the_hook_is_added_once(path: Path) -> None:
    program = """
import sys
import headwater
added = []
sys.addaudithook(lambda event, given: added.append(event) if event == "sys.addaudithook" else None)
headwater.open("memory:").close()
assert not added
for _ in range(3):
    headwater.open(sys.argv[1]).close()
assert len(added) == 1, added
"""
    subprocess.run([sys.executable, "-c", program, path], check=True)
    others = second_library._open_logs.copy()  # of tests that leave a log open on purpose
    headwater.open(path).close()
    assert second_library._open_logs == others
