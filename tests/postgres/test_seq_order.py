"""Sequence numbers are handed out before the commit: a reader that goes by them can pass a slower transaction by. The
race, shown on a plain table, and its absence in the log."""

from __future__ import annotations

import threading

import psycopg
import pytest

import headwater
from headwater.errors import LockedError
from headwater.stores.postgres import PostgresStore


def test_a_plain_sequence_loses_the_slower_of_two_to_a_reader(postgres_url: str) -> None:
    with (
        psycopg.connect(postgres_url) as slow,
        psycopg.connect(postgres_url) as quick,
        psycopg.connect(postgres_url, autocommit=True) as reader,
    ):
        reader.execute("CREATE TABLE plain (seq bigserial PRIMARY KEY)")
        slow.execute("INSERT INTO plain DEFAULT VALUES")  # has 1, and takes its time
        quick.execute("INSERT INTO plain DEFAULT VALUES")
        quick.commit()
        cursor = max(seq for (seq,) in reader.execute("SELECT seq FROM plain"))
        slow.commit()
        assert cursor == 2
        assert reader.execute("SELECT seq FROM plain WHERE seq > %s", (cursor,)).fetchall() == []  # 1 is lost to it


def test_a_publisher_waits_for_the_one_before_it_and_the_reader_sees_both(postgres_url: str) -> None:
    with (
        headwater.open(postgres_url) as log,
        headwater.open(postgres_url) as other,
        psycopg.connect(postgres_url) as slow,
    ):
        subscription = log.subscribe("reader", "a")
        first = log.publish("a", "slow", tx=slow)
        published: list[int] = []
        waiting = threading.Thread(target=lambda: published.append(other.publish("a", "quick")))
        waiting.start()
        _wait_until_a_session_waits(postgres_url)
        assert subscription.fetch() == []
        assert published == []
        slow.commit()
        waiting.join(30)
        assert published == [first + 1]
        assert [message.data for message in subscription.fetch()] == ["slow", "quick"]


def test_many_publishers_and_a_reader_that_goes_by_seq(postgres_url: str) -> None:
    """Eight publishers on connections of their own; the reader's cursor never passes what comes later."""
    publishers, each = 8, 60
    with headwater.open(postgres_url) as log:
        stores = [PostgresStore(postgres_url, durability="relaxed") for _ in range(publishers)]
        logs = [headwater.open(postgres_url, durability="relaxed") for _ in range(publishers)]
        threads = [
            threading.Thread(target=lambda mine=mine: [mine.publish("a", number) for number in range(each)])
            for mine in logs
        ]
        for thread in threads:
            thread.start()
        seen: list[int] = []
        with log.subscribe("reader", "a", max_in_flight=10_000) as subscription:
            while len(seen) < publishers * each:
                found = subscription.fetch(timeout=30)
                assert found
                seen += [message.seq for message in found]
                subscription.ack_many(found)
        for thread in threads:
            thread.join(30)
        for opened in [*stores, *logs]:
            opened.close()
    assert seen == list(range(1, publishers * each + 1))


def test_a_publisher_that_waits_too_long_is_reported_and_nothing_is_lost(postgres_url: str) -> None:
    with (
        headwater.open(postgres_url, busy_timeout=0.2) as log,
        psycopg.connect(postgres_url) as slow,
    ):
        log.publish("a", 1, tx=slow)
        with pytest.raises(LockedError):
            log.publish("a", 2)
        slow.rollback()
        assert log.publish("a", 3) == 1


def test_a_seq_is_not_used_again_however_it_was_deleted(postgres_url: str) -> None:
    with headwater.open(postgres_url) as log, psycopg.connect(postgres_url, autocommit=True) as mine:
        log.publish_many([("a", number) for number in range(5)])
        with log.subscribe("s", "a") as subscription:
            subscription.ack_many(subscription.fetch())
            mine.execute("DELETE FROM headwater.messages WHERE seq >= 3")
            assert log.publish("a", "after a deletion by hand") == 6
            mine.execute("TRUNCATE headwater.messages")
            assert log.publish("a", "after another", id="x") == 7
            assert [message.seq for message in subscription.fetch()] == [7]


def _wait_until_a_session_waits(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as watcher:
        until = threading.Event()
        for _ in range(3000):
            row = watcher.execute(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            ).fetchone()
            if row is not None and row[0]:
                return
            until.wait(0.01)
    raise AssertionError("no session waits for the publishing lock")
