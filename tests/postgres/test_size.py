"""A long log stays quick: every statement of the hot paths finds its rows by an index and looks at a bounded number of
pages, whether it is planned for its parameters or once for all of them."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
import pytest
from postgres_server import PostgresServer

from headwater.delivery.filters import parse_where
from headwater.delivery.lease import Lease
from headwater.delivery.publishing import DedupeWindow
from headwater.message import Draft, Message
from headwater.ports.records import DeliveryRow, Selection, SubscriptionRecord, SubscriptionSpec
from headwater.stores.postgres import PostgresStore
from headwater.stores.postgres.connection import SQL
from headwater.stores.postgres.known import KnownSubscriptions
from headwater.stores.postgres.pipelined import PipelinedConnection, numbered
from headwater.stores.postgres.pipelined import Statement as Asked
from headwater.stores.postgres.writer import PostgresWriter
from headwater.stores.sql import SCAN_SEQS_MAX, TopicTail
from headwater.topics import parse_pattern

NOW = 1_700_000_000_000
MESSAGES, BATCH, TOPICS = 200_000, 10_000, 20
MANY_MESSAGES = 10_000_000
IN_FLIGHT, WAITING = 5_000, 200
PAGES_MAX = 500  # visits to pages, for one statement that reads a hundred rows, or one
SCAN_PAGES_MAX = 4_000  # for one that walks past as many rows as one scan may
QUICK_S = 0.5
DATA = '{"order":17,"customer":"c-00017","note":"' + "x" * 100 + '"}'

Statement = tuple[str, Sequence[Any]]


def selection(pattern: str, where: str | None = None) -> Selection:
    return Selection(parse_pattern(pattern), where=None if where is None else parse_where(where))


HOT: dict[str, Callable[[PostgresWriter], object]] = {
    "last seq": lambda log: log.last_seq(),
    "the last seq, to publish after": lambda log: log._last_to_publish_after(),
    "read on": lambda log: log.scan(selection(">"), log.last_seq() - 100, 100),
    "read on from far behind": lambda log: log.scan(selection(">"), 1_000, 100),
    "a common topic from far behind": lambda log: log.scan(selection("orders.t7"), 1_000, 5),
    "messages by seq": lambda log: log.messages(range(150_000, 150_050)),
    "the oldest of all": lambda log: log.oldest(parse_pattern(">"), 0, 100),
    "the oldest of a common topic": lambda log: log.oldest(parse_pattern("orders.t7"), 0, 5),
    "the oldest of a topic that is not there": lambda log: log.oldest(parse_pattern("nothing.*"), 0, 100),
    "which position was it at that time": lambda log: log.seq_before(NOW + 5),
    "due": lambda log: log.due("s", NOW, 100, "seq"),
    "due by priority": lambda log: log.due("s", NOW, 100, "priority"),
    "nothing is due": lambda log: log.due("s", NOW - 10, 100, "seq"),
    "when is the next due": lambda log: log.next_due_ms("s"),
    "deliveries by seq": lambda log: log.deliveries("s", range(3_000, 3_050)),
    "ack": lambda log: log.remove_deliveries("s", range(3_000, 3_050)),
    "under lease": lambda log: log.leased_seqs(3_000, 3_050, NOW),
    "the subscription": lambda log: log.subscription("s"),
    "a lease": lambda log: log.lease("housekeeping"),
    "remembered": lambda log: log._remembered(["a#given"], 5, NOW, DedupeWindow()),
    "receipts": lambda log: log.receipts("p", 1, 100),
    "what was pruned": lambda log: log.pruned(1, 1_000),
    "gaps": lambda log: log.gaps("s"),
}
BOUNDED: dict[str, Callable[[PostgresWriter], object]] = {
    "a topic that is not there": lambda log: log.scan(selection("nothing.here"), 1_000, 100),
    "a pattern of topics that are not there": lambda log: log.scan(selection("nothing.>"), 1_000, 100),
    "a topic that comes much later": lambda log: log.scan(selection("later"), 1_000, 100),
    "a pattern of topics that come much later": lambda log: log.scan(selection("*.rare"), 1_000, 100),
    "content that is not there": lambda log: log.scan(selection(">", "data.order == 18"), 1_000, 100),
    "topics of a stretch": lambda log: log.topics_between(1_000, 1_000 + SCAN_SEQS_MAX),
}


@pytest.fixture(scope="module")
def store(postgres: PostgresServer) -> Iterator[PostgresStore]:
    url = postgres.new_database()
    opened = PostgresStore(url)
    drafts = [Draft(f"orders.t{number % TOPICS}", DATA, len(DATA)) for number in range(BATCH)]
    for start in range(0, MESSAGES, BATCH):
        with opened.write() as writer:
            writer.append(drafts, NOW + start // BATCH, DedupeWindow())
    fill_the_rest(opened)
    yield opened
    opened.close()
    postgres.drop_database(url)


def fill_the_rest(store: PostgresStore) -> None:
    with store.write() as writer:
        for number in range(20):
            spec = SubscriptionSpec(">", mode="shared")
            writer.save_subscription(SubscriptionRecord(f"s{number or ''}", spec, NOW, NOW))
            rows = [DeliveryRow(seq, 1, NOW + 30_000, token=1) for seq in range(1, IN_FLIGHT + 1)]
            rows += [DeliveryRow(IN_FLIGHT + seq, 1, NOW - seq % 7) for seq in range(1, WAITING + 1)]
            writer.put_deliveries(f"s{number or ''}", rows)
        writer.save_lease("housekeeping", Lease("me", 1, NOW))
        ids = [Draft("later", "1", 1, f"id-{number}") for number in range(5_000)]
        writer.append(ids, NOW + MESSAGES // BATCH, DedupeWindow())
        writer.fold_topic_counts(2 * MANY_MESSAGES)
    with psycopg.connect(store.place.conninfo, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")


class _Recording(PostgresWriter):
    """Keeps the statements that it executes."""

    def __init__(self, connection: PipelinedConnection, salt: int) -> None:
        super().__init__(connection, salt, False, TopicTail(), ("nowhere", ""), KnownSubscriptions())
        self.statements: list[Statement] = []

    def _execute(self, sql: str, bindings: Sequence[Any] = ()) -> Asked:
        self.statements.append((sql, bindings))
        return super()._execute(sql, bindings)

    def _later(self, name: str, bindings: Sequence[Any]) -> Asked:
        self.statements.append((SQL[name], bindings))
        return super()._later(name, bindings)


def statements_of(store: PostgresStore, action: Callable[[PostgresWriter], object]) -> list[Statement]:
    with store.write() as writer:
        recording = _Recording(writer.connection, store.salt)
        action(recording)
        writer.connection.execute("ROLLBACK; BEGIN")
    return recording.statements


def plans(store: PostgresStore, statements: list[Statement], *, generic: bool) -> list[dict[str, Any]]:
    """What the server did for each, with the pages that it looked at."""
    found = []
    with psycopg.connect(store.place.conninfo, cursor_factory=psycopg.ClientCursor) as connection:
        connection.execute(f"SET search_path = {store.place.schema}")
        connection.execute(SQL["plan_by_index"].encode())  # as a writer does
        connection.execute("SET plan_cache_mode = " + ("force_generic_plan" if generic else "force_custom_plan"))
        for name, (sql, bindings) in enumerate(statements):
            connection.execute(f"PREPARE s{name} AS ".encode() + numbered(sql))
            values = ", ".join(["%s"] * len(bindings))
            call = f"EXECUTE s{name}({values})" if bindings else f"EXECUTE s{name}"
            explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {call}"
            texts = [str(each) if isinstance(each, int) else each for each in bindings]
            connection.execute(explain.encode(), texts or None)  # the first time, the server looks names up
            row = connection.execute(explain.encode(), texts or None).fetchone()
            assert row is not None
            found.append(row[0][0]["Plan"])
        connection.rollback()
    return found


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def walked(plan: dict[str, Any]) -> list[str]:
    """Tables of any size that were read from end to end."""
    small = ("subscriptions", "headwater", "leases", "pruned", "gaps", "receipts", "topic_counts")
    return [
        node["Relation Name"]
        for node in nodes(plan)
        if node["Node Type"] == "Seq Scan" and node["Relation Name"] not in small
    ]


def pages(plan: dict[str, Any]) -> int:
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


@pytest.mark.parametrize("generic", [False, True], ids=["custom", "generic"])
@pytest.mark.parametrize("name", [*HOT, *BOUNDED])
def test_what_is_asked_often_is_found_by_an_index(store: PostgresStore, name: str, generic: bool) -> None:
    action = HOT.get(name) or BOUNDED[name]
    for plan in plans(store, statements_of(store, action), generic=generic):
        assert walked(plan) == []
        assert pages(plan) <= (PAGES_MAX if name in HOT else SCAN_PAGES_MAX), plan


def test_what_is_known_not_to_be_there_is_not_looked_for(store: PostgresStore) -> None:
    with store.read() as reader:
        last = reader.last_seq()
        for pattern in ("nothing.here", "nothing.>", "nothing.*"):
            assert reader.scan(selection(pattern), 1_000, 100) == ([], last)
            assert reader.scan(selection(pattern), 1_000, 100, upto=20_000) == ([], 20_000)
        assert reader.scan(selection("later"), 1_000, 100) == ([], 1_000 + SCAN_SEQS_MAX)


def test_so_it_is_before_the_table_was_first_analysed(postgres_schema_url: str) -> None:
    """By its guesses of then, the planner would read a whole stretch of the log and sort it, for the first few."""
    new = PostgresStore(postgres_schema_url)
    with new.write() as writer:
        writer.append([Draft("a", DATA, len(DATA))] * 30_000, NOW, DedupeWindow())
    for action in (HOT["read on from far behind"], HOT["the oldest of all"], HOT["messages by seq"]):
        for plan in plans(new, statements_of(new, action), generic=False):
            assert pages(plan) <= PAGES_MAX
            assert {node["Node Type"] for node in nodes(plan)}.isdisjoint({"Sort", "Bitmap Heap Scan", "Seq Scan"})
    new.close()


def test_the_check_itself_sees_a_table_that_is_read_from_end_to_end(store: PostgresStore) -> None:
    [plan] = plans(store, [("SELECT count(data) FROM messages WHERE size > ?", [1])], generic=False)
    assert pages(plan) > SCAN_PAGES_MAX
    assert walked(plan) == ["messages"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ten_million_messages(postgres: PostgresServer, figures: Callable[[str], None]) -> None:
    url = postgres.new_database()
    store = PostgresStore(url)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO headwater.messages (seq, topic, data, published_at, size, checked)"
            f" SELECT n, 'orders.t' || n %% {TOPICS}, %s::json, {NOW} + n / {BATCH}, {len(DATA)}, 1"
            f" FROM generate_series(1, {MANY_MESSAGES}) AS n",
            (DATA,),
        )
    fill_the_rest(store)
    for name, action in HOT.items():
        for plan in plans(store, statements_of(store, action), generic=False):
            assert walked(plan) == [], name
            assert pages(plan) <= PAGES_MAX, name
    with store.write() as writer:
        for name, action in {**HOT, **BOUNDED}.items():
            started = time.perf_counter()
            action(writer)
            took_s = time.perf_counter() - started
            figures(f"of 10 M: {name}: {took_s * 1000:.1f} ms")
            assert took_s < QUICK_S, name
    with store.read() as reader:
        started, after, last = time.perf_counter(), 0, reader.last_seq()
        found: list[Message] = []
        while after < last and not found:
            found, after = reader.scan(selection("later"), after, 100)
        assert len(found) == 100
        figures(f"of 10 M: a topic that comes last: {time.perf_counter() - started:.1f} s")
    store.close()
    postgres.drop_database(url)
