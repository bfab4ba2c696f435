"""A dedupe queue in a PostgreSQL table, beside a log or in a database of its own: for workers on several hosts."""

from __future__ import annotations

import re
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from headwater.errors import Conflict, InvalidOption, StoreError, Unavailable
from headwater.message import Span
from headwater.ports.clock import Clock
from headwater.ports.dedupe import DEDUPE_AGE_S, DEDUPE_COUNT
from headwater.stores.dedupe.sql import SQL, SqlQueue
from headwater.stores.postgres.pool import Pool, PoolTimeout

CONNECTIONS_MAX = 4
CONNECT_S = 10.0
SCHEMA = "headwater"
_SETUP_LOCK = 0x6865_6464  # taken while tables are made, for CREATE … IF NOT EXISTS races with itself
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
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


class PostgresDedupe(SqlQueue):
    """The url as a log has it, `?schema=` included: `postgres://user@host/database?schema=headwater`."""

    def __init__(
        self,
        url: str,
        *,
        max_count: int = DEDUPE_COUNT,
        max_age: Span = DEDUPE_AGE_S,
        clock: Clock | None = None,
    ) -> None:
        conninfo, schema, shown = _read_url(url)
        super().__init__(shown, max_count=max_count, max_age=max_age, clock=clock)
        self._schema = schema
        self._pool = Pool(partial(self._connect, conninfo), CONNECTIONS_MAX)
        self._prepare(conninfo)

    def _prepare(self, conninfo: str) -> None:
        try:
            with psycopg.connect(conninfo, connect_timeout=int(CONNECT_S)) as connection:
                connection.execute("SELECT pg_advisory_xact_lock(%s)", (_SETUP_LOCK,))
                found = connection.execute("SELECT to_regclass(%s)", (f'"{self._schema}".dedupe',)).fetchone()
                if found != (None,):  # who may write into the table may not be allowed to make it
                    return
                connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(self._schema)))
                connection.execute(sql.SQL("SET LOCAL search_path TO {}, pg_temp").format(sql.Identifier(self._schema)))
                for statement in _TABLE:
                    connection.execute(sql.SQL(statement))
        except psycopg.Error as exc:
            raise self._translated(exc) from exc

    def _connect(self, conninfo: str) -> psycopg.Connection:
        return psycopg.connect(
            conninfo,
            autocommit=True,
            connect_timeout=int(CONNECT_S),
            application_name="headwater-dedupe",
        )

    def _set_up(self, connection: psycopg.Connection) -> None:
        """Each time, which also shows that the connection is still there: what it fails in later is not run again."""
        connection.execute(sql.SQL("SET search_path TO {}, pg_temp").format(sql.Identifier(self._schema)))

    def _run(self, name: str, *, durable: bool = True, **bindings: Any) -> list[tuple[Any, ...]]:
        try:
            with self._pool.connection(self._set_up, CONNECT_S) as connection:
                cursor = connection.execute(_STATEMENTS[name], bindings)
                return cursor.fetchall() if cursor.description else []
        except psycopg.errors.DeadlockDetected as exc:
            if name.startswith("forget"):  # another worker forgets the same ones
                return []
            raise self._translated(exc) from exc
        except (psycopg.Error, PoolTimeout) as exc:
            raise self._translated(exc) from exc

    def _translated(self, exc: Exception) -> StoreError:
        why = f"{type(exc).__name__}: {str(exc).strip()}"
        if isinstance(exc, (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)):
            return Conflict(why, where=self.name, next="Try again")
        if isinstance(exc, (psycopg.OperationalError, PoolTimeout)):
            return Unavailable(why, where=self.name, next="Check that the server runs and can be reached")
        return StoreError(why, where=self.name)

    def _close(self) -> None:
        self._pool.close()


def _read_url(url: str) -> tuple[str, str, str]:
    """What psycopg connects to, the schema, and the url as it may be shown."""
    try:
        parts = urlsplit(url)
        if parts.fragment or "@" in parts.path + parts.query:  # what looks like the host is a part of the password
            raise ValueError("the host does not begin where it seems to")
        port = f":{parts.port}" if parts.port else ""
        query = dict(parse_qsl(parts.query))
        plain = {name: value for name, value in query.items() if name != "schema"}
        conninfo = urlunsplit(parts._replace(query=urlencode(plain, quote_via=quote)))
        conninfo_to_dict(conninfo)
    except (ValueError, psycopg.Error):
        # Their texts may quote a part of the password.
        raise InvalidOption(
            "this PostgreSQL url cannot be read",
            next="Write postgres://user:password@host:5432/database, with %-escapes in passwords",
        ) from None
    if parts.scheme not in ("postgres", "postgresql") or not parts.netloc:
        raise InvalidOption("this is no url of a PostgreSQL database", next="Write postgres://user@host/database")
    schema = query.get("schema", SCHEMA)
    if not _NAME.fullmatch(schema):
        raise InvalidOption(f"{schema!r} cannot name a schema", next="Use small letters, digits and _")
    user = f"{parts.username}@" if parts.username else ""
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    return conninfo, schema, urlunsplit((parts.scheme, f"{user}{host}{port}", parts.path, "", ""))
