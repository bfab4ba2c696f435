"""A log in a PostgreSQL database. Passwords stay in here: errors, plans and lakes have the url without.

The driver reads through psycopg, tasks through ADBC's driver, which turns COPY in binary into Arrow. COPY takes no
parameters: they go into a setting of the transaction, bound there, and the statement takes them from the setting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import Any

import adbc_driver_postgresql  # type: ignore[import-untyped]
import pyarrow as pa
from adbc_driver_manager import AdbcStatement, AdbcStatusCode, Error

from headwater.errors import ConflictError, HeadwaterError, NotALogError, StoreError, UnavailableError
from headwater.pipeline.logs import (
    BUSY_TIMEOUT_MS,
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
from headwater.stores.postgres import DatabaseClock, PostgresStore
from headwater.stores.postgres.connection import Place, connect, place_of, settings_of, translated
from headwater.stores.postgres.migrations import SCHEMA_VERSION
from headwater.stores.postgres.reader import PostgresReader
from headwater.stores.sqlite.conditions import Param

READERS_MAX = 2  # a stream asks one thing at a time, and a thread renews its lease
BATCH_BYTES = 4 * 1024 * 1024  # what ADBC collects before it passes a batch on; a statement ends early at such a point

# The log's narrow integers come as those of the fixed schema, and JSON as the text it is.
DIALECT = Dialect(
    columns={
        "data": "data::text",
        "headers": "headers::text",
        "version": "version::bigint",
        "priority": "nullif(priority, 0)::bigint",
        "size": "coalesce(size, octet_length(data::text))::bigint",
    },
    text='"{}"::text',
)
_SET = "SELECT set_config('search_path', $1, true), set_config('headwater.parameters', $2, true)"
_SETTING = "(SELECT (current_setting('headwater.parameters')::json ->> {})::{})"
_TRY_AGAIN = ("40001", "40P01", "57P01", "57P02", "57P03", "08")


class PostgresLog:
    def __init__(self, url: str) -> None:
        self._url = url
        self._place = place_of(url)
        self.name = self._place.name

    def open(
        self, *, durability: Durability = "full", busy_timeout_ms: int = BUSY_TIMEOUT_MS, create: bool = False
    ) -> OpenLog:
        options: dict[str, Any] = {"durability": durability, "busy_timeout_ms": busy_timeout_ms, "create": create}
        store = PostgresStore(self._url, **options, readers_max=READERS_MAX)
        return OpenLog(store, DatabaseClock(store))

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        place = self._place
        with (
            translated(self.name),
            closing(connect(place, application="headwater pipeline", prepare=False)) as connection,
        ):
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            connection.execute(settings_of(place, durability="full", lock_timeout_ms=BUSY_TIMEOUT_MS))

            def query(sql: str, params: Sequence[Param] = ()) -> list[tuple[Any, ...]]:
                return connection.execute(sql.replace("?", "%s").encode(), tuple(params)).fetchall()

            if query("SELECT to_regclass(?)", (f"{place.schema}.headwater",)) == [(None,)]:
                raise NotALogError(
                    f"there is no log in schema {place.schema!r} of this database",
                    where=self.name,
                    next="Check the option `path`; headwater.open() makes a log",
                )
            identity = identity_of(query, SCHEMA_VERSION, self.name, "postgres://…")
            yield Snapshot(PostgresReader(connection, identity[0]), query, DIALECT, identity)

    def arrow(self) -> AbstractContextManager[ArrowReader]:
        return closing(PostgresArrowReader(self._place))


class PostgresArrowReader(ArrowReader):
    dialect = DIALECT

    def __init__(self, place: Place) -> None:
        super().__init__(lambda: adbc_driver_postgresql.connect(place.conninfo), place.name)
        self._search_path = f"{place.schema}, pg_temp"

    def messages(
        self, columns: Mapping[str, str], asked: Range, condition: Condition, statement_rows: int
    ) -> Generator[pa.RecordBatch, None, None]:
        batch_bytes = {"adbc.postgresql.batch_size_hint_bytes": str(BATCH_BYTES)}
        with self.query(messages_sql(columns, condition), (*asked, *condition.params), **batch_bytes) as batches:
            yield pa.RecordBatch.from_pylist([], schema=batches.schema)
            yield from batches

    @contextmanager
    def query(self, sql: str, params: Sequence[Param] = (), **options: str) -> Iterator[pa.RecordBatchReader]:
        """A transaction of its own, READ COMMITTED as a rule: rows never change, and none is added below the last seq.
        It is begun by hand: ADBC would begin the next one as soon as this is over, and leave it open. All settings end
        with it, so they also hold behind a pooler."""
        marks = (_SETTING.format(at, _type_of(param)) for at, param in enumerate(params))
        bound = re.sub(r"\?", lambda _: next(marks), sql)
        self._execute("BEGIN READ ONLY")
        try:
            with super().query(_SET, (self._search_path, json.dumps(params))) as done:
                done.read_all()
            with super().query(bound, **options) as batches:
                yield batches
        finally:
            with suppress(HeadwaterError):  # the first error is the one to show
                self._execute("ROLLBACK")

    def _execute(self, sql: str) -> None:
        with self._translated(), AdbcStatement(self._connection) as statement:
            statement.set_sql_query(sql)
            statement.execute_update()

    def _translate(self, exc: Error) -> HeadwaterError:
        why, state = str(exc).splitlines()[0], exc.sqlstate or ""
        if state.startswith("42P01"):
            next = "Its tables are gone: open it again to make them, or restore a backup"
            return NotALogError(why, where=self._name, next=next)
        if state.startswith(_TRY_AGAIN):
            return ConflictError(why, where=self._name, next="Read again")
        if exc.status_code == AdbcStatusCode.IO:
            return UnavailableError(why, where=self._name, next="Check that the server runs and can be reached")
        return StoreError(why, where=self._name, next="`headwater doctor` looks into the database")


def _type_of(param: Param) -> str:
    return "text" if isinstance(param, str) else "bigint" if isinstance(param, int) else "float8"
