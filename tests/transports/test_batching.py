import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater import ManualClock, Message
from headwater.errors import (
    ClosedError,
    InvalidDataError,
    InvalidOptionError,
    TooLargeError,
    TransportFailedError,
    UnsentError,
)
from headwater.ports.transport import buffers
from headwater.transports.batching import BatchingTransport
from headwater.transports.breaker import BreakerTransport
from headwater.transports.file import read_lines
from headwater.transports.multi import MultiTransport

MAKE = Callable[..., Message]
BATCHES = Callable[..., BatchingTransport]
WAIT_S = 20
HOUR_MS = 3_600_000


@pytest.fixture
def batches(target: Any, clock: ManualClock) -> Iterator[BATCHES]:
    made: list[BatchingTransport] = []

    def make_one(**options: Any) -> BatchingTransport:
        # An hour by default: only the test's own clock can bring that about.
        made.append(BatchingTransport(target, clock=clock, **{"wait": HOUR_MS // 1000, **options}))
        return made[-1]

    yield make_one
    target.gate.set()
    for transport in made:
        try:
            transport.close()
        except UnsentError:
            continue


def calls(target: Any) -> list[list[Any]]:
    return [[message.data for message in call] for call in target.calls]


def test_a_full_batch_goes_out_at_once(target: Any, batches: BATCHES, make: MAKE) -> None:
    transport = batches(size=3)
    for number in range(7):
        transport.publish(make(number))
    for _ in range(2):
        assert target.took.acquire(timeout=WAIT_S)
    assert calls(target) == [[0, 1, 2], [3, 4, 5]]
    transport.flush()
    assert calls(target)[2:] == [[6]]
    assert transport.pending == 0


class WatchedClock(ManualClock):
    """Says when the thread that sends has looked at the time, and so is about to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = threading.Semaphore(0)

    def now_ms(self) -> int:
        now_ms = super().now_ms()
        if threading.current_thread().name.startswith("batches"):
            self.looked.release()
        return now_ms


def test_the_first_waits_no_longer_than_it_may(target: Any, make: MAKE) -> None:
    clock = WatchedClock()
    transport = BatchingTransport(target, clock=clock, wait=HOUR_MS // 1000)
    transport.publish(make(1))
    assert clock.looked.acquire(timeout=WAIT_S)
    clock.advance((HOUR_MS - 1) / 1000)
    assert clock.looked.acquire(timeout=WAIT_S)
    transport.publish(make(2))
    assert clock.looked.acquire(timeout=WAIT_S)
    assert target.asked == 0
    clock.advance(0.001)
    assert target.took.acquire(timeout=WAIT_S)
    assert calls(target) == [[1, 2]]
    transport.close()


def test_real_time_passes_too(target: Any, make: MAKE) -> None:
    from headwater.ports.clock import SystemClock

    transport = BatchingTransport(target, clock=SystemClock(), wait=0.01)
    transport.publish(make(1))
    assert target.took.acquire(timeout=WAIT_S)
    transport.close()


def test_a_clock_that_was_set_back_delays_nothing(
    target: Any, batches: BATCHES, make: MAKE, clock: ManualClock
) -> None:
    batches().publish(make(1))
    clock.advance(-0.001)
    assert target.took.acquire(timeout=WAIT_S)


def test_what_failed_stays_is_reported_and_goes_out_later_in_order(
    target: Any, batches: BATCHES, make: MAKE, clock: ManualClock
) -> None:
    reported: queue.Queue[tuple[list[Any], Exception]] = queue.Queue()
    transport = batches(size=2, on_unsent=lambda messages, error: reported.put(([m.data for m in messages], error)))
    failure = target.fail()
    transport.publish_many([make(0), make(1), make(2)])
    assert reported.get(timeout=WAIT_S) == ([0, 1], failure)
    assert transport.pending == 3
    transport.publish(make(3))
    target.failure = None
    clock.advance(HOUR_MS / 1000)
    for _ in range(2):
        assert target.took.acquire(timeout=WAIT_S)
    assert calls(target) == [[0, 1], [2, 3]]
    assert target.asked == 3


def test_after_a_failure_it_waits_before_it_asks_again(
    target: Any, batches: BATCHES, make: MAKE, clock: ManualClock
) -> None:
    reported: queue.Queue[int] = queue.Queue()
    transport = batches(size=1, on_unsent=lambda messages, error: reported.put(len(messages)))
    target.fail()
    transport.publish(make(0))
    reported.get(timeout=WAIT_S)
    for number in range(1, 6):
        transport.publish(make(number))
    clock.advance(HOUR_MS / 1000)
    reported.get(timeout=WAIT_S)
    assert target.asked == 2


def test_flushing_says_what_the_target_says(target: Any, batches: BATCHES, make: MAKE) -> None:
    transport = batches()
    failure = target.fail()
    transport.publish(make(1))
    with pytest.raises(TransportFailedError) as failed:
        transport.flush()
    assert failed.value is failure
    assert transport.pending == 1
    target.failure = None
    transport.flush()
    transport.flush()
    assert calls(target) == [[1]]


def test_waiting_for_one_sends_all_before_it_and_may_fail(target: Any, batches: BATCHES, make: MAKE) -> None:
    transport = batches()
    transport.publish(make(1))
    transport.publish_and_wait(make(2))
    assert calls(target) == [[1, 2]]
    target.fail()
    with pytest.raises(TransportFailedError):
        transport.publish_and_wait(make(3))
    assert transport.pending == 1


def test_several_waiting_callers_share_batches(target: Any, batches: BATCHES, make: MAKE) -> None:
    transport = batches()
    target.gate.clear()
    first = threading.Thread(target=transport.publish_and_wait, args=[make(0)])
    first.start()
    assert target.tried.acquire(timeout=WAIT_S)
    others = [threading.Thread(target=transport.publish_and_wait, args=[make(number)]) for number in range(1, 5)]
    for thread in others:
        thread.start()
    while transport.pending < 5:
        assert any(thread.is_alive() for thread in others)
    target.gate.set()
    for thread in (first, *others):
        thread.join(WAIT_S)
    assert [len(call) for call in target.calls] == [1, 4]


def test_a_full_buffer_refuses_whole_batches_and_says_why(target: Any, batches: BATCHES, make: MAKE) -> None:
    transport = batches(size=4, max_buffered=4)
    target.fail("no route")
    transport.publish_many([make(0), make(1)])
    with pytest.raises(TransportFailedError):
        transport.flush()
    with pytest.raises(TransportFailedError, match="holds 2 of 4 messages: no route"):
        transport.publish_many([make(2), make(3), make(4)])
    with pytest.raises(TooLargeError, match="the buffer takes 4"):
        transport.publish_many([make(number) for number in range(5)])
    target.failure = None
    transport.publish_many([make(5), make(6)])
    transport.flush()
    assert target.data == [0, 1, 5, 6]


def test_what_the_target_refuses_for_good_does_not_keep_the_rest_back(
    target: Any, batches: BATCHES, make: MAKE
) -> None:
    reported: list[tuple[Any, Exception]] = []
    transport = batches(on_unsent=lambda messages, error: reported.append(([m.data for m in messages], error)))
    refusal = InvalidDataError("odd")
    target.refused = {"bad": refusal}
    bad = make("bad")
    transport.publish_many([make(0), make(1), bad, make(2)])
    with pytest.raises(UnsentError, match=r"1 message\(s\) did not get out: odd") as left:
        transport.flush()
    assert left.value.messages == [bad]
    assert left.value.__cause__ is refusal
    assert reported == [(["bad"], refusal)]
    assert calls(target) == [[0], [1], [2]]
    transport.flush()  # reported once
    with pytest.raises(InvalidDataError):
        transport.publish_and_wait(make("bad"))
    transport.publish_many([make(3), make(4)])
    transport.close()
    assert calls(target)[3:] == [[3, 4]]


def test_closing_sends_the_rest(target: Any, batches: BATCHES, make: MAKE) -> None:
    transport = batches(size=2)
    target.gate.clear()
    transport.publish_many([make(number) for number in range(5)])
    target.gate.set()
    transport.close()
    assert target.data == [0, 1, 2, 3, 4]
    assert target.closes == 1
    with pytest.raises(ClosedError):
        transport.publish(make(5))


def test_closing_hands_over_what_cannot_be_sent(
    target: Any, batches: BATCHES, make: MAKE, unsent: Callable[[list[Message]], UnsentError]
) -> None:
    transport = batches()
    given = [make(0), make(1), make(2)]
    failure = target.fail()
    target.close_failure = unsent(given[2:])
    transport.publish_many(given[:2])
    with pytest.raises(UnsentError, match=r"target: 3 message\(s\) did not get out: away") as left:
        transport.close()
    assert left.value.messages == given
    assert left.value.__cause__ is failure
    assert target.closes == 1
    transport.close()


def test_an_error_of_the_inner_close_is_not_swallowed(target: Any, batches: BATCHES, make: MAKE) -> None:
    target.close_failure = RuntimeError("stuck")
    with pytest.raises(RuntimeError, match="stuck"):
        batches().close()


def test_on_unsent_may_fail_or_close(target: Any, batches: BATCHES, make: MAKE, clock: ManualClock) -> None:
    done: queue.Queue[list[object]] = queue.Queue()

    def give_up(messages: object, error: Exception) -> None:
        try:
            transport.close()
        except UnsentError as left:
            done.put(left.messages)
        raise RuntimeError("odd")

    transport = batches(size=1, on_unsent=give_up)
    target.fail()
    message = make(1)
    transport.publish(message)
    assert done.get(timeout=WAIT_S) == [message]


@pytest.mark.parametrize(
    "options", [{"size": 0}, {"wait": 0}, {"wait": 90_000}, {"max_buffered": 99}, {"size": 200_000}]
)
def test_impossible_options_are_refused(target: Any, clock: ManualClock, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        BatchingTransport(target, clock=clock, **options)


def test_failures_are_logged(target: Any, batches: BATCHES, make: MAKE, caplog: pytest.LogCaptureFixture) -> None:
    transport = batches()
    target.fail()
    transport.publish(make(1))
    with caplog.at_level(logging.WARNING, "headwater"), pytest.raises(TransportFailedError):
        transport.flush()
    assert "1 message(s) not sent, kept for the next try" in caplog.text


FORGETFUL = """
import sys
from headwater.ports.clock import SystemClock
from headwater.transports.batching import BatchingTransport
from headwater.transports.file import FileTransport
from headwater.transports.base import make_message
from headwater.transports.multi import MultiTransport
file = FileTransport(sys.argv[1], clock=SystemClock())
transport = BatchingTransport(MultiTransport([file]), clock=SystemClock())
transport.publish_many([make_message("a", number, 0, id=f"id-{number}") for number in range(3)])
if sys.argv[2:]:
    file.publish_many = lambda messages: 1 / 0
"""


def forget_to_close(*arguments: object) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", FORGETFUL, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0
    return ended.stderr


def test_a_script_that_forgets_to_close_sends_its_buffer_at_the_end(tmp_path: Path) -> None:
    assert forget_to_close(tmp_path / "out.jsonl") == ""
    assert [message.data for message in read_lines(tmp_path / "out.jsonl")] == [0, 1, 2]


def test_if_it_cannot_it_says_loudly_what_is_lost(tmp_path: Path) -> None:
    output = forget_to_close(tmp_path / "out.jsonl", "fail")
    assert "lost at exit" in output
    assert "3 message(s) did not get out" in output
    assert "['id-0', 'id-1', 'id-2']" in output


def test_a_close_that_was_interrupted_keeps_the_buffer_and_can_be_repeated(
    target: Any, batches: BATCHES, make: MAKE
) -> None:
    transport = batches()
    transport.publish_many([make(1), make(2)])
    target.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        transport.close()
    assert target.closes == 0
    target.fail()
    with pytest.raises(UnsentError) as unsent:
        transport.close()
    assert [message.data for message in unsent.value.messages] == [1, 2]
    transport.close()
    assert target.closes == 1


def test_those_around_it_say_that_it_buffers(target: Any, batches: BATCHES, clock: ManualClock) -> None:
    transport = batches()
    guarded = BreakerTransport(transport, clock=clock)
    assert buffers(transport)
    assert buffers(guarded)
    assert not buffers(target)
    multi = MultiTransport([target, guarded])
    assert buffers(multi)
    multi.close()
