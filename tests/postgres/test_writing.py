"""What a writer does that only PostgreSQL asks for: locks between hosts, text it cannot keep, and what is news."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import psycopg
import pytest
from psycopg import sql

import headwater
from headwater.delivery.lease import Lease
from headwater.delivery.publishing import DedupeWindow
from headwater.errors import ConflictError, InvalidDataError, InvalidOptionError, LockedError
from headwater.message import Draft, make_draft
from headwater.ports.records import (
    DeadLetter,
    DeadLetterQuery,
    DeliveryRow,
    Gap,
    SubscriptionRecord,
    SubscriptionSpec,
    Timing,
    selection_of,
)
from headwater.stores.postgres import PostgresStore
from headwater.stores.postgres.writer import PostgresWriter
from headwater.topics import parse_pattern

NOW = 1_700_000_000_000
IMPATIENT_MS = 50
WAIT_S = 30.0


@pytest.fixture
def store(postgres_schema_url: str) -> Iterator[PostgresStore]:
    opened = PostgresStore(postgres_schema_url)
    with opened.write() as writer:
        for id in ("s", "t"):
            writer.save_subscription(record(id))
    yield opened
    opened.close()


@pytest.fixture
def other(store: PostgresStore, postgres_schema_url: str) -> Iterator[PostgresStore]:
    """Another host's, which does not wait for locks."""
    opened = PostgresStore(postgres_schema_url, busy_timeout_ms=IMPATIENT_MS)
    yield opened
    opened.close()


@pytest.fixture
def patient(store: PostgresStore, postgres_schema_url: str) -> Iterator[PostgresStore]:
    """Another host's, which waits."""
    opened = PostgresStore(postgres_schema_url)
    yield opened
    opened.close()


def record(id: str, mode: str = "shared", lease: Lease = Lease()) -> SubscriptionRecord:  # noqa: B008 (frozen)
    return SubscriptionRecord(id, SubscriptionSpec(">", mode=mode), NOW, NOW, lease=lease)  # type: ignore[arg-type]


def publish(writer: PostgresWriter, *data: object, **options: object) -> list[int]:
    drafts = [make_draft("a", each, options, NOW) for each in data]  # type: ignore[arg-type]
    return writer.append(drafts, NOW, DedupeWindow()).seqs


# --- locks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ask",
    [
        lambda writer: writer.subscription("s"),
        lambda writer: writer.lease("new"),
        lambda writer: writer.lease("housekeeping"),
        lambda writer: publish(writer, 1),
        lambda writer: writer.receipts("p", 1, 1),
        lambda writer: writer.fold_topic_counts(10),
        lambda writer: writer.delete_messages(writer.oldest(parse_pattern(">"), 0, 1)),
    ],
    ids=["subscription", "new lease", "lease", "publish", "receipts", "counts", "deletion"],
)
def test_what_one_host_is_about_to_change_another_waits_for(
    store: PostgresStore, other: PostgresStore, ask: Callable[[PostgresWriter], object]
) -> None:
    with store.write() as writer:
        writer.save_lease("housekeeping", Lease("me", 1, NOW))
        publish(writer, 1, 2)
    with store.write(alone=False) as writer:
        ask(writer)
        with pytest.raises(LockedError), other.write(alone=False) as late:
            ask(late)
        with other.write(alone=False) as beside:  # but not for anything else
            assert beside.subscription("t") == record("t")
            beside.put_deliveries("t", [DeliveryRow(1, 1, NOW)])
    with other.write(alone=False) as next_one:
        ask(next_one)


def test_alone_is_alone(store: PostgresStore, other: PostgresStore) -> None:
    with store.write(alone=True):
        for alone in (True, False):
            with pytest.raises(LockedError), other.write(alone=alone) as late:
                late.last_seq()  # one that is not alone waits with its first statement
    with store.write(alone=False) as writer:
        writer.last_seq()
        with pytest.raises(LockedError), other.write(alone=True):
            pytest.fail("not alone")


def test_a_delivery_that_is_being_settled_is_passed_over(store: PostgresStore) -> None:
    with store.write() as writer:
        publish(writer, 1, 2, 3)
        writer.put_deliveries("s", [DeliveryRow(seq, 1, NOW, token=1) for seq in (1, 2, 3)])
    with psycopg.connect(store.place.conninfo) as users:
        users.execute(f"DELETE FROM {store.place.schema}.deliveries WHERE seq = 2")
        with store.write(alone=False) as writer:
            assert [due.row.seq for due in writer.due("s", NOW, 10, "seq")] == [1, 3]
            assert [due.row.seq for due in writer.due("s", NOW, 10, "priority")] == [1, 3]
        users.rollback()
    with store.write(alone=False) as writer:
        assert [due.row.seq for due in writer.due("s", NOW, 10, "seq")] == [1, 2, 3]


def until_a_session_waits(connection: psycopg.Connection) -> None:
    """There is nothing to wait for but what the server says."""
    while connection.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone() == (0,):
        pass


def test_hosts_that_count_the_same_at_once_wait_in_no_circle(store: PostgresStore, patient: PostgresStore) -> None:
    first, *_, last = timings = [Timing("s", 0, "ack", bucket, 1) for bucket in range(20)]

    def count(given: list[Timing]) -> None:
        with patient.write(alone=False) as writer:
            writer.add_timings(given)

    with ThreadPoolExecutor(1) as pool, psycopg.connect(store.place.conninfo, autocommit=True) as looking:
        with store.write(alone=False) as writer:
            writer.add_timings([first])
            writer.last_seq()  # so that it is sent
            counting = pool.submit(count, timings[::-1])
            until_a_session_waits(looking)
            writer.add_timings([last])
        counting.result(WAIT_S)
    with store.read() as reader:
        assert {timing.bucket: timing.count for timing in reader.timings()} == {
            bucket: 2 if bucket in (0, 19) else 1 for bucket in range(20)
        }


def test_hosts_that_fold_at_once_count_each_message_once(store: PostgresStore, patient: PostgresStore) -> None:
    with store.write() as writer:
        publish(writer, *range(10))

    def fold() -> int:
        with patient.write(alone=False) as writer:
            return writer.fold_topic_counts(100)

    with ThreadPoolExecutor(1) as pool, psycopg.connect(store.place.conninfo, autocommit=True) as looking:
        with store.write(alone=False) as writer:
            assert writer.fold_topic_counts(100) == 10
            folding = pool.submit(fold)
            until_a_session_waits(looking)
        assert folding.result(WAIT_S) == 0
    with store.read() as reader:
        assert [(counted.topic, counted.count) for counted in reader.topic_counts()] == [("a", 10)]


# --- subscriptions that are known -----------------------------------------------------------------------------


def move(store: PostgresStore, id: str = "s") -> None:
    with store.write(alone=False) as writer:
        known = writer.subscription(id)
        assert known is not None
        writer.save_subscription(msgspec.structs.replace(known, acked=known.acked + 1))


def is_known(store: PostgresStore) -> bool:
    with store.write(alone=False) as writer:
        writer.subscription("s")
        return bool(writer.connection.queued)  # not even the BEGIN was sent


def acked(store: PostgresStore) -> int:
    with store.read() as reader:
        found = reader.subscription("s")
        assert found is not None
        return found.acked


def test_a_subscription_that_no_other_host_writes_to_is_not_asked_for(store: PostgresStore) -> None:
    for _ in range(3):
        move(store)
    assert is_known(store)
    assert acked(store) == 3


def test_what_another_host_changed_is_a_conflict_and_then_asked_for(
    store: PostgresStore, patient: PostgresStore
) -> None:
    for _ in range(3):
        move(store)
    move(patient)
    for _ in range(2):
        with pytest.raises(ConflictError):  # checked where it is saved
            move(store)
        move(store)  # asked for
        assert not is_known(store)
        move(store)
        move(store)
        assert is_known(store)
        move(patient)
    assert acked(store) == 3 + 2 * 3 + 3


def test_it_is_checked_before_anything_of_it_is_read_or_written(store: PostgresStore, patient: PostgresStore) -> None:
    for use in (
        lambda writer: writer.due("s", NOW, 1, "seq"),
        lambda writer: writer.scan(selection_of(SubscriptionSpec(">")), 0, 1),
        lambda writer: writer.remove_deliveries("s", [1]),
        lambda writer: writer.execute("SELECT 1"),
        lambda writer: publish(writer, 1),
        lambda writer: None,
    ):
        for _ in range(3):
            move(store)
        assert is_known(store)
        move(patient)
        with contextlib.ExitStack() as stack:
            stack.enter_context(pytest.raises(ConflictError))
            writer = stack.enter_context(store.write(alone=False))
            writer.subscription("s")
            use(writer)
        move(store)


def test_a_row_that_is_being_changed_is_waited_for(store: PostgresStore, other: PostgresStore) -> None:
    for _ in range(3):
        move(other)
    with store.write(alone=False) as writer:
        writer.subscription("s")
        writer.last_seq()
        with pytest.raises(LockedError):
            move(other)


# --- text that PostgreSQL cannot keep -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["id", "from_", "to", "reply_to", "correlation_id", "type", "traceparent"])
def test_a_name_with_the_character_nul_is_refused_and_nothing_happens(store: PostgresStore, name: str) -> None:
    with store.write() as writer:
        with pytest.raises(InvalidOptionError, match=f"{name} holds the character NUL"):
            publish(writer, "fine", "not fine", **{name: "a\0b"})
        assert publish(writer, "fine") == [1]


def test_a_subscription_with_the_character_nul_is_refused(store: PostgresStore) -> None:
    with store.write() as writer:
        with pytest.raises(InvalidOptionError, match="NUL"):
            writer.save_subscription(record("a\0b"))
        assert [each.id for each in writer.subscriptions()] == ["s", "t"]


@pytest.mark.parametrize("draft", [Draft("a", '"\0"', 3), Draft("a", '"\1"', 3), Draft("a\0", "1", 1)], ids=ascii)
def test_an_unchecked_draft_does_no_harm(store: PostgresStore, draft: Draft) -> None:
    with pytest.raises(InvalidDataError), store.write() as writer:
        writer.append([Draft("a", "1", 1), draft], NOW, DedupeWindow())
    with store.write() as writer:
        assert publish(writer, "fine") == [1]


def test_what_came_from_elsewhere_is_kept_as_far_as_it_can_be(store: PostgresStore) -> None:
    with store.write() as writer:
        [seq] = publish(writer, "a\0b")
        writer.put_deliveries("s", [DeliveryRow(seq, 0, NOW, key="k\0")])
        row = writer.deliveries("s", [seq])[seq]
        writer.put_deliveries("s", [row])
        message = writer.messages([seq])[seq]
        dead = DeadLetter(0, "s", message, "rejected", 1, NOW, error="bad \0 \ud800", stack="\0", handler="ü")
        writer.save_dead_letters([dead])
        [letter] = writer.dead_letters(DeadLetterQuery(), 0, 10)
        assert writer.deliveries("s", [seq]) == {seq: row}
    assert row.key == "k\ufffd"
    assert (letter.error, letter.stack, letter.handler) == ("bad \ufffd ?", "\ufffd", "ü")
    assert letter.message.data == "a\0b"


# --- news ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "is_news"),
    [
        (lambda writer: publish(writer, 1), True),
        (lambda writer: publish(writer, 1, id="known"), False),
        (lambda writer: publish(writer), False),
        (lambda writer: writer.put_deliveries("s", [DeliveryRow(1, 1, NOW + 9, token=2)]), False),
        (lambda writer: writer.put_deliveries("s", [DeliveryRow(1, 1, NOW)]), True),
        (lambda writer: writer.remove_deliveries("s", [1]), False),
        (lambda writer: writer.remove_deliveries("s", [2]), True),
        (lambda writer: writer.end_leases("s", NOW), True),
        (lambda writer: writer.end_leases("t", NOW), False),
        (lambda writer: writer.save_subscription(record("s")), False),
        (lambda writer: writer.save_subscription(record("e", "exclusive", Lease("me", 1, NOW))), False),
        (lambda writer: writer.save_subscription(record("e", "exclusive", Lease("", 1, 0))), True),
        (lambda writer: writer.delete_subscription("t"), True),
        (lambda writer: writer.add_gap(Gap("s", 1, 1, 1, "retention", NOW)), True),
        (lambda writer: writer.fold_topic_counts(10), False),
        (lambda writer: writer.save_lease("housekeeping", Lease("me", 1, NOW)), False),
    ],
)
def test_what_others_may_be_waiting_for_is_news(
    store: PostgresStore, change: Callable[[PostgresWriter], object], is_news: bool
) -> None:
    with store.write() as writer:
        publish(writer, 0, id="known")
        rows = [DeliveryRow(1, 1, NOW + 9, token=1), DeliveryRow(2, 1, NOW + 9, token=1, key="k")]
        writer.put_deliveries("s", rows)
    with psycopg.connect(store.place.conninfo, autocommit=True) as listening:
        listening.execute(sql.SQL("LISTEN {}").format(sql.Identifier(store.place.channel)))
        with store.write() as writer:
            change(writer)
        listening.execute("SELECT 1")  # its answer comes behind what was notified before
        assert [news.payload for news in listening.notifies(timeout=0)] == [store.sender] * is_news


# --- asked ahead --------------------------------------------------------------------------------------------


def test_what_a_claim_asks_ahead_is_what_it_would_find(postgres_schema_url: str) -> None:
    """Messages that the last claim read besides its own, among them some whose payload PostgreSQL cannot read for a
    `where`."""
    with headwater.open(postgres_schema_url) as log:
        log.publish_many([("work", {"n": number}) for number in range(6)])
        log.publish("work", "no n")
        log.publish("work", {"n": "\0"})
        log.publish_many([("work", {"n": number}) for number in range(8, 12)])
        for where, wanted in ((None, 12), ("data.n < 100", 10)):
            for mode in ("shared", "exclusive"):
                found = []
                with log.subscribe(f"{mode}-{wanted}", "work", mode=mode, where=where) as subscription:  # type: ignore[call-overload]
                    while messages := subscription.fetch(1):
                        found += [message.seq for message in messages]
                        if len(found) % 5 == 4:
                            messages[0].nack(delay=0.0)
                            [again] = subscription.fetch(1)
                            assert again.seq == found[-1]
                            again.ack()
                        else:
                            subscription.ack_many(messages)
                assert len(found) == wanted
                assert found == sorted(set(found))
