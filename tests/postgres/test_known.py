"""What a store takes for true of a subscription, so that a claim and an ack are one round trip each, and what becomes
of it when another host or the user's SQL has changed that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import headwater
from headwater import Log, ManualClock
from headwater.errors import LeaseLostError
from headwater.stores.postgres import known
from headwater.stores.postgres.connection import SQL
from headwater.stores.postgres.known import AHEAD_BYTES_MAX, AHEAD_MESSAGES_MAX, ReadAhead
from headwater.stores.postgres.pipelined import PipelinedConnection

MODES = ("exclusive", "shared")
WARM = 4  # fetches and acks until the store knows the subscription and has read ahead


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


@pytest.fixture
def log(postgres_url: str, clock: ManualClock) -> Iterator[Log]:
    with headwater.open(postgres_url, clock=clock, heartbeats=False) as opened:
        opened.publish_many([("work", {"n": number}) for number in range(60)])
        yield opened


@pytest.fixture
def sql(postgres_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgres_url, autocommit=True, options="-c search_path=headwater") as connection:
        yield connection


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The statements of each round trip of the writer. The listener asks for the last seq when it has connected."""
    seen: list[list[str]] = []
    real = PipelinedConnection.send_queued

    def send_queued(connection: PipelinedConnection) -> None:
        if threading.current_thread().name == "headwater-writer":
            seen.append([statement.sql for statement in connection.queued])
        real(connection)

    monkeypatch.setattr(PipelinedConnection, "send_queued", send_queued)
    return seen


def warm(log: Log, mode: Any) -> Any:
    """A subscription whose next message is read ahead."""
    subscription = log.subscribe("s", "work", mode=mode)
    for _ in range(WARM):
        subscription.ack_many(subscription.fetch(1))
    return subscription


@pytest.mark.parametrize("mode", MODES)
def test_a_fetch_is_one_round_trip_and_an_ack_another(log: Log, trips: list[list[str]], mode: str) -> None:
    subscription = warm(log, mode)
    trips.clear()
    [message] = subscription.fetch(1)
    assert len(trips) == 1
    assert not any("FROM messages WHERE seq >" in statement for statement in trips[0])  # was read ahead
    message.ack()
    assert len(trips) == 2
    assert [message.data["n"] for message in subscription.fetch(1)] == [WARM + 1]


@pytest.mark.parametrize("mode", MODES)
def test_what_was_read_ahead_and_is_deleted_is_not_delivered(log: Log, sql: psycopg.Connection, mode: str) -> None:
    subscription = warm(log, mode)
    sql.execute("DELETE FROM messages WHERE seq = %s", (WARM + 1,))
    [message] = subscription.fetch(1)
    assert message.seq == WARM + 2
    message.ack()
    assert [message.seq for message in subscription.fetch(3)] == [WARM + 3, WARM + 4, WARM + 5]


@pytest.mark.parametrize("mode", MODES)
def test_what_another_host_redrives_is_delivered_before_what_was_read_ahead(
    log: Log, postgres_url: str, clock: ManualClock, mode: str
) -> None:
    subscription = log.subscribe("s", "work", mode=mode)  # type: ignore[call-overload]
    subscription.fetch(1)[0].reject("no use")
    for _ in range(WARM):
        subscription.ack_many(subscription.fetch(1))
    with headwater.open(postgres_url, clock=clock) as other:
        [letter] = other.dead_letters.list()
        other.dead_letters.redrive(letter.id)
    assert [message.seq for message in subscription.fetch(1)] == [1]
    assert [message.seq for message in subscription.fetch(1)] == [WARM + 2]


@pytest.mark.parametrize("mode", MODES)
def test_a_gap_is_reported_with_the_next_fetch(log: Log, sql: psycopg.Connection, mode: str) -> None:
    gaps: list[Any] = []
    subscription = warm(log, mode)
    subscription.on_gap(gaps.append)
    sql.execute(
        "INSERT INTO gaps (subscription, from_seq, to_seq, count, why, at) VALUES ('s', 50, 52, 3, 'retention', 1)"
    )
    assert [message.seq for message in subscription.fetch(1)] == [WARM + 1]
    assert subscription.fetch(1)
    assert [gap.count for gap in gaps] == [3]


@pytest.mark.parametrize("mode", MODES)
def test_a_message_that_is_due_again_comes_before_what_was_read_ahead(
    log: Log, clock: ManualClock, trips: list[list[str]], mode: str
) -> None:
    subscription = warm(log, mode)
    [message] = subscription.fetch(1)
    message.nack(delay=5.0)
    [other] = subscription.fetch(1)
    assert other.seq == message.seq + 1
    other.ack()
    trips.clear()
    [third] = subscription.fetch(1)
    assert len(trips) <= 2  # when the first is due is asked together with the rest
    third.ack()
    clock.advance(5.0)
    [again] = subscription.fetch(1)
    assert (again.seq, again.attempt) == (message.seq, 2)
    again.ack()
    assert [message.seq for message in subscription.fetch(2)] == [third.seq + 1, third.seq + 2]


def test_a_late_ack_is_refused_also_after_a_transaction_of_this_host_that_excluded_all_others(
    log: Log, postgres_url: str, clock: ManualClock
) -> None:
    subscription = log.subscribe("s", "work", mode="shared", ack_wait=5.0)
    [late] = subscription.fetch(1)
    clock.advance(6.0)
    with headwater.open(postgres_url, clock=clock, heartbeats=False) as host:
        other = host.subscribe("s", "work", mode="shared", ack_wait=5.0)
        [again] = other.fetch(1)
        assert (again.seq, again.attempt) == (late.seq, 2)
        log.subscribe("s", "work", mode="shared", ack_wait=5.0).close()  # saves what the other host has written
        with pytest.raises(LeaseLostError):
            late.ack()
        again.ack()


@pytest.mark.parametrize("mode", MODES)
def test_a_delayed_message_that_was_read_ahead_waits(log: Log, clock: ManualClock, mode: str) -> None:
    log.publish("work", {"n": 60}, deliver_at=clock.now_ms() / 1_000 + 5)
    log.publish_many([("work", {"n": number}) for number in range(61, 80)])
    subscription = log.subscribe("s", "work", mode=mode)  # type: ignore[call-overload]
    got = []
    while messages := subscription.fetch(3):
        got += [message.data["n"] for message in messages]
        subscription.ack_many(messages)
    assert got == [number for number in range(80) if number != 60]
    clock.advance(5.0)
    assert [message.data["n"] for message in subscription.fetch(1)] == [60]


def test_a_row_that_is_gone_is_not_acked(log: Log, sql: psycopg.Connection) -> None:
    subscription = warm(log, "shared")
    first, second = subscription.fetch(2)
    sql.execute("DELETE FROM deliveries WHERE seq = %s", (first.seq,))
    with pytest.raises(LeaseLostError):
        first.ack()
    second.ack()
    assert log.subscription("s").acked == WARM + 1


def test_a_row_that_another_transaction_is_settling_is_not_waited_for(log: Log, postgres_url: str) -> None:
    subscription = warm(log, "shared")
    [message] = subscription.fetch(1)
    with psycopg.connect(postgres_url) as mine:
        mine.execute("DELETE FROM headwater.deliveries WHERE seq = %s", (message.seq,))
        with pytest.raises(LeaseLostError):
            message.ack()
        mine.rollback()
    message.ack()


def test_behind_a_pooler_another_server_process_knows_nothing(
    postgres_url: str, clock: ManualClock, trips: list[list[str]]
) -> None:
    """A server that has crashed since, or the standby in its place, gives the ids of lost transactions out again."""
    with headwater.open(postgres_url, clock=clock, heartbeats=False, notify="poll") as log:
        log.publish_many([("work", n) for n in range(10)])
        subscription = warm(log, "shared")
        store = log._core.engine.store  # type: ignore[attr-defined]
        assert asks_for_the_subscription(subscription, trips) is False
        with store._connection:
            store._connection = store.connect("writer")
        assert asks_for_the_subscription(subscription, trips) is True


def asks_for_the_subscription(subscription: Any, trips: list[list[str]]) -> bool:
    trips.clear()
    subscription.ack_many(subscription.fetch(1))
    return any(statement == SQL["subscription_to_change"] for trip in trips for statement in trip)


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_users_transactions_remove_do_not_fill_the_memory(
    log: Log, postgres_url: str, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(known, "ROWS_MAX", 20)
    subscription = log.subscribe("s", "work", mode=mode)  # type: ignore[call-overload]
    *messages, last = subscription.fetch(60)
    with psycopg.connect(postgres_url) as mine:
        for message in messages:
            message.ack(tx=mine)
            mine.commit()
    last.ack()
    assert len(log._core.engine.store._known.rows("s")) <= 20  # type: ignore[attr-defined]
    assert log.subscription("s").lag == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_subscription_that_is_moved_delivers_from_there(log: Log, mode: str) -> None:
    subscription = warm(log, mode)
    subscription.close()
    log.seek("s", 0)
    with log.subscribe("s", "work", mode=mode) as again:  # type: ignore[call-overload]
        assert [message.seq for message in again.fetch(3)] == [1, 2, 3]


def test_no_more_is_read_ahead_than_is_worth_it() -> None:
    def more(limit: int, mean_bytes: int) -> int:
        return ReadAhead(None, 0, [], mean_bytes).how_many_more(limit)  # type: ignore[arg-type]

    assert more(1, 100) == 7
    assert more(10, 100) == 70
    assert more(30, 100) == AHEAD_MESSAGES_MAX - AHEAD_MESSAGES_MAX % 30
    assert more(500, 100) == 0
    assert more(1, AHEAD_BYTES_MAX + 1) == 0
