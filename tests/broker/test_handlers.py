"""Functions that are called for every message: ack when they return, try again when they raise."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from headwater import Log, ManualClock, Reject
from headwater.errors import InvalidData, InvalidOption

TIME_LIMIT_S = 30


def fields(letter: Any) -> tuple[Any, ...]:
    return letter.reason, letter.error, letter.attempts


def until(condition: Callable[[], bool], ticks: "queue.Queue[Any]") -> None:
    """Waits for a condition that can only change with a tick."""
    while not condition():
        ticks.get(timeout=TIME_LIMIT_S)


class Settled:
    """Tells when messages are settled: handlers are acked after they return, so returning is too early to look."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def wait(self, id: str, lag: int = 0) -> None:
        committer = self._log._core.engine.committer
        for _ in range(10_000):
            committer.submit(lambda writer, undo: None).wait(TIME_LIMIT_S)  # whatever is queued before is done then
            if self._log.subscription(id).lag == lag:
                return
        pytest.fail(f"the lag of {id} is {self._log.subscription(id).lag}, not {lag}")


@pytest.fixture
def settled(log: Log) -> Settled:
    return Settled(log)


def test_a_message_is_acked_after_its_handler_returns(log: Log, settled: Settled) -> None:
    seen: queue.Queue[Any] = queue.Queue()
    at_the_time: list[int] = []

    @log.on("a.*")
    def handle(message: Any) -> None:
        at_the_time.append(log.subscription("handle").in_flight)
        seen.put((message.topic, message.data, message.attempt))

    log.publish("a.b", 1)
    log.start()
    log.publish("a.c", 2)
    assert [seen.get(timeout=TIME_LIMIT_S) for _ in range(2)] == [("a.b", 1, 1), ("a.c", 2, 1)]
    settled.wait("handle")
    assert log.subscription("handle").acked == 2
    assert at_the_time[0] >= 1, "not before"


def test_a_handler_that_raises_is_tried_again_after_the_backoff(log: Log, settled: Settled, clock: ManualClock) -> None:
    attempts: queue.Queue[int] = queue.Queue()

    @log.on("a", id="h", backoff=5, jitter=0)
    def handle(message: Any) -> None:
        attempts.put(message.attempt)
        if message.attempt < 3:
            raise RuntimeError("not yet")

    log.start()
    log.publish("a", 1)
    assert attempts.get(timeout=TIME_LIMIT_S) == 1
    _until_waiting(log, "h")
    clock.advance(4_999)
    assert attempts.empty()
    clock.advance(1)
    assert attempts.get(timeout=TIME_LIMIT_S) == 2
    _until_waiting(log, "h")
    clock.advance(10_000)
    assert attempts.get(timeout=TIME_LIMIT_S) == 3
    settled.wait("h")
    assert log.dead_letters.list() == []


def _until_waiting(log: Log, id: str) -> None:
    for _ in range(10_000):
        log._core.engine.committer.submit(lambda writer, undo: None).wait(TIME_LIMIT_S)
        if log.subscription(id).waiting:
            return
    pytest.fail("it is not waiting")


def test_a_handler_that_goes_on_raising_ends_in_a_dead_letter_with_its_stack(log: Log, settled: Settled) -> None:
    @log.on("a", id="h", max_attempts=2, backoff=0)
    def handle(message: Any) -> None:
        raise ValueError(f"attempt {message.attempt}")

    log.publish("a", 1)
    log.start()
    settled.wait("h")
    [letter] = log.dead_letters.list()
    assert fields(letter) == ("max_retries", "ValueError: attempt 2", 2)
    assert letter.stack is not None
    assert "raise ValueError" in letter.stack
    assert letter.handler is not None
    assert letter.handler.endswith("handle")


def test_reject_buries_at_once(log: Log, settled: Settled) -> None:
    @log.on("a", id="h")
    def handle(message: Any) -> None:
        raise Reject("no use")

    log.publish("a", 1)
    log.start()
    settled.wait("h")
    assert fields(log.dead_letters.list()[0]) == ("rejected", "Reject: no use", 1)


def test_what_cannot_be_read_is_not_tried_again(log: Log, settled: Settled) -> None:
    @log.on("a", id="h")
    def handle(message: Any) -> None:
        raise InvalidData("not JSON")

    log.publish("a", 1)
    log.start()
    settled.wait("h")
    assert fields(log.dead_letters.list()[0]) == ("processing_error", "InvalidData: not JSON", 1)


def test_a_handler_may_settle_by_itself(log: Log, settled: Settled) -> None:
    @log.on("a", id="h")
    def handle(message: Any) -> None:
        if message.data == "ack":
            message.ack()
            raise RuntimeError("after the ack, which stands")
        message.reject("mine")

    log.publish_many([("a", "ack"), ("a", "reject")])
    log.start()
    settled.wait("h")
    assert (log.subscription("h").acked, log.subscription("h").dead) == (1, 1)


def test_without_auto_ack_returning_is_not_acking(log: Log) -> None:
    seen: queue.Queue[Any] = queue.Queue()

    @log.on("a", id="h", auto_ack=False)
    def handle(message: Any) -> None:
        seen.put(message)

    log.publish("a", 1)
    log.start()
    message = seen.get(timeout=TIME_LIMIT_S)
    log._core.engine.committer.submit(lambda writer, undo: None).wait(TIME_LIMIT_S)
    assert log.subscription("h").in_flight == 1
    message.ack()
    assert log.subscription("h").lag == 0


def test_one_worker_handles_in_order(log: Log, settled: Settled) -> None:
    seen: list[int] = []
    log.publish_many([("a", n) for n in range(100)])
    log.on("a", id="h")(lambda message: seen.append(message.seq))
    log.start()
    settled.wait("h")
    assert seen == list(range(1, 101))


def test_stop_gives_back_the_unseen_without_an_attempt(log: Log) -> None:
    entered, go_on = threading.Event(), threading.Event()
    seen: list[int] = []

    @log.on("a", id="h")
    def handle(message: Any) -> None:
        seen.append(message.seq)
        entered.set()
        assert go_on.wait(TIME_LIMIT_S)

    log.publish_many([("a", n) for n in range(5)])
    log.start()
    assert entered.wait(TIME_LIMIT_S)
    stopping = threading.Thread(target=log.stop)
    stopping.start()
    while not log._handlers._running["h"]._stopped.done:
        pass
    go_on.set()
    stopping.join(TIME_LIMIT_S)
    assert seen == [1], "it finishes what it is at, and begins nothing new"
    subscription = log.subscribe("h", "a")
    assert [(message.seq, message.attempt) for message in subscription.fetch()] == [(2, 1), (3, 1), (4, 1), (5, 1)]


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


def test_run_ends_with_stop(log: Log) -> None:
    seen = threading.Event()
    log.on("a", id="h")(lambda message: seen.set())
    running = threading.Thread(target=log.run)
    running.start()
    log.publish("a", 1)
    assert seen.wait(TIME_LIMIT_S)
    log.stop()
    running.join(TIME_LIMIT_S)
    assert not running.is_alive()


def test_an_ephemeral_handler(log: Log) -> None:
    seen: queue.Queue[Any] = queue.Queue()
    log.on(">", id="live", mode="ephemeral", start="new")(lambda message: seen.put(message.data))
    log.publish("a", "before")
    log.start()
    log.publish("a", "after")
    assert seen.get(timeout=TIME_LIMIT_S) == "after"
    assert log.subscriptions() == []


@pytest.mark.parametrize("concurrency", [0, -1, 1_001])
def test_concurrency_has_limits(log: Log, concurrency: int) -> None:
    with pytest.raises(InvalidOption):
        log.on("a", concurrency=concurrency)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_coroutine_function_needs_the_asynchronous_log(log: Log) -> None:
    async def handle(message: Any) -> None:
        """Would have to be awaited."""

    log.publish("a", 1)
    try:
        log.on("a", id="h")(handle)
        log.start()
    except InvalidOption:
        return
    Settled(log).wait("h", lag=0)
    assert log.subscription("h").acked == 0
