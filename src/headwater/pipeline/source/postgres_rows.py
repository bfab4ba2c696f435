"""Reading a log's tables through ADBC's driver for PostgreSQL: COPY in binary, turned into Arrow in C.

COPY takes no parameters. So what a statement compares with goes into a setting of its transaction, bound as a parameter
there, and the statement takes it from the setting.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import adbc_driver_manager
import adbc_driver_postgresql.dbapi  # type: ignore[import-untyped]
import pyarrow as pa
from adbc_driver_manager.dbapi import Connection

from headwater.errors import Conflict, HeadwaterError, NotALog, StoreError, Unavailable
from headwater.pipeline.source.place import Condition, Param, Range, Words
from headwater.stores.postgres.connection import Place

BATCH_BYTES = 4 * 1024 * 1024  # what ADBC gathers before it hands on; a statement is ended early at such a point

_SETTINGS = "SELECT set_config('search_path', $1, true), set_config('headwater.parameters', $2, true)"
_SETTING = "(SELECT (current_setting('headwater.parameters')::json ->> {})::{})"
_TRY_AGAIN = ("40001", "40P01", "57P01", "57P02", "57P03", "08")


class PostgresRows:
    """`place.Rows`. Each statement is a transaction of its own, READ COMMITTED as a rule: rows never change, and below
    the last seq none comes in between."""

    def __init__(self, place: Place, words: Words) -> None:
        self.words = words
        self._name = place.name
        self._search_path = f"{place.schema}, pg_temp"
        with _translated(self._name):
            self._connection: Connection = adbc_driver_postgresql.dbapi.connect(place.conninfo, autocommit=True)

    def __enter__(self) -> PostgresRows:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(adbc_driver_manager.Error):
            self._connection.close()

    def batches(
        self, values: Mapping[str, str], asked: Range, condition: Condition, rows_at_once: int
    ) -> Generator[pa.RecordBatch, None, None]:
        wanted = ", ".join(f'{sql} AS "{name}"' for name, sql in values.items())
        params = (*asked, *condition.params)
        sql = f"SELECT {wanted} FROM messages WHERE seq > ? AND seq <= ? AND ({condition.sql}) ORDER BY messages.seq"
        with _translated(self._name), self._transaction(params), self._connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(BATCH_BYTES)})
            cursor.execute(_with_marks(sql, lambda at: _SETTING.format(at, _type_of(params[at]))))
            with cursor.fetch_record_batch() as found:
                yield _empty(found.schema)
                try:
                    yield from found
                except GeneratorExit:
                    cursor.adbc_cancel()  # else the rest would be waited for, however much it is
                    raise

    def table(self, sql: str, params: Sequence[Param] = (), *, like: pa.Schema | None = None) -> pa.Table:
        with _translated(self._name), self._transaction(()), self._connection.cursor() as cursor:
            cursor.execute(_with_marks(sql, lambda at: f"${at + 1}"), params or None)
            return cursor.fetch_arrow_table()

    @contextmanager
    def _transaction(self, params: Sequence[Param]) -> Iterator[None]:
        """By hand: ADBC would begin the next one as soon as this is over, and leave it open. All settings end with it,
        so they also hold behind a pooler."""
        with self._connection.cursor() as cursor:
            cursor.executescript("BEGIN READ ONLY")
            try:
                cursor.execute(_SETTINGS, (self._search_path, json.dumps(params)))
                cursor.fetch_arrow_table()
                yield
            finally:
                with suppress(adbc_driver_manager.Error):  # what broke has said so
                    cursor.executescript("ROLLBACK")


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _with_marks(sql: str, mark: Callable[[int], str]) -> str:
    """With each `?` replaced by what stands for that parameter here."""
    numbers = itertools.count()
    return re.sub(r"\?", lambda found: mark(next(numbers)), sql)


def _type_of(param: Param) -> str:
    return "text" if isinstance(param, str) else "bigint" if isinstance(param, int) else "float8"


@contextmanager
def _translated(name: str) -> Iterator[None]:
    try:
        yield
    except adbc_driver_manager.Error as exc:
        raise _translate(exc, name) from exc


def _translate(exc: adbc_driver_manager.Error, name: str) -> HeadwaterError:
    why, state = str(exc).splitlines()[0], exc.sqlstate or ""
    if state.startswith("42P01"):
        return NotALog(why, where=name, next="Its tables are gone: open it again to make them, or restore a backup")
    if state.startswith(_TRY_AGAIN):
        return Conflict(why, where=name, next="Read again")
    if exc.status_code == adbc_driver_manager.AdbcStatusCode.IO:
        return Unavailable(why, where=name, next="Check that the server runs and can be reached")
    return StoreError(why, where=name, next="`headwater doctor` looks into the database")
