"""Where a log is, connections to it, and PostgreSQL's errors put into ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import psycopg
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from headwater.errors import (
    Conflict,
    Corrupt,
    DiskFull,
    HeadwaterError,
    InputOutput,
    InvalidData,
    InvalidOption,
    Locked,
    NotALog,
    ReadOnly,
    StoreError,
    Unavailable,
)

Durability = Literal["full", "relaxed"]
Notify = Literal["listen", "poll"]

DEFAULT_SCHEMA = "headwater"
CONNECT_S_MAX = 10
SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,49}")  # a channel is named after it, and names have 63 bytes at most
SERVER_VERSION_MIN = 140_000  # pg_current_xact_id and what else is used here is older; older servers are not tried

_SYNCHRONOUS_COMMIT = {"full": "on", "relaxed": "off"}
_KEEPALIVES = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 60_000}

# The first that fits; more special classes stand before their bases.
_TRANSLATIONS: list[tuple[type[psycopg.Error], type[HeadwaterError], str]] = [
    (errors.LockNotAvailable, Locked, "Another transaction holds the lock; end it, or raise busy_timeout"),
    (errors.DeadlockDetected, Conflict, "Run the transaction again"),
    (errors.SerializationFailure, Conflict, "Run the transaction again"),
    (errors.IdleInTransactionSessionTimeout, Conflict, "Run the transaction again, and quicker"),
    (errors.QueryCanceled, Locked, "The server's statement_timeout is too short for this, or somebody cancelled it"),
    (errors.ReadOnlySqlTransaction, ReadOnly, "Connect to the primary, not to a standby"),
    (errors.InsufficientPrivilege, ReadOnly, "Grant this role what it needs; docs/postgres.md has the statements"),
    (errors.DiskFull, DiskFull, "Free some disk space and publish again; nothing committed was lost"),
    (errors.OutOfMemory, InputOutput, "Look at the server's log; nothing committed was lost"),
    (errors.TooManyConnections, Unavailable, "Raise max_connections, or open fewer logs"),
    (errors.DataCorrupted, Corrupt, "Look at the server's log; restore a backup"),
    (errors.IndexCorrupted, Corrupt, "REINDEX the index; look at the server's log"),
    (errors.UndefinedTable, NotALog, "Its tables are gone: open it again to make them, or restore a backup"),
    (errors.UntranslatableCharacter, InvalidData, "PostgreSQL keeps no NUL character in text"),
    (errors.CharacterNotInRepertoire, InvalidData, "PostgreSQL keeps no NUL character in text"),
    (errors.InvalidPassword, Unavailable, "Check the user and the password"),
    (errors.InvalidCatalogName, Unavailable, "Create the database first: createdb NAME"),
    (errors.InvalidTransactionState, InvalidOption, "Begin it with ISOLATION LEVEL READ COMMITTED"),
    (psycopg.OperationalError, Unavailable, "Check that the server runs and can be reached"),
    (psycopg.InterfaceError, Unavailable, "Check that the server runs and can be reached"),
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


def place_of(url: str) -> Place:
    """Read `postgres://user@host/database?schema=headwater`; what else stands in the query is libpq's."""
    parts = urlsplit(url)
    if "@" in parts.path + parts.query:  # then a part of the password may stand where no password is looked for
        raise InvalidOption(
            "the url has an @ behind its host",
            where="postgres://…",
            next="Write / as %2F, ? as %3F, @ as %40 and % as %25 in a password",
        )
    query = parse_qsl(parts.query, keep_blank_values=True)
    schema = next((value for name, value in query if name == "schema"), DEFAULT_SCHEMA)
    if schema == "public":
        raise InvalidOption(
            "a log in the schema public would be open to every role of the database",
            where=shown(url),
            next="Name a schema of its own: ?schema=headwater; docs/postgres.md tells how to move a log there",
        )
    if not SCHEMA_NAME.fullmatch(schema) or schema.startswith("pg_"):
        raise InvalidOption(
            f"{schema!r} cannot be the schema of a log",
            where=shown(url),
            next="Use lower-case letters, digits and _, not beginning with pg_, at most 50",
        )
    rest = urlencode([(name, value) for name, value in query if name != "schema"])
    plain = urlunsplit(("postgresql", parts.netloc, parts.path, rest, ""))
    try:
        known = conninfo_to_dict(plain)
    except psycopg.Error:
        raise InvalidOption(
            "this is no address of a database, or its query has a word that neither Headwater (schema) nor libpq knows",
            where=shown(url),
            next="postgres://user@host:5432/database?schema=headwater",
        ) from None  # its text may quote a password
    defaults = {name: value for name, value in _KEEPALIVES.items() if name not in known}
    if "connect_timeout" not in known:
        defaults["connect_timeout"] = CONNECT_S_MAX
    return Place(make_conninfo(plain, **defaults), schema, shown(url))


def shown(url: str) -> str:
    """The url without its password, in the netloc or in the query."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    netloc = f"{user.partition(':')[0]}{at}{host}"
    query = urlencode([(name, value) for name, value in parse_qsl(parts.query) if "pass" not in name])
    return urlunsplit(("postgres", netloc, parts.path, query, ""))


def connect(place: Place, *, application: str, prepare: bool = True) -> psycopg.Connection:
    """Transactions are begun and ended by hand. Without `prepare` no statement outlives its transaction on the server,
    as poolers that hand out a server connection per transaction want it."""
    return psycopg.connect(
        place.conninfo, autocommit=True, application_name=application, prepare_threshold=5 if prepare else None
    )


def settings_of(place: Place, *, durability: Durability, lock_timeout_ms: int, local: bool = True) -> sql.Composed:
    """One statement that sets a connection up; `local`, it holds for a transaction, and is said anew in each. Every
    statement of ours is meant to go by an index: before a table was first analysed the planner guesses, and would
    rather read and sort tens of thousands of rows."""
    values = {
        # Nothing shadows PostgreSQL's own names, for pg_catalog comes first where it is not named, and no temporary
        # table shadows one of ours.
        "search_path": f"{place.schema}, pg_temp",
        "lock_timeout": str(lock_timeout_ms),
        "synchronous_commit": _SYNCHRONOUS_COMMIT[durability],
        "timezone": "UTC",
        "enable_seqscan": "off",
        "enable_bitmapscan": "off",
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


# libpq's own words, where there is no code.
_REFUSED = (
    ("password authentication failed", "Check the user and the password"),
    ("no password supplied", "Give a password: in the url, in PGPASSWORD or in ~/.pgpass"),
    ("does not exist", "Check the name; a database is made with createdb NAME, a role with createuser NAME"),
    ("does not support SSL", "Take sslmode=require out of the url, or switch the server's ssl on"),
    ("no pg_hba.conf entry", "Let this host and user in: pg_hba.conf of the server"),
    ("could not translate host name", "Check the host's name"),
)


def translate(exc: psycopg.Error, where: str) -> HeadwaterError:
    why = (exc.diag.message_primary or str(exc).strip() or type(exc).__name__).splitlines()[0]
    for foreign, own, advice in _TRANSLATIONS:
        if isinstance(exc, foreign):
            if own is Unavailable:
                advice = next((known for words, known in _REFUSED if words in str(exc)), advice)
            return own(why, where=where, next=advice)
    return StoreError(f"{type(exc).__name__}: {why}", where=where)


def is_broken(connection: psycopg.Connection, exc: psycopg.Error) -> bool:
    """Whether the connection is gone, and that is why it failed. psycopg may find its socket closed before libpq does,
    and then the connection passes for whole: so it is closed here. What a server says has a code."""
    if isinstance(exc, psycopg.OperationalError) and exc.sqlstate is None:
        connection.close()
    return bool(connection.closed)
