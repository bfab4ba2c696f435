"""Functions that are called for every message: ack when they return, try again when they raise; and their workers."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from eventually import eventually

import headwater
from headwater import Log, ManualClock, Reject
from headwater.broker import consumer as consumers
from headwater.broker.deliveries import Claimed
from headwater.broker.durable_consumer import DurableConsumer
from headwater.broker.flow import Completion
from headwater.errors import InvalidDataError, InvalidOptionError

TIME_LIMIT_S = 30


def fields(letter: Any) -> tuple[Any, ...]:
    return letter.reason, letter.error, letter.attempts


def settled(log: Log, id: str = "h") -> None:
    """Handlers are acked after they return, so returning is too early to look."""
    eventually(lambda: log.subscription(id).lag, 0)


def test_a_message_is_acked_after_its_handler_returns(log: Log) -> None:
    seen: queue.Queue[Any] = queue.Queue()
    at_the_time: list[int] = []

    @log.on("a.*", id="handle")
    def handle(message: Any) -> None:
        at_the_time.append(log.subscription("handle").in_flight)
        seen.put((message.topic, message.data, message.attempt))

    log.publish("a.b", 1)
    log.start()
    log.publish("a.c", 2)
    assert [seen.get(timeout=TIME_LIMIT_S) for _ in range(2)] == [("a.b", 1, 1), ("a.c", 2, 1)]
    settled(log, "handle")
    assert log.subscription("handle").acked == 2
    assert at_the_time[0] >= 1, "not before"


def test_a_handler_that_raises_is_tried_again_after_the_backoff(log: Log, clock: ManualClock) -> None:
    attempts: queue.Queue[int] = queue.Queue()

    @log.on("a", id="h", backoff=5, jitter=0)
    def handle(message: Any) -> None:
        attempts.put(message.attempt)
        if message.attempt < 3:
            raise RuntimeError("not yet")

    log.start()
    log.publish("a", 1)
    assert attempts.get(timeout=TIME_LIMIT_S) == 1
    eventually(lambda: log.subscription("h").waiting, 1)
    clock.advance(4.999)
    assert attempts.empty()
    clock.advance(0.001)
    assert attempts.get(timeout=TIME_LIMIT_S) == 2
    eventually(lambda: log.subscription("h").waiting, 1)
    clock.advance(10)
    assert attempts.get(timeout=TIME_LIMIT_S) == 3
    settled(log)
    assert log.dead_letters.list() == []


def test_a_handler_that_goes_on_raising_ends_in_a_dead_letter_with_its_stack(log: Log) -> None:
    @log.on("a", id="h", max_attempts=2, backoff=0)
    def handle(message: Any) -> None:
        raise ValueError(f"attempt {message.attempt}")

    log.publish("a", 1)
    log.start()
    settled(log)
    [letter] = log.dead_letters.list()
    assert fields(letter) == ("max_attempts", "ValueError: attempt 2", 2)
    assert letter.stack is not None
    assert "raise ValueError" in letter.stack
    assert letter.handler is not None
    assert letter.handler.endswith("handle")


@pytest.mark.parametrize(
    ("error", "reason"), [(Reject("no use"), "rejected"), (InvalidDataError("not JSON"), "processing_error")]
)
def test_what_is_rejected_or_cannot_be_read_is_not_tried_again(log: Log, error: Exception, reason: str) -> None:
    @log.on("a", id="h")
    def handle(message: Any) -> None:
        raise error

    log.publish("a", 1)
    log.start()
    settled(log)
    assert fields(log.dead_letters.list()[0]) == (reason, f"{type(error).__name__}: {error}", 1)


def test_a_handler_may_settle_by_itself(log: Log) -> None:
    @log.on("a", id="h")
    def handle(message: Any) -> None:
        if message.data == "ack":
            message.ack()
            raise RuntimeError("after the ack, which stands")
        message.reject("mine")

    log.publish_many([("a", "ack"), ("a", "reject")])
    log.start()
    settled(log)
    assert (log.subscription("h").acked, log.subscription("h").dead) == (1, 1)


def test_without_auto_ack_returning_is_not_acking(log: Log) -> None:
    seen: queue.Queue[Any] = queue.Queue()

    @log.on("a", id="h", auto_ack=False)
    def handle(message: Any) -> None:
        seen.put(message)

    log.publish("a", 1)
    log.start()
    message = seen.get(timeout=TIME_LIMIT_S)
    log._core.engine.committer.submit(lambda writer, hooks: None).wait(TIME_LIMIT_S)
    assert log.subscription("h").in_flight == 1
    message.ack()
    assert log.subscription("h").lag == 0


def test_one_worker_handles_in_order(log: Log) -> None:
    seen: list[int] = []
    log.publish_many([("a", n) for n in range(100)])
    log.on("a", id="h")(lambda message: seen.append(message.seq))
    log.start()
    settled(log)
    assert seen == list(range(1, 101))


def test_stopping_while_messages_come_costs_no_attempts(log: Log) -> None:
    seen = threading.Semaphore(0)
    log.on("a", id="h")(lambda message: seen.release())
    for _ in range(40):
        log.start()
        log.publish("a", "first")
        assert seen.acquire(timeout=TIME_LIMIT_S)
        log.publish_many([("a", n) for n in range(5)])  # found, and perhaps on their way, when it is stopped
        log.stop()
    assert log.subscription("h").redelivered == 0


def test_stop_ends_idle_handlers_and_frees_their_subscriptions(log: Log) -> None:
    log.on("a", id="one")(lambda message: None)
    log.on("b", id="two", concurrency=2)(lambda message: None)
    log.start()
    log.stop()
    assert [info.holder for info in log.subscriptions()] == [None, None]


def test_an_ephemeral_handler(log: Log) -> None:
    seen: queue.Queue[Any] = queue.Queue()
    log.on(">", mode="ephemeral", start="new")(lambda message: seen.put(message.data))
    log.publish("a", "before")
    log.start()
    log.publish("a", "after")
    assert seen.get(timeout=TIME_LIMIT_S) == "after"
    assert log.subscriptions() == []


def test_a_durable_handler_needs_an_id(log: Log) -> None:
    with pytest.raises(InvalidOptionError, match=r'a durable handler needs an id.*id="billing"'):
        log.on("a")


@pytest.mark.parametrize("concurrency", [0, -1, 1_001])
def test_concurrency_has_limits(log: Log, concurrency: int) -> None:
    with pytest.raises(InvalidOptionError):
        log.on("a", id="h", concurrency=concurrency)


def test_a_coroutine_function_needs_the_asynchronous_log(log: Log) -> None:
    async def handle(message: Any) -> None:
        """Would have to be awaited."""

    with pytest.raises(InvalidOptionError, match="is a coroutine function"):
        log.on("a", id="h")(handle)


async def test_a_plain_function_is_a_handler_of_an_asyncio_log() -> None:
    async with headwater.open_async("memory:") as log:
        seen: asyncio.Queue[int] = asyncio.Queue()
        log.on("a", id="h")(lambda message: seen.put_nowait(message.data))
        await log.start()
        await log.publish("a", 1)
        assert await asyncio.wait_for(seen.get(), TIME_LIMIT_S) == 1


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_two_workers_are_really_at_it_together(log: Log, mode: Any) -> None:
    together, done = threading.Barrier(2), threading.Semaphore(0)

    @log.on("a", id="h", concurrency=2, mode=mode)
    def handle(message: Any) -> None:
        together.wait(TIME_LIMIT_S)
        done.release()

    log.publish_many([("a", n) for n in range(6)])
    log.start()
    assert all(done.acquire(timeout=TIME_LIMIT_S) for _ in range(6))
    log.stop()
    assert (log.subscription("h").acked, log.subscription("h").lag) == (6, 0)


def test_no_ack_is_put_off_until_the_next_message(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    store = log._core.engine.store
    write, gate = store.write, threading.Event()
    quick, slow = threading.Event(), threading.Event()

    @log.on("a", id="h", concurrency=2)
    def handle(message: Any) -> None:
        if message.data == "slow":
            quick.set()
            assert slow.wait(TIME_LIMIT_S)
        else:
            assert quick.wait(TIME_LIMIT_S)  # both are at it

    @contextmanager
    def gated(*arguments: Any, **options: Any) -> Any:
        assert gate.wait(TIME_LIMIT_S)
        with write(*arguments, **options) as writer:
            yield writer

    gate.set()
    monkeypatch.setattr(store, "write", gated)
    log.publish_many([("a", "slow"), ("a", "quick")])
    log.start()
    assert quick.wait(TIME_LIMIT_S)
    gate.clear()
    [handler] = log._handlers._running.values()
    consumer: Any = handler._consumer
    while consumer._acking is None or not consumer._filling:
        pass  # until the quick one's ack is on its way, and its worker fetches
    slow.set()
    while not consumer._waiting:
        pass  # until the slow one's worker has nothing to do
    gate.set()
    for _ in range(200):
        log._core.engine.committer.submit(lambda writer, hooks: None).wait(TIME_LIMIT_S)
    assert log.subscription("h").acked == 2


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> dict[str, threading.Semaphore]:
    """Counts how often workers of handler `h` begin to wait: for each other, and for messages."""
    begun = {"other": threading.Semaphore(0), "message": threading.Semaphore(0)}
    wait = Completion.wait

    def counted(completion: Completion[Any], timeout_s: float | None = None) -> bool:
        if threading.current_thread().name.startswith("headwater-h-"):
            begun["other" if timeout_s is None else "message"].release()
        return wait(completion, timeout_s)

    monkeypatch.setattr(Completion, "wait", counted)
    return begun


def test_three_idle_workers_are_really_at_it_together(clock: ManualClock, naps: dict[str, threading.Semaphore]) -> None:
    # A log of its own, left open if this fails: were a worker to hang, stop() would hang with it.
    log = headwater.open("memory:", clock=clock, maintenance_interval=None, heartbeats=False)
    together, done = threading.Barrier(3), threading.Semaphore(0)

    @log.on("a", id="h", concurrency=3)
    def handle(message: Any) -> None:
        together.wait(TIME_LIMIT_S)
        done.release()

    log.start()
    for nap in ("message", "other", "other"):
        assert naps[nap].acquire(timeout=TIME_LIMIT_S)
    log.publish_many([("a", n) for n in range(3)])
    assert all(done.acquire(timeout=TIME_LIMIT_S) for _ in range(3))
    log.close()


def test_workers_with_an_order_key_do_not_wait_for_the_net(
    log: Log, naps: dict[str, threading.Semaphore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "FALLBACK_POLL_S", 2 * TIME_LIMIT_S)
    seen: queue.Queue[int] = queue.Queue()
    entered, go_on = threading.Event(), threading.Event()

    @log.on("a", id="h", concurrency=2, order_key="data.k")
    def handle(message: Any) -> None:
        entered.set()
        assert go_on.wait(TIME_LIMIT_S)
        seen.put(message.seq)

    log.publish_many([("a", {"k": 1}), ("a", {"k": 1})])
    log.start()
    assert entered.wait(TIME_LIMIT_S)
    assert naps["message"].acquire(timeout=TIME_LIMIT_S)  # the other worker finds nothing it may take
    go_on.set()
    assert [seen.get(timeout=TIME_LIMIT_S) for _ in range(2)] == [1, 2]


def test_an_ack_that_is_answered_at_once_leaves_the_handler_going(monkeypatch: pytest.MonkeyPatch) -> None:
    submit_ack = DurableConsumer.submit_ack

    def answered_at_once(
        self: DurableConsumer, settled: Sequence[Claimed], *, lazy: bool = False
    ) -> Completion[list[int]]:
        completion = submit_ack(self, settled, lazy=lazy)
        completion.wait(30)
        return completion

    monkeypatch.setattr(DurableConsumer, "submit_ack", answered_at_once)
    handled: list[Any] = []
    done = threading.Event()
    with headwater.open("memory:") as log:

        @log.on("a", id="s")
        def handle(message: headwater.ReceivedMessage) -> None:
            handled.append(message.data)
            if len(handled) == 20:
                done.set()

        log.publish_many([("a", number) for number in range(20)])
        log.start()
        assert done.wait(10), f"stuck after {handled}"
        log.stop()
        assert log.subscription("s").lag == 0
    assert handled == list(range(20))
