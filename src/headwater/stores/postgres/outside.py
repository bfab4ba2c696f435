"""A publish and an ack inside a transaction on the user's own connection: each is one call of a function that lives
beside the log's tables, so that any driver, and any language, can make it."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import msgspec
import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from headwater.delivery.dedupe import DedupeWindow
from headwater.errors import InvalidOption
from headwater.message import Draft, Extras
from headwater.stores.postgres.connection import Place, translate

_NO_EXTRAS = Extras()
_NOT_PUBLISHING = sql.SQL(
    "SELECT NOT EXISTS (SELECT 1 FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'"
    " AND classid = 1213661186)"
)


class PostgresOutside:
    """`ports.store.Outside`. `tx` is a psycopg connection, blocking or asynchronous, or one of SQLAlchemy over it."""

    def __init__(self, place: Place, salt: int) -> None:
        self._name = place.name
        self._salt = salt
        arguments = sql.SQL(", ").join([sql.Placeholder()] * 19)
        schema = sql.Identifier(place.schema)
        self._publish = sql.SQL("SELECT {}.publish_checked({})").format(schema, arguments)
        self._ack = sql.SQL("SELECT {}.ack(%s, %s, %s, %s)").format(schema)

    def publish(self, tx: Any, draft: Draft, now_ms: int, window: DedupeWindow) -> int | Awaitable[int]:
        extras = msgspec.structs.astuple(draft.extras or _NO_EXTRAS)
        oldest_ms = window.oldest_ms(now_ms)
        arguments = (draft.topic, draft.data_json, draft.id, now_ms, *extras, oldest_ms, window.count, self._salt)
        seq: int | Awaitable[int] = self._run(tx, self._publish, arguments)
        return seq

    def may_ack(self, tx: Any) -> bool | Awaitable[bool]:
        """Not after a publish in the same transaction: the ack waits for our own writer, which may be waiting for that
        transaction to end."""
        allowed: bool | Awaitable[bool] = self._run(tx, _NOT_PUBLISHING, ())
        return allowed

    def ack(self, tx: Any, subscription: str, seq: int, attempt: int, token: int) -> bool | Awaitable[bool]:
        done: bool | Awaitable[bool] = self._run(tx, self._ack, (subscription, seq, attempt, token))
        return done

    def _run(self, tx: Any, statement: sql.SQL | sql.Composed, arguments: tuple[Any, ...]) -> Any:
        connection = _psycopg_connection(tx)
        try:
            if isinstance(connection, psycopg.AsyncConnection):
                # A cursor of our own: the connection's may give rows as dicts, or want other placeholders.
                cursor = psycopg.AsyncCursor(connection, row_factory=tuple_row)
                return self._awaited(cursor.execute(statement, arguments))
            row = psycopg.Cursor(connection, row_factory=tuple_row).execute(statement, arguments).fetchone()
            return None if row is None else row[0]
        except psycopg.Error as exc:
            raise self._told(exc) from exc

    async def _awaited(self, executing: Awaitable[Any]) -> Any:
        try:
            cursor = await executing
            return (await cursor.fetchone())[0]
        except psycopg.Error as exc:
            raise self._told(exc) from exc

    def _told(self, exc: psycopg.Error) -> Exception:
        if isinstance(exc, psycopg.errors.UndefinedFunction | psycopg.errors.InvalidSchemaName):
            return InvalidOption(
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
        raise InvalidOption(
            f"tx is a connection of psycopg 3, not a {type(tx).__name__}",
            next="Pass the connection that your own statements run on",
        )
    if found.autocommit and found.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
        raise InvalidOption(
            "the connection given as tx is in no transaction",
            next="Begin one: `with conn.transaction():`; without one, leave tx out",
        )
    return found
