"""Making a log in a database, finding one, refusing what is none, and steps to a newer schema."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from postgres_server import PostgresServer
from postgres_version_1 import make_version_1

from headwater.delivery.publishing import DedupeWindow
from headwater.errors import NewerSchemaError, NotALogError, StoreError
from headwater.message import make_draft
from headwater.stores.postgres import PostgresStore, migrations
from headwater.stores.postgres.connection import connect, place_of
from headwater.stores.postgres.migrations import SCHEMA_VERSION, prepare
from headwater.stores.postgres.pipelined import PipelinedConnection
from headwater.stores.sql import OWN_TABLES

NOW = 1_700_000_000_000
NAME = "the log"
WAIT_S = 30.0

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def database(postgres: PostgresServer) -> Iterator[str]:
    url = postgres.new_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture
def schema() -> str:
    return f"migrated_{next(_numbers)}"


@pytest.fixture
def connection(database: str) -> Iterator[PipelinedConnection]:
    with connect(place_of(database), application="test") as opened:
        yield opened


def relations(connection: PipelinedConnection, schema: str) -> set[str]:
    query = "SELECT relname FROM pg_class WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = %s)"
    return {name for (name,) in connection.execute(query, (schema,))}


def facts(connection: PipelinedConnection, schema: str) -> dict[str, int]:
    return dict(connection.execute(f"SELECT name, value FROM {schema}.headwater").fetchall())


def test_a_log_is_made_once_and_found_again(connection: PipelinedConnection, schema: str) -> None:
    salt = prepare(connection, schema, NAME)
    made, known = relations(connection, schema), facts(connection, schema)
    assert made >= OWN_TABLES
    assert known.keys() == {"schema_version", "salt", "created_at", "counted_to"}
    assert (known["schema_version"], known["salt"], known["counted_to"]) == (SCHEMA_VERSION, salt, 0)
    assert prepare(connection, schema, NAME) == salt
    assert (relations(connection, schema), facts(connection, schema)) == (made, known)
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_two_schemas_are_two_logs(database: str, connection: PipelinedConnection, schema: str) -> None:
    stores = [PostgresStore(f"{database}?schema={schema}_{name}") for name in ("one", "two")]
    for number, store in enumerate(stores, start=1):
        with store.write() as writer:
            drafts = [make_draft("a", None, {}, NOW)] * number
            assert writer.append(drafts, NOW, DedupeWindow()).seqs == list(range(1, number + 1))
    for number, store in enumerate(stores, start=1):
        with store.read() as reader:
            assert reader.last_seq() == number
        store.close()
    assert stores[0].salt != stores[1].salt


def test_many_that_make_it_at_once_make_one(database: str, connection: PipelinedConnection, schema: str) -> None:
    openers = 6
    others = [connect(place_of(database), application="test") for _ in range(openers)]
    connection.execute("BEGIN")  # all of them find nothing, and then wait
    connection.execute("SELECT pg_advisory_xact_lock(hashtext('headwater'), hashtext(%s))", (schema,))
    with ThreadPoolExecutor(openers) as pool:
        preparing = [pool.submit(prepare, other, schema, NAME) for other in others]
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        while connection.execute(waiting).fetchone() != (openers,):
            assert not any(each.done() for each in preparing)
        connection.execute("COMMIT")
        salts = {each.result(WAIT_S) for each in preparing}
    for other in others:
        other.close()
    assert len(salts) == 1


def test_a_role_that_may_not_create_can_use_what_is_there(
    database: str, connection: PipelinedConnection, schema: str
) -> None:
    prepare(connection, schema, NAME)
    connection.execute(f"CREATE ROLE {schema} LOGIN")
    connection.execute(f"GRANT USAGE ON SCHEMA {schema} TO {schema}")
    connection.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {schema}")
    connection.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA {schema} TO {schema}")
    connection.execute(f"GRANT ALL ON ALL FUNCTIONS IN SCHEMA {schema} TO {schema}")
    store = PostgresStore(f"{database.replace('postgres@', f'{schema}@')}?schema={schema}")
    with store.write() as writer:
        assert writer.append([make_draft("a", None, {}, NOW)], NOW, DedupeWindow()).seqs == [1]
    store.close()


# --- what is in the way -------------------------------------------------------------------------------------


def test_a_newer_one_is_refused_and_left_as_it_is(connection: PipelinedConnection, schema: str) -> None:
    prepare(connection, schema, NAME)
    newer = SCHEMA_VERSION + 1
    connection.execute(f"UPDATE {schema}.headwater SET value = {newer} WHERE name = 'schema_version'")
    with pytest.raises(NewerSchemaError, match=f"schema {newer}.*up to {SCHEMA_VERSION}") as refused:
        prepare(connection, schema, NAME)
    assert "Upgrade" in refused.value.next
    assert facts(connection, schema)["schema_version"] == newer


@pytest.mark.parametrize(
    "own",
    [
        "CREATE TABLE {}.messages (mine integer)",
        "CREATE TABLE {}.headwater (mine integer)",
        "CREATE TABLE {}.headwater (name text, value text)",
        "CREATE VIEW {}.deliveries AS SELECT 1 AS mine",
        "CREATE FUNCTION {}.next_seq() RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint'",
    ],
)
def test_names_of_the_users_in_the_way_are_left_alone(connection: PipelinedConnection, schema: str, own: str) -> None:
    connection.execute(f"CREATE SCHEMA {schema}")
    connection.execute(own.replace("{}", schema).encode())
    before = relations(connection, schema)
    with pytest.raises(NotALogError, match="log") as refused:
        prepare(connection, schema, NAME)
    assert "schema=" in refused.value.next
    assert relations(connection, schema) == before
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_other_tables_in_the_schema_do_no_harm(connection: PipelinedConnection, schema: str) -> None:
    connection.execute(f"CREATE SCHEMA {schema}; CREATE TABLE {schema}.mine (n integer)")
    prepare(connection, schema, NAME)
    assert relations(connection, schema) >= OWN_TABLES | {"mine"}


def test_a_database_that_keeps_no_unicode_is_refused(postgres: PostgresServer) -> None:
    with postgres.administration() as administration:
        administration.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    with PipelinedConnection.connect(postgres.url_of("latin")) as connection, pytest.raises(StoreError, match="LATIN1"):
        prepare(connection, "headwater", NAME)
    postgres.drop_database(postgres.url_of("latin"))


# --- steps to a newer schema --------------------------------------------------------------------------------


@pytest.fixture
def two_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if two releases had followed."""
    steps = [
        "CREATE TABLE extra (n bigint); INSERT INTO extra SELECT count(*) FROM messages",
        "ALTER TABLE extra ADD COLUMN m bigint",
    ]
    monkeypatch.setattr(migrations, "MIGRATIONS", [*migrations.MIGRATIONS, *steps])
    monkeypatch.setattr(migrations, "SCHEMA_VERSION", SCHEMA_VERSION + 2)
    return migrations.MIGRATIONS


@pytest.fixture
def old(connection: PipelinedConnection, schema: str) -> str:
    """A log of today's version with a message in it."""
    prepare(connection, schema, NAME)
    connection.execute(f"INSERT INTO {schema}.messages (topic, data) VALUES ('a', '1')")
    return schema


def test_an_older_one_takes_all_steps(connection: PipelinedConnection, old: str, two_steps: Any) -> None:
    salt = facts(connection, old)["salt"]
    assert prepare(connection, old, NAME) == salt
    assert facts(connection, old)["schema_version"] == SCHEMA_VERSION + 2
    assert connection.execute(f"SELECT n, m FROM {old}.extra").fetchall() == [(1, None)]
    assert prepare(connection, old, NAME) == salt
    assert connection.execute(f"SELECT data FROM {old}.messages").fetchall() == [(1,)]


def test_a_step_that_fails_leaves_nothing_and_those_before_it_stay(
    connection: PipelinedConnection, old: str, two_steps: list[str]
) -> None:
    mended, two_steps[-1] = two_steps[-1], "CREATE TABLE half (n bigint); SELECT 1 / 0"
    with pytest.raises(
        StoreError, match=f"from schema {SCHEMA_VERSION + 1} to {SCHEMA_VERSION + 2} failed .*division by zero"
    ):
        prepare(connection, old, NAME)
    assert facts(connection, old)["schema_version"] == SCHEMA_VERSION + 1
    assert "half" not in relations(connection, old)
    two_steps[-1] = mended
    prepare(connection, old, NAME)
    assert facts(connection, old)["schema_version"] == SCHEMA_VERSION + 2


def test_many_that_upgrade_it_at_once_do_it_once(database: str, old: str, two_steps: Any) -> None:
    def upgrade(_: int) -> int:
        with connect(place_of(database), application="test") as mine:
            return prepare(mine, old, NAME)

    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(upgrade, range(6), timeout=WAIT_S))) == 1
    with connect(place_of(database), application="test") as connection:
        assert connection.execute(f"SELECT count(*) FROM {old}.extra").fetchall() == [(1,)]


# --- logs of older versions ---------------------------------------------------------------------------------


def shape_of(connection: PipelinedConnection, schema: str) -> set[tuple[Any, ...]]:
    """Columns, constraints and indexes."""
    columns = f"""
        SELECT table_name, column_name, data_type, collation_name, column_default, is_nullable
        FROM information_schema.columns WHERE table_schema = '{schema}'
    """
    constraints = f"""
        SELECT conrelid::regclass::text, conname, replace(pg_get_constraintdef(oid), ' NOT VALID', '')
        FROM pg_constraint
        WHERE connamespace = '{schema}'::regnamespace AND contype <> 'n'
    """
    indexes = f"SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = '{schema}'"
    found = [row for query in (columns, constraints, indexes) for row in connection.execute(query.encode())]
    return {tuple(value.replace(schema, "") if isinstance(value, str) else value for value in row) for row in found}


@pytest.fixture
def version_1(connection: PipelinedConnection, schema: str) -> str:
    """A log as version 1 made it: five messages, each with an id; the message of the last one is gone."""
    connection.execute(f"CREATE SCHEMA {schema}")
    make_version_1(connection, schema)
    connection.execute(
        f"""
        INSERT INTO {schema}.messages (seq, topic, data, published_at, id)
        SELECT n, 'a.' || n % 2, 'null', {NOW}, 'id-' || n FROM generate_series(1, 5) AS n;
        INSERT INTO {schema}.remembered_ids (seq, published_at, id)
        SELECT seq, published_at, id FROM {schema}.messages;
        DELETE FROM {schema}.messages WHERE seq = 5
        """.encode()
    )
    return schema


def test_an_old_log_looks_like_a_new_one(connection: PipelinedConnection, version_1: str) -> None:
    prepare(connection, version_1, NAME)
    new = f"{version_1}_new"
    prepare(connection, new, NAME)
    assert shape_of(connection, version_1) == {
        tuple(value.replace("_new", "") if isinstance(value, str) else value for value in row)
        for row in shape_of(connection, new)
    }


def test_ids_are_remembered_on_the_topics_they_were_published_on(database: str, version_1: str) -> None:
    """One whose message is gone is forgotten: known on all topics, it could swallow a message of another publisher."""
    store = PostgresStore(f"{database}?schema={version_1}")
    published = [("a.1", "id-3"), ("a.0", "id-3"), ("a.1", "id-5")]
    drafts = [make_draft(topic, None, {"id": id}, NOW) for topic, id in published]
    with store.write() as writer:
        assert writer.append(drafts, NOW, DedupeWindow()).seqs == [3, 6, 7]
    store.close()


def test_the_function_publishes_by_topic_too(connection: PipelinedConnection, version_1: str) -> None:
    prepare(connection, version_1, NAME)

    def publish(topic: str) -> Any:
        call = f"SELECT {version_1}.publish_checked(%s, '1', id => 'id-3', published_at => {NOW})"
        return connection.execute(call.encode(), (topic,)).fetchone()

    assert [publish(topic) for topic in ("a.1", "b", "a.1", "b")] == [(3,), (6,), (3,), (6,)]


def test_a_role_gets_the_rights_on_the_figures_that_it_has_on_the_timings(
    connection: PipelinedConnection, version_1: str
) -> None:
    reader, application = f"{version_1}_reader", f"{version_1}_application"
    for role, verbs in ((reader, "SELECT"), (application, "SELECT, INSERT, UPDATE, DELETE")):
        connection.execute(f"CREATE ROLE {role}")
        connection.execute(f"GRANT USAGE ON SCHEMA {version_1} TO {role}")
        connection.execute(f"GRANT {verbs} ON {version_1}.timings TO {role}")
    prepare(connection, version_1, NAME)

    def may(role: str, verb: str) -> Any:
        query = "SELECT has_table_privilege(%s, %s, %s)"
        return connection.execute(query, (role, f"{version_1}.samples", verb)).fetchone()

    assert [may(reader, "SELECT"), may(reader, "INSERT")] == [(True,), (False,)]
    assert [may(application, verb) for verb in ("SELECT", "INSERT", "UPDATE")] == [(True,)] * 3
    assert may("public", "SELECT") == (False,)
