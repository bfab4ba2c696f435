"""Plain callbacks: called for each message, in order, apart from each other, and never without end."""

import queue
import threading
import traceback
from typing import Any

import pytest
from eventually import eventually

from headwater import Log
from headwater.errors import InvalidOptionError, InvalidPatternError

TIME_LIMIT_S = 30


class Callback:
    """Collects its messages; `held` keeps it at its message."""

    def __init__(self) -> None:
        self.reported: queue.Queue[int] = queue.Queue()
        self.entered = threading.Semaphore(0)
        self.held = threading.Event()
        self.held.set()

    def __call__(self, message: Any) -> None:
        self.entered.release()
        assert self.held.wait(TIME_LIMIT_S)
        self.reported.put(message.data)

    def get(self, count: int) -> list[int]:
        return [self.reported.get(timeout=TIME_LIMIT_S) for _ in range(count)]


@pytest.fixture
def callback() -> Callback:
    return Callback()


def test_subscribing_twice_is_once(log: Log, callback: Callback) -> None:
    assert log.live.subscribe("x", "a", callback) is True
    assert log.live.subscribe("x", "a", callback) is False
    assert log.live.subscribe("x", "a", Callback()) is False, "another object of the same name is no other"
    assert log.live.subscribe("x", "b", callback) is True
    assert log.live.subscribe("y", "a", callback) is True


def test_unsubscribing_says_whether_there_was_something(log: Log, callback: Callback) -> None:
    assert log.live.unsubscribe("x", "a") is False
    log.live.subscribe("x", "a", callback)
    assert log.live.unsubscribe("x", "b") is False
    assert log.live.unsubscribe("x", "a") is True
    assert log.live.unsubscribe("x", "a") is False


def test_unsubscribing_all_says_how_many(log: Log, callback: Callback) -> None:
    for pattern in ("a", "b", "c.>"):
        log.live.subscribe("x", pattern, callback)
    log.live.subscribe("y", "a", callback)
    assert log.live.unsubscribe_all("x") == 3
    assert log.live.unsubscribe_all("x") == 0
    log.publish("a", 1)
    assert callback.get(1) == [1], "y is still there"


def test_it_tells_what_comes_not_what_was(log: Log, callback: Callback) -> None:
    log.publish("a", "before")
    log.live.subscribe("x", "a", callback)
    log.publish("b", "of others")
    log.publish("a", "after")
    assert callback.get(1) == ["after"]
    assert log.subscriptions() == []


@pytest.mark.parametrize(("dialect", "pattern", "expected"), [("nats", "a.*", [2]), ("amqp", "a.#", [1, 2, 3])])
def test_both_dialects(log: Log, callback: Callback, dialect: Any, pattern: str, expected: list[int]) -> None:
    log.live.subscribe("x", pattern, callback, dialect=dialect)
    log.publish_many([("a", 1), ("a.b", 2), ("a.b.c", 3), ("end", 0)])
    last = Callback()
    log.live.subscribe("last", "last", last)
    log.publish("last", 0)
    last.get(1)
    assert callback.get(len(expected)) == expected
    assert callback.reported.empty()


def test_one_at_a_time_and_in_order(log: Log, callback: Callback) -> None:
    log.live.subscribe("x", "a", callback)
    for start in range(0, 300, 30):
        log.publish_many([("a", n) for n in range(start, start + 30)])
    assert callback.get(300) == list(range(300))


def test_a_callback_that_raises_goes_on_with_the_next_and_harms_no_other(
    log: Log, callback: Callback, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(message: Any) -> None:
        raise RuntimeError("mine alone")

    log.live.subscribe("broken", "a", broken)
    log.live.subscribe("x", "a", callback)
    log.publish_many([("a", n) for n in range(3)])
    assert callback.get(3) == [0, 1, 2]
    log.live.unsubscribe("x", "a")
    done = Callback()
    log.live.subscribe("broken", "b", done)
    log.publish("b", 0)
    done.get(1)
    eventually(lambda: log.live.counts("broken").failed, 3)
    logged = [record for record in caplog.records if record.exc_info]
    assert len(logged) == 3
    for record in logged:
        assert record.exc_info is not None
        assert [frame.name for frame in traceback.extract_tb(record.exc_info[2])] == ["broken"]


def test_nothing_after_unsubscribing(log: Log, callback: Callback) -> None:
    callback.held.clear()
    log.live.subscribe("x", "a", callback)
    log.publish_many([("a", n) for n in range(5)])
    assert callback.entered.acquire(timeout=TIME_LIMIT_S)
    log.live.unsubscribe("x", "a")
    callback.held.set()
    assert callback.get(1) == [0]
    other = Callback()
    log.live.subscribe("y", "a", other)
    log.publish("a", 9)
    other.get(1)
    assert callback.reported.empty()


def test_nothing_after_close(log: Log, callback: Callback) -> None:
    callback.held.clear()
    log.live.subscribe("x", "a", callback)
    log.publish_many([("a", n) for n in range(5)])
    assert callback.entered.acquire(timeout=TIME_LIMIT_S)
    closing = threading.Thread(target=log.close)
    closing.start()
    while log.live.counts("x").delivered == 0 and log.live._listeners:
        pass
    callback.held.set()
    closing.join(TIME_LIMIT_S)
    assert not closing.is_alive()
    assert callback.get(1) == [0]
    assert callback.reported.empty()


@pytest.mark.parametrize(
    ("pattern", "options", "error"),
    [
        ("a..b", {}, InvalidPatternError),
        ("a", {"callback": 5}, InvalidOptionError),
        ("a", {"queue_max": 0}, InvalidOptionError),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(log: Log, pattern: str, options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        log.live.subscribe("x", pattern, **{"callback": print, **options})
