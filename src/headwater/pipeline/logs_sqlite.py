"""A log in a file. The driver reads it through APSW, tasks through ADBC.

ADBC brings an SQLite of its own. Two copies of SQLite in one process do not see each other's locks on a file, and
closing it in one drops the locks of the other. So a process that has a log open with APSW never opens it with ADBC.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any
from urllib.parse import quote

import adbc_driver_sqlite
import apsw
import pyarrow as pa

from headwater.errors import HeadwaterError, LockedError, NotALogError, StoreError
from headwater.pipeline.logs import (
    BUSY_TIMEOUT_MS,
    NUMBERS,
    ArrowReader,
    Condition,
    Dialect,
    Durability,
    OpenLog,
    Range,
    Snapshot,
    identity_of,
    messages_sql,
)
from headwater.ports.clock import SystemClock
from headwater.stores.sqlite import SqliteStore
from headwater.stores.sqlite.conditions import Param
from headwater.stores.sqlite.connection import translated
from headwater.stores.sqlite.migrations import SCHEMA_VERSION
from headwater.stores.sqlite.reader import SqliteReader

DIALECT = Dialect(
    columns={"priority": "nullif(priority, 0)", "size": "octet_length(data)"},
    text='CAST("{}" AS BLOB)',
)


class SqliteLog:
    def __init__(self, path: str) -> None:
        self.name = path

    def open(
        self, *, durability: Durability = "full", busy_timeout_ms: int = BUSY_TIMEOUT_MS, create: bool = False
    ) -> OpenLog:
        if not create:
            _check_exists(self.name)
        store = SqliteStore(self.name, durability=durability, busy_timeout_ms=busy_timeout_ms)
        return OpenLog(store, SystemClock())

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        path = self.name
        _check_exists(path)
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        with translated(path), closing(apsw.Connection(_read_only_uri(path), flags=flags)) as connection:
            connection.set_busy_timeout(BUSY_TIMEOUT_MS)

            def query(sql: str, params: Sequence[Param] = ()) -> list[tuple[Any, ...]]:
                return connection.execute(sql, tuple(params)).fetchall()

            query("BEGIN")
            if not query("SELECT 1 FROM sqlite_schema WHERE name = 'headwater'"):
                raise NotALogError("a SQLite database without a log in it", where=path, next="Name the file of a log")
            identity = identity_of(query, SCHEMA_VERSION, path, path)
            yield Snapshot(SqliteReader(connection, identity[0]), query, DIALECT, identity)

    def arrow(self) -> AbstractContextManager[ArrowReader]:
        return closing(SqliteArrowReader(self.name))


class SqliteArrowReader(ArrowReader):
    """Read-only, and it waits for locks. Without the wait, one in some hundred opens of a file that no other process
    holds open fails with "database is locked"."""

    dialect = DIALECT

    def __init__(self, path: str) -> None:
        _check_exists(path)
        _check_not_open_here(path)
        super().__init__(lambda: adbc_driver_sqlite.connect(_read_only_uri(path)), path)
        self.table(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")

    def messages(
        self, columns: Mapping[str, str], asked: Range, condition: Condition, statement_rows: int
    ) -> Generator[pa.RecordBatch, None, None]:
        """ADBC takes the type of a column from the first rows, so a first one is made up that has them all."""
        typed = ", ".join(f"""{0 if name in NUMBERS else "''"} AS "{name}\"""" for name in columns)
        sql = f"SELECT {typed} UNION ALL SELECT * FROM ({messages_sql(columns, condition)} LIMIT ?)"
        params = (*asked, *condition.params, asked.upto - asked.after)
        with self.query(sql, params, **{"adbc.sqlite.query.batch_rows": str(statement_rows)}) as batches:
            for number, batch in enumerate(batches):
                yield batch if number else batch.slice(1)

    def _translate(self, exc: Exception) -> HeadwaterError:
        text = str(exc)
        if "locked" in text or "busy" in text:
            next = "Another process holds the file; end its transaction and try again"
            return LockedError(text, where=self._name, next=next)
        if "not a database" in text or "no such table" in text:
            return NotALogError(text, where=self._name, next="Name the file of a log that this Headwater knows")
        return StoreError(text, where=self._name, next="`headwater doctor` looks into the file")


def _read_only_uri(path: str) -> str:
    """The file and nothing else, whatever `?`, `#`, `%` or blanks its name holds."""
    return f"file:{quote(os.path.abspath(path))}?mode=ro"


def _check_exists(path: str) -> None:
    if not os.path.isfile(path):
        raise NotALogError(
            "there is no such file", where=path, next="Check the option `path`; headwater.open() makes a log"
        )


def _check_not_open_here(path: str) -> None:
    for connection in apsw.connections():
        try:
            is_same = os.path.samefile(connection.filename, path)
        except (OSError, apsw.Error):  # it is in memory, or was closed just now
            continue
        if is_same:
            raise StoreError(
                "this process has the log open already, through another copy of SQLite, and the two would drop each "
                "other's locks",
                where=path,
                next="Close it first, or read in another process",
            )
