"""What is committed with an fsync, and what a power cut may undo: claims, and nothing else.

A deferred trigger notes the setting that the commit itself goes by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest

import headwater
from headwater import Log, ManualClock
from headwater.delivery.lease import Lease
from headwater.delivery.publishing import DedupeWindow, Receipt
from headwater.delivery.retention import Limits
from headwater.message import Draft
from headwater.ports.records import (
    DeadLetter,
    DeliveryRow,
    Gap,
    RetentionPolicy,
    SubscriptionRecord,
    SubscriptionSpec,
    Timing,
)
from headwater.ports.store import Reader, Writer
from headwater.stores.postgres import PostgresStore
from headwater.stores.postgres.writer import PostgresWriter
from headwater.topics import parse_pattern

NOW = 1_700_000_000_000
WATCHED = ("messages", "subscriptions", "deliveries", "dead_letters")
NOTING = """
CREATE TABLE noted (setting text);
CREATE FUNCTION note_setting() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO public.noted VALUES (current_setting('synchronous_commit'));
    RETURN NULL;
END $$;
"""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def log(postgres_url: str, clock: ManualClock) -> Iterator[Log]:
    with headwater.open(postgres_url, clock=clock, heartbeats=False, maintenance_interval=None) as opened:
        opened.publish_many([("a", number) for number in range(10)])
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(NOTING)
            for table in WATCHED:
                connection.execute(
                    f"CREATE CONSTRAINT TRIGGER noting AFTER INSERT OR UPDATE OR DELETE ON headwater.{table}"
                    " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.note_setting()"
                )
        yield opened


@pytest.fixture
def settings_of(postgres_url: str) -> Iterator[Callable[[Callable[[], object]], set[str]]]:
    """The settings of the commits in which something is written."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:

        def ask(action: Callable[[], object]) -> set[str]:
            connection.execute("TRUNCATE noted")
            action()
            return {setting for (setting,) in connection.execute("SELECT DISTINCT setting FROM noted")}

        yield ask


Asked = Callable[[Callable[[], object]], set[str]]


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_only_claims_go_without_an_fsync(log: Log, clock: ManualClock, settings_of: Asked, mode: str) -> None:
    options = {"mode": mode, "lease": 1_000.0, "ack_wait": 30.0}
    assert settings_of(lambda: log.publish("a", 11)) == {"on"}
    assert settings_of(lambda: log.publish_many([("a", 12), ("a", 13)])) == {"on"}
    subscription = log.subscribe("s", "a", **options)  # type: ignore[arg-type]
    for _ in range(3):  # a subscription that is known to be unchanged is no exception
        messages = []
        assert settings_of(lambda: messages.extend(subscription.fetch(2))) == {"off"}  # noqa: B023
        first, second = messages
        assert settings_of(first.ack) == {"on"}
        assert settings_of(lambda: subscription.ack_many([second])) == {"on"}  # noqa: B023
    (message,) = subscription.fetch(1)
    assert settings_of(message.extend) == {"off"}
    assert settings_of(lambda: message.nack(delay=5.0)) == {"on"}
    (message,) = subscription.fetch(1)
    assert settings_of(lambda: message.reject("no use")) == {"on"}
    subscription.fetch(1)
    assert settings_of(subscription.close) == {"on"}
    assert settings_of(lambda: log.subscribe("s", "a", **options)) == {"on"}  # type: ignore[arg-type]


def test_a_change_of_holder_is_synced(log: Log, clock: ManualClock, settings_of: Asked, postgres_url: str) -> None:
    log.subscribe("s", "a", lease=10).fetch(1)
    clock.advance(10.001)
    with headwater.open(postgres_url, clock=clock, heartbeats=False, maintenance_interval=None) as other:
        assert settings_of(lambda: other.subscribe("s", "a", lease=10)) == {"on"}


def test_a_claim_that_shares_its_commit_with_an_ack_is_synced(log: Log, settings_of: Asked) -> None:
    with log.subscribe("s", "a", mode="shared") as one, log.subscribe("t", "a", mode="shared") as two:
        (message,) = one.fetch(1)
        two.fetch(1)

        def together() -> None:
            engine = log._core.engine  # type: ignore[attr-defined]
            with engine.store._turn:  # so that both become one group
                acking = one._consumer.submit_ack([message._claimed])
                claiming = two._consumer._claim_at_once
                claimed = engine.committer.submit(lambda writer, hooks: claiming(1, writer, hooks), touching="t")
            acking.wait(30)
            claimed.wait(30)
            assert acking.error is claimed.error is None

        assert settings_of(together) == {"on"}


def test_a_relaxed_log_syncs_nothing(postgres_url: str, log: Log, settings_of: Asked) -> None:
    with headwater.open(postgres_url, durability="relaxed") as relaxed:
        assert settings_of(lambda: relaxed.publish("a", 1)) == {"off"}


# --- each method of a writer ----------------------------------------------------------------------------------------


def record(**changes: object) -> SubscriptionRecord:
    spec = SubscriptionSpec(">", mode="shared")
    return SubscriptionRecord("s", spec, NOW, NOW, **changes)  # type: ignore[arg-type]


def letter(writer: PostgresWriter) -> DeadLetter:
    return DeadLetter(0, "s", writer.messages([1])[1], "rejected", 1, NOW)


WRITES: dict[str, Callable[[PostgresWriter], object]] = {
    "append": lambda writer: writer.append([Draft("a", "1", 1)], NOW, DedupeWindow()),
    "add_receipts": lambda writer: writer.add_receipts("p", [Receipt(1, 1, 1)], NOW),
    "forget_receipts": lambda writer: writer.forget_receipts("p", 1),
    "forget_old_receipts": lambda writer: writer.forget_old_receipts(NOW, 1),
    "save_subscription": lambda writer: writer.save_subscription(record(acked=1)),
    "delete_subscription": lambda writer: writer.delete_subscription("s"),
    "put_deliveries": lambda writer: writer.put_deliveries("s", [DeliveryRow(1, 1, NOW)]),
    "end_leases": lambda writer: writer.end_leases("s", NOW),
    "remove_deliveries": lambda writer: writer.remove_deliveries("s", [1]),
    "clear_deliveries": lambda writer: writer.clear_deliveries("s"),
    "save_dead_letters": lambda writer: writer.save_dead_letters([letter(writer)]),
    "remove_dead_letters": lambda writer: writer.remove_dead_letters([1]),
    "end_redrives": lambda writer: writer.end_redrives("s", "why"),
    "add_gap": lambda writer: writer.add_gap(Gap("s", 1, 1, 1, "retention", NOW)),
    "mark_gaps_reported": lambda writer: writer.mark_gaps_reported("s"),
    "set_retention": lambda writer: writer.set_retention(RetentionPolicy("a", Limits(max_count=1), "nats")),
    "remove_retention": lambda writer: writer.remove_retention("a", "nats"),
    "delete_messages": lambda writer: writer.delete_messages(writer.oldest(parse_pattern(">"), 0, 1)),
    "fold_topic_counts": lambda writer: writer.fold_topic_counts(10),
    "forget_ids": lambda writer: writer.forget_ids(DedupeWindow(), NOW, 10),
    "save_sink_batch": lambda writer: writer.save_sink_batch("sink", 1, NOW),
    "add_timings": lambda writer: writer.add_timings([Timing("s", 0, "ack", 1, 1)]),
    "forget_old_timings": lambda writer: writer.forget_old_timings(NOW, 1),
    "save_lease": lambda writer: writer.save_lease("housekeeping", Lease("me", 1, NOW)),
    "delete_lease": lambda writer: writer.delete_lease("housekeeping"),
    "delete_sink": lambda writer: writer.delete_sink("sink"),
    "execute": lambda writer: writer.execute("CREATE TEMPORARY TABLE mine ()"),
}
CLAIMS: dict[str, Callable[[PostgresWriter], object]] = {
    "a claim": lambda writer: writer.save_subscription(record(lease=Lease("", 1, 0), redelivered=1)),
    "deliveries in flight": lambda writer: writer.put_deliveries("s", [DeliveryRow(1, 1, NOW + 9, token=1)]),
}


def test_every_method_that_writes_is_listed_here() -> None:
    methods = {name for name in vars(Writer) if not name.startswith("_")} - {*vars(Reader)}
    assert methods == {*WRITES}


@pytest.fixture
def store(postgres_schema_url: str) -> Iterator[PostgresStore]:
    opened = PostgresStore(postgres_schema_url)
    with opened.write() as writer:
        writer.append([Draft("a", "1", 1)], NOW, DedupeWindow())
        writer.save_subscription(record())
    yield opened
    opened.close()


@pytest.mark.parametrize("name", WRITES)
def test_whatever_else_is_written_is_synced(store: PostgresStore, name: str) -> None:
    with store.write(alone=False) as writer:
        writer.subscription("s")
        assert writer.only_claims
        WRITES[name](writer)
        assert not writer.only_claims


@pytest.mark.parametrize("name", CLAIMS)
def test_claims_are_not(store: PostgresStore, name: str) -> None:
    with store.write(alone=False) as writer:
        writer.subscription("s")
        CLAIMS[name](writer)
        assert writer.only_claims
