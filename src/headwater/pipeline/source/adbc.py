"""Reading a log's file through ADBC: SQLite's rows become Arrow batches without a Python object for any of them.

ADBC brings an SQLite of its own. Two copies of SQLite in one process do not see each other's locks on a file, and
closing it in one drops the locks of the other. So a process that has a log open with apsw never opens it here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import adbc_driver_manager
import adbc_driver_sqlite.dbapi
import pyarrow as pa
from adbc_driver_manager.dbapi import Connection

from headwater.errors import HeadwaterError, Locked, NotALog, StoreError

BUSY_TIMEOUT_MS = 10_000
STATEMENT_ROWS_BATCH = 1_024

Param = str | int | float


@contextmanager
def opened(path: str) -> Iterator[Connection]:
    """A read-only connection that waits for locks. Without the wait, one of some hundred opens of a file that nobody
    else holds open fails with "database is locked"."""
    _refuse_what_is_not_there(path)
    _refuse_a_second_sqlite(path)
    with _translated(path):
        connection = adbc_driver_sqlite.dbapi.connect(read_only_uri(path), autocommit=True)
    try:
        run(connection, path, f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        yield connection
    finally:
        connection.close()


def read_only_uri(path: str) -> str:
    """The file and nothing else, whatever `?`, `#`, `%` or blanks its name holds."""
    return f"file:{quote(os.path.abspath(path))}?mode=ro"


def run(connection: Connection, path: str, sql: str, params: Sequence[Param] = ()) -> pa.Table:
    """All rows of a small result."""
    with _translated(path), connection.cursor() as cursor:
        cursor.execute(sql, params or None)
        return cursor.fetch_arrow_table()


def batches(
    connection: Connection, path: str, sql: str, params: Sequence[Param], batch_rows: int = STATEMENT_ROWS_BATCH
) -> Generator[pa.RecordBatch, None, None]:
    """The result piece by piece. The read transaction lasts until the iterator is exhausted or closed."""
    with _translated(path), connection.cursor() as cursor:
        cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(batch_rows)})
        cursor.execute(sql, params or None)
        with cursor.fetch_record_batch() as reader:
            yield from reader


def _refuse_what_is_not_there(path: str) -> None:
    if not os.path.isfile(path):
        raise NotALog(
            "there is no such file",
            where=os.path.abspath(path),
            next="Check the option `path`; headwater.open() makes a log",
        )


def _refuse_a_second_sqlite(path: str) -> None:
    apsw: Any = sys.modules.get("apsw")
    for connection in apsw.connections() if apsw is not None else ():
        try:
            is_the_same = os.path.samefile(connection.filename, path)
        except (OSError, apsw.Error):  # it is in memory, or was closed just now
            continue
        if is_the_same:
            raise StoreError(
                "this process has the log open already, through another copy of SQLite, and the two would drop each "
                "other's locks",
                where=path,
                next="Close it first, or read in another process",
            )


@contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except adbc_driver_manager.Error as exc:
        raise _translate(exc, path) from exc


def _translate(exc: Exception, path: str) -> HeadwaterError:
    text = str(exc)
    if "locked" in text or "busy" in text:
        return Locked(text, where=path, next="Another process holds the file; end its transaction and try again")
    if "not a database" in text or "no such table" in text:
        return NotALog(text, where=path, next="Name the file of a log that this Headwater knows")
    return StoreError(text, where=path, next="`headwater doctor` looks into the file")
