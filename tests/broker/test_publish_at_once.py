"""A thread that publishes stores its message itself, whatever interrupts it, or leaves it to the writer."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import apsw
import pytest

import headwater
from headwater.api._sync import Log
from headwater.broker import committer as committing
from headwater.broker.committer import TransactionHooks, _wake_readers
from headwater.broker.flow import Completion
from headwater.broker.wakeups import Wakeups
from headwater.message import Draft
from headwater.stores.sqlite import SqliteStore
from headwater.stores.sqlite import store as sqlite_store
from headwater.topics import parse_pattern

STORMS = 1_500
EVERY_S = 0.000_5  # of processor time
TIME_LIMIT_S = 30
SECOND = 10**9  # the data of the second message of a pair is larger by so much
NO_WRITER: Any = None


class Interrupted(BaseException):
    """What a signal handler raises."""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with headwater.open(tmp_path / "log.db", durability="relaxed", maintenance_interval=None, heartbeats=False) as log:
        yield log


class Counted:
    """How many publishes the threads stored themselves, and how many they left to the writer."""

    def __init__(self, store: SqliteStore) -> None:
        self.stored = self.left = 0
        publish_at_once = store.publish_at_once

        def counted(drafts: Any) -> range | None:
            seqs = publish_at_once(drafts)
            self.stored, self.left = self.stored + (seqs is not None), self.left + (seqs is None)
            return seqs

        store.publish_at_once = counted  # type: ignore[method-assign]


def store_of(log: Log) -> SqliteStore:
    return log._core.engine.store  # type: ignore[attr-defined, no-any-return]


def stored(log: Log) -> dict[int, int]:
    """The data of every message by seq, as another connection reads it; of a pair, that of its first message."""
    connection = apsw.Connection(store_of(log).path)
    try:
        found = {seq: int(data) for seq, data in connection.execute("SELECT seq, data FROM messages")}
    finally:
        connection.close()
    seconds = {seq: data for seq, data in found.items() if data > SECOND // 2}
    firsts = {seq: data for seq, data in found.items() if data <= SECOND // 2}
    assert all(firsts[seq - 1] == data - SECOND for seq, data in seconds.items())
    assert not seconds or len(seconds) == len(firsts)
    return firsts


def publish_one(log: Log, data: int, **options: Any) -> int:
    return log.publish("a.b", data, **options)


def publish_pair(log: Log, data: int, **options: Any) -> int:
    first, second = log.publish_many([("a.b", data, options), ("a.b", data + SECOND)])
    assert second == first + 1
    return first


Publish = Callable[..., int]
both_ways = pytest.mark.parametrize("publish", [publish_one, publish_pair])


def at_instruction(number: int, then: Callable[[], object]) -> Callable[..., Any]:
    """A trace function that calls `then` once, before this instruction of Headwater's."""
    left = itertools.count(number, -1)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if "headwater" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(left) == 0:
            sys.settrace(None)
            then()
        return trace

    return trace


def publish_traced(publish: Publish, log: Log, data: int, trace: Callable[..., Any]) -> int:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return publish(log, data)
    finally:
        sys.settrace(before)


@both_ways
@pytest.mark.timeout(60)
def test_an_exception_before_any_instruction_loses_nothing_and_stores_nothing_twice(log: Log, publish: Publish) -> None:
    counted = Counted(store_of(log))
    publish(log, -1)

    def interrupt() -> None:
        raise Interrupted

    returned: dict[int, int] = {}
    for number in itertools.count():
        try:
            returned[publish_traced(publish, log, 2 * number, at_instruction(number, interrupt))] = 2 * number
            break
        except Interrupted:
            returned[publish(log, 2 * number + 1)] = 2 * number + 1
    assert number > 200
    found = stored(log)
    assert returned.items() <= found.items()
    assert len(set(found.values())) == len(found)
    assert set(found.values()) <= {*range(-1, 2 * number + 2)}
    assert counted.stored > 0.9 * number  # an interruption costs the next publishes nothing
    with log.subscribe("reader", "a.b", max_in_flight=10_000) as reader:
        assert [each.seq for each in reader.fetch(10_000) if each.data <= SECOND // 2] == sorted(found)


@both_ways
@pytest.mark.timeout(60)
@pytest.mark.parametrize("way", ["at once", "by the writer"])
def test_a_publish_before_any_instruction_of_a_publish_waits_for_nothing(log: Log, publish: Publish, way: str) -> None:
    """As a signal handler may do."""
    publish(log, -1)
    inner: list[tuple[int, int]] = []
    outer: list[tuple[int, int]] = []
    for number in itertools.count():
        data = 2 * number

        def handle(data: int = data) -> None:
            options = {"id": f"id-{data}"} if way == "by the writer" else {}
            inner.append((publish(log, data + 1, **options), data + 1))

        outer.append((publish_traced(publish, log, data, at_instruction(number, handle)), data))
        if len(inner) < len(outer):
            break
    assert number > 200
    assert stored(log) == {1: -1, **dict(inner), **dict(outer)}


def test_a_storm_of_signals_whose_handlers_raise(log: Log) -> None:
    """Real signals in the main thread, beside threads that publish."""
    armed = False

    def handle(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Interrupted

    returned: dict[int, int] = {}
    interrupted = 0
    stop = threading.Event()

    def publish_beside(numbers: Iterator[int]) -> None:
        while not stop.wait(0.002):
            data = next(numbers)
            returned[log.publish("a.b", data)] = data

    beside = [threading.Thread(target=publish_beside, args=(itertools.count(at * 10**6),)) for at in (1, 2)]
    for thread in beside:
        thread.start()
    before = signal.signal(signal.SIGPROF, handle)
    signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
    try:
        for data in range(STORMS):
            try:
                armed = True
                seq = log.publish("a.b", data)
                armed = False
                returned[seq] = data
            except Interrupted:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        stop.set()
        for thread in beside:
            thread.join(TIME_LIMIT_S)
    returned[log.publish("a.b", -1)] = -1
    found = stored(log)
    assert interrupted > 0
    assert returned.items() <= found.items()
    assert len(set(found.values())) == len(found)
    assert len(returned) <= len(found) <= len(returned) + interrupted
    assert log.statistics().messages == len(found)


class HeldFile(apsw.VFSFile):
    """Waits before each sync in the thread that is to be held in the midst of its commit."""

    holds: threading.Thread | None = None
    arrived, goes_on = threading.Event(), threading.Event()

    def __init__(self, name: Any, flags: list[int]) -> None:
        super().__init__("", name, flags)

    def xSync(self, flags: int) -> None:
        if threading.current_thread() is HeldFile.holds:
            HeldFile.arrived.set()
            HeldFile.goes_on.wait(TIME_LIMIT_S)
        super().xSync(flags)


class HeldVfs(apsw.VFS):
    def __init__(self, name: str) -> None:
        super().__init__(name, "")

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return HeldFile(name, flags)


@pytest.mark.timeout(60)
def test_a_commit_of_another_thread_before_any_instruction_does_not_hide_that_it_is_stored(tmp_path: Path) -> None:
    """A signal handler publishes too, and its end hides from the other thread that a publish is under way."""
    vfs = HeldVfs("held")
    store = SqliteStore(tmp_path / "log.db", vfs="held")
    drafts = (Draft("a.b", str(number), 1) for number in itertools.count())
    seqs: list[int] = []

    def publish() -> None:
        seqs.extend(store.publish_at_once((next(drafts), next(drafts))) or ())

    def publish_beside() -> None:
        publish()
        HeldFile.arrived.set()

    try:
        publish()
        for number in itertools.count():
            store._unseen_pages = 0
            threads: list[threading.Thread] = []

            def interrupt(threads: list[threading.Thread] = threads) -> None:
                publish()
                HeldFile.arrived.clear()
                HeldFile.goes_on.clear()
                HeldFile.holds = threading.Thread(target=publish_beside)
                threads.append(HeldFile.holds)
                HeldFile.holds.start()
                assert HeldFile.arrived.wait(TIME_LIMIT_S)

            before = sys.gettrace()
            sys.settrace(at_instruction(number, interrupt))
            try:
                publish()
            finally:
                sys.settrace(before)
                HeldFile.goes_on.set()
            for thread in threads:
                thread.join(TIME_LIMIT_S)
            if not threads:
                break
        assert number > 50
        with store.read() as reader:
            assert sorted(seqs) == list(range(1, reader.last_seq() + 1))
    finally:
        store.close()
        vfs.unregister()


def test_a_store_that_is_closed_before_any_instruction_has_what_it_returned(tmp_path: Path) -> None:
    for number in itertools.count():
        path = tmp_path / f"{number}.db"
        store = SqliteStore(path, durability="relaxed")
        store.publish_at_once([Draft("a.b", "1", 1)])
        closers: list[threading.Thread] = []

        def close(store: SqliteStore = store, closers: list[threading.Thread] = closers) -> None:
            closers.append(threading.Thread(target=store.close))
            closers[0].start()
            closers[0].join(TIME_LIMIT_S)

        before = sys.gettrace()
        sys.settrace(at_instruction(number, close))
        try:
            seqs = store.publish_at_once([Draft("a.b", "2", 1)] * 2)
        finally:
            sys.settrace(before)
        store.close()
        assert not Path(f"{path}-wal").exists()
        connection = apsw.Connection(str(path))
        assert connection.execute("SELECT count(*) FROM messages").get == (1 if seqs is None else 3)
        connection.close()
        if not closers:
            break
    assert number > 50


def test_it_stores_a_plain_message_and_leaves_others_to_the_writer(log: Log) -> None:
    counted = Counted(store_of(log))
    many = committing.SMALL_MESSAGES_MAX
    log.publish("a.b", 1)
    log.publish_many([("a.b", 2)] * many)
    assert (counted.stored, counted.left) == (2, 0)
    seqs = [log.publish("a.b", 3, id="x"), log.publish("a.b", 4, headers={"a": 1}), log.publish("a.b", 5, priority=1)]
    seqs += log.publish_many([("a.b", 6), ("a.b", 7, {"id": "y"})])
    assert log.publish_many([("a.b", 8)] * (many + 1))[-1] == seqs[-1] + many + 1
    assert (counted.stored, counted.left) == (2, 0)
    with log.transaction() as tx:
        thread = threading.Thread(target=lambda: seqs.append(log.publish("a.b", 10)))
        tx.publish("a.b", 9)
        thread.start()
        thread.join(0.05)
        assert len(seqs) == 5
    thread.join(TIME_LIMIT_S)
    assert (counted.stored, counted.left) == (2, 1)
    assert seqs == [*range(many + 2, many + 7), 2 * many + 9]
    assert list(stored(log).values()) == [1, *[2] * many, 3, 4, 5, 6, 7, *[8] * (many + 1), 9, 10]


def test_it_leaves_batches_of_many_bytes_to_the_writer(log: Log) -> None:
    counted = Counted(store_of(log))
    log.publish("a.b", 1)
    assert log.publish_many([("a.b", "x" * (committing.SMALL_BYTES_MAX // 2))] * 2) == [2, 3]
    assert (counted.stored, counted.left) == (1, 0)


def test_a_consumer_of_this_process_has_its_messages_claimed_by_the_writer(log: Log) -> None:
    counted = Counted(store_of(log))
    log.publish("a.b", 1)
    with log.subscribe("reader", "a.b") as reader:
        log.publish("a.b", 2)
        assert counted.stored == 1
        assert [message.data for message in reader.fetch(10)] == [1, 2]
    while counted.stored == 1:  # the close may have shared a commit: then the next publish is left to the writer, too
        log.publish("a.b", 3)


def test_a_consumer_that_begins_to_wait_meanwhile_is_woken(log: Log) -> None:
    store, wakeups = store_of(log), log._core.engine.wakeups  # type: ignore[attr-defined]
    publish_at_once = store.publish_at_once
    news: list[Completion[None]] = []

    def beside_a_consumer(drafts: Sequence[Draft]) -> range | None:
        seqs = publish_at_once(drafts)
        news.append(wakeups.add(parse_pattern("a.*"), "reader", wake_on_settle=False).arm())
        return seqs

    store.publish_at_once = beside_a_consumer  # type: ignore[method-assign]
    assert log.publish("a.b", 1) == 1
    assert news[0].wait(TIME_LIMIT_S)


def test_the_log_is_closed_before_the_consumer_that_has_begun_to_wait_is_woken(log: Log) -> None:
    wakeups = log._core.engine.wakeups  # type: ignore[attr-defined]

    def close_and_wake(seqs: Sequence[int]) -> bool:
        log.close()
        return True

    wakeups.note_stored = close_and_wake
    assert log.publish("a.b", 1) == 1


def test_an_event_loop_is_never_blocked(log: Log) -> None:
    counted = Counted(store_of(log))

    async def publish() -> None:
        log.publish("a.b", 1)

    asyncio.run(publish())
    assert (counted.stored, counted.left) == (0, 0)


def test_a_manual_clock_dates_the_message(tmp_path: Path) -> None:
    clock = headwater.ManualClock()
    with headwater.open(tmp_path / "log.db", clock=clock) as log:
        log.publish("a.b", 1)
        with log.subscribe("reader", "a.b") as reader:
            (message,) = reader.fetch()
        assert message.published_at.timestamp() * 1_000 == clock.now_ms()


def test_times_ascend_between_both_ways(log: Log) -> None:
    counted = Counted(store_of(log))
    for number in range(300):
        log.publish("a.b", number, id=None if number % 2 else str(number))
    assert 100 < counted.stored < 200
    connection = apsw.Connection(store_of(log).path)
    times = [ms for (ms,) in connection.execute("SELECT published_at FROM messages ORDER BY seq")]
    connection.close()
    assert times == sorted(times)


def test_another_process_has_the_lock(log: Log) -> None:
    """Then the writer waits for it, and the thread for the writer."""
    counted = Counted(store_of(log))
    log.publish("a.b", 1)
    other = apsw.Connection(store_of(log).path)
    other.execute("BEGIN IMMEDIATE")
    thread = threading.Thread(target=log.publish, args=("a.b", 2))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    other.execute("ROLLBACK")
    other.close()
    thread.join(TIME_LIMIT_S)
    assert (counted.stored, counted.left) == (1, 1)
    assert stored(log) == {1: 1, 2: 2}


@pytest.mark.parametrize(("data", "messages"), [(1, 2_000), ("x" * 40_000, 300)], ids=["small", "large"])
def test_the_journal_does_not_grow(log: Log, monkeypatch: pytest.MonkeyPatch, data: object, messages: int) -> None:
    """The connection never looks at its length; now and then a message is left to the writer, which does."""
    monkeypatch.setattr(sqlite_store, "WAL_PAGES_MAX", 300)
    counted = Counted(store_of(log))
    for _ in range(messages):
        log.publish("a.b", data)
    assert counted.stored > 0.9 * messages
    assert store_of(log).journal_bytes() < 2 * 300 * sqlite_store.PAGE_BYTES


def test_its_connection_is_closed_with_the_log(tmp_path: Path) -> None:
    with headwater.open(tmp_path / "log.db") as log:
        log.publish("a.b", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["log.db"]


def test_threads_that_publish_at_the_same_time_share_commits(tmp_path: Path) -> None:
    with headwater.open(tmp_path / "log.db") as log:
        commits = 0
        write = store_of(log).write

        def counting(*arguments: Any, **options: Any) -> Any:
            nonlocal commits
            commits += 1
            return write(*arguments, **options)

        store_of(log).write = counting  # type: ignore[method-assign, assignment]
        counted = Counted(store_of(log))
        together = threading.Barrier(30)  # on a busy machine the first would have ended before the last began

        def publish() -> None:
            together.wait(TIME_LIMIT_S)
            for number in range(20):
                log.publish("a.b", number)

        threads = [threading.Thread(target=publish) for _ in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIME_LIMIT_S)
        assert len(stored(log)) == 600
        assert commits + counted.stored < 300


@pytest.mark.parametrize("is_last", [True, False], ids=["the others before", "the others behind"])
def test_readers_are_woken_for_the_others_of_the_group_too(is_last: bool) -> None:
    """The thread wakes readers for a message that is stored, in a group in which others are published."""
    hooks = TransactionHooks()
    steps = [
        lambda: hooks.note_published([Draft("b", "1", 1)], [6]),
        lambda: _wake_readers(Wakeups(), [Draft("a", "1", 1)], [5], NO_WRITER, hooks),
    ]
    for step in steps if is_last else reversed(steps):
        step()
    assert hooks.published == ({"a", "b"}, 5, 6)


def test_a_reader_of_another_topic_looks_after_messages_were_stored_beside_it() -> None:
    """Its message may have been published while `last_known` was read and written, which is then too low."""
    wakeups, hooks = Wakeups(), TransactionHooks()
    reader = wakeups.add(parse_pattern("b"), "reader", wake_on_settle=False)
    reader.is_stale, news = False, reader.arm()
    _wake_readers(wakeups, [Draft("a", "1", 1)], [5], NO_WRITER, hooks)
    assert not news.done  # the messages of the group are not committed yet
    hooks.after_commit()
    assert news.done
    assert reader.is_stale


def test_an_error_while_the_connection_is_opened_has_no_context_of_ours(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> apsw.Connection:
        raise Interrupted

    monkeypatch.setattr(store_of(log), "_open_publisher", fail)
    with pytest.raises(Interrupted) as caught:
        log.publish("a", 1)
    assert caught.value.__context__ is None
