"""A publish and an ack inside the user's own transaction: they commit with it, or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

import headwater
from headwater import Log, ManualClock
from headwater.errors import InvalidOptionError, InvalidStateError, LeaseLostError, ReadOnlyError

MODES = ("exclusive", "shared")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def log(postgres_url: str, clock: ManualClock) -> Iterator[Log]:
    with headwater.open(postgres_url, clock=clock, maintenance_interval=None, heartbeats=False) as log:
        yield log


@pytest.fixture
def mine(postgres_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS accounts (name text PRIMARY KEY, balance integer NOT NULL)")
        connection.commit()
        yield connection


def balances(connection: psycopg.Connection) -> dict[str, int]:
    return dict(connection.execute("SELECT name, balance FROM accounts").fetchall())  # type: ignore[arg-type]


def test_a_publish_commits_with_the_users_rows(log: Log, mine: psycopg.Connection) -> None:
    mine.execute("INSERT INTO accounts VALUES ('a', 1)")
    seq = log.publish("accounts.opened", {"name": "a"}, tx=mine, headers={"by": "test"}, priority=3)
    assert log.last_seq() == 0
    mine.commit()
    assert log.last_seq() == seq == 1
    (message,) = log.subscribe("s", ">").fetch()
    assert (message.data, message.headers, message.priority) == ({"name": "a"}, {"by": "test"}, 3)
    assert message.size == len('{"name":"a"}')


def test_a_rolled_back_publish_leaves_neither_message_nor_hole(log: Log, mine: psycopg.Connection) -> None:
    log.publish("a", 1, tx=mine)
    mine.rollback()
    assert log.publish("a", 2) == 1


def test_a_message_of_the_past_is_no_part_of_it(log: Log, mine: psycopg.Connection) -> None:
    with pytest.raises(InvalidOptionError, match="published_at and tx"):
        log.publish("a", 1, published_at=1_600_000_000, tx=mine)


def test_an_id_is_recognised_across_both_ways(log: Log, mine: psycopg.Connection) -> None:
    first = log.publish("a", 1, id="one")
    assert log.publish("a", 1, id="one", tx=mine) == first
    second = log.publish("a", 2, id="two", tx=mine)
    mine.commit()
    assert log.publish("a", 2, id="two") == second
    assert log.last_seq() == 2


def test_an_id_outside_the_window_is_a_new_message(log: Log, clock: ManualClock, mine: psycopg.Connection) -> None:
    log.publish("a", 1, id="one", tx=mine)
    mine.commit()
    clock.advance(25 * 3_600)
    assert log.publish("a", 1, id="one", tx=mine) == 2
    mine.commit()


@pytest.mark.parametrize("mode", MODES)
def test_an_ack_commits_with_the_users_rows(log: Log, mine: psycopg.Connection, mode: str) -> None:
    log.publish_many([("a", 1), ("a", 2), ("a", 3)])
    subscription = log.subscribe("s", "a", mode=mode)
    one, two, three = subscription.fetch()
    mine.execute("INSERT INTO accounts VALUES ('a', 1)")
    two.ack(tx=mine)
    mine.commit()
    one.ack()
    three.ack()
    assert log.subscription("s").lag == 0
    assert balances(mine) == {"a": 1}


@pytest.mark.parametrize("mode", MODES)
def test_what_was_acked_in_a_transaction_that_is_rolled_back_comes_again(
    log: Log, clock: ManualClock, mine: psycopg.Connection, mode: str
) -> None:
    log.publish_many([("a", 1), ("a", 2)])
    subscription = log.subscribe("s", "a", mode=mode, ack_wait=30)
    one, two = subscription.fetch()
    one.ack(tx=mine)
    two.ack()
    mine.rollback()
    assert subscription.fetch() == []
    clock.advance(30.001)
    (again,) = subscription.fetch()
    assert (again.data, again.attempt) == (1, 2)
    again.ack()
    assert log.subscription("s").lag == 0


def test_while_the_transaction_is_open_no_other_consumer_gets_the_message(
    log: Log, clock: ManualClock, mine: psycopg.Connection
) -> None:
    """Not even when its ack wait is over: its row is locked, and claims pass locked rows by."""
    log.publish("a", 1)
    first = log.subscribe("s", "a", mode="shared", ack_wait=30)
    other = log.subscribe("s", "a", mode="shared", ack_wait=30)
    (message,) = first.fetch()
    message.ack(tx=mine)
    clock.advance(31)
    assert other.fetch() == []
    mine.commit()
    clock.advance(31)
    assert other.fetch() == []
    assert log.subscription("s").lag == 0


def test_an_ack_that_comes_too_late_is_refused_and_the_transaction_can_go_on(
    log: Log, clock: ManualClock, mine: psycopg.Connection
) -> None:
    log.publish("a", 1)
    late = log.subscribe("s", "a", mode="shared", ack_wait=30)
    other = log.subscribe("s", "a", mode="shared", ack_wait=30)
    (message,) = late.fetch()
    clock.advance(31)
    (taken,) = other.fetch()
    with pytest.raises(LeaseLostError):
        message.ack(tx=mine)
    mine.execute("INSERT INTO accounts VALUES ('a', 1)")
    mine.commit()
    taken.ack()


async def test_an_asynchronous_connection_does_too(postgres_url: str) -> None:
    async with (
        headwater.open_async(postgres_url) as log,
        await psycopg.AsyncConnection.connect(postgres_url) as mine,
    ):
        assert await log.publish("a", 1, tx=mine) == 1
        await mine.commit()
        async with log.subscribe("s", "a") as subscription:
            (message,) = await subscription.fetch()
            await message.ack(tx=mine)
            await mine.commit()
            assert (await log.subscription("s")).lag == 0


@pytest.mark.parametrize("work", ["heartbeat", "claim", "take over"])
def test_a_message_whose_ack_is_still_open_is_not_redelivered(
    log: Log, postgres_url: str, clock: ManualClock, mine: psycopg.Connection, work: str
) -> None:
    """A writer skips the rows of deliveries that a transaction of the user's is about to remove."""
    log.publish("a", 1)
    subscription = log.subscribe("s", "a", mode="shared", ack_wait=30)
    (message,) = subscription.fetch()
    store = log._core.engine.store  # type: ignore[attr-defined]
    message.ack(tx=mine)
    clock.advance(31)
    with store.write(alone=True) as writer:
        if work == "heartbeat":
            assert writer.deliveries("s", [message.seq]) == {}, "what it extends it reads first"
        elif work == "claim":
            assert writer.due("s", clock.now_ms(), 10, "seq") == []
        else:
            writer.end_leases("s", clock.now_ms())
    mine.commit()
    clock.advance(31)
    assert subscription.fetch() == []
    assert log.subscription("s").lag == 0


def test_ack_first_and_publish_last(log: Log, mine: psycopg.Connection) -> None:
    """The other way round the ack could wait for a writer that waits for this transaction."""
    log.publish_many([("a", 1), ("a", 2)])
    one, two = log.subscribe("s", "a").fetch()
    one.ack(tx=mine)
    log.publish("b", 1, tx=mine)
    with pytest.raises(InvalidStateError, match="Ack first"):
        two.ack(tx=mine)
    mine.commit()
    two.ack()


def test_rows_as_dicts_and_isolation_levels(log: Log, postgres_url: str) -> None:
    with psycopg.connect(postgres_url, row_factory=psycopg.rows.dict_row) as mine:
        assert log.publish("a", 1, tx=mine) == 1
        mine.commit()
    (message,) = log.subscribe("s", "a").fetch()
    with psycopg.connect(postgres_url) as mine:
        mine.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with pytest.raises(InvalidOptionError, match="READ COMMITTED"):
            log.publish("a", 2, tx=mine)
        mine.rollback()
        with pytest.raises(InvalidOptionError, match="READ COMMITTED"):
            message.ack(tx=mine)


def test_a_temporary_table_of_the_users_shadows_nothing(log: Log, mine: psycopg.Connection) -> None:
    mine.execute("CREATE TEMP TABLE messages AS SELECT * FROM headwater.messages")
    log.publish("a", 1, tx=mine)
    mine.commit()
    assert log.last_seq() == 1
    with log.transaction() as tx:
        tx.execute("CREATE TEMP TABLE messages (n INTEGER)")
    assert log.publish("a", 2) == 2
    assert len(log.subscribe("s", "a").fetch()) == 2


def test_a_connection_of_sqlalchemy_commits_what_was_published(log: Log, postgres_url: str) -> None:
    """Stood in for by what matters of it: the driver's connection inside, and a transaction that it must know of."""

    class Inside:
        def __init__(self, connection: psycopg.Connection) -> None:
            self.driver_connection = connection

    class Outer:
        def __init__(self, connection: psycopg.Connection) -> None:
            self.connection, self.begun = Inside(connection), False

        def execute(self) -> None: ...

        def in_transaction(self) -> bool:
            return self.begun

        def begin(self) -> None:
            self.begun = True

        def commit(self) -> None:
            if self.begun:
                self.connection.driver_connection.commit()

    with psycopg.connect(postgres_url) as driver:
        outer = Outer(driver)
        log.publish("a", 1, tx=outer)
        outer.commit()
        driver.rollback()
    assert log.last_seq() == 1


async def test_each_api_wants_a_connection_of_its_kind(log: Log, postgres_url: str, mine: psycopg.Connection) -> None:
    async with (
        headwater.open_async(postgres_url) as other,
        await psycopg.AsyncConnection.connect(postgres_url) as awaited,
    ):
        with pytest.raises(InvalidOptionError, match="asynchronous"):
            await other.publish("a", 1, tx=mine)
        with pytest.raises(InvalidOptionError, match="blocking"):
            log.publish("a", 1, tx=awaited)


def test_it_is_reported_what_tx_can_be(log: Log, postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(
        InvalidOptionError, match=r"psycopg 3.*, not a str\. .* SQLAlchemy session, session\.connection\(\)"
    ):
        log.publish("a", 1, tx="conn")
    with psycopg.connect(postgres_url, autocommit=True) as mine:
        with pytest.raises(InvalidStateError, match="in no transaction"):
            log.publish("a", 1, tx=mine)
        with mine.transaction():
            log.publish("a", 1, tx=mine)
    assert log.last_seq() == 1
    with headwater.open("memory:") as other, pytest.raises(InvalidStateError, match="PostgreSQL"):
        other.publish("a", 1, tx=object())


def test_a_connection_to_another_database_is_refused(log: Log, postgres_url: str, postgres_schema_url: str) -> None:
    elsewhere = postgres_schema_url.partition("?")[0]
    with psycopg.connect(elsewhere) as mine, pytest.raises(InvalidOptionError, match="without this log"):
        log.publish("a", 1, tx=mine)
    refused = pytest.raises(InvalidOptionError, match="without this log")  # a log is there, but another one
    with headwater.open(elsewhere), psycopg.connect(elsewhere) as mine, refused:
        log.publish("a", 1, tx=mine)


def test_a_role_that_may_not_use_the_schema_is_reported_what_to_grant(
    log: Log, postgres_url: str, mine: psycopg.Connection
) -> None:
    mine.execute("DO $$ BEGIN CREATE ROLE newcomer LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
    mine.commit()
    with pytest.raises(ReadOnlyError, match="GRANT USAGE ON SCHEMA headwater"):
        headwater.open(postgres_url.replace("postgres@", "newcomer@"))


def test_any_client_can_publish_with_plain_sql(log: Log, mine: psycopg.Connection) -> None:
    subscription = log.subscribe("s", ">")
    row = mine.execute("""SELECT headwater.publish('orders.new', '{"order": 17}')""").fetchone()
    assert row == (1,)
    mine.commit()
    (message,) = subscription.fetch(timeout=10)
    assert message.data == {"order": 17}
    with pytest.raises(psycopg.errors.CheckViolation, match="topic must be"):
        mine.execute("""SELECT headwater.publish('orders.*', '{"order": 17}')""")
