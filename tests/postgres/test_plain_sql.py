"""Anyone may insert with plain SQL, from any connection: topic and data suffice."""

import json
from collections.abc import Callable, Iterator

import psycopg
import pytest

from headwater.delivery.filters import parse_where
from headwater.delivery.publishing import DedupeWindow
from headwater.message import make_draft
from headwater.ports.records import Selection, TopicCount
from headwater.stores.postgres import PostgresStore
from headwater.topics import parse_pattern

INSERT = "INSERT INTO {}.messages (topic, data) VALUES (%s, %s)"
NOW = 1_700_000_000_000
EVERYTHING = Selection(parse_pattern(">"))

Hand = Callable[..., list[tuple[object, ...]]]


@pytest.fixture
def store(postgres_schema_url: str) -> Iterator[PostgresStore]:
    opened = PostgresStore(postgres_schema_url)
    yield opened
    opened.close()


@pytest.fixture
def connection(store: PostgresStore) -> Iterator[psycopg.Connection]:
    """One of the user's own, which knows nothing of the log's schema."""
    with psycopg.connect(store.place.conninfo, autocommit=True) as opened:
        yield opened


@pytest.fixture
def by_hand(store: PostgresStore, connection: psycopg.Connection) -> Hand:
    def run(sql: str, *bindings: object) -> list[tuple[object, ...]]:
        cursor = connection.execute(sql.replace("{}", store.place.schema).encode(), bindings or None)
        return cursor.fetchall() if cursor.description else []

    return run


def publish(store: PostgresStore, *data: object) -> list[int]:
    with store.write() as writer:
        return writer.append([make_draft("own", each, {}, NOW) for each in data], NOW, DedupeWindow()).seqs


def contents(store: PostgresStore) -> list[tuple[int, str, object]]:
    with store.read() as reader:
        return [(message.seq, message.topic, message.data) for message in reader.scan(EVERYTHING, 0, 100).messages]


def test_a_row_is_a_message(store: PostgresStore, by_hand: Hand) -> None:
    by_hand(INSERT, "orders.new", '{"order": 17}')
    with store.read() as reader:
        [message] = reader.scan(EVERYTHING, 0, 10).messages
        assert reader.messages([1]) == {1: message}
        assert reader.topic_counts() == [TopicCount("orders.new", 1, 13, 1, message.published_ms)]
        [(now_ms,)] = by_hand("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint")
    assert (message.seq, message.topic, message.data, message.size) == (1, "orders.new", {"order": 17}, 13)
    assert isinstance(now_ms, int)
    assert 0 <= now_ms - message.published_ms < 60_000
    assert by_hand("SELECT id, size FROM {}.history") == [(message.id, 13)]


def test_all_other_fields_may_be_given(store: PostgresStore, by_hand: Hand) -> None:
    by_hand(
        """INSERT INTO {}.messages (topic, data, id, priority, deliver_at, expires_at, "from", "to", reply_to,
        correlation_id, type, version, content_type, traceparent, headers, published_at)
        VALUES ('a', '1', 'given', 5, 6, 7, 'f', 't', 'r', 'c', 'T', 2, 'x/y', 'tp', '{"h": [1]}', 9)"""
    )
    with store.read() as reader:
        [message] = reader.scan(EVERYTHING, 0, 10).messages
    assert (message.id, message.priority, message.deliver_ms, message.expires_ms) == ("given", 5, 6, 7)
    assert (message.from_, message.to, message.reply_to, message.correlation_id) == ("f", "t", "r", "c")
    assert (message.type, message.version, message.content_type, message.traceparent) == ("T", 2, "x/y", "tp")
    assert (message.headers, message.published_ms) == ({"h": [1]}, 9)


def test_rows_and_our_own_publishes_keep_one_order_without_holes(store: PostgresStore, by_hand: Hand) -> None:
    assert publish(store, "one", "two") == [1, 2]
    assert by_hand(
        "INSERT INTO {}.messages (topic, data) SELECT 'hand', to_json(n) FROM generate_series(3, 5) AS n ORDER BY n"
        " RETURNING seq"
    ) == [(3,), (4,), (5,)]
    assert publish(store, "six") == [6]
    with store.write() as writer:
        writer.delete_messages(writer.oldest(EVERYTHING.pattern, 4, 10))
    assert by_hand(INSERT + " RETURNING seq", "hand", "7") == [(7,)]
    assert [seq for seq, _, _ in contents(store)] == [1, 2, 3, 4, 7]


def test_what_is_rolled_back_leaves_no_hole(
    store: PostgresStore, by_hand: Hand, connection: psycopg.Connection
) -> None:
    with connection.transaction(force_rollback=True):
        by_hand(INSERT, "hand", "1")
    assert publish(store, "first") == [1]


def test_copy_by_hand(store: PostgresStore, connection: psycopg.Connection) -> None:
    publish(store, 1)
    statement = f"COPY {store.place.schema}.messages (topic, data) FROM STDIN".encode()
    with connection.cursor().copy(statement) as copy:
        for number in range(2, 5):
            copy.write_row(("hand", json.dumps(number)))
    assert [(seq, data) for seq, _, data in contents(store)] == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_listeners_are_notified(store: PostgresStore, by_hand: Hand, connection: psycopg.Connection) -> None:
    with psycopg.connect(store.place.conninfo, autocommit=True) as listening:
        listening.execute(f"LISTEN {store.place.channel}")
        with connection.transaction():
            by_hand(INSERT, "a", "1")
            by_hand(INSERT, "a", "2")
        reported = [(each.channel, each.payload) for each in listening.notifies(timeout=20, stop_after=1)]
        assert reported == [(store.place.channel, "")]
        assert list(listening.notifies(timeout=0)) == [], "once for the transaction"


@pytest.mark.parametrize(
    ("columns", "values", "problem"),
    [
        ("topic, data", ("a..b", "1"), "topic must be"),
        ("topic, data", ("a.*", "1"), "topic must be"),
        ("topic, data", ("a.>", "1"), "topic must be"),
        ("topic, data", ("a b", "1"), "topic must be"),
        ("topic, data", ("a\x01", "1"), "topic must be"),
        ("topic, data", ("", "1"), "topic must be"),
        ("topic, data", (".a", "1"), "topic must be"),
        ("topic, data", ("a", "{"), "json"),
        ("topic, data", ("a", None), "data"),
        ("topic, data, published_at", ("a", "1", -1), "times are"),
        ("topic, data, deliver_at", ("a", "1", 253402300800000), "times are"),
        ("topic, data, headers", ("a", "1", "[]"), "headers must be"),
    ],
)
def test_what_is_no_message_is_refused(
    store: PostgresStore, by_hand: Hand, columns: str, values: tuple[object, ...], problem: str
) -> None:
    marks = ", ".join(["%s"] * len(values))
    with pytest.raises(psycopg.Error, match=problem):
        by_hand(f"INSERT INTO {{}}.messages ({columns}) VALUES ({marks})", *values)
    assert contents(store) == []


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_transaction_that_sees_the_past_may_not_publish(
    store: PostgresStore, by_hand: Hand, connection: psycopg.Connection, level: str
) -> None:
    """It would give out a seq that another has had: one that was published and pruned since is free in the table."""
    connection.execute(f"BEGIN ISOLATION LEVEL {level}")
    assert by_hand("SELECT count(*) FROM {}.messages") == [(0,)]
    publish(store, 1)
    with store.write() as writer:
        writer.delete_messages(writer.oldest(EVERYTHING.pattern, 0, 10))
    with pytest.raises(psycopg.errors.InvalidTransactionState, match="READ COMMITTED"):
        by_hand(INSERT, "hand", "1")
    connection.execute("ROLLBACK")
    assert publish(store, 2) == [2]


def test_odd_payloads_do_not_stand_in_the_way(store: PostgresStore, by_hand: Hand) -> None:
    deep = "[" * 3_000 + "]" * 3_000
    by_hand(INSERT, "a", deep)
    # Larger than the limit: a log of version 1 may hold such rows.
    by_hand("INSERT INTO {}.messages (checked, topic, data) VALUES (0, 'a', %s)", json.dumps("x" * 2_000_000))
    by_hand(INSERT, "a", r'"\ud800"')
    by_hand(INSERT, "a", ' { "spaced" :\n\t1 } ')
    publish(store, "last")
    with store.read() as reader:
        found = reader.scan(EVERYTHING, 0, 10).messages
        assert [message.seq for message in found] == [1, 2, 3, 4, 5]
        assert [message.size for message in found[:2]] == [6_000, 2_000_002]
        assert len(found[1].data) == 2_000_000
        assert bytes(found[0].raw) == deep.encode()
        assert (found[3].data, found[4].data) == ({"spaced": 1}, "last")
        assert list(reader.messages(range(1, 9))) == [1, 2, 3, 4, 5]
        wanted = Selection(parse_pattern(">"), where=parse_where("data.spaced == 1"))
        seqs, after = list[int](), 0
        while after < 5:  # one look ends after so many bytes
            messages, after = reader.scan(wanted, after, 10)
            seqs += [message.seq for message in messages]
        assert 4 in seqs
