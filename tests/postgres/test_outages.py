"""The server goes away, connections break, all are busy: what was acknowledged stays, the rest fails or goes on."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import psycopg
import pytest
from postgres_server import PostgresServer

import headwater
from headwater.delivery.publishing import DedupeWindow
from headwater.errors import ConflictError, HeadwaterError, LockedError, OutcomeUnknownError, UnavailableError
from headwater.message import Draft
from headwater.ports.store import PUBLISHING
from headwater.stores.postgres import PostgresStore, store
from headwater.stores.postgres.connection import Place, connect, place_of
from headwater.stores.postgres.pipelined import PipelinedConnection
from headwater.stores.postgres.reader import PostgresReader

WINDOW = DedupeWindow()
PATIENCE_MS = 30_000


@pytest.fixture(scope="module")
def restartable() -> Iterator[PostgresServer]:
    """A server that this file may stop; with fsync, for it is killed too."""
    with PostgresServer() as server:
        yield server


def test_publishers_and_consumers_go_on_after_a_restart(restartable: PostgresServer) -> None:
    url = restartable.new_database()
    with headwater.open(url) as log:
        subscription = log.subscribe("s", "a")
        assert log.publish("a", 1) == 1
        restartable.stop()
        restartable.start()
        assert log.publish("a", 2) == 2
        assert [message.data for message in subscription.fetch()] == [1, 2]


def test_what_was_acknowledged_survives_a_killed_server(restartable: PostgresServer) -> None:
    url = restartable.new_database()
    acknowledged: list[int] = []
    enough, stop = threading.Event(), threading.Event()

    def publish(log: headwater.Log) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            with contextlib.suppress(ConflictError, UnavailableError, OutcomeUnknownError):
                log.publish("a", number, id=str(number))
                acknowledged.append(number)
            if len(acknowledged) >= 50:
                enough.set()

    with headwater.open(url) as log:
        publisher = threading.Thread(target=publish, args=(log,))
        publisher.start()
        assert enough.wait(30)
        restartable.kill()
        restartable.start()
        enough.clear()
        assert enough.wait(30)
        stop.set()
        publisher.join(30)
        found: list[int] = []
        with log.subscribe("s", "a") as subscription:
            while batch := subscription.fetch(1_000):
                found += [message.data for message in batch]
                subscription.ack_many(batch)
    assert set(acknowledged) <= set(found)
    assert len(found) == len(set(found))
    assert found == sorted(found)


def test_a_publish_waits_for_a_server_that_comes_back(restartable: PostgresServer) -> None:
    url = restartable.new_database()
    with headwater.open(url, busy_timeout=30) as log:
        restartable.stop()
        published: list[int] = []
        waiting = threading.Thread(target=lambda: published.append(log.publish("a", 1)))
        waiting.start()
        restartable.start()
        waiting.join(30)
        assert published == [1]


def test_a_server_that_stays_away_is_reported(restartable: PostgresServer) -> None:
    url = restartable.new_database()
    with headwater.open(url, busy_timeout=0.3) as log:
        restartable.stop()
        try:
            with pytest.raises(UnavailableError):
                log.publish("a", 1)
            with pytest.raises((UnavailableError, ConflictError)):
                log.last_seq()
        finally:
            restartable.start()
        assert log.publish("a", 2) == 1


def cut(postgres: PostgresServer, url: str) -> None:
    assert postgres.cut_connections(url, "headwater writer") == 1


def test_a_connection_cut_inside_a_transaction_leaves_nothing_of_it(
    postgres: PostgresServer, postgres_url: str
) -> None:
    store = PostgresStore(postgres_url)
    rolled_back: list[int] = []
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(pytest.raises(ConflictError))
            writer = stack.enter_context(store.write(lambda: rolled_back.append(1)))
            writer.append([Draft("a", "1", 1)], 1_000, WINDOW)
            cut(postgres, postgres_url)
            writer.append([Draft("a", "2", 1)], 1_000, WINDOW)
        assert rolled_back == [1]
        with store.write() as writer:
            assert writer.append([Draft("a", "3", 1)], 1_000, WINDOW).seqs == [1]
    finally:
        store.close()


def test_a_log_is_opened_although_its_first_connections_are_cut(
    postgres: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: dict[str, int] = {}
    last_seq = PostgresReader.last_seq

    def cut_once(application: str) -> None:
        if application not in cut:
            cut[application] = postgres.cut_connections(postgres_url, application)

    def connect_and_cut(place: Place, *, application: str, prepare: bool) -> PipelinedConnection:
        connection = connect(place, application=application, prepare=prepare)
        if application == "headwater writer":
            cut_once(application)
        return connection

    def cut_and_read(reader: PostgresReader) -> int:
        cut_once("headwater reader")
        return last_seq(reader)

    monkeypatch.setattr(store, "connect", connect_and_cut)
    monkeypatch.setattr(PostgresReader, "last_seq", cut_and_read)
    with headwater.open(postgres_url, maintenance_interval=None) as log:
        assert log.publish("a", 1) == 1
    assert cut == {"headwater writer": 1, "headwater reader": 1}


def test_a_group_whose_connection_is_cut_is_written_on_the_next(postgres: PostgresServer, postgres_url: str) -> None:
    with headwater.open(postgres_url) as log:
        log.publish("a", 1)
        for number in range(2, 6):
            cut(postgres, postgres_url)
            assert log.publish("a", number) == number


class AtCommit:
    """Stands where the writing connection is and does something instead of sending the commit and all before it."""

    def __init__(self, inner: PipelinedConnection, instead: Callable[[PipelinedConnection], None]) -> None:
        self._inner, self._instead = inner, instead

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def send_queued(self) -> None:
        if self._inner.queued[-1].sql == "COMMIT":
            self._instead(self._inner)
            self._inner.forget_queued()
            self._inner.ask("SELECT 1")  # the answer never came
        else:
            self._inner.send_queued()


@pytest.mark.parametrize("committed", [True, False])
def test_a_commit_whose_answer_is_lost_is_asked_about(
    postgres: PostgresServer, postgres_url: str, committed: bool
) -> None:
    store = PostgresStore(postgres_url)

    def lose_answer(connection: PipelinedConnection) -> None:
        if committed:
            connection.send_queued()
        cut(postgres, postgres_url)

    store._connection = AtCommit(store._connection, lose_answer)  # type: ignore[assignment]
    try:
        with contextlib.ExitStack() as stack:
            if not committed:
                stack.enter_context(pytest.raises(ConflictError))
            with store.write() as writer:
                assert writer.append([Draft("a", "1", 1)], 1_000, WINDOW).seqs == [1]
        with store.read() as reader:
            assert reader.last_seq() == (1 if committed else 0)
        with store.write() as writer:
            assert writer.append([Draft("a", "2", 1)], 1_000, WINDOW).seqs == [2 if committed else 1]
    finally:
        store.close()


@pytest.mark.parametrize("committed", [True, False])
def test_an_ack_that_was_sent_with_its_commit_is_asked_about(
    postgres: PostgresServer, postgres_url: str, committed: bool
) -> None:
    """Nothing came back of it, not even the id of its transaction."""
    sent: list[str] = []

    def lose_answer(connection: PipelinedConnection) -> None:
        sent[:] = [statement.sql for statement in connection.queued]
        if committed:
            connection.send_queued()
        cut(postgres, postgres_url)

    with headwater.open(postgres_url) as log:
        log.publish_many([("a", number) for number in range(4)])
        subscription = log.subscribe("s", "a")
        for _ in range(2):  # from then on the store knows the subscription
            subscription.ack_many(subscription.fetch(1))
        (message,) = subscription.fetch(1)
        store = log._core.engine.store  # type: ignore[attr-defined]
        store._connection = AtCommit(store._connection, lose_answer)
        message.ack()
        assert sent[0].startswith("BEGIN")
        assert log.subscription("s").lag == 1
        assert log.subscription("s").acked == 3
        assert [message.data for message in subscription.fetch()] == [3]


def test_an_id_that_is_given_out_again_after_a_crash_proves_nothing(restartable: PostgresServer) -> None:
    """The server dies before the commit reaches it, and another session gets the same transaction id, and commits."""
    url = restartable.new_database()
    store = PostgresStore(url, busy_timeout_ms=30_000)
    other = restartable.url_of("postgres")

    def crash(connection: PipelinedConnection) -> None:
        restartable.kill()
        restartable.start()
        with psycopg.connect(other, autocommit=True) as other_session:
            for number in range(200):
                other_session.execute(f"CREATE TABLE crash_{number} ()")

    try:
        store._connection = AtCommit(store._connection, crash)  # type: ignore[assignment]
        with contextlib.ExitStack() as stack:
            stack.enter_context(pytest.raises(ConflictError))
            stack.enter_context(store.write()).append([Draft("a", "1", 1)], 1_000, WINDOW)
        with store.write() as writer:
            assert writer.append([Draft("a", "2", 1)], 1_000, WINDOW).seqs == [1]
    finally:
        store.close()


def test_a_transaction_that_cannot_begin_gives_the_turn_back(postgres_url: str) -> None:
    with headwater.open(postgres_url, busy_timeout=0.2) as log, psycopg.connect(postgres_url) as mine:
        log.publish("a", 1)
        (message,) = log.subscribe("s", "a").fetch()
        mine.execute("SELECT 1 FROM headwater.subscriptions FOR UPDATE")
        with pytest.raises(HeadwaterError), message.transaction():
            pytest.fail("its subscription is locked")
        assert log.publish("a", 2) == 2  # the writer's turn is free
        mine.rollback()


def test_acks_do_not_wait_for_a_publisher(postgres_url: str) -> None:
    with headwater.open(postgres_url, busy_timeout=0.5) as log, psycopg.connect(postgres_url) as stranger:
        log.publish("a", 1)
        (message,) = log.subscribe("s", "a").fetch()
        stranger.execute("SELECT headwater.begin_publishing()")
        engine = log._core.engine  # type: ignore[attr-defined]
        with engine.store._turn:  # so that both become one group
            publishing = engine.committer.submit(Draft("a", "2", 1), bytes=1, touching=PUBLISHING)
            acking = message._subscription._consumer.submit_ack([message._claimed])
        acking.wait(30)
        publishing.wait(30)
        assert acking.error is None
        assert isinstance(publishing.error, LockedError)
        stranger.rollback()
        assert log.subscription("s").lag == 0


def test_readers_that_are_all_busy_are_reported_and_recover(postgres_url: str) -> None:
    store = PostgresStore(postgres_url, busy_timeout_ms=200, readers_max=2)
    try:
        with store.read(), store.read(), pytest.raises(UnavailableError, match="became free"), store.read():
            pass
        with store.read() as reader:
            assert reader.last_seq() == 0
    finally:
        store.close()


def test_a_reader_whose_connection_broke_in_the_pool_is_passed_over(
    postgres: PostgresServer, postgres_url: str
) -> None:
    with headwater.open(postgres_url) as log:
        log.publish("a", 1)
        for _ in range(3):
            assert log.last_seq() == 1
            postgres.cut_connections(postgres_url, "headwater reader")


def test_an_idle_connection_that_was_ended_is_not_taken_for_alive(postgres: PostgresServer, postgres_url: str) -> None:
    with closing(connect(place_of(postgres_url), application="idle")) as connection:
        assert connection.ask("SELECT 1").value() == 1
        assert connection.is_alive()
        hung_up = select.poll()
        hung_up.register(connection.fileno(), select.POLLRDHUP)
        postgres.cut_connections(postgres_url, "idle")
        assert hung_up.poll(PATIENCE_MS)
        assert not connection.is_alive()  # though the server's last words came first


class SocketFoundClosed:
    """The socket is found closed while libpq still takes the connection for whole; once, when a statement of this kind
    is sent, before the server has got it or after it has done it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, word: str, *, done: bool) -> None:
        self.happened = 0
        real = PipelinedConnection.send_queued

        def send_queued(connection: PipelinedConnection) -> None:
            if self.happened or not any(statement.sql.endswith(word) for statement in connection.queued):
                return real(connection)
            self.happened += 1
            if done:
                real(connection)
            assert not connection.closed
            raise psycopg.OperationalError("connection socket closed")

        monkeypatch.setattr(PipelinedConnection, "send_queued", send_queued)


def test_a_socket_found_closed_when_a_read_begins(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with headwater.open(postgres_url) as log:
        log.publish("a", 1)
        found = SocketFoundClosed(monkeypatch, "READ ONLY", done=False)
        assert log.last_seq() == 1
        assert found.happened


@pytest.mark.parametrize("done", [False, True])
def test_a_socket_found_closed_in_a_commit(postgres_url: str, monkeypatch: pytest.MonkeyPatch, done: bool) -> None:
    with headwater.open(postgres_url) as log:
        log.publish("a", 1)
        found = SocketFoundClosed(monkeypatch, "COMMIT", done=done)
        assert log.publish("a", 2) == 2  # asked on another connection, and written again if it is not there
        assert found.happened
        with log.subscribe("s", "a") as subscription:
            assert [message.data for message in subscription.fetch()] == [1, 2]


def test_too_many_connections_are_reported(restartable: PostgresServer) -> None:
    url = restartable.new_database()
    with psycopg.connect(restartable.url_of("postgres"), autocommit=True) as connection:
        name = url.rpartition("/")[2]
        connection.execute(f"ALTER DATABASE {name} CONNECTION LIMIT 0")
        connection.execute("CREATE ROLE guest LOGIN")
    with pytest.raises(UnavailableError, match="too many connections"):
        headwater.open(url.replace("postgres@", "guest@"), busy_timeout=0.2)
