"""How long deliveries took, as the log counts it: from publish to delivery, and to the ack."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from headwater import Log, ManualClock
from headwater.broker import maintenance, statistics
from headwater.broker.committer import TransactionHooks
from headwater.broker.deliveries import Claimed
from headwater.broker.statistics import SAVE_EVERY_MS, Timings
from headwater.delivery.histogram import SAMPLES_MAX, bucket_of
from headwater.errors import StoreError
from headwater.message import Message
from headwater.ports.records import Timing
from headwater.ports.store import Writer
from headwater.stores.postgres import PostgresStore
from headwater.stores.postgres.writer import PostgresWriter
from headwater.stores.sqlite import SqliteStore
from headwater.stores.sqlite.writer import SqliteWriter

HOUR_MS = statistics.HOUR_MS


@pytest.fixture
def stored(log: Log, open_log: Any) -> Callable[[], list[Timing]]:
    """What stands in the table, seen past the log; behind a server it is in the server's file."""

    def look() -> list[Timing]:
        if open_log.url.startswith(("memory:", "postgres:")):
            with log._core.engine.store.read() as reader:  # type: ignore[attr-defined]
                return list(reader.timings())
        store = SqliteStore(open_log.url)
        try:
            with store.read() as reader:
                return reader.timings()
        finally:
            store.close()

    return look


def hour(clock: ManualClock) -> int:
    return clock.now_ms() // HOUR_MS * HOUR_MS


def test_delivery_and_ack_are_counted_from_publish(
    log: Log, clock: ManualClock, stored: Callable[[], list[Timing]], mode: Any
) -> None:
    log.publish_many([("a", n) for n in range(3)])
    subscription = log.subscribe("s", "a", mode=mode)
    clock.advance(0.05)
    found = subscription.fetch(3)
    clock.advance(0.2)
    subscription.ack_many(found)
    log.run_maintenance()
    assert stored() == [
        Timing("s", hour(clock), "ack", bucket_of(250), 3),
        Timing("s", hour(clock), "deliver", bucket_of(50), 3),
    ]


def test_each_ack_of_its_own(log: Log, clock: ManualClock, stored: Callable[[], list[Timing]], mode: Any) -> None:
    log.publish("a", 1)
    [message] = log.subscribe("s", "a", mode=mode).fetch()
    clock.advance(0.007)
    message.ack()
    log.run_maintenance()
    assert stored() == [
        Timing("s", hour(clock), "ack", bucket_of(7), 1),
        Timing("s", hour(clock), "deliver", 0, 1),
    ]


def test_only_the_first_delivery_counts(
    log: Log, clock: ManualClock, stored: Callable[[], list[Timing]], mode: Any
) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a", mode=mode)
    subscription.fetch()[0].nack(delay=1)
    clock.advance(1)
    [message] = subscription.fetch()
    assert message.attempt == 2
    message.ack()
    log.run_maintenance()
    assert stored() == [
        Timing("s", hour(clock), "ack", bucket_of(1_000), 1),
        Timing("s", hour(clock), "deliver", 0, 1),
    ]


def test_a_delayed_message_counts_from_when_it_was_due(
    log: Log, clock: ManualClock, stored: Callable[[], list[Timing]], mode: Any
) -> None:
    log.publish("a", 1, delay=60)
    subscription = log.subscribe("s", "a", mode=mode)
    assert subscription.fetch() == []
    clock.advance(60.005)
    subscription.fetch()[0].ack()
    log.run_maintenance()
    assert {(timing.stage, timing.bucket) for timing in stored()} == {("ack", bucket_of(5)), ("deliver", bucket_of(5))}


def test_how_long_a_redriven_message_was_dead_is_not_counted(
    log: Log, clock: ManualClock, stored: Callable[[], list[Timing]], mode: Any
) -> None:
    log.publish("a", 1)
    subscription = log.subscribe("s", "a", mode=mode)
    subscription.fetch()[0].reject("broken")
    clock.advance(5)
    log.dead_letters.redrive()
    log.publish("a", 2)
    while found := subscription.fetch():
        subscription.ack_many(found)
    assert log.subscription("s").acked == 2
    log.run_maintenance()
    assert stored() == [Timing("s", hour(clock), "ack", 0, 1), Timing("s", hour(clock), "deliver", 0, 2)]


@pytest.mark.usefixtures("engine_here")
def test_an_ack_in_a_transaction_counts_once_it_is_committed(
    log: Log, clock: ManualClock, stored: Callable[[], list[Timing]]
) -> None:
    log.publish("a", 1)
    [message] = log.subscribe("s", "a").fetch()
    with pytest.raises(ZeroDivisionError), message.transaction():
        raise ZeroDivisionError
    log.run_maintenance()
    assert [timing.stage for timing in stored()] == ["deliver"]
    with message.transaction():
        pass
    log.run_maintenance()
    assert [timing.stage for timing in stored()] == ["ack", "deliver"]


def test_hours_and_subscriptions_are_kept_apart(
    log: Log, clock: ManualClock, stored: Callable[[], list[Timing]]
) -> None:
    first, second = (log.subscribe(id, "a", mode="shared") for id in "st")
    log.publish("a", 1)
    first.fetch()
    clock.advance(HOUR_MS / 1000)
    second.fetch()
    log.run_maintenance()
    assert stored() == [
        Timing("s", hour(clock) - HOUR_MS, "deliver", 0, 1),
        Timing("t", hour(clock), "deliver", bucket_of(HOUR_MS), 1),
    ]


def test_a_large_batch_is_counted_whole(log: Log, clock: ManualClock, stored: Callable[[], list[Timing]]) -> None:
    for _ in range(10):
        log.publish_many([("a", n) for n in range(77)])
        clock.advance(0.1)
    subscription = log.subscribe("s", "a", mode="shared")
    subscription.ack_many(subscription.fetch(770))
    log.run_maintenance()
    delivered = [timing for timing in stored() if timing.stage == "deliver"]
    assert sum(timing.count for timing in delivered) == 770 > SAMPLES_MAX
    assert len(delivered) > 3, "early ones took longer than late ones"
    assert max(timing.bucket for timing in delivered) == bucket_of(1_000)


# --- when they are saved ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("engine_here")
def test_a_heartbeat_saves_them_now_and_then(
    log: Log, clock: ManualClock, stored: Callable[[], list[Timing]], mode: Any
) -> None:
    subscription = log.subscribe("s", "a", mode=mode)
    log.publish("a", 1)
    subscription.fetch()
    clock.advance((SAVE_EVERY_MS - 1) / 1000)
    log._core.heartbeat()  # type: ignore[attr-defined]
    assert stored() == []
    clock.advance(0.001)
    log._core.heartbeat()  # type: ignore[attr-defined]
    assert len(stored()) == 1
    log.publish("a", 2)
    subscription.fetch()
    log._core.heartbeat()  # type: ignore[attr-defined]
    assert sum(timing.count for timing in stored()) == 1
    clock.advance(SAVE_EVERY_MS / 1000)
    log._core.heartbeat()  # type: ignore[attr-defined]
    log._core.heartbeat()  # type: ignore[attr-defined]
    assert sum(timing.count for timing in stored()) == 2, "each once"


def test_closing_saves_the_rest(open_log: Any) -> None:
    log = open_log()
    log.publish("a", 1)
    subscription = log.subscribe("s", "a")
    subscription.ack_many(subscription.fetch())
    log.close()
    open_log.close_all()  # also the server, whose log it is
    is_database = open_log.url.startswith("postgres:")
    store = PostgresStore(open_log.url) if is_database else SqliteStore(open_log.url)
    with store.read() as reader:
        assert [timing.stage for timing in reader.timings()] == ["ack", "deliver"]
    store.close()


@pytest.mark.usefixtures("engine_here")
def test_what_could_not_be_saved_waits(
    log: Log, clock: ManualClock, stored: Callable[[], list[Timing]], monkeypatch: pytest.MonkeyPatch
) -> None:
    subscription = log.subscribe("s", "a")
    log.publish("a", 1)
    subscription.fetch()[0].ack()
    clock.advance(SAVE_EVERY_MS / 1000)

    def fail(*_: object) -> None:
        raise StoreError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(SqliteWriter, "add_timings", fail)
        patch.setattr(PostgresWriter, "add_timings", fail)
        log._core.heartbeat()  # type: ignore[attr-defined]
    with log._core.engine.store.read() as reader:  # type: ignore[attr-defined]
        assert reader.subscription("s").active_ms == clock.now_ms(), "the lease was renewed all the same"
    assert stored() == []
    log.run_maintenance()
    assert sorted(timing.stage for timing in stored()) == ["ack", "deliver"]


@pytest.mark.usefixtures("engine_here")
def test_a_delivery_that_was_taken_back_is_not_counted(
    log: Log, stored: Callable[[], list[Timing]], monkeypatch: pytest.MonkeyPatch
) -> None:
    subscription = log.subscribe("s", "a")
    log.publish("a", 1)
    store = log._core.engine.store  # type: ignore[attr-defined]
    write = store.write

    @contextmanager
    def write_and_fail(on_rollback: Callable[[], None], **options: bool) -> Iterator[Writer]:
        with write(on_rollback, **options) as writer:
            yield writer
            raise StoreError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", write_and_fail)
        with pytest.raises(StoreError):
            subscription.fetch()
    log.run_maintenance()
    assert stored() == []
    assert len(subscription.fetch()) == 1
    log.run_maintenance()
    assert [timing.count for timing in stored()] == [1]


def test_removed_with_the_subscription(log: Log, stored: Callable[[], list[Timing]]) -> None:
    log.publish("a", 1)
    with log.subscribe("s", "a") as subscription:
        subscription.ack_many(subscription.fetch())
    log.delete_subscription("s")
    log.run_maintenance()
    assert stored() == []


def test_maintenance_drops_what_is_old(log: Log, clock: ManualClock, stored: Callable[[], list[Timing]]) -> None:
    subscription = log.subscribe("s", "a", mode="shared")
    log.publish("a", 1)
    subscription.fetch()
    log.run_maintenance()
    began_ms = hour(clock)
    clock.advance((began_ms + maintenance.TIMINGS_KEPT_MS - clock.now_ms()) / 1000)
    log.run_maintenance()
    assert len(stored()) == 1
    clock.advance(0.001)
    log.run_maintenance()
    assert stored() == []


# --- counting -----------------------------------------------------------------------------------------------


def claim(clock: ManualClock, published_ms_ago: int = 0, attempt: int = 1) -> Claimed:
    message = Message(1, "a", msgspec.Raw(b"1"), clock.now_ms() - published_ms_ago, 1, 0)
    return Claimed(message, attempt, 1)


def test_all_that_a_transaction_settles_is_one_batch(clock: ManualClock) -> None:
    counted, hooks = Timings(clock), TransactionHooks()
    for ms in (0, 50, 50):
        counted.note(hooks, "ack", "s", [claim(clock, ms)] * 20)
    counted.note(hooks, "ack", "t", [claim(clock)])
    counted.note(hooks, "deliver", "s", [claim(clock)] * 3)
    assert not counted, "nothing is counted before the commit"
    assert len(hooks.then) == 3
    for step in hooks.then:
        step()
    sums: dict[tuple[str, str], int] = {}
    for (subscription, _, stage, bucket), count in counted._counts.items():
        assert bucket in (0, bucket_of(50))
        sums[subscription, stage] = sums.get((subscription, stage), 0) + count
    assert sums == {("s", "ack"): 60, ("t", "ack"): 1, ("s", "deliver"): 3}


def test_a_clock_that_was_set_back(clock: ManualClock) -> None:
    counted = Timings(clock)
    counted.count("deliver", "s", [claim(clock, -5_000), claim(clock, attempt=2)])
    assert counted._counts == {("s", hour(clock), "deliver", 0): 1}


def test_there_is_a_limit_to_what_waits(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "UNSAVED_MAX", 2)
    claimed = [claim(clock)]
    counted = Timings(clock)
    for subscription in ("s", "t", "u", "s"):
        counted.count("ack", subscription, claimed)
    assert {key[0]: count for key, count in counted._counts.items()} == {"s": 2, "t": 1}
