"""The limit (bare APSW) and other queues in a SQLite file, each with the same message and fsync setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from litequeue import LiteQueue
from persistqueue import SQLiteAckQueue

from common import MESSAGE_JSON, TOPIC, bare_connection, seconds

ROWS_SQL = "CREATE TABLE rows (seq INTEGER PRIMARY KEY, topic TEXT, data TEXT, published_at INTEGER)"
INSERT_SQL = "INSERT INTO rows (topic, data, published_at) VALUES (?, ?, ?)"
ROW = (TOPIC, MESSAGE_JSON, 1_700_000_000_000)
WHOLE_ROWS_SQL = """
    SELECT seq, id, topic, data, type, version, "from", "to", reply_to, correlation_id, priority, published_at,
        deliver_at, expires_at, headers, size
    FROM messages ORDER BY seq
"""


def bare_inserts(path: Path, batch: int, batches: int, page_bytes: int = 4096) -> float:
    connection = bare_connection(path, page_bytes)
    connection.execute(ROWS_SQL)

    def work() -> None:
        for _ in range(batches):
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(INSERT_SQL, [ROW] * batch)
            connection.execute("COMMIT")

    return batch * batches / seconds(work)


def bare_reads(path: Path) -> float:
    """Every column of a message, row by row, from a filled log."""
    connection = bare_connection(path)
    count = 0

    def work() -> None:
        nonlocal count
        for _ in connection.execute(WHOLE_ROWS_SQL):
            count += 1

    took_s = seconds(work)
    return count / took_s


def litequeue_puts(path: Path, count: int) -> float:
    return puts(_litequeue(path), count)


def litequeue_consumes(path: Path, count: int) -> float:
    queue = _litequeue(path)
    puts(queue, count)
    return count / seconds(lambda: [queue.done(queue.pop().message_id) for _ in range(count)])


def persist_queue_puts(path: Path, count: int) -> float:
    return puts(SQLiteAckQueue(str(path), auto_commit=True), count)


def persist_queue_consumes(path: Path, count: int) -> float:
    queue = SQLiteAckQueue(str(path), auto_commit=True)
    puts(queue, count)
    return count / seconds(lambda: [queue.ack(queue.get()) for _ in range(count)])


def puts(queue: Any, count: int) -> float:
    return count / seconds(lambda: [queue.put(MESSAGE_JSON) for _ in range(count)])


def _litequeue(path: Path) -> LiteQueue:
    queue = LiteQueue(str(path))
    queue.conn.execute("PRAGMA synchronous = FULL")
    return queue
