"""An archive in a table of PostgreSQL, for people who ask with SQL. Publish-only.

    SELECT id, topic, type, data, published_at FROM archive
    WHERE status = 'archived' AND topic LIKE 'orders.%' AND published_at >= now() - interval '1 day'
    ORDER BY published_at, seq;

`data` and `headers` are json, not jsonb: the text stays as it was published, and may hold \\u0000, which jsonb cannot.
To look into it write `data ->> 'order_id'`, or `data::jsonb @> …` where nothing of that kind is in it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from headwater.errors import Closed, InvalidData, InvalidOption, TransportFailed
from headwater.message import Message, datetime_of, to_document
from headwater.transports.base import BaseTransport
from headwater.transports.lines import publish_only

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
COLUMNS = {
    "id": "text NOT NULL",
    "seq": "bigint NOT NULL",
    "topic": "text NOT NULL",
    "type": "text",
    "version": "integer",
    "from_entity": "text",
    "to_entity": "text",
    "reply_to": "text",
    "correlation_id": "text",
    "content_type": "text",
    "traceparent": "text",
    "data": "json NOT NULL",
    "unreadable": "boolean NOT NULL",  # the payload was no JSON, and `data` is its text
    "headers": "json",
    "priority": "integer NOT NULL",
    "size": "integer NOT NULL",
    "published_at": "timestamptz NOT NULL",
    "deliver_at": "timestamptz",
    "expires_at": "timestamptz",
}
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

    def __init__(self, url: str, table: str = TABLE) -> None:
        parts = _checked_table(table)
        self._table, self._index_prefix = sql.Identifier(*parts), parts[-1]
        self._url, self.name = url, f"{_without_password(url)}?table={table}"
        self._lock = threading.Lock()
        self._connection: psycopg.Connection[Any] | None = None
        self._prepared = False
        self._closed = False

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, Any] | None = None) -> PostgresArchive:
        """`archive+postgres://user@host/database?table=archive`; the table may be written `schema.table`. What else the
        url says after the question mark is for libpq. The only option is table."""
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES:
            raise InvalidOption(f"{parts.scheme!r} is no archive", next=_USE)
        given = dict(parse_qsl(parts.query))
        own = {"table": given.pop("table", TABLE), **(options or {})}
        if len(own) > 1:
            raise InvalidOption(f"unknown option {sorted(own.keys() - {'table'})[0]!r}", next="The only one is table")
        plain = urlunsplit(("postgresql", parts.netloc, parts.path, urlencode(given, quote_via=quote), ""))
        return cls(plain, own["table"])

    @property
    def connected(self) -> bool:
        return self._connection is not None and not self._connection.closed

    def _publish(self, messages: Sequence[Message]) -> None:
        rows = [_row(message, self.name) for message in messages]
        with self._lock:
            if self._closed:
                raise Closed("the transport is closed", where=self.name, next="Open another")
            for at in range(0, len(rows), BATCH_MESSAGES_MAX):
                try:
                    self._archive(rows[at : at + BATCH_MESSAGES_MAX])
                except psycopg.Error as exc:
                    self._let_go()
                    raise self._failed(exc) from exc

    def subscribe(self, pattern: str, handle: object, **_: object) -> NoReturn:
        raise publish_only(
            "PostgresArchive", self.name, "Ask the table with SQL, or subscribe to the log it is fed from"
        )

    def close(self) -> None:
        """Nothing is held back, so nothing can be unsent."""
        with self._lock:
            self._closed = True
            self._let_go()

    def _archive(self, rows: Sequence[tuple[object, ...]]) -> None:
        connection = self._connected()
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

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            usual: dict[str, Any] = {
                "connect_timeout": CONNECT_TIMEOUT_S,
                "tcp_user_timeout": SILENCE_MAX_MS,
                "application_name": APPLICATION,
            }
            # No prepared statements: poolers may put another server connection under each transaction.
            self._connection = psycopg.connect(
                make_conninfo("", **{**usual, **conninfo_to_dict(self._url)}), autocommit=True, prepare_threshold=None
            )
        return self._connection

    def _let_go(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._prepared = False  # somebody may have dropped the table

    def _make_table(self, cursor: psycopg.Cursor[Any]) -> None:
        """Looks first, for who may write into the table may not be allowed to make it."""
        text = self._table.as_string(cursor)
        found = cursor.execute("SELECT to_regclass(%s) IS NOT NULL", (text,)).fetchone()
        if found is not None and found[0]:
            self._tell_topics_apart(cursor, text)
            return
        self._alone(cursor, text)
        columns = [sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in COLUMNS.items()]
        cursor.execute(
            sql.SQL("CREATE TABLE IF NOT EXISTS {} ({}, {})").format(
                self._table, sql.SQL(", ").join(columns), sql.SQL(_OWN_COLUMNS)
            )
        )
        for name, over in _INDEXES.items():
            index = sql.Identifier(f"{self._index_prefix}_{name}")
            cursor.execute(sql.SQL("CREATE INDEX IF NOT EXISTS {} ON {} {}").format(index, self._table, sql.SQL(over)))

    def _alone(self, cursor: psycopg.Cursor[Any], text: str) -> None:
        """Two that make or change the table at once would get in each other's way, even with IF NOT EXISTS."""
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('headwater archive'), hashtext(%s))", (text,))

    def _tell_topics_apart(self, cursor: psycopg.Cursor[Any], text: str) -> None:
        """A table made before ids were told apart by topic leaves out the second message of an id. It gets the primary
        key that new ones have; until the index is built, a minute for ten million rows, readers wait."""
        if not self._unique_id_constraint(cursor, text):
            return
        self._alone(cursor, text)
        constraint = self._unique_id_constraint(cursor, text)
        if constraint is None:  # another one was quicker
            return
        change = sql.SQL("ALTER TABLE {} DROP CONSTRAINT {}, ADD PRIMARY KEY (id, topic)").format(
            self._table, sql.Identifier(constraint)
        )
        cursor.execute(sql.SQL("SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = {}").format(LOCK_TIMEOUT_MS))
        try:
            cursor.execute(change)
            cursor.execute(sql.SQL("SET LOCAL statement_timeout = {}").format(STATEMENT_TIMEOUT_MS))
        except psycopg.errors.InsufficientPrivilege as exc:
            raise TransportFailed(
                "its table recognises messages by their id alone, and would leave out those of another topic",
                where=self.name,
                next=f"As its owner: {change.as_string(cursor)}",
            ) from exc

    def _unique_id_constraint(self, cursor: psycopg.Cursor[Any], text: str) -> str | None:
        """The name of the constraint, if the table has it."""
        found = cursor.execute(_PRIMARY_KEY, (text,)).fetchone()
        return found[0] if found is not None and found[1] == "PRIMARY KEY (id)" else None

    def _failed(self, exc: psycopg.Error) -> TransportFailed:
        said = (exc.diag.message_primary or str(exc).partition("\n")[0] or type(exc).__name__).strip()
        if isinstance(exc, _OTHER_SHAPE):
            advice = "A table of that name with other columns is there: name another, or drop it"
        elif isinstance(exc, psycopg.errors.InsufficientPrivilege):
            advice = "Grant INSERT and SELECT on the table, and TEMPORARY on the database, to this user"
        elif isinstance(exc, psycopg.OperationalError):
            advice = "Check that the server runs, and the url"
        else:
            advice = "The batch is not there; the cause says more"
        return TransportFailed(said, where=self.name, next=advice)


def _plain_columns() -> list[sql.Composable]:
    return [sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind.split()[0])) for name, kind in COLUMNS.items()]


def _row(message: Message, where: str) -> tuple[object, ...]:
    document = to_document(message)
    headers = bytes(document.headers)
    row = (
        document.id,
        document.seq,
        document.topic,
        document.type,
        document.version,
        document.from_,
        document.to,
        document.reply_to,
        document.correlation_id,
        document.content_type,
        document.traceparent,
        bytes(document.data).decode(),
        document.unreadable,
        None if headers == b"null" else headers.decode(),
        document.priority,
        document.size,
        datetime_of(message.published_ms),
        None if message.deliver_ms is None else datetime_of(message.deliver_ms),
        None if message.expires_ms is None else datetime_of(message.expires_ms),
    )
    if any(isinstance(value, str) and "\0" in value for value in row):
        raise InvalidData(
            f"message {message.id!r} on {message.topic} has a NUL character in its id or a named header",
            where=where,
            next="PostgreSQL's text cannot hold it; archive this one elsewhere",
        )
    return row


def _checked_table(table: str) -> list[str]:
    parts = table.split(".") if isinstance(table, str) else []
    if not 1 <= len(parts) <= 2 or not all(_IDENTIFIER.fullmatch(part) for part in parts):
        raise InvalidOption(
            f"{table!r} is no name of a table",
            next=f"Use letters, digits and _, {TABLE_CHARS_MAX} at most, with or without a schema: audit.archive",
        )
    return parts


def _without_password(url: str) -> str:
    """Raises InvalidOption for what libpq could not read; its own words may repeat a part of the password."""
    try:
        conninfo_to_dict(url)
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except (ValueError, psycopg.Error):
        raise InvalidOption("the url cannot be read", next=f"{_USE}; write special characters as %XX") from None
    user = f"{parts.username}@" if parts.username else ""
    return f"archive+postgres://{user}{parts.hostname or ''}{port}{parts.path}"


_USE = "Use archive+postgres://user@host:5432/database?table=archive"
