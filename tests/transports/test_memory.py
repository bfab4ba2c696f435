import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from headwater import Message
from headwater.errors import ClosedError, InvalidOptionError, InvalidPatternError, TransportFailedError
from headwater.transports import memory
from headwater.transports.memory import MemoryTransport

MAKE = Callable[..., Message]
WAIT_S = 20


def data_of(transport: MemoryTransport) -> list[Any]:
    return [message.data for message in transport.messages]


def test_a_full_one_drops_its_oldest_and_counts_them(make: MAKE) -> None:
    transport = MemoryTransport(max_messages=3)
    transport.publish_many([make(number) for number in range(5)])
    assert data_of(transport) == [2, 3, 4]
    assert transport.dropped == 2


def test_a_full_one_refuses_whole_batches_on_request(make: MAKE) -> None:
    transport = MemoryTransport(max_messages=3, overflow="refuse")
    transport.publish_many([make(0), make(1)])
    with pytest.raises(TransportFailedError, match="may hold 3"):
        transport.publish_many([make(2), make(3)])
    transport.publish(make(4))
    assert data_of(transport) == [0, 1, 4]
    transport.clear()
    transport.publish(make(5))
    assert data_of(transport) == [5]


def test_an_id_it_no_longer_holds_is_new_again(make: MAKE) -> None:
    transport = MemoryTransport(max_messages=1)
    first = make(0)
    for message in (first, first, make(1), first):
        transport.publish(message)
    assert transport.dropped == 2
    assert data_of(transport) == [0]


@pytest.mark.parametrize("options", [{"max_messages": 0}, {"max_messages": True}, {"overflow": "block"}])
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        MemoryTransport(**options)


def test_a_follower_gets_what_matches_from_now_on_in_order(make: MAKE) -> None:
    transport = MemoryTransport()
    transport.publish(make("before"))
    got: queue.Queue[Any] = queue.Queue()
    transport.subscribe("orders.>", lambda message: got.put(message.data))
    transport.publish(make("other", "payments.new"))
    transport.publish_many([make(number) for number in range(100)])
    assert [got.get(timeout=WAIT_S) for _ in range(100)] == list(range(100))
    transport.close()


def test_a_follower_gets_what_is_given_twice_once(make: MAKE) -> None:
    transport = MemoryTransport()
    got: queue.Queue[Any] = queue.Queue()
    transport.subscribe(">", lambda message: got.put(message.data))
    first = make(1)
    for message in (first, first, make(2)):
        transport.publish(message)
    assert [got.get(timeout=WAIT_S) for _ in range(2)] == [1, 2]
    transport.close()


def test_a_failing_handler_is_logged_and_stops_no_other(make: MAKE, caplog: pytest.LogCaptureFixture) -> None:
    transport = MemoryTransport()
    got: queue.Queue[Any] = queue.Queue()
    failed: queue.Queue[Any] = queue.Queue()

    def fail(message: Message) -> None:
        failed.put(message.data)
        raise RuntimeError("no")

    transport.subscribe(">", fail)
    transport.subscribe(">", lambda message: got.put(message.data))
    with caplog.at_level(logging.ERROR, "headwater"):
        transport.publish_many([make(1), make(2)])
        assert [got.get(timeout=WAIT_S) for _ in range(2)] == [1, 2]
        assert [failed.get(timeout=WAIT_S) for _ in range(2)] == [1, 2]
        transport.close()
    assert caplog.text.count("the handler failed") == 2


def test_a_slow_consumer_misses_what_its_queue_cannot_hold_and_delays_no_other(
    make: MAKE, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "CONSUMER_QUEUE_MAX", 2)
    transport = MemoryTransport()
    began, go_on = threading.Event(), threading.Event()
    got: queue.Queue[Any] = queue.Queue()

    def slow(message: Message) -> None:
        began.set()
        assert go_on.wait(WAIT_S)
        got.put(message.data)

    following = transport.subscribe(">", slow)
    transport.publish(make(0))
    assert began.wait(WAIT_S)
    transport.publish_many([make(number) for number in range(1, 6)])
    assert following.missed == 3
    assert "misses messages" in caplog.text
    go_on.set()
    assert [got.get(timeout=WAIT_S) for _ in range(3)] == [0, 1, 2]
    transport.close()


def test_stop_waits_for_the_handler_and_then_nothing_comes(make: MAKE) -> None:
    transport = MemoryTransport()
    began, go_on, stopped = threading.Event(), threading.Event(), threading.Event()
    got: list[Any] = []

    def slow(message: Message) -> None:
        began.set()
        assert go_on.wait(WAIT_S)
        got.append(message.data)

    following = transport.subscribe(">", slow)
    transport.publish_many([make(0), make(1)])
    assert began.wait(WAIT_S)
    stopper = threading.Thread(target=lambda: (following.stop(), stopped.set()))
    stopper.start()
    assert not stopped.is_set()
    go_on.set()
    assert stopped.wait(WAIT_S)
    stopper.join()
    transport.publish(make(2))
    following.stop()
    assert got == [0]


def test_a_handler_may_stop_its_own_following(make: MAKE) -> None:
    transport = MemoryTransport()
    done = threading.Event()
    box: list[Any] = []

    def once(message: Message) -> None:
        box[0].stop()
        done.set()

    box.append(transport.subscribe(">", once))
    transport.publish(make(0))
    assert done.wait(WAIT_S)


def test_those_of_a_group_share_and_pass_on_what_fails(make: MAKE) -> None:
    transport = MemoryTransport()
    got: queue.Queue[Any] = queue.Queue()
    tries: queue.Queue[Any] = queue.Queue()
    failures = iter([RuntimeError("no")])

    def handle(message: Message) -> None:
        tries.put(message.data)
        for failure in failures:
            raise failure
        got.put(message.data)

    for _ in range(3):
        transport.subscribe(">", handle, group="workers")
    transport.publish_many([make(number) for number in range(20)])
    assert sorted(got.get(timeout=WAIT_S) for _ in range(20)) == list(range(20))
    assert tries.qsize() == 21
    transport.close()


def test_what_a_group_never_manages_is_given_up(make: MAKE) -> None:
    transport = MemoryTransport()
    tries: queue.Queue[Any] = queue.Queue()

    def handle(message: Message) -> None:
        tries.put(message.data)
        if message.data == "bad":
            raise RuntimeError("no")

    transport.subscribe(">", handle, group="workers")
    transport.publish(make("bad"))
    assert [tries.get(timeout=WAIT_S) for _ in range(memory.GROUP_ATTEMPTS_MAX)] == ["bad"] * memory.GROUP_ATTEMPTS_MAX
    transport.publish(make("good"))
    assert tries.get(timeout=WAIT_S) == "good"
    transport.close()


def test_subscribing_checks_the_pattern_and_whether_it_is_closed() -> None:
    transport = MemoryTransport()
    with pytest.raises(InvalidPatternError):
        transport.subscribe("a..b", print)
    transport.close()
    with pytest.raises(ClosedError):
        transport.subscribe(">", print)
