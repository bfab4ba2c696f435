"""Transactions shared with the user: a publish and an ack inside a transaction on the user's own connection, and the
user's own SQL inside a transaction of the log. A publish and an ack are each one call of a function beside the log's
tables, so that any driver, and any language, can make it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import psycopg
from psycopg import sql as psycopg_sql
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from headwater.delivery.publishing import DedupeWindow
from headwater.errors import InvalidOptionError, InvalidStateError, SqlError
from headwater.message import EXTRA_FIELDS, Draft, Extras
from headwater.stores.postgres.connection import SQL, Place, translate
from headwater.stores.postgres.pipelined import PipelinedConnection
from headwater.stores.sql import OWN_TABLES

_NO_EXTRAS = Extras()
_NOT_PUBLISHING = psycopg_sql.SQL(
    "SELECT NOT EXISTS (SELECT 1 FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'"
    " AND classid = 1213661186)"
)


class PostgresExternalTx:
    """`ports.store.ExternalTx`. `tx` is a psycopg connection, blocking or async, or one of SQLAlchemy over it."""

    def __init__(self, place: Place, salt: int) -> None:
        self._name = place.name
        self._salt = salt
        arguments = psycopg_sql.SQL(", ").join([psycopg_sql.Placeholder()] * (7 + len(EXTRA_FIELDS)))
        schema = psycopg_sql.Identifier(place.schema)
        self._publish = psycopg_sql.SQL("SELECT {}.publish_checked({})").format(schema, arguments)
        self._ack = psycopg_sql.SQL("SELECT {}.ack(%s, %s, %s, %s)").format(schema)

    def publish(self, tx: Any, draft: Draft, now_ms: int, window: DedupeWindow) -> int | Awaitable[int]:
        extras = msgspec.structs.astuple(draft.extras or _NO_EXTRAS)
        oldest_ms = window.oldest_ms(now_ms)
        arguments = (draft.topic, draft.data_json, draft.id, now_ms, *extras, oldest_ms, window.count, self._salt)
        seq: int | Awaitable[int] = self._run(tx, self._publish, arguments)
        return seq

    def may_ack(self, tx: Any) -> bool | Awaitable[bool]:
        """Whether an ack is possible: not after a publish in the same transaction, because the ack waits for our own
        writer, which may be waiting for that transaction to end."""
        allowed: bool | Awaitable[bool] = self._run(tx, _NOT_PUBLISHING, ())
        return allowed

    def ack(self, tx: Any, subscription: str, seq: int, attempt: int, token: int) -> bool | Awaitable[bool]:
        done: bool | Awaitable[bool] = self._run(tx, self._ack, (subscription, seq, attempt, token))
        return done

    def _run(self, tx: Any, statement: psycopg_sql.SQL | psycopg_sql.Composed, arguments: tuple[Any, ...]) -> Any:
        connection = _psycopg_connection(tx)
        try:
            if isinstance(connection, psycopg.AsyncConnection):
                # A cursor of our own: the connection's may give rows as dicts, or want other placeholders.
                cursor = psycopg.AsyncCursor(connection, row_factory=tuple_row)
                return self._awaited(cursor.execute(statement, arguments))
            row = psycopg.Cursor(connection, row_factory=tuple_row).execute(statement, arguments).fetchone()
            return None if row is None else row[0]
        except psycopg.Error as exc:
            raise self._translated(exc) from exc

    async def _awaited(self, executing: Awaitable[Any]) -> Any:
        try:
            cursor = await executing
            return (await cursor.fetchone())[0]
        except psycopg.Error as exc:
            raise self._translated(exc) from exc

    def _translated(self, exc: psycopg.Error) -> Exception:
        if isinstance(exc, psycopg.errors.UndefinedFunction | psycopg.errors.InvalidSchemaName):
            return InvalidOptionError(
                "the connection given as tx is to a database without this log",
                where=self._name,
                next="Connect to the database that the log lives in",
            )
        return translate(exc, self._name)


def _psycopg_connection(tx: Any) -> Any:
    """SQLAlchemy's connections have the driver's one inside. What runs on that alone SQLAlchemy does not see: unless
    its own transaction is begun, its commit() does nothing, and what was published is rolled back."""
    found = getattr(getattr(tx, "connection", None), "driver_connection", tx)
    if found is not tx and not tx.in_transaction():
        tx.begin()
    if not isinstance(found, psycopg.Connection | psycopg.AsyncConnection):
        raise InvalidOptionError(
            f"tx is a connection of psycopg 3, or one of SQLAlchemy over it, not a {type(tx).__name__}",
            next="Pass the connection that your own statements run on; of a SQLAlchemy session, session.connection()",
        )
    if found.autocommit and found.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
        raise InvalidStateError(
            "the connection given as tx is in no transaction",
            next="Begin one: `with conn.transaction():`; without one, leave tx out",
        )
    return found


# --- the user's own SQL inside a transaction of the log ------------------------------------------------------------

QUOTED_CHARS_MAX = 80

_PIECE = re.compile(
    r"""
    '(?:[^']|'')*' | "(?:[^"]|"")*" | --[^\n]* | /\*.*?\*/ | \$(?P<tag>\w*)\$.*?\$(?P=tag)\$
  | (?P<psycopg>%(?:[sbt]\b|\())
  | (?P<mark>\?)
  | (?<![:\w]):(?P<name>[^\W\d]\w*)
    """,
    re.VERBOSE | re.DOTALL,
)
_FIRST_WORD = re.compile(r"(?:\s|\(|--[^\n]*(?:\n|$)|/\*.*?\*/)*([A-Za-z]+)", re.DOTALL)
_READS = frozenset(["SELECT", "VALUES", "TABLE", "SHOW"])
_WRITES = frozenset(["INSERT", "UPDATE", "DELETE", "MERGE", "WITH"])
_OTHERS = frozenset(
    ["CREATE", "ALTER", "DROP", "TRUNCATE", "COMMENT", "GRANT", "REVOKE", "REFRESH", "CALL", "DO", "NOTIFY", "ANALYZE"]
)


def run_users_sql(
    connection: PipelinedConnection, sql: str, bindings: Sequence[Any] | Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    """Run one statement of the user; if it fails, nothing of it stays and the transaction continues.

    PostgreSQL has no authorizer that could be asked about each table, so mistakes are caught in three ways: by the
    first word of the statement; by the plan of an INSERT, UPDATE, DELETE or MERGE, which names the tables it writes to;
    and after any other statement by the locks it left. What a function, a DO block or a trigger does is not checked, so
    that the user's triggers may publish with plain SQL: this guards against mistakes, not against malice.
    """
    found = _FIRST_WORD.match(sql)
    word = found[1].upper() if found else ""
    if word not in _READS | _WRITES | _OTHERS:
        raise _refused(sql)
    begun = connection.execute(SQL["begin_users_sql"].encode(), prepare=False)
    begun.nextset()
    row = begun.fetchone()
    schema = "" if row is None else str(row[0])
    try:
        rows = _run_guarded(connection, word, sql, bindings, schema)
    except BaseException as exc:
        if not connection.closed:
            connection.execute("ROLLBACK TO SAVEPOINT headwater; RELEASE SAVEPOINT headwater", prepare=False)
        if isinstance(exc, psycopg.Error | TypeError) and not connection.closed:
            raise SqlError(_first_line(exc), where=sql[:QUOTED_CHARS_MAX]) from exc
        raise
    connection.execute(SQL["end_users_sql"].encode(), prepare=False)
    return rows


def _run_guarded(
    connection: PipelinedConnection, word: str, sql: str, bindings: Sequence[Any] | Mapping[str, Any], schema: str
) -> list[tuple[Any, ...]]:
    if word in _WRITES:
        plan = _execute(connection, f"EXPLAIN (VERBOSE, FORMAT JSON) {sql}", bindings)
        if any(written in OWN_TABLES for written in _written_tables(plan, schema)):
            raise _refused(sql)
    rows = _execute(connection, sql, bindings)
    if connection.info.transaction_status != TransactionStatus.INTRANS:
        raise _refused(sql)
    if word in _OTHERS:
        own = sorted(OWN_TABLES)
        if not connection.ask(SQL["untouched"], (len(own), schema, own)).value():
            raise _refused(sql)
    return rows


def _execute(
    connection: PipelinedConnection, sql: str, bindings: Sequence[Any] | Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    spelled = in_psycopgs_spelling(sql).encode() if bindings else sql.encode()
    with connection.pipeline():  # in it, psycopg sends statements in the way that allows one at a time only
        cursor = connection.execute(spelled, bindings or None, prepare=False)
    return cursor.fetchall() if cursor.description is not None else []


def in_psycopgs_spelling(sql: str) -> str:
    """Bindings may stand as `%s` and `%(name)s`, or as `?` and `:name`, so that what was written for a file runs here.
    A statement that has one of psycopg's is left as it is: a `?` in it is an operator."""
    pieces = list(_PIECE.finditer(sql))
    if any(piece["psycopg"] for piece in pieces):
        return sql
    spelled, end = [], 0
    for piece in pieces:
        if piece["mark"] or piece["name"]:
            spelled += [sql[end : piece.start()].replace("%", "%%"), f"%({piece['name']})s" if piece["name"] else "%s"]
            end = piece.end()
    return "".join([*spelled, sql[end:].replace("%", "%%")])


def _written_tables(plan: Any, schema: str) -> Iterator[str]:
    """The tables of the schema that a plan inserts into, updates or deletes from."""
    if isinstance(plan, Mapping):
        if plan.get("Node Type") == "ModifyTable" and plan.get("Schema") == schema:
            yield str(plan.get("Relation Name"))
        plan = list(plan.values())
    if isinstance(plan, Sequence) and not isinstance(plan, str):
        for part in plan:
            yield from _written_tables(part, schema)


def _refused(sql: str) -> SqlError:
    return SqlError(
        "this statement would touch the log's own tables or the transaction itself",
        where=sql[:QUOTED_CHARS_MAX],
        next="Use the publish of the transaction, and leave BEGIN and COMMIT to it",
    )


def _first_line(exc: BaseException) -> str:
    lines = str(exc).strip().splitlines()
    return lines[0] if lines else type(exc).__name__
