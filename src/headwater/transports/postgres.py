"""An archive in a table of PostgreSQL, to be queried with SQL. Publish-only.

    SELECT id, topic, type, data, published_at FROM archive
    WHERE status = 'archived' AND topic LIKE 'orders.%' AND published_at >= now() - interval '1 day'
    ORDER BY published_at, seq;

`data` and `headers` are json, not jsonb: the text stays as it was published, and may hold \\u0000, which jsonb cannot.
To look into it write `data ->> 'order_id'`, or `data::jsonb @> …` where nothing of that kind is in it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from headwater.errors import InvalidDataError, InvalidOptionError, TransportFailedError
from headwater.formats import datetime_of, redact_url, split_url
from headwater.message import FIELDS, LEADING_HEADERS, Field, Kind, Message, to_document
from headwater.transports.base import ANY_NAME, BaseTransport

TABLE = "archive"
TABLE_CHARS_MAX = 40  # with room for the names of its indexes, of which PostgreSQL keeps 63
CONNECT_TIMEOUT_S = 10
STATEMENT_TIMEOUT_MS = 60_000
SILENCE_MAX_MS = 30_000
LOCK_TIMEOUT_MS = 10_000
BATCH_MESSAGES_MAX = 10_000
APPLICATION = "headwater archive"

_SCHEMES = ("archive+postgres", "archive+postgresql")
_IDENTIFIER = re.compile(rf"[A-Za-z_][A-Za-z0-9_]{{0,{TABLE_CHARS_MAX - 1}}}")
_ENTITIES = {"from": "from_entity", "to": "to_entity"}  # FROM and TO are words of SQL
_TYPES: dict[Kind, str] = {"text": "text", "whole": "integer", "time": "timestamptz", "json": "json"}
_REQUIRED = ("id", "seq", "topic", "data", "priority", "size", "published_at")
_FIELDS = {field.name: field for field in FIELDS}
_ORDER = dict.fromkeys([
    "id", "seq", "topic", "type", "version", *LEADING_HEADERS, "data", "unreadable", "headers", "priority", "size",
    "published_at", "deliver_at", "expires_at", *_FIELDS,
])  # fmt: skip


def _column(name: str) -> str:
    if name == "unreadable":  # the payload was no JSON, and `data` is its text
        return "boolean NOT NULL"
    return ("bigint" if name == "seq" else _TYPES[_FIELDS[name].kind]) + " NOT NULL" * (name in _REQUIRED)


COLUMNS = {_ENTITIES.get(name, name): _column(name) for name in _ORDER}
_OWN_COLUMNS = """
    archived_at timestamptz NOT NULL DEFAULT now(),
    status text NOT NULL DEFAULT 'archived'
        CHECK (status IN ('pending', 'processing', 'completed', 'failed', 'archived')),
    PRIMARY KEY (id, topic)
"""
_PRIMARY_KEY = """
    SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = to_regclass(%s) AND contype = 'p'
"""
_INDEXES = {
    "by_topic": "(topic, published_at)",
    "by_time": "(published_at)",
    "by_correlation": "(correlation_id) WHERE correlation_id IS NOT NULL",
}
_ARRIVING = sql.Identifier("pg_temp", "headwater_arriving")


_OTHER_SHAPE = (
    psycopg.errors.UndefinedColumn,
    psycopg.errors.DatatypeMismatch,
    psycopg.errors.NotNullViolation,
    psycopg.errors.InvalidColumnReference,  # no unique id and topic
)


class PostgresArchive(BaseTransport):
    """Batches are one transaction each: all of it is there, or nothing. One connection, made when it is needed."""

    recognises_ids = True
    """All of them, by the primary key: of messages with one topic and id the table has the first."""

    read_instead = "Ask the table with SQL, or subscribe to the log it is fed from"
    client_options = ANY_NAME  # libpq's; it refuses those that it does not know

    def __init__(self, url: str, *, table: str = TABLE) -> None:
        """`archive+postgres://user@host/database`; the table may be written `schema.table`."""
        parts = split_url(url, next=f"{_USE}; write special characters as %XX")
        if parts.scheme not in _SCHEMES:
            raise InvalidOptionError(f"{parts.scheme!r} is no archive", next=_USE)
        self.name = f"{redact_url(url)}?table={table}"
        self._conninfo = _conninfo(parts._replace(scheme="postgresql").geturl(), self.name)
        names = _checked_table(table)
        self._table, self._index_prefix = sql.Identifier(*names), names[-1]
        self._lock = threading.Lock()
        self._connection: psycopg.Connection[Any] | None = None
        self._prepared = False

    @property
    def connected(self) -> bool:
        return self._connection is not None and not self._connection.closed

    def _publish(self, messages: Sequence[Message]) -> None:
        rows = [_row(message, self.name) for message in messages]
        with self._lock:
            self._check_open()
            for at in range(0, len(rows), BATCH_MESSAGES_MAX):
                try:
                    self._archive(rows[at : at + BATCH_MESSAGES_MAX])
                except psycopg.Error as exc:
                    self._disconnect()
                    raise self._failed(exc) from exc

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._disconnect()

    def _archive(self, rows: Sequence[tuple[object, ...]]) -> None:
        connection = self._connect()
        names = sql.SQL(", ").join(map(sql.Identifier, COLUMNS))
        with connection.transaction(), connection.cursor() as cursor:
            cursor.execute(sql.SQL("SET LOCAL statement_timeout = {}").format(STATEMENT_TIMEOUT_MS))
            if not self._prepared:
                self._make_table(cursor)
            cursor.execute(
                sql.SQL("CREATE TEMPORARY TABLE IF NOT EXISTS {} ({}) ON COMMIT DELETE ROWS").format(
                    _ARRIVING, sql.SQL(", ").join(_plain_columns())
                )
            )
            with cursor.copy(sql.SQL("COPY {} ({}) FROM STDIN").format(_ARRIVING, names)) as copy:
                for row in rows:
                    copy.write_row(row)
            cursor.execute(
                sql.SQL("INSERT INTO {} ({}) SELECT {} FROM {} ON CONFLICT (id, topic) DO NOTHING").format(
                    self._table, names, names, _ARRIVING
                )
            )
        self._prepared = True

    def _connect(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            # No prepared statements: poolers may put another server connection under each transaction.
            self._connection = psycopg.connect(self._conninfo, autocommit=True, prepare_threshold=None)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._prepared = False  # the table may have been dropped

    def _make_table(self, cursor: psycopg.Cursor[Any]) -> None:
        """Looks first: a user that may write into the table may not be allowed to make it."""
        text = self._table.as_string(cursor)
        found = cursor.execute("SELECT to_regclass(%s) IS NOT NULL", (text,)).fetchone()
        if found is not None and found[0]:
            self._make_ids_unique_by_topic(cursor, text)
            return
        self._lock_table(cursor, text)
        columns = [sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in COLUMNS.items()]
        cursor.execute(
            sql.SQL("CREATE TABLE IF NOT EXISTS {} ({}, {})").format(
                self._table, sql.SQL(", ").join(columns), sql.SQL(_OWN_COLUMNS)
            )
        )
        for name, over in _INDEXES.items():
            index = sql.Identifier(f"{self._index_prefix}_{name}")
            cursor.execute(sql.SQL("CREATE INDEX IF NOT EXISTS {} ON {} {}").format(index, self._table, sql.SQL(over)))

    def _lock_table(self, cursor: psycopg.Cursor[Any], text: str) -> None:
        """Lock the table by name: two sessions that make or change it at once would collide, even with IF NOT
        EXISTS."""
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('headwater archive'), hashtext(%s))", (text,))

    def _make_ids_unique_by_topic(self, cursor: psycopg.Cursor[Any], text: str) -> None:
        """A table of an older version recognises messages by their id alone, and would leave out those of another
        topic. It gets the primary key of new tables; readers wait until the index is built, a minute for ten million
        rows."""
        if not self._unique_id_constraint(cursor, text):
            return
        self._lock_table(cursor, text)
        constraint = self._unique_id_constraint(cursor, text)
        if constraint is None:  # another session was quicker
            return
        change = sql.SQL("ALTER TABLE {} DROP CONSTRAINT {}, ADD PRIMARY KEY (id, topic)").format(
            self._table, sql.Identifier(constraint)
        )
        cursor.execute(sql.SQL("SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = {}").format(LOCK_TIMEOUT_MS))
        try:
            cursor.execute(change)
            cursor.execute(sql.SQL("SET LOCAL statement_timeout = {}").format(STATEMENT_TIMEOUT_MS))
        except psycopg.errors.InsufficientPrivilege as exc:
            raise TransportFailedError(
                "its table recognises messages by their id alone, and would leave out those of another topic",
                where=self.name,
                next=f"As its owner: {change.as_string(cursor)}",
            ) from exc

    def _unique_id_constraint(self, cursor: psycopg.Cursor[Any], text: str) -> str | None:
        """The name of the constraint, if the table has it."""
        found = cursor.execute(_PRIMARY_KEY, (text,)).fetchone()
        return found[0] if found is not None and found[1] == "PRIMARY KEY (id)" else None

    def _failed(self, exc: psycopg.Error) -> TransportFailedError:
        reason = (exc.diag.message_primary or str(exc).partition("\n")[0] or type(exc).__name__).strip()
        if isinstance(exc, _OTHER_SHAPE):
            advice = "A table of that name with other columns is there: name another, or drop it"
        elif isinstance(exc, psycopg.errors.InsufficientPrivilege):
            advice = "Grant INSERT and SELECT on the table, and TEMPORARY on the database, to this user"
        elif isinstance(exc, psycopg.OperationalError):
            advice = "Check that the server runs, and the url"
        else:
            advice = "Nothing of the batch was stored; see the cause"
        return TransportFailedError(reason, where=self.name, next=advice)


def _plain_columns() -> list[sql.Composable]:
    return [sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind.split()[0])) for name, kind in COLUMNS.items()]


def _row(message: Message, where: str) -> tuple[object, ...]:
    document = to_document(message)
    headers = bytes(document.headers)
    values = {
        "id": document.id,
        "data": bytes(document.data).decode(),
        "unreadable": document.unreadable,
        "headers": None if headers == b"null" else headers.decode(),
    }
    row = tuple(values[name] if name in values else _value(message, _FIELDS[name]) for name in _ORDER)
    if any(isinstance(value, str) and "\0" in value for value in row):
        raise InvalidDataError(
            f"message {message.id!r} on {message.topic} has a NUL character in its id or a named header",
            where=where,
            next="PostgreSQL's text cannot hold it; archive this one elsewhere",
        )
    return row


def _value(message: Message, field: Field) -> object:
    value = getattr(message, field.attribute)
    return datetime_of(value) if field.kind == "time" and value is not None else value


def _checked_table(table: str) -> list[str]:
    parts = table.split(".") if isinstance(table, str) else []
    if not 1 <= len(parts) <= 2 or not all(_IDENTIFIER.fullmatch(part) for part in parts):
        raise InvalidOptionError(
            f"{table!r} is no name of a table",
            next=f"Use letters, digits and _, {TABLE_CHARS_MAX} at most, with or without a schema: audit.archive",
        )
    return parts


def _conninfo(url: str, where: str) -> str:
    defaults: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "tcp_user_timeout": SILENCE_MAX_MS,
        "application_name": APPLICATION,
    }
    try:
        return make_conninfo("", **{**defaults, **conninfo_to_dict(url)})
    except psycopg.Error:  # its text may repeat a part of the password
        raise InvalidOptionError(
            "the url cannot be read", where=where, next=f"{_USE}; write special characters as %XX"
        ) from None


_USE = "Use archive+postgres://user@host:5432/database?table=archive"
