"""SQLite's own `sqlite3_rsync`, run directly on two files, agrees with what is on the server and with what is pulled:
byte for byte, but for the counters of changes in the header (bytes 24-27 and 92-99), which it keeps for each file."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import apsw
import apsw.sqlite_extra
import pytest
from replica_host import ReplicaHost

import headwater
from headwater.replication import snapshot
from headwater.replication.names import Remote, place_of

TOOL = str(apsw.sqlite_extra.path("sqlite3_rsync"))
COUNTERS = (slice(24, 28), slice(92, 100))
PATIENCE_S = 60.0
PUBLISH_EVERY_S = 0.001
HASH_BYTES = 40
HASHES_MAX = 100

Edit = Callable[[apsw.Connection], object]

ROWS = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"


def add_rows(rows: int = 400, size: int = 500) -> Edit:
    def edit(connection: apsw.Connection) -> None:
        connection.execute("CREATE TABLE IF NOT EXISTS item (id INTEGER PRIMARY KEY, body)")
        connection.execute(f"{ROWS} INSERT INTO item (body) SELECT randomblob({size}) FROM n", (rows,))

    return edit


def run(*statements: str) -> Edit:
    def edit(connection: apsw.Connection) -> None:
        for statement in statements:
            connection.execute(statement).fetchall()

    return edit


def page_size(size: int) -> Edit:
    """Which WAL mode does not let one change."""

    def edit(connection: apsw.Connection) -> None:
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        run("PRAGMA journal_mode = DELETE", f"PRAGMA page_size = {size}", "VACUUM", f"PRAGMA journal_mode = {mode}")(
            connection
        )

    return edit


CHANGE = run("UPDATE item SET body = zeroblob(300) WHERE id % 50 = 7")
SHRINK = run("DELETE FROM item WHERE id > 40", "VACUUM")
RICH = run(
    "CREATE VIRTUAL TABLE prose USING fts5 (title, body)",
    "CREATE TABLE pair (a TEXT, b INT, c REAL, PRIMARY KEY (a, b)) WITHOUT ROWID",
    "CREATE INDEX pair_by_c ON pair (c) WHERE c > 0",
    "CREATE VIEW sums AS SELECT a, sum(b) FROM pair GROUP BY a",
    "CREATE TRIGGER told AFTER INSERT ON pair BEGIN INSERT INTO prose VALUES (new.a, 'it has ' || new.b); END",
    "INSERT INTO pair VALUES ('one', 1, 1.5), ('two', 2, -1), ('zwei', 2, NULL)",
)

STORIES: dict[str, list[Edit]] = {
    "pages of 512": [run("PRAGMA page_size = 512"), add_rows(), CHANGE],
    "pages of 4096": [run("PRAGMA page_size = 4096"), add_rows(), CHANGE],
    "pages of 65536": [run("PRAGMA page_size = 65536"), add_rows(2_000), CHANGE],
    "vacuum": [add_rows(), run("DELETE FROM item WHERE id % 3 = 0", "VACUUM"), CHANGE],
    "other page sizes": [add_rows(), page_size(1024), CHANGE, page_size(16384)],
    "growth and shrinking": [add_rows(40), add_rows(2_000), SHRINK, add_rows(20)],
    "auto vacuum": [
        run("PRAGMA auto_vacuum = FULL"),
        add_rows(1_000),
        run("DELETE FROM item WHERE id > 300"),
        run("PRAGMA auto_vacuum = INCREMENTAL", "DELETE FROM item WHERE id % 2", "PRAGMA incremental_vacuum(20)"),
    ],
    "all kinds of tables": [
        RICH,
        run("INSERT INTO pair VALUES ('three', 3, 3)", "DELETE FROM pair WHERE b = 2"),
        run("INSERT INTO prose (prose) VALUES ('optimize')", "DROP INDEX pair_by_c", "ALTER TABLE pair ADD COLUMN d"),
    ],
}


def rsync(origin: Path, replica: Path) -> int:
    """Returns the bytes that it moved."""
    done = subprocess.run([TOOL, "-v", origin, replica], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert done.stderr == ""
    moved = re.search(r"sent ([\d,]+) bytes, received ([\d,]+) bytes", done.stdout)
    assert moved, done.stdout
    return sum(int(number.replace(",", "")) for number in moved.groups())


def pages_of(path: Path | str) -> bytes:
    content = bytearray(Path(path).read_bytes())
    for counter in COUNTERS:
        content[counter] = bytes(counter.stop - counter.start)
    return bytes(content)


def assert_all_agree(host: ReplicaHost, remote: str, origin: Path, plain: Path, pulled: Path) -> None:
    place = place_of(remote)
    assert isinstance(place, Remote)
    with host.store() as store, store.open_version(place.name, store.catalogue.get(place.name).newest) as newest:
        assert pages_of(newest.path) == pages_of(plain)
    assert pages_of(pulled) == pages_of(plain)
    # What still moves to the copy: hashes of parts of the whole, and the one page with the counters.
    size = _page_size(pulled)
    assert rsync(origin, pulled) <= 1_000 + size + HASH_BYTES * min(os.stat(pulled).st_size // size, HASHES_MAX)


def _page_size(path: Path) -> int:
    size = int.from_bytes(path.read_bytes()[16:18], "big")
    return 65536 if size == 1 else size


@pytest.mark.parametrize("mode", ["wal", "delete"])
@pytest.mark.parametrize("story", STORIES)
def test_it_agrees_after_each_push(
    shared_host: ReplicaHost, remote: str, tmp_path: Path, mode: str, story: str
) -> None:
    origin, plain, pulled = (tmp_path / f"{name}.db" for name in ("origin", "plain", "pulled"))
    # It stays open, as it is while an application runs: with WAL, most of it is in the log. By APSW, since a process
    # must not have two SQLites at work on one file.
    with closing(apsw.Connection(str(origin))) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        for number, edit in enumerate(STORIES[story]):
            edit(connection)
            if number == 0:
                connection.execute(f"PRAGMA journal_mode = {mode}").fetchall()
                connection.execute("CREATE TABLE IF NOT EXISTS item (id INTEGER PRIMARY KEY, body)")
            assert headwater.sync(origin, remote).version == number + 1
            headwater.sync(remote, pulled)
            if plain.exists() and _page_size(plain) != connection.pragma("page_size"):
                plain.unlink()  # the tool refuses to change it
            rsync(origin, plain)
            assert_all_agree(shared_host, remote, origin, plain, pulled)
        assert connection.pragma("journal_mode") == mode
        if story.startswith("pages of "):
            assert _page_size(pulled) == int(story.removeprefix("pages of "))


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_it_agrees_where_the_snapshot_is_made_by_pages(
    shared_host: ReplicaHost, remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(snapshot, "LOCKED_BYTES_MAX", 0)
    monkeypatch.setattr(snapshot.shutil, "which", lambda name: None)
    test_it_agrees_after_each_push(shared_host, remote, tmp_path, mode, "all kinds of tables")


def test_a_log_of_headwater_is_pushed_while_it_is_published_to(
    shared_host: ReplicaHost, remote: str, tmp_path: Path
) -> None:
    path, pulled, plain = tmp_path / "events.db", tmp_path / "pulled.db", tmp_path / "plain.db"
    stop = threading.Event()
    published: list[int] = []
    with closing(headwater.open(path)) as log:

        def publish() -> None:
            while not stop.wait(PUBLISH_EVERY_S):  # unpaced, it stores 400,000 messages during these pushes
                published.append(log.publish("orders.new", {"number": len(published) + 1}))

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            for _ in range(3):
                before = len(published)
                headwater.sync(path, remote)
                headwater.sync(remote, pulled)
                numbers = numbers_in_log(pulled)
                assert numbers == [*range(1, len(numbers) + 1)]
                assert before <= len(numbers) <= len(published) + 1
                pulled.unlink()  # reading it as a log has changed it
        finally:
            stop.set()
            thread.join()
        headwater.sync(path, remote)
        headwater.sync(remote, pulled)
        rsync(path, plain)
        assert_all_agree(shared_host, remote, path, plain, pulled)
    assert numbers_in_log(pulled) == [*range(1, len(published) + 1)]


def numbers_in_log(path: Path) -> list[int]:
    numbers = []
    with (
        closing(headwater.open(path, durability="relaxed")) as log,
        log.subscribe("reader", "orders.*", start="first") as all,
    ):
        while batch := all.fetch(1_000, timeout=0):
            numbers += [message.data["number"] for message in batch]
            all.ack_many(batch)
    return numbers
