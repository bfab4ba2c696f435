"""Waking up when another process has written: by notification, by looking after a broken connection, and by polling."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psycopg
import pytest
from postgres_server import PostgresServer

import headwater
from headwater.broker import consumer
from headwater.stores.postgres import PostgresListener, PostgresStore
from headwater.stores.postgres import listener as listening

PATIENCE_S = 30.0


def wait_until(holds: Callable[[], bool], what: str) -> None:
    pause = threading.Event()
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, what
        pause.wait(0.01)


def listeners(postgres: PostgresServer, url: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name = 'headwater listener' AND state = 'idle' AND query ILIKE 'listen%'"
        ).fetchone()
        assert row is not None
        return int(row[0])


def fetching(log: headwater.Log, **options: object) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []
    subscription = log.subscribe("s", "a", **options)  # type: ignore[arg-type]
    thread = threading.Thread(target=lambda: found.extend(m.data for m in subscription.fetch(timeout=PATIENCE_S)))
    thread.start()
    return thread, found


def test_a_publish_of_another_process_wakes_by_notification(
    postgres: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "FALLBACK_POLL_S", 3600.0)  # so that nothing else can have woken it
    with headwater.open(postgres_url) as log, headwater.open(postgres_url) as other:
        thread, found = fetching(log)
        wait_until(lambda: listeners(postgres, postgres_url) == 1, "no session listens")
        other.publish("a", 1)
        thread.join(PATIENCE_S)
        assert found == [1]


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_a_resume_of_another_process_wakes_by_notification(
    postgres: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(listening, "FALLBACK_POLL_S", 3600.0)
    monkeypatch.setattr(consumer, "FALLBACK_POLL_S", 3600.0)
    with headwater.open(postgres_url) as log, headwater.open(postgres_url) as other:
        log.subscribe("s", "a", mode=mode).close()  # type: ignore[arg-type]
        other.pause("s")
        other.publish("a", 1)
        thread, found = fetching(log, mode=mode)
        wait_until(lambda: listeners(postgres, postgres_url) == 1, "no session listens")
        other.resume("s")
        thread.join(PATIENCE_S / 2)
        assert found == [1]  # and not only when the fetch has waited long enough


def test_what_is_published_while_the_listener_is_cut_off_is_found_after_it(
    postgres: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "FALLBACK_POLL_S", 3600.0)
    with headwater.open(postgres_url) as log, headwater.open(postgres_url) as other:
        thread, found = fetching(log)
        wait_until(lambda: listeners(postgres, postgres_url) == 1, "no session listens")
        with psycopg.connect(postgres_url) as slow:
            other.publish("a", "in between", tx=slow)
            assert postgres.cut_connections(postgres_url, "headwater listener") == 1
            slow.commit()  # its notification may find no listener
        thread.join(PATIENCE_S)
        assert found == ["in between"]
        wait_until(lambda: listeners(postgres, postgres_url) == 1, "no session listens again")


def test_what_is_published_just_before_it_listens_again_is_found(
    postgres: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look that follows a broken connection has been taken, and the LISTEN of the next one is yet to come."""
    monkeypatch.setattr(listening, "FALLBACK_POLL_S", 3600.0)
    with headwater.open(postgres_url) as log, headwater.open(postgres_url) as other:
        thread, found = fetching(log)
        wait_until(lambda: listeners(postgres, postgres_url) == 1, "no session listens")
        store = log._core.engine.store  # type: ignore[attr-defined]
        connect = store.connect

        def late(purpose: str) -> psycopg.Connection:
            connection = connect(purpose)
            if purpose == "listener":
                other.publish("a", "just before")
            return connection

        monkeypatch.setattr(store, "connect", late)
        postgres.cut_connections(postgres_url, "headwater listener")
        thread.join(PATIENCE_S)
        assert found == ["just before"]


def test_a_lost_notification_costs_latency_and_no_message(
    postgres: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with headwater.open(postgres_url) as log:
        thread, found = fetching(log)
        wait_until(lambda: listeners(postgres, postgres_url) == 1, "no session listens")
        with psycopg.connect(postgres_url) as silent:  # a row with a seq of its own notifies no listener
            silent.execute(
                "INSERT INTO headwater.messages (seq, topic, data) SELECT headwater.begin_publishing() + 1, 'a', '7'"
            )
            silent.commit()
        thread.join(PATIENCE_S)
        assert found == [7]


def test_by_force_it_polls_and_no_session_listens(postgres: PostgresServer, postgres_url: str) -> None:
    with headwater.open(postgres_url, notify="poll") as log, headwater.open(postgres_url, notify="poll") as other:
        thread, found = fetching(log)
        other.publish("a", 1)
        thread.join(PATIENCE_S)
        assert found == [1]
        assert listeners(postgres, postgres_url) == 0


def test_ones_own_commits_wake_no_listener(postgres: PostgresServer, postgres_url: str) -> None:
    """They were announced already; a look for each would cost a query for each."""
    looks: list[int] = []
    looked = threading.Event()
    own, other = PostgresStore(postgres_url), headwater.open(postgres_url)
    listener = PostgresListener(own, lambda: (looks.append(1), looked.set()))  # type: ignore[func-returns-value]
    listener.start()
    try:
        assert looked.wait(PATIENCE_S)  # the look that follows the connection
        wait_until(lambda: listeners(postgres, postgres_url) == 1, "no session listens")
        looked.clear()
        before = len(looks)
        with own.write() as writer:
            writer.append([], 0, headwater_window())
            writer.has_news = True
        other.publish("a", 1)
        assert looked.wait(PATIENCE_S)
        assert len(looks) <= before + 2  # the other's, and perhaps the net's
    finally:
        listener.stop()
        own.close()
        other.close()


def headwater_window() -> object:
    from headwater.delivery.publishing import DedupeWindow

    return DedupeWindow()
