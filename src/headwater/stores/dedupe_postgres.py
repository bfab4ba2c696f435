"""A dedupe queue in a PostgreSQL table, beside a log or in a database of its own: for workers on several hosts."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import psycopg
from psycopg import sql

from headwater.errors import UnavailableError
from headwater.formats import Span
from headwater.ports.clock import Clock
from headwater.ports.dedupe import DEDUPE_AGE_S, DEDUPE_COUNT
from headwater.stores.dedupe import SQL, BaseDedupe
from headwater.stores.postgres.connection import Place, Pool, PoolTimeout, connect, place_of, translate
from headwater.stores.postgres.pipelined import PipelinedConnection

PREPARED_AFTER = 5  # uses of a statement
CONNECTIONS_MAX = 4
CONNECT_S = 10.0
_SETUP_LOCK = 0x6865_6464  # taken while tables are made, for CREATE … IF NOT EXISTS races with itself
_PLACEHOLDER = re.compile(r":(\w+)")
_STATEMENTS = {name: _PLACEHOLDER.sub(r"%(\1)s", text).encode() for name, text in SQL.items()}

_TABLE = (
    "CREATE TABLE IF NOT EXISTS dedupe ("
    " position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,"
    " handler text NOT NULL,"
    " id text NOT NULL,"
    " owner text NOT NULL,"
    " until_ms bigint,"
    " at_ms bigint NOT NULL,"
    " turn bigint NOT NULL,"
    " UNIQUE (handler, id))",
    "CREATE INDEX IF NOT EXISTS dedupe_done ON dedupe (handler, turn, position) WHERE until_ms IS NULL",
    "CREATE INDEX IF NOT EXISTS dedupe_begun ON dedupe (handler, until_ms) WHERE until_ms IS NOT NULL",
)


class PostgresDedupe(BaseDedupe):
    """The url as a log has it, `?schema=` included: `postgres://user@host/database?schema=headwater`."""

    def __init__(
        self,
        url: str,
        *,
        max_count: int = DEDUPE_COUNT,
        max_age: Span = DEDUPE_AGE_S,
        clock: Clock | None = None,
    ) -> None:
        place = place_of(url, public=True)
        super().__init__(place.name, max_count=max_count, max_age=max_age, clock=clock)
        self._schema = sql.Identifier(place.schema)
        self._pool = Pool(partial(_connect, place), CONNECTIONS_MAX)
        try:
            with _connect(place) as connection, connection.transaction():
                self._prepare(connection, place.schema)
        except psycopg.Error as exc:
            raise translate(exc, self.name) from exc

    def _prepare(self, connection: psycopg.Connection, schema: str) -> None:
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (_SETUP_LOCK,))
        found = connection.execute("SELECT to_regclass(%s)", (f'"{schema}".dedupe',)).fetchone()
        if found == (None,):  # a role that may write into the table may not be allowed to make it
            connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(self._schema))
            connection.execute(sql.SQL("SET LOCAL search_path TO {}, pg_temp").format(self._schema))
            for statement in _TABLE:
                connection.execute(sql.SQL(statement))

    def _set_up(self, connection: psycopg.Connection) -> None:
        """Set the schema, each time, which also shows that the connection is still there: what it fails in later is not
        run again."""
        connection.execute(sql.SQL("SET search_path TO {}, pg_temp").format(self._schema))

    def _run(self, step: str, *, durable: bool = True, **values: Any) -> list[Any]:
        try:
            with self._pool.connection(self._set_up, CONNECT_S) as connection:
                cursor = connection.execute(_STATEMENTS[step], values)
                return cursor.fetchall() if cursor.description else []
        except PoolTimeout as exc:
            raise UnavailableError(
                str(exc), where=self.name, next="Check that the server runs and can be reached"
            ) from exc
        except psycopg.Error as exc:
            if isinstance(exc, psycopg.errors.DeadlockDetected) and step.startswith("forget"):
                return []  # another worker forgets the same ones
            raise translate(exc, self.name) from exc

    def _close(self) -> None:
        self._pool.close()


def _connect(place: Place) -> PipelinedConnection:
    connection = connect(place, application="headwater-dedupe")
    connection.prepare_threshold = PREPARED_AFTER
    return connection
