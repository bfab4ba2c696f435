"""Logs for tests of the pipeline: made, filled past all checks, and read back.

ADBC and APSW must not have the same file open in one process, so each function closes the log again.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import psycopg
from psycopg import sql

import headwater
from headwater.delivery.publishing import DedupeWindow
from headwater.message import Message
from headwater.pipeline.logs import backend_of, open_reader
from headwater.ports.records import Selection
from headwater.stores.sqlite import SqliteStore
from headwater.topics import parse_pattern


def new_log(path: Path) -> str:
    SqliteStore(path, durability="relaxed").close()
    return str(path)


def put(path: str, rows: list[dict[str, Any]]) -> None:
    """Rows of the table `messages`, put in with plain SQL, all in one transaction."""
    if path.startswith("postgres://"):
        _put_into_postgres(path, rows)
        return
    with closing(apsw.Connection(path)) as connection, connection:
        for row in rows:
            names = ", ".join(f'"{name}"' for name in row)
            values = ", ".join("CAST(? AS TEXT)" if isinstance(value, bytes) else "?" for value in row.values())
            connection.execute(f"INSERT INTO messages ({names}) VALUES ({values})", tuple(row.values()))


def _put_into_postgres(url: str, rows: list[dict[str, Any]]) -> None:
    with psycopg.connect(url) as connection:
        for row in rows:
            names = sql.SQL(", ").join(map(sql.Identifier, row))
            marks = sql.SQL(", ").join(sql.SQL("%s") for _ in row)
            connection.execute(
                sql.SQL("INSERT INTO headwater.messages ({}) VALUES ({})").format(names, marks), list(row.values())
            )


def prune(log: headwater.Log, pattern: str = ">", **limits: Any) -> None:
    log.retain(pattern, **limits)
    log.run_maintenance()


def messages_in(log: Path | str) -> list[Message]:
    """What a log holds that a sink wrote; nothing if there is no such file."""
    if isinstance(log, Path) and not log.exists():
        return []
    found: list[Message] = []
    with open_reader(str(log)) as reader:
        after, last = 0, reader.last_seq()
        while after < last:
            scan = reader.scan(Selection(parse_pattern(">")), after, 10_000)
            found += scan.messages
            after = scan.scanned_to
    return found


def published(log: Path | str) -> list[object]:
    return [message.data for message in messages_in(log)]


def forget_ids(log: Path | str) -> None:
    """So that the guard of a sink stands alone: a repeat that it misses is not caught by its ids."""
    if isinstance(log, Path) and not log.exists():
        return
    with closing(backend_of(str(log)).open().store) as store, store.write() as writer:
        writer.forget_ids(DedupeWindow(span_ms=0, count=0), 2**50, 10_000_000)
