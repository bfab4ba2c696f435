"""Making a log in a schema of a database, and bringing an older one up to date."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import errors, sql

from headwater.errors import NewerSchema, NotALog, ReadOnly, StoreError
from headwater.message import SALT_BITS
from headwater.stores.database import OWN_TABLES
from headwater.stores.postgres.queries import FUNCTIONS, SCHEMA, SQL

# The statements that lead from version N to N + 1 stand at index N - 1. A release never changes one that was shipped.
MIGRATIONS: list[str] = [
    # An id whose message is gone has no topic any more and is forgotten: to know it on every topic could swallow a
    # message of another publisher, to forget it can at worst store one twice that is sent again.
    """
    CREATE UNLOGGED TABLE ids_by_topic AS
    SELECT known.seq, known.published_at, message.topic || '#' || known.id AS scoped_id
    FROM remembered_ids AS known JOIN messages AS message USING (seq);
    TRUNCATE remembered_ids;
    ALTER TABLE remembered_ids DROP CONSTRAINT remembered_ids_id_key;
    ALTER TABLE remembered_ids RENAME COLUMN id TO scoped_id;
    INSERT INTO remembered_ids (seq, published_at, scoped_id) SELECT * FROM ids_by_topic ORDER BY seq;
    ALTER TABLE remembered_ids ADD CONSTRAINT remembered_ids_scoped_id_key UNIQUE (scoped_id);
    DROP TABLE ids_by_topic;
    """,
]
SCHEMA_VERSION = 1 + len(MIGRATIONS)


def prepare(connection: psycopg.Connection, schema: str, name: str) -> int:
    """Create the schema and the log's tables if they are missing, or check and migrate those that are there. Returns
    the log's salt. Several may do it at once: one does, the others wait."""
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise StoreError(f"the database keeps text as {encoding}", where=name, next="CREATE DATABASE … ENCODING 'UTF8'")
    with _transaction(connection, schema):
        version = _version(connection, schema, name)
        salt = _fact(connection, "salt")
    if version != SCHEMA_VERSION or salt is None:
        _bring_up_to_date(connection, schema, name)
        with _transaction(connection, schema):
            salt = _fact(connection, "salt")
    if salt is None:
        raise NotALog("its facts are gone", where=name, next="Restore a backup, or name another schema")
    return salt


def _bring_up_to_date(connection: psycopg.Connection, schema: str, name: str) -> None:
    """One step in each transaction, so that a later one that fails does not take the earlier ones back."""
    while True:
        with _transaction(connection, schema, alone=True):
            version = _version(connection, schema, name)  # another process may have been quicker
            if version == SCHEMA_VERSION:
                return
            if version is None:
                _create(connection, schema, name)
            elif version > SCHEMA_VERSION:
                raise NewerSchema(
                    f"the log has schema {version}, this Headwater knows up to {SCHEMA_VERSION}",
                    where=name,
                    next="Upgrade: pip install -U headwater",
                )
            else:
                _migrate(connection, version, name)


def _create(connection: psycopg.Connection, schema: str, name: str) -> None:
    if not _there(connection, "SELECT 1 FROM pg_namespace WHERE nspname = %s", schema):
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
    in_the_way = _tables(connection, schema) & OWN_TABLES
    if in_the_way:
        raise NotALog(
            f"the schema has tables of the log's names ({', '.join(sorted(in_the_way)[:3])}) and no log",
            where=name,
            next="Name another schema: ?schema=…",
        )
    try:
        connection.execute(SCHEMA.encode())
        connection.execute(FUNCTIONS.encode())
    except (errors.DuplicateTable, errors.DuplicateFunction, errors.DuplicateObject) as exc:
        raise NotALog(
            f"something of the log's names is in the way ({exc.diag.message_primary})",
            where=name,
            next="Name another schema: ?schema=…",
        ) from exc
    facts = {
        "schema_version": SCHEMA_VERSION,
        "salt": secrets.randbits(SALT_BITS),
        "created_at": time.time_ns() // 1_000_000,
        "counted_to": 0,
    }
    for fact in facts.items():
        connection.execute(SQL["set_fact"].encode(), fact)


def _migrate(connection: psycopg.Connection, version: int, name: str) -> None:
    connection.execute(f"SELECT {SQL['lock_alone']}".encode())  # no writer is in the middle of something
    try:
        connection.execute(MIGRATIONS[version - 1].encode())
        connection.execute(FUNCTIONS.encode())
    except psycopg.Error as exc:
        raise StoreError(
            f"the step from schema {version} to {version + 1} failed ({exc.diag.message_primary or exc})",
            where=name,
            next="Mend that and open the log again; nothing of the step stays",
        ) from exc
    connection.execute(SQL["set_fact"].encode(), ("schema_version", version + 1))


@contextmanager
def _transaction(connection: psycopg.Connection, schema: str, *, alone: bool = False) -> Iterator[None]:
    connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
    try:
        connection.execute(sql.SQL("SET LOCAL search_path = {}, pg_catalog, pg_temp").format(sql.Identifier(schema)))
        if alone:
            connection.execute("SELECT pg_advisory_xact_lock(hashtext('headwater'), hashtext(%s))", (schema,))
        yield
        connection.execute("COMMIT")
    except BaseException:
        if not connection.closed:
            connection.execute("ROLLBACK")
        raise


def _version(connection: psycopg.Connection, schema: str, name: str) -> int | None:
    """None where there is no log yet."""
    if "headwater" not in _tables(connection, schema):
        return None
    if not _there(connection, "SELECT 1 WHERE has_schema_privilege(%s, 'USAGE')", schema):
        raise ReadOnly(
            f"this role may not use the schema {schema}",
            where=name,
            next=f"As its owner: GRANT USAGE ON SCHEMA {schema} TO …; "
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO …",
        )
    version = _fact(connection, "schema_version")
    if version is None:
        raise NotALog(
            "the schema has a table `headwater` that is none of the log's",
            where=name,
            next="Name another schema: ?schema=…",
        )
    return version


def _tables(connection: psycopg.Connection, schema: str) -> set[str]:
    rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,)).fetchall()
    return {table for (table,) in rows}


def _fact(connection: psycopg.Connection, name: str) -> int | None:
    try:
        with connection.transaction():
            row = connection.execute(SQL["fact"].encode(), (name,)).fetchone()
    except (errors.UndefinedTable, errors.UndefinedColumn):
        return None
    return row[0] if row is not None and isinstance(row[0], int) else None


def _there(connection: psycopg.Connection, query: str, *bindings: str) -> bool:
    return connection.execute(query.encode(), bindings).fetchone() is not None
