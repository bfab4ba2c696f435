"""Several workers of one handler: really at it together, none left behind, no ack put off."""

import queue
import threading
from contextlib import contextmanager
from typing import Any

import pytest

import headwater
from headwater import Log, ManualClock
from headwater.broker import reading
from headwater.broker.flow import Ticket

TIME_LIMIT_S = 30


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
        log._core.engine.committer.submit(lambda writer, undo: None).wait(TIME_LIMIT_S)
    assert log.subscription("h").acked == 2


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> dict[str, threading.Semaphore]:
    """Counts how often workers of handler `h` begin to wait: for each other, and for messages."""
    begun = {"other": threading.Semaphore(0), "message": threading.Semaphore(0)}
    wait = Ticket.wait

    def counted(ticket: Ticket[Any], timeout_s: float | None = None) -> bool:
        if threading.current_thread().name.startswith("headwater-h-"):
            begun["other" if timeout_s is None else "message"].release()
        return wait(ticket, timeout_s)

    monkeypatch.setattr(Ticket, "wait", counted)
    return begun


def test_three_idle_workers_are_really_at_it_together(clock: ManualClock, naps: dict[str, threading.Semaphore]) -> None:
    # A log of its own, left open if this fails: were a worker to hang, stop() would hang with it.
    log = headwater.open("memory:", clock=clock, housekeeping=None, heartbeats=False)
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
    monkeypatch.setattr(reading, "NET_POLL_S", 2 * TIME_LIMIT_S)
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
