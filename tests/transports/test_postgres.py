"""The archive in a table of PostgreSQL, on a real server."""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import msgspec
import psycopg
import pytest
from eventually import eventually
from postgres_server import PostgresServer

from headwater.errors import InvalidDataError, InvalidOptionError, TransportFailedError
from headwater.message import Message
from headwater.transports import postgres as postgres_module
from headwater.transports.base import make_message
from headwater.transports.postgres import APPLICATION, PostgresArchive

NOON = 1_794_744_000_000  # 2026-11-15T12:00Z


def batch(first: int, last: int) -> list[Message]:
    return [
        msgspec.structs.replace(make_message("orders.new", {"n": seq}, NOON + seq, id=f"id-{seq}"), seq=seq)
        for seq in range(first, last + 1)
    ]


def opened(url: str, **options: Any) -> PostgresArchive:
    return PostgresArchive.from_url(f"archive+{url}", **options)


def ask(url: str, question: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(question).fetchall()


def test_every_column_is_kept(postgres_url: str) -> None:
    archive = opened(postgres_url)
    assert not archive.connected
    message = make_message(
        "orders.new", {"b": 1, "a": "Grüße \0 \U0001f680", "n": 10**30}, NOON, id="given", headers={"ü": 1}, from_="a",
        to="b", reply_to="c", correlation_id="d", type="T", version=2, content_type="application/json",
        traceparent="00-1", priority=-5, deliver_at=NOON / 1000 + 60, expires_at=NOON / 1000 + 90,
    )  # fmt: skip
    archive.publish(msgspec.structs.replace(message, seq=7))
    assert archive.connected
    noon = datetime.fromtimestamp(NOON / 1000, UTC)
    with psycopg.connect(postgres_url) as connection:
        cursor = connection.execute(
            "SELECT *, data::text AS exact, now() - archived_at < '1 min' AS fresh FROM archive"
        )
        (row,) = cursor.fetchall()
        names = [column.name for column in cursor.description or ()]
    found = dict(zip(names, row, strict=True))
    assert found.pop("archived_at").tzinfo is not None
    assert found == {
        "id": "given", "seq": 7, "topic": "orders.new", "type": "T", "version": 2, "from_entity": "a", "to_entity": "b",
        "reply_to": "c", "correlation_id": "d", "content_type": "application/json", "traceparent": "00-1",
        "data": message.data, "exact": message.data_json, "unreadable": False, "headers": {"ü": 1}, "priority": -5,
        "size": message.size, "published_at": noon, "deliver_at": datetime.fromtimestamp(NOON / 1000 + 60, UTC),
        "expires_at": datetime.fromtimestamp(NOON / 1000 + 90, UTC), "status": "archived", "fresh": True,
    }  # fmt: skip


def test_ids_that_are_there_stay_as_they_are(postgres_url: str) -> None:
    archive = opened(postgres_url)
    archive.publish_many(batch(1, 10))
    changed = [msgspec.structs.replace(each, raw=msgspec.Raw(b'"changed"')) for each in batch(5, 12)]
    archive.publish_many([*changed, *changed])
    opened(postgres_url).publish_many(batch(1, 13))
    assert ask(postgres_url, "SELECT count(*), count(DISTINCT id), min(seq), max(seq) FROM archive") == [
        (13, 13, 1, 13)
    ]
    assert ask(postgres_url, "SELECT id FROM archive WHERE data::text = '\"changed\"' ORDER BY seq") == [
        ("id-11",),
        ("id-12",),
    ]


VERSION_1 = """
    CREATE TABLE archive (
        id text PRIMARY KEY, seq bigint NOT NULL, topic text NOT NULL, type text, version integer, from_entity text,
        to_entity text, reply_to text, correlation_id text, content_type text, traceparent text, data json NOT NULL,
        unreadable boolean NOT NULL, headers json, priority integer NOT NULL, size integer NOT NULL,
        published_at timestamptz NOT NULL, deliver_at timestamptz, expires_at timestamptz,
        archived_at timestamptz NOT NULL DEFAULT now(), status text NOT NULL DEFAULT 'archived'
    );
    INSERT INTO archive (id, seq, topic, data, unreadable, priority, size, published_at)
    VALUES ('id-1', 1, 'orders.new', '{"n": 1}', false, 0, 8, now())
"""
PRIMARY_KEY = """
    SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = 'archive'::regclass AND contype = 'p'
"""


def test_a_table_of_unique_ids_is_changed_to_ids_by_topic(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.execute(VERSION_1)
    same = [msgspec.structs.replace(each, topic="a.x") for each in batch(1, 2)]
    archives = [opened(postgres_url) for _ in range(4)]
    with ThreadPoolExecutor(len(archives)) as pool:
        list(pool.map(lambda archive: archive.publish_many([*batch(1, 2), *same]), archives))
    assert sorted(ask(postgres_url, "SELECT id, topic FROM archive")) == [
        ("id-1", "a.x"),
        ("id-1", "orders.new"),
        ("id-2", "a.x"),
        ("id-2", "orders.new"),
    ]
    assert ask(postgres_url, PRIMARY_KEY) == [("PRIMARY KEY (id, topic)",)]


def test_an_error_names_the_statement_for_the_owner_of_an_older_table(postgres_url: str) -> None:
    role = f"archivist_{secrets.token_hex(4)}"
    with psycopg.connect(postgres_url) as connection:
        connection.execute(VERSION_1)
        connection.execute(f"CREATE ROLE {role} LOGIN; GRANT SELECT, INSERT ON archive TO {role}".encode())
    archive = opened(postgres_url.replace("postgres@", f"{role}@"))
    with pytest.raises(TransportFailedError, match="recognises messages by their id alone") as failed:
        archive.publish_many(batch(2, 2))
    assert failed.value.next.startswith("As its owner: ALTER TABLE")
    with psycopg.connect(postgres_url) as connection:
        connection.execute(failed.value.next.removeprefix("As its owner: ").encode())
    archive.publish_many(batch(2, 2))
    assert ask(postgres_url, "SELECT count(*) FROM archive") == [(2,)]
    archive.close()
    with psycopg.connect(postgres_url) as connection:
        connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def test_large_deep_and_unreadable_payloads_are_kept(postgres_url: str) -> None:
    archive = opened(postgres_url)
    large = make_message("a", "x" * (1024 * 1024 - 2), NOON, id="large")
    deep = make_message("a", msgspec.json.decode(b"[" * 500 + b"]" * 500), NOON, id="deep")
    spoiled = msgspec.structs.replace(make_message("a", 1, NOON, id="spoiled"), raw=msgspec.Raw(b"{no json \xff"))
    archive.publish_many([large, deep, spoiled])
    found = {row[0]: row[1:] for row in ask(postgres_url, "SELECT id, data::text, unreadable FROM archive")}
    assert found["large"] == (large.data_json, False)
    assert found["deep"] == (deep.data_json, False)
    assert found["spoiled"] == ('"{no json \ufffd"', True)


def test_the_documented_question_finds_what_was_archived(postgres_url: str) -> None:
    opened(postgres_url).publish_many(batch(1, 3))
    question = (postgres_module.__doc__ or "").partition("SELECT")[2].partition(";")[0]
    rows = ask(postgres_url, "SELECT" + question.replace("now() - interval '1 day'", "'2026-11-15'"))
    assert [row[0] for row in rows] == ["id-1", "id-2", "id-3"]


def test_rows_may_be_marked_with_a_legal_status_and_no_other(postgres_url: str) -> None:
    opened(postgres_url).publish_many(batch(1, 1))
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("UPDATE archive SET status = 'completed'")
        with pytest.raises(psycopg.errors.CheckViolation):
            connection.execute("UPDATE archive SET status = 'lost'")
    indexes = ask(postgres_url, "SELECT indexname FROM pg_indexes WHERE tablename = 'archive' ORDER BY 1")
    assert [name for (name,) in indexes] == [
        "archive_by_correlation",
        "archive_by_time",
        "archive_by_topic",
        "archive_pkey",
    ]


def test_the_table_may_have_another_name_and_a_schema(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA audit")
    archive = PostgresArchive.from_url(f"archive+{postgres_url}?table=audit.Copies&application_name=mine")
    archive.publish_many(batch(1, 2))
    assert archive.name.endswith("?table=audit.Copies")
    assert ask(postgres_url, 'SELECT count(*) FROM audit."Copies"') == [(2,)]


@pytest.mark.parametrize("table", ["", "a b", "a;DROP TABLE x", 'a"b', "a.b.c", ".a", "1a", "ä", "x" * 41, None])
def test_a_bad_table_name_is_refused(table: Any) -> None:
    with pytest.raises(InvalidOptionError, match="no name of a table"):
        PostgresArchive.from_url("archive+postgres://127.0.0.1/x", table=table)


@pytest.mark.parametrize("url", ["archive+postgres://user:hush/er@host/x", "archive+postgres://u:hush@h/x?nonsense=1"])
def test_a_url_that_cannot_be_read_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(InvalidOptionError, match="cannot be read") as caught:
        PostgresArchive.from_url(url)
    assert "hush" not in str(caught.value)


def test_an_unknown_option_or_scheme_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="'colour'"):
        PostgresArchive.from_url("archive+postgres://127.0.0.1/x", colour=1)
    with pytest.raises(InvalidOptionError, match="archive"):
        PostgresArchive.from_url("postgres://127.0.0.1/x")


def test_passwords_are_in_no_name_and_no_error() -> None:
    archive = PostgresArchive.from_url("archive+postgres://user:hush@127.0.0.1:1/x?password=hush")
    assert archive.name == "archive+postgres://user@127.0.0.1:1/x?table=archive"
    with pytest.raises(TransportFailedError, match="Check that the server runs") as caught:
        archive.publish_many(batch(1, 1))
    assert "hush" not in f"{caught.value} {caught.value.__cause__}"


def test_a_batch_is_all_or_nothing_and_a_nul_is_named(postgres_url: str) -> None:
    archive = opened(postgres_url)
    bad = make_message("orders.new", 1, NOON, id="a\0b")
    with pytest.raises(InvalidDataError, match=r"'a\\x00b'.*NUL"):
        archive.publish_many([*batch(1, 3), bad])
    archive.publish_many(batch(2, 2))
    assert ask(postgres_url, "SELECT id FROM archive") == [("id-2",)]


def test_a_table_of_another_shape_is_refused_with_what_to_do(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE archive (id text)")
    archive = opened(postgres_url)
    with pytest.raises(TransportFailedError, match="other columns"):
        archive.publish_many(batch(1, 1))
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP TABLE archive")
    archive.publish_many(batch(1, 1))
    assert ask(postgres_url, "SELECT count(*) FROM archive") == [(1,)]


def test_a_dropped_table_is_created_again(postgres_url: str) -> None:
    archive = opened(postgres_url)
    archive.publish_many(batch(1, 1))
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP TABLE archive")
    with pytest.raises(TransportFailedError, match="does not exist"):
        archive.publish_many(batch(2, 2))
    archive.publish_many(batch(2, 2))
    assert ask(postgres_url, "SELECT id FROM archive") == [("id-2",)]


def test_the_right_to_insert_and_select_is_enough(postgres_url: str, postgres: PostgresServer) -> None:
    opened(postgres_url).publish_many(batch(1, 1))
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS archivist")
        connection.execute("CREATE ROLE archivist LOGIN")
        connection.execute("GRANT INSERT, SELECT ON archive TO archivist")
    opened(postgres_url.replace("postgres@", "archivist@")).publish_many(batch(1, 2))
    assert ask(postgres_url, "SELECT count(*) FROM archive") == [(2,)]
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP OWNED BY archivist")
        connection.execute("DROP ROLE archivist")


def test_several_that_begin_at_once_make_one_table(postgres_url: str) -> None:
    begin = threading.Barrier(4)
    failures: list[BaseException] = []

    def write(which: int) -> None:
        archive = opened(postgres_url)
        begin.wait()
        try:
            archive.publish_many(batch(which, which + 20))
        except BaseException as exc:
            failures.append(exc)
        archive.close()

    threads = [threading.Thread(target=write, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    assert ask(postgres_url, "SELECT count(*) FROM archive") == [(24,)]


def test_a_connection_cut_in_the_middle_leaves_nothing_and_the_repeat_is_whole(
    postgres: PostgresServer, postgres_url: str
) -> None:
    archive = opened(postgres_url)
    archive.publish_many(batch(1, 2))
    outcome: list[BaseException | None] = []

    def publish() -> None:
        try:
            archive.publish_many(batch(2, 9))
            outcome.append(None)
        except BaseException as exc:
            outcome.append(exc)

    with psycopg.connect(postgres_url) as blocker:
        blocker.execute("LOCK TABLE archive IN SHARE MODE")
        publishing = threading.Thread(target=publish)
        publishing.start()
        waiting = (
            f"SELECT 1 FROM pg_stat_activity WHERE application_name = '{APPLICATION}' AND wait_event_type = 'Lock'"
        )
        while publishing.is_alive() and not ask(postgres_url, waiting):
            pass
        assert postgres.cut_connections(postgres_url, APPLICATION) == 1
        publishing.join(30)
    assert isinstance(outcome[0], TransportFailedError)
    assert isinstance(outcome[0].__cause__, psycopg.Error)
    assert not archive.connected
    assert ask(postgres_url, "SELECT count(*) FROM archive") == [(2,)]
    archive.publish_many(batch(2, 9))
    assert archive.connected
    assert ask(postgres_url, "SELECT count(*), count(DISTINCT id) FROM archive") == [(9, 9)]


def test_closing_ends_its_session(postgres_url: str) -> None:
    archive = opened(postgres_url)
    archive.publish_many(batch(1, 1))
    archive.close()
    with psycopg.connect(postgres_url, autocommit=True) as looking:  # a session takes a moment to end

        def there() -> int:
            query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND datname = current_database()"
            [(count,)] = looking.execute(query, (APPLICATION,))
            return int(count)

        eventually(there, 0)


def test_a_batch_over_the_limit_is_several_transactions(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_module, "BATCH_MESSAGES_MAX", 4)
    opened(postgres_url).publish_many(batch(1, 10))
    assert ask(postgres_url, "SELECT count(*), count(DISTINCT archived_at) FROM archive") == [(10, 3)]
