"""What every store promises about transactions, settings, leases and its own life."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headwater.delivery.lease import Lease
from headwater.delivery.publishing import DedupeWindow, Receipt
from headwater.delivery.retention import Limits
from headwater.errors import ClosedError, LockedError, SqlError
from headwater.message import make_draft
from headwater.ports.records import (
    DeadLetter,
    DeadLetterQuery,
    DeliveryRow,
    Gap,
    RetentionPolicy,
    Sample,
    Selection,
    SubscriptionRecord,
    SubscriptionSpec,
    Timing,
)
from headwater.ports.store import Reader, Store, Writer
from headwater.stores.postgres import PostgresStore
from headwater.stores.sql import OWN_TABLES
from headwater.stores.sqlite import MemoryStore, SqliteStore
from headwater.topics import parse_pattern

NOW = 1_700_000_000_000
WINDOW = DedupeWindow()
EVERYTHING = Selection(parse_pattern(">"))
SAMPLE = Sample(NOW, 1, 2, 3, 4, {})
WAIT_S = 30.0  # so long only if something is broken


class Trouble(Exception):
    """Raised by a test in the middle of a transaction."""


def append(writer: Writer, *data: Any, id: str | None = None) -> list[int]:
    return writer.append([make_draft("a", part, {"id": id}, NOW) for part in data], NOW, WINDOW).seqs


def write_and_raise(store: Store, change: Callable[[Writer], object], error: type[BaseException]) -> None:
    with store.write() as writer:
        change(writer)
        raise error


def everything(reader: Reader) -> dict[str, Any]:
    """All that a reader can tell, in a form that can be compared."""
    ids = [record.id for record in reader.subscriptions()]
    return {
        "last_seq": reader.last_seq(),
        "messages": reader.scan(EVERYTHING, 0, 1_000),
        "topic_counts": reader.topic_counts(),
        "seq_before": reader.seq_before(NOW + 1),
        "subscriptions": reader.subscriptions(),
        "deliveries": {id: reader.deliveries(id, range(100)) for id in ids},
        "dead_letters": [
            (letter.id, letter.error, letter.message.to_json())
            for letter in reader.dead_letters(DeadLetterQuery(), 0, 1_000)
        ],
        "gaps": {id: (reader.gaps(id), reader.gap_total(id)) for id in ids},
        "retention": reader.retention(),
        "leases": [reader.lease(resource) for resource in ("held", "new")],
        "receipts": reader.receipts("p", 1, 100),
        "pruned": reader.pruned(0, 1_000),
        "sinks": [reader.sink_batch(sink) for sink in ("s", "t")],
        "timings": reader.timings(),
        "samples": reader.samples(60),
    }


def snapshot(store: Store) -> dict[str, Any]:
    with store.read() as reader:
        return everything(reader)


# --- all or nothing -----------------------------------------------------------------------------------------


def fill(writer: Writer) -> None:
    append(writer, 1, 2, 3)
    append(writer, 4, id="remembered")
    writer.fold_topic_counts(2)
    for id in ("s", "t"):
        writer.save_subscription(SubscriptionRecord(id, SubscriptionSpec(">"), NOW, NOW))
        writer.put_deliveries(id, [DeliveryRow(1, 1, NOW), DeliveryRow(2, 1, NOW, key="k")])
        writer.add_gap(Gap(id, 1, 1, 1, "retention", NOW))
    message = writer.messages([1])[1]
    for error in ("one", "two"):
        writer.save_dead_letters([DeadLetter(0, "s", message, "rejected", 1, NOW, error=error)])
    writer.set_retention(RetentionPolicy("a", Limits(max_count=1)))
    writer.save_lease("held", Lease("me", 1, NOW))
    writer.add_receipts("p", [Receipt(1, 3, 1), Receipt(4, 3, 4)], NOW)
    writer.delete_messages(writer.oldest(EVERYTHING.pattern, 1, 1))
    writer.save_sink_batch("s", 3, NOW)
    writer.add_timings([Timing(id, 0, "ack", 3, 1) for id in ("s", "t")])
    writer.save_sample(60, 7, SAMPLE)


def change_everything(writer: Writer) -> None:
    first, second = writer.dead_letters(DeadLetterQuery(), 0, 2)
    append(writer, 5, 6)
    append(writer, 7, id="new")
    writer.delete_messages(writer.oldest(EVERYTHING.pattern, 1, 4))
    writer.fold_topic_counts(100)
    writer.forget_ids(DedupeWindow(0, 0), NOW + 1, 100)
    writer.save_subscription(SubscriptionRecord("s", SubscriptionSpec("b"), NOW, NOW, acked=9))
    writer.save_subscription(SubscriptionRecord("u", SubscriptionSpec("b"), NOW, NOW))
    writer.put_deliveries("s", [DeliveryRow(2, 9, NOW), DeliveryRow(3, 9, NOW)])
    writer.remove_deliveries("s", [1])
    writer.clear_deliveries("s")
    writer.put_deliveries("s", [DeliveryRow(4, 1, NOW + 5, token=1)])
    writer.end_leases("s", NOW)
    writer.delete_subscription("t")
    writer.add_gap(Gap("s", 2, 2, 1, "retention", NOW))
    writer.mark_gaps_reported("s")
    writer.save_dead_letters([DeadLetter(first.id, "s", first.message, "rejected", 1, NOW, error="changed")])
    writer.save_dead_letters([DeadLetter(0, "s", first.message, "rejected", 1, NOW, error="three")])
    writer.remove_dead_letters([second.id])
    writer.set_retention(RetentionPolicy("b", Limits(max_count=1)))
    writer.set_retention(RetentionPolicy("a", Limits(max_count=2)))
    writer.remove_retention("a", "nats")
    writer.save_lease("held", Lease("you", 2, NOW))
    writer.save_lease("new", Lease("you", 1, NOW))
    writer.forget_receipts("p", 4)
    writer.add_receipts("p", [Receipt(4, 3, 4), Receipt(9, 1, 9)], NOW + 1)
    writer.save_sink_batch("s", 4, NOW)
    writer.save_sink_batch("t", 1, NOW)
    writer.forget_old_timings(1, 10)
    writer.add_timings([Timing("s", 0, "ack", 4, 1)])
    writer.save_sample(60, 7, Sample(NOW + 60, 1, 2, 3, 4, {}))


def test_a_block_that_raises_leaves_no_trace(store: Store) -> None:
    with store.write() as writer:
        fill(writer)
    before = snapshot(store)

    with pytest.raises(Trouble):
        write_and_raise(store, change_everything, Trouble)
    assert snapshot(store) == before
    with store.write() as writer:
        assert append(writer, "again", id="remembered") == [4]
        assert append(writer, "first try", id="new") == [5]
        assert writer.forget_old_receipts(NOW + 1, 10) == 2, "the times of receipts are those that were"


def test_a_block_that_ends_well_leaves_all(store: Store) -> None:
    with store.write() as writer:
        fill(writer)
        before = everything(writer)
    with store.write() as writer:
        change_everything(writer)
        changed = everything(writer)

    assert [name for name in before if before[name] == changed[name]] == [], "a writer sees what it has done"
    assert snapshot(store) == changed
    with store.write() as writer:
        assert append(writer, "forgotten", id="remembered") == [8]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_all_of_it_is_there_when_the_store_is_opened_again(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def open_it() -> Store:
        if kind == "sqlite":
            return SqliteStore(tmp_path / "log.db")
        return PostgresStore(request.getfixturevalue("postgres_schema_url"))

    opened = open_it()
    with opened.write() as writer:
        fill(writer)
        before = everything(writer)
    opened.close()
    again = open_it()
    assert snapshot(again) == before
    again.close()


def test_a_rolled_back_append_leaves_the_log_empty(store: Store) -> None:
    with pytest.raises(Trouble):
        write_and_raise(store, lambda writer: append(writer, 1, 2, 3), Trouble)

    with store.read() as reader:
        assert (reader.last_seq(), reader.topic_counts()) == (0, [])
        assert reader.scan(EVERYTHING, 0, 10).messages == []
    with store.write() as writer:
        assert writer.last_seq() < append(writer, 1)[0] == writer.last_seq()


def test_an_interrupted_block_is_rolled_back_too(store: Store) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_and_raise(store, lambda writer: append(writer, 1), KeyboardInterrupt)

    with store.read() as reader:
        assert reader.last_seq() == 0


def test_a_reader_that_raises_does_no_harm(store: Store) -> None:
    with pytest.raises(Trouble), store.read():
        raise Trouble

    with store.write() as writer:
        append(writer, 1)
    with store.read() as reader:
        assert reader.last_seq() == 1


# --- threads ------------------------------------------------------------------------------------------------


def test_writers_take_turns(store: Store) -> None:
    """No update is lost: what a block has read is still true when it writes."""
    threads, rounds = 8, 25

    def count_up(_: int) -> None:
        for _ in range(rounds):
            with store.write() as writer:
                fence = writer.lease("counter").fence
                (seq,) = append(writer, fence)
                writer.save_lease("counter", Lease("", fence + 1))
                assert seq == fence + 1

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(count_up, range(threads)))
    with store.read() as reader:
        assert reader.lease("counter").fence == reader.last_seq() == threads * rounds
        assert [message.data for message in reader.scan(EVERYTHING, 0, 1_000).messages] == list(range(200))


def test_a_reader_never_sees_a_mixture(store: Store) -> None:
    """Each write keeps the log, its counts and a lease equal; each read finds them equal."""
    writing = threading.Event()
    stop = threading.Event()

    def keep_writing() -> None:
        while not stop.is_set():
            with store.write() as writer:
                last_seq = append(writer, None)[-1]
                writer.save_lease("counter", Lease("", last_seq))
            writing.set()

    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(keep_writing)
        try:
            assert writing.wait(WAIT_S)
            for _ in range(200):
                with store.read() as reader:
                    seen = {
                        reader.last_seq(),
                        reader.lease("counter").fence,
                        reader.count(EVERYTHING, 0, 1_000_000),
                        reader.topic_counts()[0].last_seq,
                        reader.last_seq(),
                    }
                assert len(seen) == 1
        finally:
            stop.set()
        written.result(WAIT_S)


def test_a_reader_keeps_its_moment_while_others_write(concurrent_store: Store) -> None:
    with concurrent_store.write() as writer:
        fill(writer)

    def write() -> None:
        with concurrent_store.write() as writer:
            change_everything(writer)

    with ThreadPoolExecutor(1) as pool, concurrent_store.read() as reader:
        before = everything(reader)
        pool.submit(write).result(WAIT_S)
        assert everything(reader) == before
    assert snapshot(concurrent_store) != before


def test_an_unfinished_write_is_not_visible(concurrent_store: Store) -> None:
    with concurrent_store.write() as writer:
        fill(writer)
    before = snapshot(concurrent_store)

    with ThreadPoolExecutor(1) as pool, concurrent_store.write() as writer:
        change_everything(writer)
        assert pool.submit(snapshot, concurrent_store).result(WAIT_S) == before


def test_readers_do_not_wait_for_each_other(concurrent_store: Store) -> None:
    both_inside = threading.Barrier(2)

    def read(_: int) -> int:
        with concurrent_store.read() as reader:
            both_inside.wait(WAIT_S)
            return reader.last_seq()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(read, range(2))) == [0, 0]


# --- settings and leases ------------------------------------------------------------------------------------


def retention(store: Store) -> dict[tuple[str, str], Limits]:
    with store.read() as reader:
        return {(policy.pattern, policy.dialect): policy.limits for policy in reader.retention()}


def test_retention_is_set_replaced_and_removed(store: Store) -> None:
    full = Limits(max_age_ms=1, max_count=0, max_bytes=2**50, keep_unacked=True)
    with store.write() as writer:
        writer.set_retention(RetentionPolicy("a.*", Limits(max_age_ms=5)))
        writer.set_retention(RetentionPolicy("a.*", full, "amqp"))
        writer.set_retention(RetentionPolicy("b.>", Limits(max_count=5)))
    assert retention(store) == {
        ("a.*", "nats"): Limits(max_age_ms=5),
        ("a.*", "amqp"): full,
        ("b.>", "nats"): Limits(max_count=5),
    }

    with store.write() as writer:
        writer.set_retention(RetentionPolicy("a.*", Limits(max_bytes=7)))
        assert writer.remove_retention("b.>", "nats") is True
        assert writer.remove_retention("b.>", "nats") is False
        assert writer.remove_retention("a.>", "amqp") is False
    assert retention(store) == {("a.*", "nats"): Limits(max_bytes=7), ("a.*", "amqp"): full}


def test_leases(store: Store) -> None:
    with store.read() as reader:
        assert reader.lease("housekeeping") == Lease()
    with store.write() as writer:
        writer.save_lease("housekeeping", Lease("ü", 2**40, NOW))
        writer.save_lease("other", Lease("b", 1, NOW))
        writer.save_lease("other", Lease("", 1, 0))

    with store.read() as reader:
        assert reader.lease("housekeeping") == Lease("ü", 2**40, NOW)
        assert reader.lease("other") == Lease("", 1, 0)


# --- the user's SQL -----------------------------------------------------------------------------------------


def append_and_delete_paid(writer: Writer) -> None:
    append(writer, 1)
    writer.execute("DELETE FROM paid")


def test_the_users_sql_shares_the_transaction(store: Store) -> None:
    with store.write() as writer:
        assert writer.execute("CREATE TABLE paid (id INTEGER, name TEXT)") == []
        writer.execute("INSERT INTO paid VALUES (?, ?)", (1, "ü"))
        writer.execute("INSERT INTO paid VALUES (:id, :name)", {"id": 2, "name": None})
    with pytest.raises(Trouble):
        write_and_raise(store, append_and_delete_paid, Trouble)

    with store.write() as writer:
        assert writer.execute("SELECT * FROM paid ORDER BY id") == [(1, "ü"), (2, None)]
        assert writer.last_seq() == 0


@pytest.mark.parametrize(
    "sql",
    ["DELETE FROM messages", "UPDATE messages SET topic = 'x'", "COMMIT", "ROLLBACK"],
)
def test_the_users_sql_may_not_touch_the_log_nor_end_the_transaction(store: Store, sql: str) -> None:
    with store.write() as writer:
        append(writer, 1)
    with pytest.raises(SqlError), store.write() as writer:
        writer.execute(sql)

    with store.read() as reader:
        assert [message.data for message in reader.scan(EVERYTHING, 0, 10).messages] == [1]


@pytest.mark.parametrize("table", sorted(OWN_TABLES))
@pytest.mark.parametrize("statement", ["DELETE FROM {}", "DROP TABLE {}", "INSERT INTO {} SELECT * FROM {}"])
def test_no_table_of_the_log_is_the_users(store: Store, statement: str, table: str) -> None:
    with pytest.raises(SqlError, match=r"the log's own tables|other objects depend"), store.write() as writer:
        writer.execute(statement.replace("{}", table))


# --- the store's own life -----------------------------------------------------------------------------------


def test_health_is_reported_in_plain_values(store: Store) -> None:
    assert isinstance(store.name, str)
    health = store.health()
    assert health
    assert all(isinstance(name, str) for name in health)


def test_space_can_be_reclaimed_until_there_is_no_more(store: Store) -> None:
    with store.write() as writer:
        append(writer, *("x" * 10_000 for _ in range(100)))
    with store.write() as writer:
        writer.delete_messages(writer.oldest(EVERYTHING.pattern, 0, 100))

    for _ in range(10_000):
        if not store.reclaim_space(pages=64):
            break
    else:
        pytest.fail("there is always more space to reclaim")
    with store.read() as reader:
        assert reader.last_seq() == 100


def test_a_closed_store_says_so(store: Store) -> None:
    store.close()
    store.close()

    with pytest.raises(ClosedError), store.write():
        pytest.fail("a closed store was written to")
    with pytest.raises(ClosedError), store.read():
        pytest.fail("a closed store was read")
    with pytest.raises(ClosedError):
        store.health()


def test_in_memory_a_read_inside_the_open_transaction_does_not_wait_forever() -> None:
    store = MemoryStore(busy_timeout_ms=10)
    with store.write(), pytest.raises(LockedError, match="take turns"), store.read():
        pytest.fail("it read what is not committed")
    with store.read() as reader:
        assert reader.last_seq() == 0
    store.close()


def test_leases_by_prefix_and_what_is_deleted(store: Store) -> None:
    with store.write() as writer:
        for resource in ("a:1", "a:2", "a", "b:1", "A:1", "a%"):
            writer.save_lease(resource, Lease("owner", 3, 7))
        writer.save_sink_batch("a:1", 5, 0)
    with store.read() as reader:
        assert list(reader.leases("a:")) == ["a:1", "a:2"]
        assert reader.leases("a:")["a:1"] == Lease("owner", 3, 7)
    with store.write() as writer:
        writer.delete_lease("a:1")
        writer.delete_sink("a:1")
    with store.read() as reader:
        assert list(reader.leases("a:")) == ["a:2"]
        assert (reader.lease("a:1"), reader.sink_batch("a:1")) == (Lease(), None)
