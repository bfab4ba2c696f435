"""A handler's own writes and its ack: both or neither."""

# ruff: noqa: PT012 (what a transaction refuses, it may refuse at the end of its block)

import contextvars
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served import ServedFile

import headwater
from headwater import Log, ManualClock
from headwater.broker.transaction import OwnTransaction
from headwater.errors import InvalidStateError, InvalidTopicError, LeaseLostError, SqlError
from headwater.topics import parse_pattern


@pytest.fixture
def ledger(engine_here: None, open_log: Any) -> Log:
    """A log whose database also has a table of the user's."""
    log: Log = open_log()
    log.publish("setup", None)
    with log.subscribe("setup", "setup") as subscription:
        [message] = subscription.fetch()
        with message.transaction() as tx:
            tx.execute("CREATE TABLE ledger (n INTEGER PRIMARY KEY, note TEXT NOT NULL)")
    return log


def test_behind_a_server_it_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    served = ServedFile(tmp_path / "log.db")
    with served.open() as log:
        log.publish("a", 1)
        with log.subscribe("s", "a") as subscription:
            [message] = subscription.fetch()
            with pytest.raises(InvalidStateError, match="needs the log in this process"), message.transaction():
                pytest.fail("there is no transaction to be in")
            message.ack()
        with pytest.raises(InvalidStateError), log.transaction():
            pytest.fail("there is no transaction to be in")
        assert log.subscription("s").acked == 1
    served.stop()


def rows(log: Log) -> list[tuple[Any, ...]]:
    with log._core.engine.store.write() as writer:
        return writer.execute("SELECT n, note FROM ledger ORDER BY n")


@pytest.fixture(params=["exclusive", "shared"])
def subscription(request: pytest.FixtureRequest, ledger: Log) -> Any:
    return ledger.subscribe("s", "a", mode=request.param, ack_wait=5)


def one_message(ledger: Log, subscription: Any) -> Any:
    ledger.publish("a", 1)
    [message] = subscription.fetch()
    return message


def test_both_commit_together(ledger: Log, subscription: Any) -> None:
    message = one_message(ledger, subscription)
    with message.transaction() as tx:
        tx.execute("INSERT INTO ledger VALUES (?, ?)", (1, "one"))
        tx.execute("INSERT INTO ledger VALUES (:n, :note)", {"n": 2, "note": "two"})
        assert tx.execute("SELECT count(*) FROM ledger") == [(2,)]
    assert message.settled
    assert rows(ledger) == [(1, "one"), (2, "two")]
    assert (ledger.subscription("s").lag, ledger.subscription("s").acked) == (0, 1)


def test_an_error_of_the_handler_takes_both_back(ledger: Log, subscription: Any) -> None:
    message = one_message(ledger, subscription)
    with pytest.raises(RuntimeError, match="in the middle"), message.transaction() as tx:
        tx.execute("INSERT INTO ledger VALUES (1, 'one')")
        raise RuntimeError("in the middle")
    assert rows(ledger) == []
    assert not message.settled
    assert ledger.subscription("s").in_flight == 1
    message.ack()


def test_an_error_of_the_sql_takes_both_back(ledger: Log, subscription: Any) -> None:
    message = one_message(ledger, subscription)
    with pytest.raises(SqlError) as failed, message.transaction() as tx:
        tx.execute("INSERT INTO ledger VALUES (1, 'one')")
        tx.execute("INSERT INTO ledger VALUES (1, NULL)")
    assert failed.value.__cause__ is not None
    assert rows(ledger) == []
    assert ledger.subscription("s").in_flight == 1


@pytest.mark.parametrize("sql", ["NOT SQL", "SELECT * FROM nowhere", "INSERT INTO ledger VALUES (?, ?)"])
def test_bad_sql_has_a_named_error(ledger: Log, subscription: Any, sql: str) -> None:
    message = one_message(ledger, subscription)
    with pytest.raises(SqlError), message.transaction() as tx:
        tx.execute(sql)
    assert rows(ledger) == []


@pytest.mark.parametrize("subscription", ["exclusive"], indirect=True)
@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM messages",
        "UPDATE subscriptions SET floor = 0",
        "INSERT INTO deliveries (subscription, seq) VALUES ('s', 1)",
        "INSERT INTO messages (topic, data) VALUES ('a', '1')",
        "DROP TABLE dead_letters",
        "CREATE TRIGGER t AFTER INSERT ON messages BEGIN SELECT 1; END",
        "DELETE FROM sqlite_sequence",
        "COMMIT",
        "END",
        "ROLLBACK",
        "BEGIN",
        "SAVEPOINT x",
        "ATTACH ':memory:' AS other",
        "PRAGMA journal_mode = DELETE",
        "PRAGMA synchronous = OFF",
    ],
)
def test_the_log_itself_is_out_of_reach(ledger: Log, subscription: Any, sql: str) -> None:
    message = one_message(ledger, subscription)
    with message.transaction() as tx:
        tx.execute("INSERT INTO ledger VALUES (1, 'one')")
        with pytest.raises(SqlError):
            tx.execute(sql)
        tx.execute("INSERT INTO ledger VALUES (2, 'two')")
    assert rows(ledger) == [(1, "one"), (2, "two")]
    assert (ledger.last_seq(), ledger.subscription("s").lag) == (2, 0)


def test_reading_the_log_is_allowed(ledger: Log, subscription: Any) -> None:
    message = one_message(ledger, subscription)
    with message.transaction() as tx:
        assert tx.execute("SELECT CAST(data AS TEXT) FROM messages WHERE seq = ?", (message.seq,)) == [("1",)]


def test_publishing_belongs_to_it(ledger: Log, subscription: Any) -> None:
    message = one_message(ledger, subscription)
    results = ledger.subscribe("results", "results.>")
    with message.transaction() as tx:
        assert tx.publish("results.a", {"of": message.seq}, id="r-1", priority=2) == 3
    [result] = results.fetch(timeout=30)
    assert (result.data, result.id, result.priority) == ({"of": 2}, "r-1", 2)


def test_what_was_published_in_it_goes_with_it(ledger: Log, subscription: Any) -> None:
    message = one_message(ledger, subscription)
    with pytest.raises(RuntimeError), message.transaction() as tx:
        tx.publish("results.a", 1)
        raise RuntimeError
    assert ledger.last_seq() == 2
    assert ledger.publish("a", 2) == 3


def test_publishing_something_bad_in_it_takes_all_back(ledger: Log, subscription: Any) -> None:
    message = one_message(ledger, subscription)
    with pytest.raises(InvalidTopicError), message.transaction() as tx:
        tx.execute("INSERT INTO ledger VALUES (1, 'one')")
        tx.publish("bad..topic", 1)
    assert rows(ledger) == []


def test_the_logs_own_verbs_refuse_instead_of_waiting_for_themselves(ledger: Log, subscription: Any) -> None:
    message = one_message(ledger, subscription)
    ledger.publish("a", 2)
    [other] = subscription.fetch()
    with message.transaction() as tx:
        for verb in (
            lambda: ledger.publish("a", 3),
            lambda: ledger.publish_many([("a", 3)]),
            message.ack,
            other.nack,
            other.reject,
            other.extend,
            lambda: ledger.subscribe("t", "a"),
            lambda: ledger.seek("s", "first"),
            ledger.run_maintenance,
        ):
            with pytest.raises(InvalidStateError):
                verb()
        with pytest.raises(InvalidStateError), other.transaction():
            pytest.fail("no transaction inside another")
        if ledger._core.engine.store.name != "memory":  # there, reads and writes take turns
            assert ledger.last_seq() == 3, "reading is no problem"
        tx.execute("INSERT INTO ledger VALUES (1, 'one')")
    assert rows(ledger) == [(1, "one")]
    assert ledger.publish("a", 4) == 4, "and it ends with the block"


def test_nothing_is_committed_once_the_right_to_ack_has_passed_on(
    ledger: Log, subscription: Any, clock: ManualClock
) -> None:
    message = one_message(ledger, subscription)
    clock.advance(5)
    [again] = subscription.fetch()
    with pytest.raises(LeaseLostError), message.transaction() as tx:
        tx.execute("INSERT INTO ledger VALUES (1, 'too late')")
        tx.publish("results.a", 1)
    assert rows(ledger) == []
    assert ledger.last_seq() == 2
    with again.transaction() as tx:
        tx.execute("INSERT INTO ledger VALUES (1, 'in time')")
    assert rows(ledger) == [(1, "in time")]


def test_a_transaction_that_is_over_is_over(ledger: Log, subscription: Any) -> None:
    message = one_message(ledger, subscription)
    with message.transaction() as tx:
        pass
    with pytest.raises(InvalidStateError):
        tx.execute("SELECT 1")
    with pytest.raises(InvalidStateError):
        tx.publish("a", 1)


def test_both_survive_reopening(open_log: Any, ledger: Log) -> None:
    subscription = ledger.subscribe("s", "a")
    with one_message(ledger, subscription).transaction() as tx:
        tx.execute("INSERT INTO ledger VALUES (1, 'one')")
    ledger.close()
    log = open_log()
    assert rows(log) == [(1, "one")]
    assert log.subscription("s").acked == 1


def test_an_ephemeral_message_has_nothing_to_ack(ledger: Log) -> None:
    [message] = ledger.subscribe("live", ">", mode="ephemeral", start="first").fetch()
    with pytest.raises(InvalidStateError), message.transaction():
        pytest.fail("there is no transaction to be in")


def test_another_log_is_another_matter(ledger: Log) -> None:
    with headwater.open("memory:", maintenance_interval=None) as other, ledger.transaction() as tx:
        assert other.publish("a", 1) == 1
        tx.execute("INSERT INTO ledger VALUES (1, 'one')")
        with pytest.raises(InvalidStateError, match="would wait for the transaction"):
            ledger.publish("a", 1)
    assert rows(ledger) == [(1, "one")]


def test_another_thread_waits_for_its_end(ledger: Log) -> None:
    """Also one that was started inside, with a copy of the context."""
    with ThreadPoolExecutor(1) as threads:
        with ledger.transaction() as tx:
            publishing = threads.submit(contextvars.copy_context().run, ledger.publish, "a", "from beside")
            assert tx.publish("a", "from inside") == 2
        assert publishing.result(30) == 3


def test_a_callback_that_fails_after_the_commit_leaves_no_reader_asleep(
    ledger: Log, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ledger._core.engine
    news = engine.wakeups.add(parse_pattern("a"), "reader", wake_on_settle=False).arm()
    transaction = OwnTransaction(engine, settle=lambda writer, hooks: hooks.then.append(lambda: 1 / 0))
    transaction.begin()
    transaction.publish("a", 1, {})
    transaction.commit()
    assert news.done
    assert "ZeroDivisionError" in caplog.text
