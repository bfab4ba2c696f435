"""One commit where there were several: claims with the publish, acks that wait for others, commits on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest

import headwater
from headwater import ManualClock
from headwater.api._sync import Log
from headwater.broker import committer as committing
from headwater.broker import consumer as consumers
from headwater.broker import durable_consumer as durable_consumers
from headwater.broker import wakeups as waking
from headwater.broker.committer import Committer
from headwater.broker.durable_consumer import DurableConsumer
from headwater.broker.flow import Completion, run_blocking
from headwater.broker.wakeups import Wakeups
from headwater.delivery.publishing import DedupeWindow
from headwater.errors import StoreError
from headwater.message import Draft
from headwater.ports.store import PUBLISHING
from headwater.stores.sqlite import SqliteStore
from headwater.stores.sqlite import connection as sqlite_connection
from headwater.stores.sqlite import store as sqlite_store

TIME_LIMIT_S = 30


class Transactions:
    """What a store was asked for: whether each transaction was synced, and on which thread it ran."""

    def __init__(self, store: SqliteStore) -> None:
        self.synced: list[bool] = []
        self.threads: list[str] = []
        write = store.write

        @contextmanager
        def counted(*arguments: Any, synced: bool = True, **options: Any) -> Iterator[Any]:
            with write(*arguments, synced=synced, **options) as writer:
                yield writer
            self.synced.append(synced)
            self.threads.append(threading.current_thread().name)

        store.write = counted  # type: ignore[method-assign]

    def clear(self) -> None:
        self.synced.clear()
        self.threads.clear()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with headwater.open(tmp_path / "log.db", maintenance_interval=None, heartbeats=False) as log:
        yield log


@pytest.fixture
def transactions(log: Log) -> Transactions:
    return Transactions(log._core.engine.store)  # type: ignore[attr-defined]


def standing_by(log: Log, count: int = 1) -> None:
    """Wait until so many consumers do."""
    wakeups = log._core.engine.wakeups  # type: ignore[attr-defined]
    done, stand_by = threading.Semaphore(0), wakeups.stand_by

    def counted(*arguments: Any) -> None:
        stand_by(*arguments)
        done.release()

    wakeups.stand_by = counted
    try:
        missing = count - len(wakeups._standing_by)
        for _ in range(max(0, missing)):
            assert done.acquire(timeout=TIME_LIMIT_S)
    finally:
        wakeups.stand_by = stand_by


class Taking(threading.Thread):
    """A consumer that waits for messages on a thread of its own."""

    def __init__(self, subscription: headwater.Subscription, limit: int = 10) -> None:
        super().__init__(daemon=True)
        self._subscription, self._limit = subscription, limit
        self.found: list[headwater.ReceivedMessage] = []
        self.start()

    def run(self) -> None:
        self.found = self._subscription.fetch(self._limit, timeout=TIME_LIMIT_S)

    def seqs(self) -> list[int]:
        self.join(TIME_LIMIT_S)
        return [message.seq for message in self.found]


# --- claims ---------------------------------------------------------------------------------------------------------


def test_a_claim_does_not_wait_for_the_disk_and_an_ack_does(log: Log, transactions: Transactions) -> None:
    for mode in ("exclusive", "shared"):
        subscription = log.subscribe(mode, "a", mode=mode, start="new")
        log.publish("a", 1)
        transactions.clear()
        [message] = subscription.fetch()
        assert transactions.synced == [False]
        message.ack()
        assert transactions.synced == [False, True]


@pytest.mark.parametrize("lazy", [True, False])
def test_an_ack_whose_answer_names_the_late_ones_waits_for_the_disk(
    log: Log, transactions: Transactions, lazy: bool
) -> None:
    """Of a handler if it is lazy, else of a client behind a server."""
    log.publish("a", 1)
    subscription = log.subscribe("s", "a")
    [message] = subscription.fetch()
    transactions.clear()
    acking = subscription._consumer.submit_ack([message._claimed], lazy=lazy)
    assert acking.wait(TIME_LIMIT_S)
    assert transactions.synced == [True]


def test_a_claim_that_shares_its_commit_with_an_ack_waits_for_the_disk(log: Log, transactions: Transactions) -> None:
    log.publish("a", 1)
    one, two = log.subscribe("one", "a"), log.subscribe("two", "a")
    [message] = one.fetch()
    transactions.clear()
    committer = log._core.engine.committer  # type: ignore[attr-defined]
    with committer._committing:  # so that both become one group
        acking = one._consumer.submit_ack([message._claimed])
        claim = partial(two._consumer._claim_at_once, 1)  # type: ignore[attr-defined]
        claiming = committer.submit(claim, touching="two", synced=False)
    assert acking.wait(TIME_LIMIT_S)
    assert claiming.wait(TIME_LIMIT_S)
    assert acking.error is claiming.error is None
    assert transactions.synced == [True]


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_the_transaction_that_publishes_claims_for_a_consumer_that_waits(
    log: Log, transactions: Transactions, mode: Any
) -> None:
    subscription = log.subscribe("s", "a.>", mode=mode)
    taking = Taking(subscription)
    standing_by(log)
    transactions.clear()
    log.publish_many([("a.x", 1), ("a.y", 2), ("b", 3)])
    assert taking.seqs() == [1, 2]
    assert transactions.synced == [True], "one commit stores and claims"
    assert [message.attempt for message in taking.found] == [1, 1]
    subscription.ack_many(taking.found)
    assert subscription.fetch() == []
    assert log.subscription("s").acked == 2


def test_consumers_that_wait_take_turns(log: Log) -> None:
    first, second = (log.subscribe("s", "a", mode="shared") for _ in range(2))
    served: list[int] = []
    for _ in range(2):
        taking = []
        for subscription in (first, second):
            taking.append(Taking(subscription, 1))
            standing_by(log, len(taking))
        log.publish("a", 1)
        log.publish("a", 2)
        served += [seq for each in taking for seq in each.seqs()]
    assert sorted(served) == [1, 2, 3, 4]
    assert served[:2] == [1, 2], "the one that waited longest comes first"


def test_few_consumers_are_served_by_one_transaction(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waking, "CLAIMS_MAX", 2)
    claimed: list[str] = []
    claim = DurableConsumer._claim_published

    def counted(self: DurableConsumer, *arguments: Any) -> bool:
        claimed.append(self.id)
        return claim(self, *arguments)

    monkeypatch.setattr(DurableConsumer, "_claim_published", counted)
    taking = [Taking(log.subscribe(f"s{number}", "a")) for number in range(4)]
    standing_by(log, 4)
    log.publish("a", 1)
    assert [each.seqs() for each in taking] == [[1]] * 4, "the others claim for themselves"
    assert len(claimed) == 2


def test_a_claim_that_fails_costs_the_publish_nothing(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    subscription = log.subscribe("s", "a")
    taking = Taking(subscription)
    standing_by(log)
    save, failures = DurableConsumer._claim, [1]

    def fails_once(self: DurableConsumer, *arguments: Any) -> Any:
        claim = save(self, *arguments)
        if failures:
            failures.pop()
            raise StoreError("no")
        return claim

    monkeypatch.setattr(DurableConsumer, "_claim", fails_once)
    assert log.publish("a", 1) == 1
    assert taking.seqs() == [1], "and the claim is made again"
    assert log.last_seq() == 1


def test_what_is_rolled_back_was_not_claimed(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    subscription = log.subscribe("s", "a")
    taking = Taking(subscription)
    standing_by(log)
    store = log._core.engine.store  # type: ignore[attr-defined]
    write = store.write

    @contextmanager
    def fails(*arguments: Any, **options: Any) -> Iterator[Any]:
        with write(*arguments, **options) as writer:
            yield writer
            raise headwater.errors.DiskFullError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", fails)
        with pytest.raises(headwater.errors.DiskFullError):
            log.publish("a", 1)
    assert log.publish("a", 2) == 1
    assert taking.seqs() == [1]
    assert [message.data for message in taking.found] == [2]


def test_a_delayed_message_is_left_to_the_consumer(tmp_path: Path) -> None:
    clock = ManualClock()
    with headwater.open(tmp_path / "log.db", clock=clock, maintenance_interval=None, heartbeats=False) as log:
        taking = Taking(log.subscribe("s", "a"))
        standing_by(log)
        log.publish("a", 1, delay=60)
        standing_by(log)
        clock.advance(61)
        assert taking.seqs() == [1]


# --- acks that no caller waits for ----------------------------------------------------------------------------------


class Desk:
    def __init__(self, path: Path) -> None:
        self.store = SqliteStore(path)
        self.transactions = Transactions(self.store)
        self.committer = Committer(self.store, ManualClock(), DedupeWindow(), Wakeups())

    def lazy(self) -> Completion[None]:
        return self.committer.submit(lambda writer, hooks: None, touching="s", lazy=True)

    def publish(self, size: int = 1) -> Completion[int]:
        return self.committer.submit(Draft("a", "1", size), bytes=size, touching=PUBLISHING)

    def close(self) -> None:
        self.committer.close()
        self.store.close()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "log.db")
    yield desk
    desk.close()


def test_a_lazy_work_shares_the_commit_of_the_next_one(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committing, "LAZY_S", TIME_LIMIT_S)
    waiting = [desk.lazy() for _ in range(3)]
    assert not any(work.done for work in waiting)
    assert desk.publish().wait(TIME_LIMIT_S / 2)
    assert all(work.wait(TIME_LIMIT_S) for work in waiting)
    assert len(desk.transactions.synced) == 1


def test_a_lazy_work_waits_a_moment_only(desk: Desk) -> None:
    assert desk.lazy().wait(TIME_LIMIT_S)


def test_a_log_that_closes_commits_what_waits(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committing, "LAZY_S", 10 * TIME_LIMIT_S)
    waiting = desk.lazy()
    desk.committer.close()
    assert waiting.wait(TIME_LIMIT_S)
    assert waiting.error is None


# --- on an event loop -----------------------------------------------------------------------------------------------


def on_a_loop(desk: Desk, submit: Callable[[], list[Completion[Any]]]) -> list[str]:
    """The threads that committed what is submitted in one turn of the loop."""

    async def turn() -> None:
        desk.committer.commit_on(asyncio.get_running_loop())
        for completion in submit():
            assert await completion.wait_async(TIME_LIMIT_S)
            completion.result()

    desk.transactions.clear()
    asyncio.run(turn())
    return desk.transactions.threads


def test_a_loop_commits_what_is_small_at_the_end_of_its_turn(desk: Desk) -> None:
    here = threading.current_thread().name
    assert on_a_loop(desk, lambda: [desk.publish() for _ in range(10)]) == [here]


@pytest.mark.parametrize("large", ["bytes", "works", "anything", "elsewhere"])
def test_what_may_take_long_is_left_to_the_writer(desk: Desk, large: str) -> None:
    def submit() -> list[Completion[Any]]:
        if large == "bytes":
            return [desk.publish(committing.SMALL_BYTES_MAX + 1)]
        if large == "works":
            return [desk.publish() for _ in range(committing.LOOP_WORKS_MAX + 1)]
        if large == "anything":
            return [desk.committer.submit(lambda writer, hooks: None)]
        other: list[Completion[Any]] = []
        thread = threading.Thread(target=lambda: other.append(desk.publish()))
        with desk.committer._committing:
            thread.start()
            thread.join()
            mine = desk.publish()
        return [*other, mine]

    assert set(on_a_loop(desk, submit)) == {"headwater-writer"}


def test_a_loop_does_not_wait_for_the_lock_of_another_process(desk: Desk, tmp_path: Path) -> None:
    other = apsw.Connection(str(tmp_path / "log.db"))
    other.execute("BEGIN IMMEDIATE")
    turned = threading.Event()

    async def publish() -> int:
        loop = asyncio.get_running_loop()
        desk.committer.commit_on(loop)
        publishing = desk.publish()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        turned.set()  # the loop goes on
        other.execute("ROLLBACK")
        assert await publishing.wait_async(TIME_LIMIT_S)
        return publishing.result()

    assert asyncio.run(publish()) == 1
    assert turned.is_set()
    assert desk.transactions.threads == ["headwater-writer"]
    other.close()


def test_after_a_slow_commit_the_writer_has_its_turn(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committing, "LOOP_S_MAX", -1.0)
    monkeypatch.setattr(committing, "SLOW_S", 1_000.0)
    assert on_a_loop(desk, lambda: [desk.publish()]) == [threading.current_thread().name]
    assert on_a_loop(desk, lambda: [desk.publish()]) == ["headwater-writer"]


# --- the write-ahead log --------------------------------------------------------------------------------------------


def test_the_write_ahead_log_stays_short(tmp_path: Path) -> None:
    with headwater.open(tmp_path / "log.db", durability="relaxed", maintenance_interval=None) as log:
        for _ in range(300):
            log.publish_many([("a", "x" * 1_000)] * 100)
        store = log._core.engine.store  # type: ignore[attr-defined]
        pages = store.journal_bytes() / 4096
        assert pages < 2 * sqlite_connection.WAL_PAGES_MAX, "30 MB were written"
    with headwater.open(tmp_path / "log.db") as log:
        assert log.last_seq() == 30_000


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_a_claim_that_leaves_rows_is_followed_by_a_look(log: Log, mode: Any) -> None:
    """Rows that a claim has parked or delayed are found though nothing is published any more."""
    handled: queue.Queue[Any] = queue.Queue()
    log.on("a", id="s", mode=mode, order="priority")(lambda message: handled.put(message.data))
    log.on("b", id="t", mode=mode)(lambda message: handled.put(message.data))
    log.publish_many([("a", number) for number in range(300)])
    log.publish_many([("b", 300), ("b", 301, {"delay": 0.05})])
    log.start()
    assert sorted(handled.get(timeout=TIME_LIMIT_S) for _ in range(302)) == list(range(302))


@pytest.mark.usefixtures("no_fallback")
def test_a_look_that_fails_is_made_again(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    subscription = log.subscribe("s", "a", backoff=0.0)
    log.publish("a", 1)
    [message] = subscription.fetch()
    consumer = subscription._consumer
    message.nack(0)
    with monkeypatch.context() as patch:
        patch.setattr(log._core.engine, "read_now", refuse)  # type: ignore[attr-defined]
        with pytest.raises(StoreError), consumer.taking():
            run_blocking(consumer.take_next(1.0))
    with consumer.taking():
        claimed = run_blocking(consumer.take_next(float(TIME_LIMIT_S)))
    assert claimed is not None
    assert claimed.attempt == 2


def refuse(*_: Any) -> Any:
    raise StoreError("no")


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (consumers, durable_consumers):
        monkeypatch.setattr(module, "FALLBACK_POLL_S", 10.0 * TIME_LIMIT_S)


def test_works_that_a_loop_leaves_to_the_writer_keep_their_order(desk: Desk, tmp_path: Path) -> None:
    """A group fails, its works are run one by one, and meanwhile another process has the lock."""
    other = apsw.Connection(str(tmp_path / "log.db"))
    runs: list[int] = []

    def work(number: int, writer: Any, hooks: Any) -> None:
        runs.append(number)
        if len(runs) == 3:
            hooks.append(lambda: other.execute("BEGIN IMMEDIATE"))  # when it is rolled back
            raise ValueError("the first time")

    async def turn() -> None:
        loop = asyncio.get_running_loop()
        desk.committer.commit_on(loop)
        works = [desk.committer.submit(partial(work, number), touching="s") for number in range(3)]
        while not other.in_transaction:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        other.execute("ROLLBACK")
        for each in works:
            assert await each.wait_async(TIME_LIMIT_S)

    asyncio.run(turn())
    other.close()
    assert runs[:3] == [0, 1, 2]
    assert runs[3:] == [0, 1, 2]


def test_a_checkpoint_that_cannot_be_made_fails_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "WAL_PAGES_MAX", 1)
    with headwater.open(tmp_path / "log.db", durability="relaxed", maintenance_interval=None) as log:
        busy, done = log._core.engine.store.connect(), threading.Event()  # type: ignore[attr-defined]

        def checkpoint() -> None:
            while not done.is_set():
                with contextlib.suppress(apsw.BusyError):
                    busy.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

        thread = threading.Thread(target=checkpoint)
        thread.start()
        try:
            assert [log.publish("a", number) for number in range(1, 501)] == list(range(1, 501))
        finally:
            done.set()
            thread.join()
            busy.close()
