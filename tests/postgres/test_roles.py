"""What each kind of role can and cannot do with a log, by the very statements of docs/reference/postgres.md."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from postgres_server import PostgresServer
from postgres_version_1 import make_version_1
from psycopg.errors import CheckViolation, InsufficientPrivilege, UndefinedFunction

import headwater
from headwater.errors import InvalidOptionError, LockedError, ReadOnlyError, StoreError
from headwater.message import DATA_BYTES_MAX, HEADERS_BYTES_MAX, ID_CHARS_MAX, NAME_CHARS_MAX, PRIORITY_MAX, VERSION_MAX
from headwater.pipeline.logs import Condition, Range, backend_of, log_identity, open_reader, read_table
from headwater.stores.dedupe_postgres import PostgresDedupe
from headwater.stores.postgres import migrations
from headwater.stores.postgres.connection import connect, place_of
from headwater.stores.postgres.migrations import OWN_FUNCTIONS, prepare
from headwater.stores.sql import OWN_TABLES
from headwater.topics import check_topic
from headwater.topics.topic import TOPIC_BYTES_MAX, TOPIC_TOKENS_MAX
from headwater.transports.postgres import PostgresArchive

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "postgres.md"
KINDS = ["publisher", "inserter", "reader", "application", "stranger"]
PUBLISH, INSERT = "SELECT headwater.publish('a', '1')", "INSERT INTO headwater.messages (topic, data) VALUES ('a', '1')"

_numbers = itertools.count(1)


def documented(first_words: str) -> str:
    """The statements of the block in the docs that begins so."""
    blocks = re.findall(r"^```sql\n(.*?)^```$", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    [found] = [block for block in blocks if block.startswith(first_words)]
    return str(found)


def url_as(role: str, database: str) -> str:
    return database.replace("postgres@", f"{role}@")


class Roles:
    """A database with a log that has an owner of its own, and a login for each kind of role."""

    def __init__(self, database: str) -> None:
        self.database = database

    def url(self, kind: str) -> str:
        return url_as(f"some_{kind}", self.database)

    def run(self, kind: str, statement: str, *bindings: object) -> list[tuple[object, ...]]:
        with psycopg.connect(self.url(kind)) as connection:
            cursor = connection.execute(statement.encode(), bindings or None)
            return cursor.fetchall() if cursor.description else []


@pytest.fixture(scope="module")
def roles(postgres: PostgresServer) -> Iterator[Roles]:
    database = postgres.new_database()
    made = Roles(database)
    with psycopg.connect(database, autocommit=True) as admin:
        admin.execute("CREATE ROLE some_owner LOGIN")
        admin.execute(f"GRANT CREATE ON DATABASE {database.rpartition('/')[2]} TO some_owner")
        with headwater.open(made.url("owner")) as log:
            log.publish("orders.new", {"order": 17})
        for kind in KINDS:
            admin.execute(f"CREATE ROLE some_{kind} LOGIN")
            if kind != "stranger":
                admin.execute(documented(f"CREATE ROLE headwater_{kind};").encode())
                admin.execute(f"GRANT headwater_{kind} TO some_{kind}")
    yield made
    postgres.drop_database(database)
    with postgres.administration() as admin:
        for kind in ["owner", *KINDS]:
            admin.execute(f"DROP ROLE IF EXISTS some_{kind}, headwater_{kind}")


# --- rights of a role ---------------------------------------------------------------------------------------

EVERYTHING_ELSE = {
    **{f"SELECT * FROM headwater.{name} LIMIT 1": {"reader", "application"} for name in sorted(OWN_TABLES)},
    **{f"DELETE FROM headwater.{name} WHERE false": {"application"} for name in sorted(OWN_TABLES)},
    **{f"TRUNCATE headwater.{name}": set() for name in sorted(OWN_TABLES)},
    **{f"DROP TABLE headwater.{name}": set() for name in sorted(OWN_TABLES)},
}
RIGHTS: dict[str, set[str]] = {
    PUBLISH: {"publisher", "application"},
    INSERT: {"inserter", "application"},
    "INSERT INTO headwater.messages (topic, data, id, headers) VALUES ('a', '1', 'x', '{}')": {
        "inserter",
        "application",
    },
    "INSERT INTO headwater.messages (topic, data, published_at) VALUES ('a', '1', 1)": {"application"},
    "INSERT INTO headwater.messages (topic, data, seq) VALUES ('a', '1', 1000000)": {"application"},
    "INSERT INTO headwater.messages (topic, data, size) VALUES ('a', '1', 7)": {"application"},
    "INSERT INTO headwater.messages (topic, data, checked) VALUES ('a', '1', 2)": {"application"},
    "UPDATE headwater.messages SET data = '2' WHERE seq = 1": {"application"},
    "UPDATE headwater.subscriptions SET floor = 0": {"application"},
    "UPDATE headwater.headwater SET value = 0 WHERE name = 'nothing'": {"application"},
    "SELECT * FROM headwater.history": {"reader", "application"},
    "SELECT headwater.ack('billing', 1, 1, 1)": {"application"},
    "SELECT headwater.begin_publishing()": {"application"},
    "SELECT headwater.next_seq()": {"inserter", "application"},
    "SELECT headwater.publish_checked('a', '1', published_at => 1)": {"application"},
    "SELECT nextval('headwater.dead_letters_id_seq')": {"application"},
    "SELECT setval('headwater.dead_letters_id_seq', 1)": set(),
    "CREATE TABLE headwater.mine (n integer)": set(),
    "CREATE FUNCTION headwater.mine() RETURNS integer LANGUAGE sql AS 'SELECT 1'": set(),
    "CREATE TRIGGER mine BEFORE INSERT ON headwater.messages EXECUTE FUNCTION headwater.keep_last_seq()": set(),
    "ALTER TABLE headwater.messages ADD COLUMN mine integer": set(),
    **EVERYTHING_ELSE,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_role_can_do_what_its_kind_may_and_nothing_else(roles: Roles, kind: str) -> None:
    surprises = []
    with psycopg.connect(roles.url(kind)) as connection:
        for statement, allowed in RIGHTS.items():
            try:
                connection.execute(statement.encode())
                could = True
            except InsufficientPrivilege:
                could = False
            connection.rollback()
            if could != (kind in allowed):
                surprises.append(f"{'could' if could else 'could not'}: {statement}")
    assert surprises == []


def rights_of_public(connection: psycopg.Connection) -> list[tuple[str]]:
    return connection.execute(
        "SELECT proname::text FROM pg_proc, aclexplode(coalesce(proacl, acldefault('f', proowner))) AS acl"
        " WHERE pronamespace = 'headwater'::regnamespace AND acl.grantee = 0"
        " UNION ALL SELECT relname FROM pg_class, aclexplode(relacl) AS acl"
        " WHERE relnamespace = 'headwater'::regnamespace AND acl.grantee = 0"
        " UNION ALL SELECT nspname FROM pg_namespace, aclexplode(nspacl) AS acl"
        " WHERE nspname = 'headwater' AND acl.grantee = 0"
    ).fetchall()


def test_public_has_no_right_at_all(roles: Roles) -> None:
    with psycopg.connect(roles.database) as admin:
        functions = admin.execute(
            "SELECT proname FROM pg_proc WHERE pronamespace = 'headwater'::regnamespace"
        ).fetchall()
        assert rights_of_public(admin) == []
    assert {name for (name,) in functions} == OWN_FUNCTIONS


def test_rights_to_public_that_a_database_gives_by_itself_are_taken_back(postgres_url: str) -> None:
    with connect(place_of(postgres_url), application="test") as admin:
        for kind in ("TABLES", "SEQUENCES", "SCHEMAS"):
            admin.execute(f"ALTER DEFAULT PRIVILEGES GRANT ALL ON {kind} TO PUBLIC")
        prepare(admin, "headwater", "the log")
        assert rights_of_public(admin) == []


# --- publishing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["publisher", "inserter"])
def test_the_time_of_a_message_is_the_databases(roles: Roles, kind: str) -> None:
    statement = PUBLISH if kind == "publisher" else INSERT
    [(before,)] = roles.run("owner", "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint")
    roles.run(kind, statement)
    [(published_at,)] = roles.run("owner", "SELECT published_at FROM headwater.messages ORDER BY seq DESC LIMIT 1")
    assert isinstance(before, int)
    assert isinstance(published_at, int)
    assert 0 <= published_at - before < 60_000


@pytest.mark.parametrize("setting", ["published_at", "remembered_since", "remembered_count", "salt", "seq", "checked"])
def test_a_publisher_cannot_say_what_headwater_says(roles: Roles, setting: str) -> None:
    with pytest.raises(UndefinedFunction):
        roles.run("publisher", f"SELECT headwater.publish('a', '1', {setting} => 1)")


def test_a_publisher_is_reported_a_repeated_id_and_wakes_readers(roles: Roles) -> None:
    with psycopg.connect(roles.url("stranger"), autocommit=True) as listening:
        listening.execute("LISTEN headwater_headwater")
        first = roles.run("publisher", "SELECT headwater.publish('a', '1', id => 'once', priority => 5)")
        assert [each.payload for each in listening.notifies(timeout=20, stop_after=1)] == [""]
    assert roles.run("publisher", "SELECT headwater.publish('a', '1', id => 'once')") == first


LIMITS: dict[str, list[object]] = {
    "topic": [
        "é" * (TOPIC_BYTES_MAX // 2),
        "é" * (TOPIC_BYTES_MAX // 2) + "x",
        ".".join("x" * TOPIC_TOKENS_MAX),
        ".".join("x" * (TOPIC_TOKENS_MAX + 1)),
    ],
    "data": [f'"{"x" * (DATA_BYTES_MAX - 2)}"', f'"{"x" * (DATA_BYTES_MAX - 1)}"'],
    "headers": [
        f'{{"h":"{"x" * (HEADERS_BYTES_MAX - 8)}"}}',
        f'{{"h":"{"x" * (HEADERS_BYTES_MAX - 7)}"}}',
        "{}",
        "[]",
    ],
    "id": ["é" * ID_CHARS_MAX, "é" * (ID_CHARS_MAX + 1), "x", ""],
    **{
        name: ["é" * NAME_CHARS_MAX, "é" * (NAME_CHARS_MAX + 1), "x", ""]
        for name in ("from", "to", "reply_to", "correlation_id", "type", "content_type", "traceparent")
    },
    "version": [VERSION_MAX, VERSION_MAX + 1, 0, -1],
    "priority": [PRIORITY_MAX, PRIORITY_MAX + 1, -PRIORITY_MAX, -PRIORITY_MAX - 1],
}


@pytest.mark.parametrize(("kind", "migrated"), [("publisher", False), ("inserter", False), ("inserter", True)])
def test_the_limits_of_a_publish_hold_for_sql(
    roles: Roles, kind: str, migrated: bool, request: pytest.FixtureRequest
) -> None:
    """Values come in pairs: one at the limit, one over it."""
    database = request.getfixturevalue("old_log").database if migrated else roles.database
    with psycopg.connect(database if migrated else roles.url(kind), autocommit=True) as connection:
        for name, values in LIMITS.items():
            for value, is_over in zip(values, itertools.cycle([False, True]), strict=False):
                given = {"topic": "a", "data": "1", name: value}
                names, marks = ", ".join(f'"{each}"' for each in given), ", ".join(["%s"] * len(given))
                statement = f"INSERT INTO headwater.messages ({names}) VALUES ({marks})"
                if kind == "publisher":
                    named = ", ".join(f'"{each}" => %s' for each in given)
                    statement = f"SELECT headwater.publish({named})"
                if is_over:
                    with pytest.raises(CheckViolation, match="must"):
                        connection.execute(statement.encode(), tuple(given.values()))
                else:
                    connection.execute(statement.encode(), tuple(given.values()))


def test_sql_takes_the_topics_that_python_takes(roles: Roles) -> None:
    def is_topic(character: str) -> bool:
        try:
            return check_topic(f"a{character}b") is not None
        except headwater.errors.InvalidTopicError:
            return False

    plane = [chr(code) for code in range(1, 0x10000) if not 0xD800 <= code < 0xE000]
    with psycopg.connect(roles.database) as admin:
        [(checks,)] = admin.execute(
            "SELECT string_agg(regexp_replace(pg_get_constraintdef(oid), '^CHECK ', ''), ' AND ') FROM pg_constraint"
            " WHERE conrelid = 'headwater.messages'::regclass AND conname LIKE 'topic must%'"
        )
        taken = admin.execute(
            f"SELECT c FROM (SELECT c, 'a' || c || 'b' AS topic, NULL AS checked FROM unnest(%s::text[]) AS c) AS asked"
            f" WHERE {checks.replace('%', '%%')}".encode(),
            (plane,),
        ).fetchall()
    assert {character for (character,) in taken} == set(filter(is_topic, plane))


# --- names that another role has made -----------------------------------------------------------------------


def test_functions_look_nothing_up_where_others_can_write(roles: Roles) -> None:
    """Each takes its operators and functions from pg_catalog first, and temporary tables last."""
    with psycopg.connect(roles.database) as admin:
        found = admin.execute(
            "SELECT proname::text, proconfig FROM pg_proc WHERE pronamespace = 'headwater'::regnamespace"
        ).fetchall()
    assert {name: settings for name, settings in found if settings != ["search_path=pg_catalog, pg_temp"]} == {}


TRAPS = {
    # The same signature as PostgreSQL's own, and one that fits the call better.
    "pg_notify": "CREATE FUNCTION headwater.pg_notify(text, text) RETURNS void {}",
    "hashtext": "CREATE FUNCTION headwater.hashtext(text) RETURNS integer {}",
    "octet_length": "CREATE FUNCTION headwater.octet_length(text) RETURNS integer {}",
    "*": (
        "CREATE FUNCTION headwater.times(numeric, integer) RETURNS numeric {};"
        "CREATE OPERATOR headwater.* (LEFTARG = numeric, RIGHTARG = integer, FUNCTION = headwater.times)"
    ),
}
_SPRINGS = "LANGUAGE plpgsql AS $trap$ BEGIN RAISE EXCEPTION 'sprung by %', current_user; END $trap$"


@pytest.mark.parametrize("name", TRAPS)
def test_what_is_made_in_the_schema_runs_with_its_callers_rights_only(roles: Roles, name: str) -> None:
    """Even a role that may create things in the schema, which no kind of role may, does not become its owner."""
    with psycopg.connect(roles.database) as admin:  # it is rolled back
        admin.execute("GRANT CREATE ON SCHEMA headwater TO some_publisher")
        admin.execute("SET LOCAL ROLE some_publisher")
        admin.execute(TRAPS[name].replace("{}", _SPRINGS).encode())
        admin.execute(PUBLISH)
        admin.rollback()


@pytest.fixture
def trapped(roles: Roles) -> Iterator[None]:
    with psycopg.connect(roles.database, autocommit=True) as admin:
        same_signature = [name for name in TRAPS if name != "*"]
        for name in same_signature:
            admin.execute(TRAPS[name].replace("{}", _SPRINGS).encode())
        yield
        for name in same_signature:
            admin.execute(f"DROP FUNCTION headwater.{name}".encode())


def test_the_librarys_own_connections_find_postgresqls_functions_first(roles: Roles, trapped: None) -> None:
    with headwater.open(roles.url("application"), maintenance_interval=None) as log:
        log.publish("trapped", 1)
        with log.subscribe("trapped", "trapped") as subscription:
            subscription.fetch(1)[0].ack()
        log.delete_subscription("trapped")
        assert log.topics()
    with backend_of(roles.url("reader")).arrow() as reader:
        size = {"size": "octet_length(data::text)::bigint"}
        batches = list(reader.messages(size, Range(0, 1), Condition(), 10))
    assert sum(batch.num_rows for batch in batches) == 1


@pytest.mark.parametrize("name", ["messages", "remembered_ids", "headwater", "pruned"])
def test_a_temporary_table_takes_the_place_of_none(roles: Roles, name: str) -> None:
    with psycopg.connect(roles.url("publisher")) as connection:
        connection.execute(f"CREATE TEMPORARY TABLE {name} (mine integer)")
        connection.execute("SELECT headwater.publish('a', '1', id => 'temporary')")
        connection.rollback()
    with psycopg.connect(roles.url("application")) as connection:
        connection.execute(f"CREATE TEMPORARY TABLE {name} (mine integer)")
        connection.execute(INSERT)
        connection.rollback()


# --- the library, by role -----------------------------------------------------------------------------------


def test_an_application_has_all_verbs(roles: Roles) -> None:
    with headwater.open(roles.url("application"), maintenance_interval=None) as log:
        with psycopg.connect(roles.url("application")) as mine:
            seq = log.publish("work.tx", 0, tx=mine, id="in-tx")
        log.publish("work.a", 1, id="one")
        log.publish_many([("work.a", number) for number in range(2, 6)])
        subscription = log.subscribe("worker", "work.>", max_attempts=1)
        first, second, third, *_ = subscription.fetch(10)
        assert (first.seq, first.data) == (seq, 0)
        with psycopg.connect(roles.url("application")) as mine:
            first.ack(tx=mine)
        second.ack()
        third.reject("no good")
        [letter] = log.dead_letters.list()
        assert letter.subscription == "worker"
        log.dead_letters.redrive(letter.id)
        with log.transaction() as tx:
            tx.publish("work.b", 7)
        log.retain("work.>", max_count=1)
        log.run_maintenance()
        assert log.topics()
        subscription.close()
        log.delete_subscription("worker")


def test_a_reader_reads_and_is_reported_that_it_may_not_write(roles: Roles) -> None:
    with headwater.open(roles.url("reader")) as log:
        assert log.last_seq() >= 1
        assert "orders.new" in {each.topic for each in log.topics()}
        assert log.subscriptions() == []
        with pytest.raises(ReadOnlyError) as refused:
            log.publish("orders.new", 1)
        assert "Grant" in refused.value.next


def test_the_pipeline_reads_as_a_reader(roles: Roles) -> None:
    log = backend_of(roles.url("reader"))
    assert "orders.new" in {
        topic for batch in read_table(roles.url("reader"), "topics") for topic in batch["topic"].to_pylist()
    }
    assert log_identity(roles.url("reader")) == log_identity(roles.url("owner"))
    with log.arrow() as reader:
        batches = reader.messages({"seq": "seq", "topic": "topic"}, Range(0, 1), Condition(), 10)
        found = [row for batch in batches for row in batch.to_pylist()]
    assert found == [{"seq": 1, "topic": "orders.new"}]


@pytest.mark.parametrize("kind", ["publisher", "inserter", "stranger"])
def test_a_role_that_may_not_read_cannot_open_the_log(roles: Roles, kind: str) -> None:
    with pytest.raises(ReadOnlyError, match=r"permission denied|may not use"):
        headwater.open(roles.url(kind))
    with pytest.raises(ReadOnlyError), open_reader(roles.url(kind)):
        pass


def test_an_archive_is_written_by_one_role_and_read_by_another(roles: Roles) -> None:
    with headwater.open(roles.url("owner")) as log:
        with log.subscribe("archive", "orders.new") as subscription:
            [message] = subscription.fetch(1)
        log.delete_subscription("archive")
    with psycopg.connect(roles.database, autocommit=True) as admin:
        admin.execute("CREATE SCHEMA kept; GRANT USAGE ON SCHEMA kept TO some_stranger, some_reader")
        admin.execute("GRANT USAGE, CREATE ON SCHEMA kept TO some_owner")
        owners = PostgresArchive(f"archive+{roles.url('owner')}", table="kept.archive")
        owners.publish(message)  # makes the table
        owners.close()
        admin.execute(
            "GRANT INSERT, SELECT ON kept.archive TO some_stranger; GRANT SELECT ON kept.archive TO some_reader"
        )
        admin.execute("DELETE FROM kept.archive")
    writer = PostgresArchive(f"archive+{roles.url('stranger')}", table="kept.archive")
    writer.publish(message)
    writer.close()
    assert roles.run("reader", "SELECT seq, topic FROM kept.archive") == [(1, "orders.new")]
    for statement in ("DELETE FROM kept.archive", "UPDATE kept.archive SET topic = 'x'"):
        with pytest.raises(InsufficientPrivilege):
            roles.run("reader", statement)
        with pytest.raises(InsufficientPrivilege):
            roles.run("stranger", statement)


def test_an_application_uses_the_dedupe_queue_that_the_owner_made(roles: Roles) -> None:
    with pytest.raises(StoreError, match="permission denied"):
        PostgresDedupe(roles.url("application"))
    PostgresDedupe(roles.url("owner")).close()
    with psycopg.connect(roles.database) as admin:
        admin.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON headwater.dedupe TO headwater_application")
    PostgresDedupe(roles.url("application")).close()


# --- what rights do not protect -----------------------------------------------------------------------------


@pytest.mark.parametrize("lock", [1213661185, 1213661186])
def test_a_stranger_that_takes_a_lock_by_its_number_is_waited_for_no_longer_than_asked(roles: Roles, lock: int) -> None:
    with (
        psycopg.connect(roles.url("stranger"), autocommit=True) as stranger,
        headwater.open(roles.url("application"), busy_timeout=0.3, maintenance_interval=None) as log,
    ):
        stranger.execute("SELECT pg_advisory_lock(%s, hashtext('headwater'))", (lock,))
        begun = time.monotonic()
        with pytest.raises(LockedError) as refused:
            log.publish("orders.new", 1)
        assert time.monotonic() - begun < 5
        assert "lock" in refused.value.next
        assert log.last_seq() >= 1  # readers do not wait
        stranger.execute("SELECT pg_advisory_unlock_all()")
        log.publish("orders.new", 2)


_FLOOD = """
DO $$ BEGIN
    FOR number IN 1..200 LOOP PERFORM pg_notify('headwater_headwater', number::text); COMMIT; END LOOP;
END $$
"""


def test_a_flood_of_notifications_delays_no_delivery(roles: Roles, figures: Callable[[str], None]) -> None:
    over = threading.Event()
    sent = 0

    def flood() -> None:
        nonlocal sent
        with psycopg.connect(roles.url("stranger"), autocommit=True) as stranger:
            while not over.is_set():
                stranger.execute(_FLOOD)
                sent += 200

    flooding = threading.Thread(target=flood)
    latencies = []
    with headwater.open(roles.url("application")) as log, headwater.open(roles.url("application")) as other:
        subscription = log.subscribe("flooded", "flood.>", start="new")
        flooding.start()
        try:
            for number in range(200):
                begun = time.monotonic()
                other.publish("flood.a", number)
                [message] = subscription.fetch(1, timeout=10.0)
                latencies.append((time.monotonic() - begun) * 1000)
                message.ack()
        finally:
            over.set()
            flooding.join()
        subscription.close()
        log.delete_subscription("flooded")
    p99 = sorted(latencies)[int(len(latencies) * 0.99)]
    rate = sent / sum(latencies) * 1000
    figures(f"publish to delivery under {rate:,.0f} notifications a second from a stranger: p99 {p99:.0f} ms")
    assert p99 < 250


# --- public, and logs of version 1 --------------------------------------------------------------------------


def test_the_schema_public_is_refused(postgres_url: str) -> None:
    with pytest.raises(InvalidOptionError, match="public") as refused:
        headwater.open(f"{postgres_url}?schema=public")
    assert "?schema=" in refused.value.next
    with pytest.raises(InvalidOptionError, match="public"):
        place_of("postgres://db/shop?schema=public")


class OldLog:
    def __init__(self, database: str, number: int) -> None:
        self.database = database
        self.owner, self.application, self.publisher, self.reader, self.explicit = (
            f"{kind}_{number}" for kind in ("owner", "app", "pub", "read", "explicit")
        )

    def url(self, role: str) -> str:
        return url_as(role, self.database)


def make_old_log(database: str, schema: str, admin: psycopg.Connection, owner: str) -> None:
    admin.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    admin.execute(f"ALTER SCHEMA {schema} OWNER TO {owner}")
    with psycopg.connect(url_as(owner, database)) as connection:
        make_version_1(connection, schema)
        insert = f"INSERT INTO {schema}.messages (topic, data) VALUES ('old', '1'), ('old', %s)"
        connection.execute(insert.encode(), (f'"{"x" * 2**21}"',))


@pytest.fixture
def old_log(postgres: PostgresServer, postgres_url: str) -> Iterator[OldLog]:
    """As version 1 made it, with roles as its documentation had them."""
    made = OldLog(postgres_url, next(_numbers))
    names = [made.owner, made.application, made.publisher, made.reader, made.explicit]
    with connect(place_of(postgres_url), application="test") as admin:
        for role in names:
            admin.execute(f"CREATE ROLE {role} LOGIN")
        make_old_log(postgres_url, "headwater", admin, made.owner)
        admin.execute(f"GRANT USAGE ON SCHEMA headwater TO {', '.join(names[1:])}")
        admin.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA headwater TO {made.application}")
        admin.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA headwater TO {made.reader}, {made.explicit}")
        admin.execute(f"GRANT EXECUTE ON FUNCTION headwater.publish TO {made.explicit}")
        admin.execute("GRANT USAGE ON SCHEMA headwater TO PUBLIC; GRANT SELECT ON headwater.messages TO PUBLIC")
        prepare(admin, "headwater", "the log")  # as a superuser that is not its owner
    yield made
    postgres.drop_database(postgres_url)
    with postgres.administration() as admin:
        admin.execute(f"DROP ROLE {', '.join(names)}")


def outcome(url: str, statement: str) -> str:
    with psycopg.connect(url) as connection:
        try:
            connection.execute(statement.encode())
        except InsufficientPrivilege:
            return "refused"
        connection.rollback()
    return "done"


def test_roles_of_version_1_go_on_with_what_they_did(old_log: OldLog) -> None:
    with headwater.open(old_log.url(old_log.application), maintenance_interval=None) as log:
        assert log.publish("new", 3) == 3
        with psycopg.connect(old_log.url(old_log.application)) as mine:
            log.publish("new", 4, tx=mine)
        subscription = log.subscribe("reads", ">", max_attempts=1)
        first, second, third, fourth = subscription.fetch(10)
        assert len(second.data) == 2**21
        with psycopg.connect(old_log.url(old_log.application)) as mine:
            first.ack(tx=mine)
        third.reject("no good")
        fourth.ack()
        assert len(log.dead_letters.list()) == 1
    statements = {
        "SELECT headwater.publish('a', '1', id => 'x')": {"application", "publisher", "explicit"},
        "SELECT headwater.publish_checked('a', '1', published_at => 1)": {"application"},
        "SELECT headwater.ack('reads', 2, 1, 1)": {"application"},
        "SELECT headwater.next_seq()": {"application"},
        "SELECT * FROM headwater.history": {"application", "reader", "explicit"},
        "SELECT * FROM headwater.messages": {"application", "reader", "explicit"},
        INSERT: {"application"},
    }
    for statement, allowed in statements.items():
        for kind in ("application", "publisher", "reader", "explicit"):
            wanted = "done" if kind in allowed else "refused"
            assert (kind, statement, outcome(old_log.url(getattr(old_log, kind)), statement)) == (
                kind,
                statement,
                wanted,
            )


def test_what_version_1_had_is_its_owners_and_nothing_is_publics(old_log: OldLog) -> None:
    with psycopg.connect(old_log.database) as admin:
        owners = admin.execute(
            "SELECT DISTINCT proowner::regrole::text, proconfig FROM pg_proc"
            " WHERE pronamespace = 'headwater'::regnamespace"
        ).fetchall()
        assert rights_of_public(admin) == []
    assert owners == [(old_log.owner, ["search_path=pg_catalog, pg_temp"])]


def test_a_migrated_log_is_as_a_new_one(old_log: OldLog, postgres: PostgresServer) -> None:
    def shape(database: str) -> list[tuple[object, ...]]:
        with psycopg.connect(database) as admin:
            return admin.execute(
                "SELECT conname::text, replace(pg_get_constraintdef(oid), ' NOT VALID', '') FROM pg_constraint"
                " WHERE connamespace = 'headwater'::regnamespace AND contype <> 'n'"
                " UNION ALL SELECT proname, concat_ws(' ', prosecdef, pg_get_function_arguments(oid), prosrc)"
                " FROM pg_proc WHERE pronamespace = 'headwater'::regnamespace"
                " UNION ALL SELECT relname, pg_get_expr(adbin, adrelid) FROM pg_attrdef JOIN pg_class AS own"
                " ON own.oid = adrelid WHERE relnamespace = 'headwater'::regnamespace ORDER BY 1, 2"
            ).fetchall()

    with connect(place_of(new_log := postgres.new_database()), application="test") as admin:
        prepare(admin, "headwater", "the log")
    assert shape(old_log.database) == shape(new_log)
    postgres.drop_database(new_log)


def test_another_role_than_the_owner_is_refused_with_the_name_of_the_owner(
    postgres: PostgresServer, postgres_url: str
) -> None:
    number = next(_numbers)
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE owner_{number} LOGIN; CREATE ROLE app_{number} LOGIN")
        make_old_log(postgres_url, "headwater", admin, f"owner_{number}")
        admin.execute(f"GRANT USAGE ON SCHEMA headwater TO app_{number}")
        admin.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA headwater TO app_{number}")
    with pytest.raises(StoreError, match=f"owner_{number}") as refused:
        headwater.open(url_as(f"app_{number}", postgres_url))
    assert "owner" in refused.value.next
    headwater.open(url_as(f"owner_{number}", postgres_url)).close()
    headwater.open(url_as(f"app_{number}", postgres_url)).close()
    postgres.drop_database(postgres_url)
    with postgres.administration() as admin:
        admin.execute(f"DROP ROLE owner_{number}, app_{number}")


def test_a_log_in_public_moves_by_the_documented_statements(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        make_old_log(postgres_url, "public", admin, "postgres")
        admin.execute(documented("CREATE SCHEMA headwater;").encode())
        [(left,)] = admin.execute("SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace")
        [(functions,)] = admin.execute("SELECT count(*) FROM pg_proc WHERE pronamespace = 'public'::regnamespace")
        assert (left, functions) == (0, 0)
        with headwater.open(postgres_url, maintenance_interval=None) as log:
            assert log.publish("new", 3) == 3
            admin.execute(INSERT)
            assert log.last_seq() == 4
            assert [message.seq for message in log.subscribe("all", ">").fetch(10)] == [1, 2, 3, 4]
        [(version,)] = admin.execute("SELECT value FROM headwater.headwater WHERE name = 'schema_version'")
    assert version == migrations.SCHEMA_VERSION
