"""Making a log in a schema of a database, and bringing an older one up to date."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import errors, sql

from headwater.errors import NotALogError, ReadOnlyError, StoreError
from headwater.stores.postgres.connection import FUNCTIONS, SCHEMA, SQL
from headwater.stores.postgres.pipelined import PipelinedConnection
from headwater.stores.sql import OWN_TABLES, facts_of_new_log, newer_schema

# An id whose message is gone has no topic any more and is forgotten: to know it on every topic could swallow a message
# of another publisher, to forget it can at worst store one twice that is sent again.
_IDS_BY_TOPIC = """
CREATE UNLOGGED TABLE ids_by_topic AS
SELECT known.seq, known.published_at, message.topic || '#' || known.id AS scoped_id
FROM remembered_ids AS known JOIN messages AS message USING (seq);
TRUNCATE remembered_ids;
ALTER TABLE remembered_ids DROP CONSTRAINT remembered_ids_id_key;
ALTER TABLE remembered_ids RENAME COLUMN id TO scoped_id;
INSERT INTO remembered_ids (seq, published_at, scoped_id) SELECT * FROM ids_by_topic ORDER BY seq;
ALTER TABLE remembered_ids ADD CONSTRAINT remembered_ids_scoped_id_key UNIQUE (scoped_id);
DROP TABLE ids_by_topic;
"""

# PUBLIC loses its rights. A role that was granted some goes on with what it did: one that may delete deliveries is an
# application, one that may insert messages does that, and one that may use the schema and read nothing publishes. The
# functions' new texts follow. Messages that are there stay as they are, whatever their size.
_ROLES_AND_LIMITS = """
ALTER TABLE messages
    ADD CONSTRAINT "topic must have 256 bytes and 32 tokens at most, no blanks" CHECK (
        checked IS NOT NULL OR (
            octet_length(topic) <= 256 AND array_length(string_to_array(topic, '.'), 1) <= 32
            AND topic !~ '[\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]'
        )
    ) NOT VALID,
    ADD CONSTRAINT "data must have 1048576 bytes at most, headers 65536" CHECK (
        checked IS NOT NULL OR (octet_length(data::text) <= 1048576 AND octet_length(headers::text) <= 65536)
    ) NOT VALID,
    ADD CONSTRAINT "id must have 1 to 128 characters, other texts to 256" CHECK (
        checked IS NOT NULL OR (
            length(id) BETWEEN 1 AND 128 AND length("from") BETWEEN 1 AND 256 AND length("to") BETWEEN 1 AND 256
            AND length(reply_to) BETWEEN 1 AND 256 AND length(correlation_id) BETWEEN 1 AND 256
            AND length(type) BETWEEN 1 AND 256 AND length(content_type) BETWEEN 1 AND 256
            AND length(traceparent) BETWEEN 1 AND 256
        )
    ) NOT VALID,
    ADD CONSTRAINT "version must be 0 to 1000000, priority -1000000 to 1000000" CHECK (
        checked IS NOT NULL OR (version BETWEEN 0 AND 1000000 AND priority BETWEEN -1000000 AND 1000000)
    ) NOT VALID;
ALTER FUNCTION publish RENAME TO publish_checked;
CREATE FUNCTION publish(
    topic text, data json, id text, priority integer, deliver_at bigint, expires_at bigint, "from" text, "to" text,
    reply_to text, correlation_id text, type text, version integer, content_type text, traceparent text, headers json
) RETURNS bigint LANGUAGE sql AS 'SELECT NULL::bigint';
REVOKE ALL ON messages, pruned, remembered_ids, receipts, subscriptions, deliveries, dead_letters, gaps, retention,
    topic_counts, sinks, timings, leases, headwater, history FROM PUBLIC;
REVOKE ALL ON SEQUENCE dead_letters_id_seq, gaps_number_seq FROM PUBLIC;
DO $$
DECLARE
    granted record;
BEGIN
    EXECUTE format('REVOKE ALL ON SCHEMA %I FROM PUBLIC', current_schema());
    FOR granted IN
        SELECT acl.grantee::regrole AS role, bool_or(acl.verb = 'EXECUTE') AS publishes,
            has_table_privilege(acl.grantee, 'messages', 'SELECT') AS reads,
            has_any_column_privilege(acl.grantee, 'messages', 'INSERT') AS inserts,
            has_table_privilege(acl.grantee, 'deliveries', 'DELETE') AS settles
        FROM (
            SELECT (aclexplode(nspacl)).* FROM pg_namespace WHERE nspname = current_schema()
            UNION SELECT (aclexplode(relacl)).* FROM pg_class WHERE oid = 'messages'::regclass
            UNION SELECT (aclexplode(proacl)).* FROM pg_proc WHERE oid = 'publish_checked'::regproc
        ) AS acl (grantor, grantee, verb, grantable)
        WHERE acl.grantee <> 0 AND NOT pg_has_role(acl.grantee, current_user, 'USAGE')
        GROUP BY acl.grantee
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION publish_checked FROM %s', granted.role);
        IF granted.publishes OR granted.inserts OR NOT granted.reads THEN
            EXECUTE format('GRANT EXECUTE ON FUNCTION publish TO %s', granted.role);
        END IF;
        IF granted.inserts THEN
            EXECUTE format('GRANT EXECUTE ON FUNCTION begin_publishing, next_seq TO %s', granted.role);
        END IF;
        IF granted.settles THEN
            EXECUTE format('GRANT EXECUTE ON FUNCTION publish_checked, ack TO %s', granted.role);
            EXECUTE format('GRANT USAGE ON SEQUENCE dead_letters_id_seq, gaps_number_seq TO %s', granted.role);
        END IF;
    END LOOP;
END $$;
"""

# Roles have the rights on it that they have on `timings`.
_SAMPLES = """
CREATE TABLE samples (
    step    bigint NOT NULL,
    slot    bigint NOT NULL,
    at      bigint NOT NULL,
    figures text NOT NULL,
    PRIMARY KEY (step, slot)
) WITH (fillfactor = 70);
REVOKE ALL ON samples FROM PUBLIC;
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN
        SELECT acl.grantee::regrole AS role, acl.verb
        FROM (SELECT (aclexplode(relacl)).* FROM pg_class WHERE oid = 'timings'::regclass)
            AS acl (grantor, grantee, verb, grantable)
        WHERE acl.grantee <> 0 AND NOT pg_has_role(acl.grantee, current_user, 'USAGE')
    LOOP
        EXECUTE format('GRANT %s ON samples TO %s', granted.verb, granted.role);
    END LOOP;
END $$;
"""

_DEAD_LETTERS_BY_SEQ = "CREATE INDEX dead_letters_by_seq ON dead_letters (seq);"

# The statements that lead from version N to N + 1 stand at index N - 1. A release never changes one that was shipped.
MIGRATIONS: list[str] = [_IDS_BY_TOPIC + _ROLES_AND_LIMITS, _SAMPLES, _DEAD_LETTERS_BY_SEQ]
SCHEMA_VERSION = 1 + len(MIGRATIONS)
OWN_FUNCTIONS = frozenset(re.findall(r"FUNCTION (\w+)\(", FUNCTIONS))


def prepare(connection: PipelinedConnection, schema: str, name: str) -> int:
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
        raise NotALogError(
            "its table `headwater` has lost its rows", where=name, next="Restore a backup, or name another schema"
        )
    return salt


def _bring_up_to_date(connection: PipelinedConnection, schema: str, name: str) -> None:
    """Create or migrate the log, one step in each transaction, so that a later one that fails does not take the earlier
    ones back."""
    while True:
        with _transaction(connection, schema, alone=True):
            version = _version(connection, schema, name)  # another process may have been quicker
            if version == SCHEMA_VERSION:
                return
            if version is None:
                _create(connection, schema, name)
            elif version > SCHEMA_VERSION:
                raise newer_schema(version, SCHEMA_VERSION, name)
            else:
                _migrate(connection, schema, version, name)


def _create(connection: PipelinedConnection, schema: str, name: str) -> None:
    if not _there(connection, "SELECT 1 FROM pg_namespace WHERE nspname = ?", schema):
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
    connection.execute(sql.SQL("REVOKE ALL ON SCHEMA {} FROM PUBLIC").format(sql.Identifier(schema)))
    in_the_way = (_tables(connection, schema) & OWN_TABLES) | (_functions(connection, schema) & OWN_FUNCTIONS)
    if in_the_way:
        raise NotALogError(
            f"the schema has things of the log's names ({', '.join(sorted(in_the_way)[:3])}) and no log",
            where=name,
            next="Name another schema: ?schema=…",
        )
    try:
        _make_functions(connection, schema)
        connection.execute(SCHEMA.encode())
    except (errors.DuplicateTable, errors.DuplicateObject) as exc:
        raise NotALogError(
            f"something of the log's names is in the way ({exc.diag.message_primary})",
            where=name,
            next="Name another schema: ?schema=…",
        ) from exc
    for fact in facts_of_new_log(SCHEMA_VERSION):
        connection.ask(SQL["set_fact"], fact)


def _make_functions(connection: PipelinedConnection, schema: str) -> None:
    connection.execute(FUNCTIONS.replace("{schema}", schema).encode())


def _migrate(connection: PipelinedConnection, schema: str, version: int, name: str) -> None:
    connection.execute(f"SELECT {SQL['lock_alone']}".encode())  # no writer is in the middle of something
    owner = connection.ask(
        "SELECT tableowner FROM pg_tables WHERE schemaname = ? AND tablename = 'headwater'", (schema,)
    ).value()
    try:
        # What is new belongs to the log's owner too, whichever superuser opens the log first.
        connection.execute(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(owner)))
        connection.execute(MIGRATIONS[version - 1].encode())
        _make_functions(connection, schema)
    except errors.InsufficientPrivilege as exc:
        raise ReadOnlyError(
            f"only its owner, {owner}, can take the log to schema {version + 1} ({exc.diag.message_primary})",
            where=name,
            next="Open it once as its owner: headwater doctor postgres://…",
        ) from exc
    except psycopg.Error as exc:
        raise StoreError(
            f"the step from schema {version} to {version + 1} failed ({exc.diag.message_primary or exc})",
            where=name,
            next="Fix the cause and open the log again; the step was rolled back",
        ) from exc
    connection.ask(SQL["set_fact"], ("schema_version", version + 1))


@contextmanager
def _transaction(connection: PipelinedConnection, schema: str, *, alone: bool = False) -> Iterator[None]:
    connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
    try:
        connection.execute(sql.SQL("SET LOCAL search_path = {}, pg_temp").format(sql.Identifier(schema)))
        if alone:
            connection.ask("SELECT pg_advisory_xact_lock(hashtext('headwater'), hashtext(?))", (schema,))
        yield
        connection.execute("COMMIT")
    except BaseException:
        if not connection.closed:
            connection.execute("ROLLBACK")
        raise


def _version(connection: PipelinedConnection, schema: str, name: str) -> int | None:
    """The version of the schema; None where there is no log yet."""
    if "headwater" not in _tables(connection, schema):
        return None
    if not _there(connection, "SELECT 1 WHERE has_schema_privilege(?, 'USAGE')", schema):
        raise ReadOnlyError(
            f"this role may not use the schema {schema}",
            where=name,
            next=f"As its owner: GRANT USAGE ON SCHEMA {schema} TO …; docs/reference/postgres.md has all grants",
        )
    version = _fact(connection, "schema_version")
    if version is None:
        raise NotALogError(
            "the schema has a table `headwater` that is none of the log's",
            where=name,
            next="Name another schema: ?schema=…",
        )
    return version


def _tables(connection: PipelinedConnection, schema: str) -> set[str]:
    rows = connection.ask("SELECT tablename FROM pg_tables WHERE schemaname = ?", (schema,)).rows()
    return {table for (table,) in rows}


def _functions(connection: PipelinedConnection, schema: str) -> set[str]:
    query = "SELECT proname FROM pg_proc JOIN pg_namespace AS place ON place.oid = pronamespace WHERE nspname = ?"
    return {function for (function,) in connection.ask(query, (schema,)).rows()}


def _fact(connection: PipelinedConnection, name: str) -> int | None:
    try:
        with connection.transaction():
            fact = connection.ask(SQL["fact"], (name,)).value()
    except (errors.UndefinedTable, errors.UndefinedColumn):
        return None
    return fact if isinstance(fact, int) else None


def _there(connection: PipelinedConnection, query: str, *bindings: str) -> bool:
    return connection.ask(query, bindings).row() is not None
