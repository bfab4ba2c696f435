import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

import headwater
from headwater import Message
from headwater.errors import (
    AllTransportsFailedError,
    ClosedError,
    InvalidOptionError,
    PublishOnlyError,
    TransportFailedError,
    UnsentError,
)
from headwater.transports import multi as multi_module
from headwater.transports.file import StdoutTransport
from headwater.transports.memory import MemoryTransport
from headwater.transports.multi import MultiTransport

MAKE = Callable[..., Message]
TARGETS = Callable[..., list[Any]]
WAIT_S = 20


@pytest.mark.parametrize("given", [["memory:"], [None], {"a": 1}, [MemoryTransport]], ids=repr)
def test_what_is_no_transport_is_refused_by_name(given: Any) -> None:
    with pytest.raises(InvalidOptionError, match="expected a transport, got ") as refused:
        MultiTransport(given)
    assert "open_transport" in str(refused.value)


def test_a_log_is_no_transport() -> None:
    with headwater.open("memory:", maintenance_interval=None) as log:
        for other in (log, "memory:"):
            with pytest.raises(InvalidOptionError, match="expected a transport"):
                headwater.Forwarder(log, other, id="copy")  # type: ignore[arg-type]


def test_any_iterable_of_transports_will_do(targets: TARGETS, make: MAKE) -> None:
    two = targets("a", "b")
    multi = MultiTransport(iter(two))
    multi.publish(make(1))
    assert [each.data for each in two] == [[1], [1]]
    multi.close()


def test_if_the_middle_one_fails_the_others_get_it(
    targets: TARGETS, make: MAKE, caplog: pytest.LogCaptureFixture
) -> None:
    first, middle, last = targets("a", "b", "c")
    failure = middle.fail("away")
    multi = MultiTransport([first, middle, last])
    with caplog.at_level(logging.WARNING, "headwater"):
        multi.publish(make(1))
    assert [first.data, middle.data, last.data] == [[1], [], [1]]
    assert multi.last_errors == {"b": failure}
    assert "b did not take 1 message(s)" in caplog.text
    assert multi.connected
    middle.failure = None
    multi.publish(make(2))
    assert multi.last_errors == {}
    assert middle.data == [2]
    multi.close()


def test_if_all_fail_one_error_names_each(targets: TARGETS, make: MAKE) -> None:
    first, second = targets("a", "b")
    causes = {"a": first.fail("away"), "b": RuntimeError("odd")}
    second.failure = causes["b"]
    multi = MultiTransport([first, second])
    with pytest.raises(AllTransportsFailedError) as failed:
        multi.publish(make(1))
    assert str(failed.value) == "All transports failed: a: away; b: odd"
    assert failed.value.causes == causes
    assert not multi.connected
    multi.close()


def test_a_slow_one_does_not_hold_up_the_others(targets: TARGETS, make: MAKE) -> None:
    slow, quick = targets("slow", "quick")
    slow.gate.clear()
    multi = MultiTransport([slow, quick])
    publishing = threading.Thread(target=multi.publish, args=[make(1)])
    publishing.start()
    assert quick.tried.acquire(timeout=WAIT_S)
    assert slow.data == []
    slow.gate.set()
    publishing.join(WAIT_S)
    assert [slow.data, quick.data] == [[1], [1]]
    multi.close()


def test_what_several_threads_publish_comes_to_all_in_the_same_order(
    targets: TARGETS, make: MAKE, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = multi_module._Worker.call

    def call_after_the_others(lane: Any, *arguments: Any) -> Any:
        os.sched_yield()  # so that threads get in each other's way
        return call(lane, *arguments)

    monkeypatch.setattr(multi_module._Worker, "call", call_after_the_others)
    three = targets("a", "b", "c")
    multi = MultiTransport(three)

    def publish(begin: int) -> None:
        for number in range(begin, begin + 100):
            multi.publish(make(number))

    threads = [threading.Thread(target=publish, args=[begin]) for begin in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(three[0].data) == 300
    assert three[0].data == three[1].data == three[2].data
    multi.close()


def test_two_of_the_same_name_get_different_names(targets: TARGETS, make: MAKE) -> None:
    first, second = targets("a", "a")
    first.fail("one")
    second.fail("two")
    multi = MultiTransport([first, second])
    with pytest.raises(AllTransportsFailedError, match=r"a: one; a \(2\): a: two"):
        multi.publish(make(1))
    multi.close()


def test_it_recognises_ids_if_all_of_them_do(targets: TARGETS) -> None:
    first, second = targets("a", "b")
    assert MultiTransport([first, second]).recognises_ids
    second.recognises_ids = False
    assert not MultiTransport([first, second]).recognises_ids


@pytest.mark.parametrize("count", [0, 2, 65])
def test_none_too_many_or_the_same_twice_are_refused(targets: TARGETS, count: int) -> None:
    given = targets(*["a"] * count) if count != 2 else targets("a") * 2
    with pytest.raises(InvalidOptionError):
        MultiTransport(given)


def test_following_goes_to_the_first_that_can(make: MAKE) -> None:
    memory = MemoryTransport()
    multi = MultiTransport([StdoutTransport(), memory])
    got = threading.Event()
    following = multi.subscribe(">", lambda _: got.set())
    memory.publish(make(1))
    assert got.wait(WAIT_S)
    following.stop()
    multi.close()


def test_following_is_refused_if_none_can(targets: TARGETS) -> None:
    multi = MultiTransport([StdoutTransport(), *targets("a")])
    with pytest.raises(PublishOnlyError, match="multi: each of its transports is publish-only"):
        multi.subscribe(">", print)
    multi.close()


def test_closing_closes_all_and_hands_over_what_was_not_sent(
    targets: TARGETS, make: MAKE, unsent: Callable[[list[Message]], UnsentError]
) -> None:
    first, second, third = targets("a", "b", "c")
    one, two = make(1), make(2)
    first.close_failure = unsent([one])
    second.close_failure = unsent([one, two])
    multi = MultiTransport([first, second, third])
    with pytest.raises(UnsentError) as left:
        multi.close()
    assert left.value.messages == [one, two]
    assert [each.closes for each in (first, second, third)] == [1, 1, 1]
    multi.close()
    with pytest.raises(ClosedError):
        multi.publish(one)


def test_messages_of_one_id_and_two_topics_are_both_handed_over(
    targets: TARGETS, make: MAKE, unsent: Callable[[list[Message]], UnsentError]
) -> None:
    first, second = targets("a", "b")
    same = [make(1, "a.x", id="order-17"), make(2, "orders.new", id="order-17")]
    first.close_failure, second.close_failure = unsent(same[:1]), unsent(same)
    with pytest.raises(UnsentError) as left:
        MultiTransport([first, second]).close()
    assert left.value.messages == same


def test_one_that_does_not_close_is_named(targets: TARGETS) -> None:
    first, second = targets("a", "b")
    first.close_failure = RuntimeError("stuck")
    multi = MultiTransport([first, second])
    with pytest.raises(TransportFailedError, match="a: stuck"):
        multi.close()
    assert second.closes == 1
