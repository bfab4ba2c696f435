"""Where a log is, connections to it, the named statements, and PostgreSQL's errors put into ours."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import psycopg
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from headwater.errors import (
    ConflictError,
    CorruptError,
    DiskFullError,
    HeadwaterError,
    InputOutputError,
    InvalidDataError,
    InvalidOptionError,
    LockedError,
    NotALogError,
    ReadOnlyError,
    StoreError,
    UnavailableError,
)
from headwater.formats import redact_url
from headwater.stores.postgres.pipelined import PipelinedConnection
from headwater.stores.sql import extra_columns, load, text_of

Durability = Literal["full", "relaxed"]

DEFAULT_SCHEMA = "headwater"
CONNECT_S_MAX = 10
SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
LOG_SCHEMA_CHARS_MAX = 50  # a channel is named after it, and names have 63 bytes at most
SERVER_VERSION_MIN = 140_000  # pg_current_xact_id and what else is used here is older; older servers are not tried

RECONNECT_S_MIN, RECONNECT_S_MAX = 0.05, 1.0
IDLE_S_MAX = 600.0  # an idle connection is closed after this long

_PACKAGE = "headwater.stores.postgres"

SCHEMA = text_of(_PACKAGE, "schema.sql")
FUNCTIONS = text_of(_PACKAGE, "functions.sql")
AMONG = "= ANY(?::bigint[])"
SQL = load(
    text_of("headwater.stores", "queries.sql") + text_of(_PACKAGE, "queries.sql"),
    among=AMONG,
    json_rows="coalesce(json_agg(json_build_array",
    as_json="), '[]')::text",
    greatest="greatest",
    by_key="",
    extras=extra_columns(),
    extras_of_m=extra_columns("m.{}"),
    extras_but_headers=extra_columns(headers="NULL"),
    extras_raw=extra_columns(headers="{}::text"),
)

_SYNCHRONOUS_COMMIT = {"full": "on", "relaxed": "off"}
_KEEPALIVES = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 60_000}

# The first that fits; more special classes stand before their bases.
_TRANSLATIONS: list[tuple[type[psycopg.Error], type[HeadwaterError], str]] = [
    (errors.LockNotAvailable, LockedError, "Another transaction holds the lock; end it, or raise busy_timeout"),
    (errors.DeadlockDetected, ConflictError, "Run the transaction again"),
    (errors.SerializationFailure, ConflictError, "Run the transaction again"),
    (errors.IdleInTransactionSessionTimeout, ConflictError, "Run the transaction again, and quicker"),
    (errors.QueryCanceled, LockedError, "The server's statement_timeout is too short, or the statement was cancelled"),
    (errors.ReadOnlySqlTransaction, ReadOnlyError, "Connect to the primary, not to a standby"),
    (
        errors.InsufficientPrivilege,
        ReadOnlyError,
        "Grant this role what it needs; docs/reference/postgres.md has the statements",
    ),
    (errors.DiskFull, DiskFullError, "Free some disk space and publish again; nothing committed was lost"),
    (errors.OutOfMemory, InputOutputError, "Look at the server's log; nothing committed was lost"),
    (errors.TooManyConnections, UnavailableError, "Raise max_connections, or open fewer logs"),
    (errors.DataCorrupted, CorruptError, "Look at the server's log; restore a backup"),
    (errors.IndexCorrupted, CorruptError, "REINDEX the index; look at the server's log"),
    (errors.UndefinedTable, NotALogError, "Its tables are gone: open it again to make them, or restore a backup"),
    (errors.UntranslatableCharacter, InvalidDataError, "PostgreSQL keeps no NUL character in text"),
    (errors.CharacterNotInRepertoire, InvalidDataError, "PostgreSQL keeps no NUL character in text"),
    (errors.InvalidPassword, UnavailableError, "Check the user and the password"),
    (errors.InvalidCatalogName, UnavailableError, "Create the database first: createdb NAME"),
    (errors.InvalidTransactionState, InvalidOptionError, "Begin it with ISOLATION LEVEL READ COMMITTED"),
    (psycopg.OperationalError, UnavailableError, "Check that the server runs and can be reached"),
    (psycopg.InterfaceError, UnavailableError, "Check that the server runs and can be reached"),
]


class Place(NamedTuple):
    """A log in a database: how to connect, in which schema it lives, and its url without a password."""

    conninfo: str
    schema: str
    name: str

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def channel(self) -> str:
        return f"headwater_{self.schema}"


def place_of(url: str, *, public: bool = False) -> Place:
    """Read `postgres://user@host/database?schema=headwater`; other query parameters are libpq's. A log may not be
    in the schema `public`. Several hosts may have ports of their own, which `split_url` does not read."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _unreadable("postgres://…") from None  # its text may quote a password
    if parts.fragment or "@" in parts.path + parts.query:  # a part of the password may stand behind the host
        raise InvalidOptionError(
            "the url has an @ or a # behind its host",
            where="postgres://…",
            next="Write / as %2F, ? as %3F, @ as %40, # as %23 and % as %25 in a password",
        )
    name = redact_url(url, keep=None).replace("postgresql:", "postgres:", 1)
    query = parse_qsl(parts.query, keep_blank_values=True)
    schema = next((value for name, value in query if name == "schema"), DEFAULT_SCHEMA)
    if schema == "public" and not public:
        raise InvalidOptionError(
            "a log in the schema public would be open to every role of the database",
            where=name,
            next="Name a schema of its own: ?schema=headwater; docs/reference/postgres.md shows how to move it",
        )
    fits = SCHEMA_NAME.fullmatch(schema) and (public or (len(schema) <= LOG_SCHEMA_CHARS_MAX and schema[:3] != "pg_"))
    if not fits:
        raise InvalidOptionError(
            f"{schema!r} cannot be the schema of a log",
            where=name,
            next="Use lower-case letters, digits and _, not beginning with pg_, at most 50",
        )
    rest = urlencode([(name, value) for name, value in query if name != "schema"])
    plain = urlunsplit(("postgresql", parts.netloc, parts.path, rest, ""))
    try:
        known = conninfo_to_dict(plain)
        for port in str(known.get("port") or "").split(","):
            int(port or 0)
    except (psycopg.Error, ValueError):
        raise _unreadable(redact_url(url)) from None  # its text may quote a password
    defaults = {name: value for name, value in _KEEPALIVES.items() if name not in known}
    if "connect_timeout" not in known:
        defaults["connect_timeout"] = CONNECT_S_MAX
    return Place(make_conninfo(plain, **defaults), schema, name)


def _unreadable(where: str) -> InvalidOptionError:
    return InvalidOptionError(
        "this is no address of a database, or its query has a word that neither Headwater (schema) nor libpq knows",
        where=where,
        next="postgres://user@host:5432/database?schema=headwater",
    )


def connect(place: Place, *, application: str, prepare: bool = True) -> PipelinedConnection:
    """Transactions are begun and ended by hand. Without `prepare` no statement outlives its transaction on the server,
    as poolers that hand out a server connection per transaction want it. psycopg itself prepares none: at times it
    would deallocate all of them."""
    connection = PipelinedConnection.connect(
        place.conninfo,
        autocommit=True,
        application_name=application,
        client_encoding="utf8",
        prepare_threshold=None,
    )
    connection.prepares = prepare
    return connection


def settings_of(place: Place, *, durability: Durability, lock_timeout_ms: int, local: bool = True) -> sql.Composed:
    """One statement that sets a connection up; `local`, it holds for one transaction and is repeated in each. Every
    statement of ours is meant to go by an index: before a table was first analysed the planner guesses, and would
    rather read and sort tens of thousands of rows. Planning takes longer than executing, and an array or a range among
    the bindings makes the planner plan anew each time, unless it is told not to."""
    values = {
        # Nothing shadows PostgreSQL's own names, for pg_catalog comes first where it is not named, and no temporary
        # table shadows one of ours.
        "search_path": f"{place.schema}, pg_temp",
        "lock_timeout": str(lock_timeout_ms),
        "synchronous_commit": _SYNCHRONOUS_COMMIT[durability],
        "timezone": "UTC",
        "enable_seqscan": "off",
        "enable_bitmapscan": "off",
        "plan_cache_mode": "force_generic_plan",
    }
    calls = [
        sql.SQL("set_config({}, {}, {})").format(sql.Literal(name), sql.Literal(value), sql.Literal(local))
        for name, value in values.items()
    ]
    return sql.SQL("SELECT {}").format(sql.SQL(", ").join(calls))


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Inside, PostgreSQL's errors come out as Headwater's."""
    try:
        yield
    except psycopg.Error as exc:
        raise translate(exc, where) from exc


# libpq's own words, where there is no code. Trying again does not help.
_REFUSED = (
    ("password authentication failed", "Check the user and the password"),
    ("no password supplied", "Give a password: in the url, in PGPASSWORD or in ~/.pgpass"),
    ("does not exist", "Check the name; a database is made with createdb NAME, a role with createuser NAME"),
    ("does not support SSL", "Take sslmode=require out of the url, or switch the server's ssl on"),
    ("no pg_hba.conf entry", "Let this host and user in: pg_hba.conf of the server"),
)
_UNREACHABLE = (("could not translate host name", "Check the host's name"),)


def translate(exc: psycopg.Error, where: str) -> HeadwaterError:
    why = (exc.diag.message_primary or str(exc).strip() or type(exc).__name__).splitlines()[0]
    for foreign, own, advice in _TRANSLATIONS:
        if isinstance(exc, foreign):
            if own is UnavailableError and (refused := _advice(exc, _REFUSED)):
                return StoreError(why, where=where, next=refused)
            if own is UnavailableError:
                advice = _advice(exc, _UNREACHABLE) or advice
            return own(why, where=where, next=advice)
    return StoreError(f"{type(exc).__name__}: {why}", where=where)


def _advice(exc: psycopg.Error, known: tuple[tuple[str, str], ...]) -> str | None:
    return next((advice for words, advice in known if words in str(exc)), None)


def is_broken(connection: psycopg.Connection, exc: psycopg.Error) -> bool:
    """Whether a statement failed because the connection is gone. psycopg may find its socket closed before libpq does;
    the connection then counts as open, so it is closed here. An error that the server sends has a code."""
    if isinstance(exc, psycopg.OperationalError) and exc.sqlstate is None:
        connection.close()
    return bool(connection.closed)


Begin = Callable[[PipelinedConnection], object]


class PoolTimeout(Exception):
    """No connection became free in time."""


class Pool:
    """A pool of connections without threads and without a logger. The one of psycopg logs every failed attempt to
    connect as a warning; here the caller gets the error."""

    def __init__(self, connect: Callable[[], PipelinedConnection], most: int) -> None:
        self._connect = connect
        self._free = threading.Semaphore(most)
        self._lock = threading.Lock()
        self._idle: list[tuple[PipelinedConnection, float]] = []  # and since when, the latest last
        self._closed = False

    @contextmanager
    def connection(self, begin: Begin, timeout_s: float) -> Iterator[PipelinedConnection]:
        """A connection on which `begin` has succeeded. Idle ones that broke are dropped; an unreachable server is tried
        again until the time is over. Raises PoolTimeout, or psycopg's error."""
        until = time.monotonic() + timeout_s
        if not self._free.acquire(timeout=timeout_s):
            raise PoolTimeout(f"no connection became free in {timeout_s:.0f} s")
        try:
            connection = self._begun(begin, until)
            try:
                yield connection
            finally:
                self._put(connection)
        finally:
            self._free.release()

    def _begun(self, begin: Begin, until: float) -> PipelinedConnection:
        pause_s = RECONNECT_S_MIN
        while True:
            connection = idle = self._take()
            try:
                connection = idle or self._connect()
                begin(connection)
                return connection
            except psycopg.Error as exc:
                if connection is not None and not is_broken(connection, exc):
                    self._put(connection)
                    raise
                if time.monotonic() + pause_s > until or _advice(exc, _REFUSED):
                    raise
            except BaseException:
                if connection is not None:
                    connection.close()
                raise
            if idle is None:
                time.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(RECONNECT_S_MAX, pause_s * 2)

    def _take(self) -> PipelinedConnection | None:
        with self._lock:
            return self._idle.pop()[0] if self._idle else None

    def _put(self, connection: PipelinedConnection) -> None:
        now = time.monotonic()
        with self._lock:
            if not self._closed and not connection.closed:
                self._idle.append((connection, now))
                if now - self._idle[0][1] <= IDLE_S_MAX:
                    return
                connection, _ = self._idle.pop(0)
        connection.close()

    def close(self) -> None:
        """Close idle connections now, and those in use when they come back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()


def array_of(numbers: Iterable[int | None]) -> str:
    """The literal of an array: written and read at half the cost of a list of parameters."""
    return f"{{{','.join(['NULL' if number is None else str(number) for number in numbers])}}}"
