"""Files that are no log, or may not be one: the right error, a useful next step, and the file left as it is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import apsw
import pytest
from unprivileged import printed_without_rights

import headwater
from headwater.errors import CorruptError, HeadwaterError, NewerSchemaError, NotALogError, StoreError
from headwater.stores.sqlite.watcher import RETRY_S_MIN, SqliteWatcher


def refusal(path: Path, kind: type[HeadwaterError], **options: object) -> HeadwaterError:
    with pytest.raises(kind) as caught:
        headwater.open(path, **options)  # type: ignore[arg-type]
    assert type(caught.value) is kind
    assert caught.value.next, f"no next step in: {caught.value}"
    assert str(path) in caught.value.where or str(path.parent) in caught.value.where
    return caught.value


def test_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary, " * 500)
    refusal(path, NotALogError)
    assert path.read_text() == "dear diary, " * 500
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_short_text_file(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hi")
    refusal(path, NotALogError)
    assert path.read_text() == "hi"


def test_an_empty_file_becomes_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    path.touch()
    with headwater.open(path) as log:
        assert log.publish("a", 1) == 1


def test_another_database(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE orders (id); INSERT INTO orders VALUES (17)")
    connection.close()
    before = path.read_bytes()
    assert "adopt" in refusal(path, NotALogError).next
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["shop.db"]
    with headwater.open(path, adopt=True) as log:
        assert log.publish("a", 1) == 1
    connection = apsw.Connection(str(path))
    assert connection.execute("SELECT id FROM orders").fetchall() == [(17,)]
    connection.close()


def test_another_database_with_a_table_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE messages (id); INSERT INTO messages VALUES (17)")
    connection.close()
    refusal(path, NotALogError, adopt=True)
    connection = apsw.Connection(str(path))
    assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == [("messages",)]
    connection.close()


DAMAGE = """
import os, sys, apsw
connection = apsw.Connection(sys.argv[1])
connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
file = os.open(sys.argv[1], os.O_WRONLY)
os.pwrite(file, b"\\xff" * (os.fstat(file).st_size - 4096), 4096)  # all but the first page
connection.execute("PRAGMA user_version = 1")  # a commit, which the watcher notices
"""


def test_damage_under_an_open_log_is_looked_at_less_and_less_often(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log.db"
    failed_s: list[float] = []
    enough = threading.Event()
    with headwater.open(path) as log:
        log.publish_many([("a", "x" * 1_000)] * 100)

        def look() -> None:
            try:
                log.topics()
            except CorruptError:
                failed_s.append(time.monotonic())
                if len(failed_s) == 5:
                    enough.set()
                raise

        watcher = SqliteWatcher(log._core.engine.store, look)  # type: ignore[attr-defined]
        watcher.start()
        try:
            subprocess.run([sys.executable, "-c", DAMAGE, str(path)], check=True)
            assert enough.wait(20)
        finally:
            watcher.stop()
    assert failed_s[4] - failed_s[0] >= sum(RETRY_S_MIN * 2**at for at in range(4))
    # One of this watcher, and one of the log's own.
    assert 1 <= sum("could not look for news" in line for line in caplog.messages) <= 2


def test_a_newer_schema(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    headwater.open(path).close()
    connection = apsw.Connection(str(path))
    connection.execute("UPDATE headwater SET value = 99 WHERE name = 'schema_version'")
    connection.close()
    error = refusal(path, NewerSchemaError)
    assert "99" in error.why
    assert error.next == "Upgrade Headwater here: pip install . in a newer checkout"


def test_a_directory(tmp_path: Path) -> None:
    refusal(tmp_path, NotALogError)


def test_a_missing_directory(tmp_path: Path) -> None:
    assert "mkdir" in refusal(tmp_path / "no" / "such" / "log.db", StoreError).next
    assert os.listdir(tmp_path) == []


def test_a_truncated_log(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    with headwater.open(path) as log:
        log.publish_many([("a", "x" * 500) for _ in range(200)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2 // 4096 * 4096])
    with pytest.raises(CorruptError) as caught, headwater.open(path) as log:
        log.subscribe("s", ">").fetch(1_000)
    assert "backup" in caught.value.next


def test_a_log_cut_in_its_first_page(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    headwater.open(path).close()
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(StoreError) as caught:
        headwater.open(path)
    assert type(caught.value) in (CorruptError, NotALogError)
    assert caught.value.next


def test_a_log_with_a_broken_header(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    headwater.open(path).close()
    content = path.read_bytes()
    path.write_bytes(b"SQLite format 4\0" + content[16:])
    refusal(path, NotALogError)


# --- as a user without rights: root may write everywhere, so a forked child becomes nobody --------------------------


def refused_without_rights(path: Path) -> tuple[str, str]:
    """The class of the error, and its next step."""

    def report() -> str:
        try:
            return f"nothing raised, {headwater.open(path)!r}"
        except HeadwaterError as exc:
            return f"{type(exc).__name__}|{exc.next}"

    kind, _, next = printed_without_rights(report).removeprefix("ended with ").partition("|")
    return kind, next


def make_log(directory: Path) -> Path:
    path = directory / "log.db"
    with headwater.open(path) as log:
        log.publish("a", 1)
    return path


def test_a_file_without_write_permission(public_directory: Path) -> None:
    path = make_log(public_directory)
    path.chmod(0o444)
    kind, next = refused_without_rights(path)
    assert kind == "ReadOnlyError"
    assert "write access" in next


def test_a_file_without_any_permission(public_directory: Path) -> None:
    path = make_log(public_directory)
    path.chmod(0o400)
    kind, next = refused_without_rights(path)
    assert kind in ("StoreError", "ReadOnlyError")
    assert next


def test_a_directory_without_write_permission(public_directory: Path) -> None:
    path = make_log(public_directory)
    path.chmod(0o666)  # the file may be written, but no -wal may be made beside it
    kind, next = refused_without_rights(path)
    assert kind in ("StoreError", "ReadOnlyError")
    assert "director" in next
    kind, next = refused_without_rights(public_directory / "new.db")
    assert kind in ("StoreError", "ReadOnlyError")
    assert "director" in next
