"""The user's own SQL in a transaction of the log: which mistakes are caught, and what stays possible."""

from collections.abc import Iterator

import psycopg
import pytest
from postgres_server import PostgresServer

from headwater.delivery.publishing import DedupeWindow
from headwater.errors import SqlError
from headwater.message import make_draft
from headwater.ports.records import Selection
from headwater.stores.postgres import PostgresStore
from headwater.stores.postgres.external_tx import in_psycopgs_spelling
from headwater.stores.postgres.writer import PostgresWriter
from headwater.topics import parse_pattern

NOW = 1_700_000_000_000
EVERYTHING = Selection(parse_pattern(">"))


@pytest.fixture(scope="module")
def shared(postgres: PostgresServer) -> Iterator[PostgresStore]:
    """With a table of the user's beside it, where a connection of the user's finds it."""
    url = postgres.new_database()
    opened = PostgresStore(url)
    with opened.write() as writer:
        writer.execute("CREATE TABLE mine (n integer PRIMARY KEY, data jsonb)")
        publish(writer, 1, 2)
    yield opened
    opened.close()
    postgres.drop_database(url)


@pytest.fixture
def store(shared: PostgresStore) -> PostgresStore:
    with shared.write() as writer:
        writer.execute("DELETE FROM mine")
    return shared


def publish(writer: PostgresWriter, *data: object) -> list[int]:
    return writer.append([make_draft("a", each, {}, NOW) for each in data], NOW, DedupeWindow()).seqs


def test_names_are_found_as_on_a_connection_of_the_users_own(store: PostgresStore) -> None:
    with store.write() as writer:
        writer.execute("INSERT INTO mine VALUES (1)")
        assert publish(writer, "more") == [writer.last_seq()], "and the log's own in its schema"
    with psycopg.connect(store.place.conninfo) as own:
        assert own.execute("SELECT n FROM public.mine").fetchall() == [(1,)]
    with store.write() as writer:
        assert writer.execute("SELECT count(*) FROM messages") == [(writer.last_seq(),)]
        writer.execute("CREATE TABLE pruned (n integer)")
        writer.execute("INSERT INTO pruned VALUES (1)")
        assert writer.pruned(0, 10) == [], "a table of the user's of that name is another one"
        writer.execute("DROP TABLE pruned")


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM messages",
        "delete from headwater.messages where seq = 99",
        "/* why not */ UPDATE subscriptions SET floor = 0",
        "INSERT INTO messages (topic, data) VALUES ('a', '1')",
        "WITH gone AS (DELETE FROM deliveries RETURNING seq) SELECT * FROM gone",
        "MERGE INTO sinks USING mine ON false WHEN NOT MATCHED THEN INSERT VALUES ('s', 1, 1)",
        "TRUNCATE messages",
        "DROP TABLE dead_letters",
        "DROP SCHEMA headwater CASCADE",
        "ALTER TABLE messages ADD COLUMN mine integer",
        "ALTER TABLE headwater.leases RENAME TO rent",
        "CREATE INDEX ON messages (topic)",
        "CREATE TRIGGER t AFTER INSERT ON messages EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        "COMMIT",
        "END",
        "ROLLBACK",
        "BEGIN",
        "SAVEPOINT x",
        "RELEASE headwater",
        "SET search_path = public",
        "PREPARE TRANSACTION 'x'",
        "LOCK TABLE messages",
        "EXPLAIN ANALYZE DELETE FROM messages",
        "",
        ";",
    ],
)
def test_the_log_and_the_transaction_are_out_of_reach(store: PostgresStore, sql: str) -> None:
    with store.write() as writer:
        writer.execute("INSERT INTO mine VALUES (1)")
        with pytest.raises(SqlError, match="the log's own tables or the transaction itself"):
            writer.execute(sql)
        writer.execute("INSERT INTO mine VALUES (2)")
    with store.write() as writer:
        assert writer.execute("SELECT n FROM mine ORDER BY n") == [(1,), (2,)]
        assert publish(writer, 3) == [writer.last_seq()]
        assert writer.scan(EVERYTHING, 0, 2).scanned_to == 2, "nothing is gone"


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("INSERT INTO mine VALUES (1)", "duplicate key"),
        ("INSERT INTO mine VALUES ('x')", "invalid input"),
        ("SELECT * FROM nowhere", "nowhere"),
        ("DELETE FROM mine; DELETE FROM messages", "multiple commands"),
        ("SELECT 1; COMMIT", "multiple commands"),
        ("SELECT ?", "parameter|operator|syntax"),
        ("DO $$ BEGIN COMMIT; END $$", "invalid transaction termination"),
    ],
)
def test_a_statement_that_fails_leaves_the_transaction_as_it_was(store: PostgresStore, sql: str, problem: str) -> None:
    with store.write() as writer:
        writer.execute("INSERT INTO mine VALUES (1)")
        with pytest.raises(SqlError, match=problem):
            writer.execute(sql)
        [seq] = publish(writer, 3)
    with store.write() as writer:
        assert (writer.last_seq(), writer.execute("SELECT n FROM mine")) == (seq, [(1,)])


def test_a_trigger_of_the_users_may_publish(store: PostgresStore) -> None:
    with store.write() as writer:
        writer.execute(
            "CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " INSERT INTO headwater.messages (topic, data) VALUES ('mine', to_json(NEW.n)); RETURN NEW; END $$"
        )
        writer.execute("CREATE TRIGGER tell AFTER INSERT ON mine FOR EACH ROW EXECUTE FUNCTION tell()")
    with store.write() as writer:
        [before] = publish(writer, "before")
        writer.execute("INSERT INTO mine VALUES (7)")
        assert publish(writer, "after") == [before + 2]
        assert writer.last_seq() == before + 2
    with store.read() as reader:
        found = reader.scan(EVERYTHING, before - 1, 10).messages
        assert [message.data for message in found] == ["before", 7, "after"]
    with store.write() as writer:
        writer.execute("DROP TRIGGER tell ON mine")


# --- how bindings are spelled -------------------------------------------------------------------------------


def test_bindings_in_both_spellings(store: PostgresStore) -> None:
    with store.write() as writer:
        writer.execute("INSERT INTO mine VALUES (?, ?)", (1, '{"a": "100%"}'))
        writer.execute("INSERT INTO mine VALUES (%s, %s)", (2, '{"b": 1}'))
        writer.execute("INSERT INTO mine VALUES (:n, :data)", {"n": 3, "data": None})
        writer.execute("INSERT INTO mine VALUES (%(n)s, %(data)s)", {"n": 4, "data": None})
        assert writer.execute("SELECT n FROM mine WHERE data ? %s", ("b",)) == [(2,)]
        assert writer.execute("SELECT '100%', '?', ':n', 1::int % 2, n FROM mine WHERE n = ?", (3,)) == [
            ("100%", "?", ":n", 1, 3)
        ]
        assert writer.execute("SELECT '100%', n FROM mine WHERE data IS NULL ORDER BY n") == [("100%", 3), ("100%", 4)]


@pytest.mark.parametrize(
    ("sql", "spelled"),
    [
        ("a = ? AND b = ?", "a = %s AND b = %s"),
        ("a = :a::text AND b = :b_2", "a = %(a)s::text AND b = %(b_2)s"),
        ("'?' || ? -- ?\n || \":x\" /* ? */", "'?' || %s -- ?\n || \":x\" /* ? */"),
        ("? || $$?$$ || $t$ :n $t$", "%s || $$?$$ || $t$ :n $t$"),
        ("a[1:n] % ?", "a[1:n] %% %s"),
        ("'it''s ?' LIKE ?", "'it''s ?' LIKE %s"),
        ("a ? %s", "a ? %s"),
        ("a = %(a)s AND b ?| c", "a = %(a)s AND b ?| c"),
    ],
)
def test_spelling(sql: str, spelled: str) -> None:
    assert in_psycopgs_spelling(sql) == spelled
