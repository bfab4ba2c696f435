"""A dedupe queue in a SQLite file: one of its own, or the log's, beside the log's tables."""

from __future__ import annotations

import os
import threading
from typing import Any

from headwater.message import Span, span_ms
from headwater.ports.clock import Clock
from headwater.ports.dedupe import DEDUPE_AGE_S, DEDUPE_COUNT
from headwater.stores.dedupe.sql import SQL, SqlQueue
from headwater.stores.sqlite.connection import (
    Durability,
    check_file,
    connect,
    refuse_unsafe_sqlite,
    translated,
    use_wal,
)

BUSY_TIMEOUT_S = 10.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS dedupe (
    position INTEGER PRIMARY KEY,
    handler TEXT NOT NULL,
    id TEXT NOT NULL,
    owner TEXT NOT NULL,
    until_ms INTEGER,
    at_ms INTEGER NOT NULL,
    turn INTEGER NOT NULL,
    UNIQUE (handler, id)
) STRICT;
CREATE INDEX IF NOT EXISTS dedupe_done ON dedupe (handler, turn, position) WHERE until_ms IS NULL;
CREATE INDEX IF NOT EXISTS dedupe_begun ON dedupe (handler, until_ms) WHERE until_ms IS NOT NULL;
"""


class SqliteDedupe(SqlQueue):
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_count: int = DEDUPE_COUNT,
        max_age: Span = DEDUPE_AGE_S,
        clock: Clock | None = None,
        durability: Durability = "full",
        busy_timeout: Span = BUSY_TIMEOUT_S,
    ) -> None:
        refuse_unsafe_sqlite()
        self.path = check_file(os.fspath(path))
        super().__init__(self.path, max_count=max_count, max_age=max_age, clock=clock)
        self._turn = threading.Lock()
        self._synchronous = {True: "FULL" if durability == "full" else "NORMAL", False: "NORMAL"}
        with translated(self.path):
            busy_timeout_ms = span_ms(busy_timeout, "busy_timeout")
            self._connection = connect(self.path, durability=durability, busy_timeout_ms=busy_timeout_ms)
            try:
                use_wal(self._connection, self.path, busy_timeout_ms)
                self._transact(_SCHEMA, {})
            except BaseException:
                self._connection.close()
                raise

    def _run(self, name: str, *, durable: bool = True, **bindings: Any) -> list[tuple[Any, ...]]:
        with self._turn, translated(self.path):
            self._connection.pragma("synchronous", self._synchronous[durable])
            return self._transact(SQL[name], bindings)

    def _transact(self, sql: str, bindings: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Begun as a writer, for a reader that becomes one may be refused however long it would wait."""
        connection = self._connection
        if sql.startswith("SELECT"):
            return connection.execute(sql, bindings).fetchall()
        connection.execute("BEGIN IMMEDIATE")
        try:
            rows = connection.execute(sql, bindings).fetchall()
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return rows

    def _close(self) -> None:
        with self._turn, translated(self.path):
            self._connection.close()
