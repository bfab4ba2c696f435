"""Another connection holds the write lock: for less than the busy timeout, and for more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import apsw
import pytest
from fault_desk import Desk

from headwater.errors import LockedError

BUSY_S = 0.3
PATIENCE_S = 30.0


@contextmanager
def write_lock(desk: Desk) -> Iterator[None]:
    connection = apsw.Connection(str(desk.path))
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()


def test_a_short_lock_is_waited_for(desk: Desk) -> None:
    log = desk.open()
    seqs: list[int] = []
    thread = threading.Thread(target=lambda: seqs.append(log.publish("a", 1)))
    with write_lock(desk):
        thread.start()
        thread.join(0.2)
        assert thread.is_alive(), "published in spite of the lock"
    thread.join(PATIENCE_S)
    assert seqs == [1]


def test_a_long_lock_is_reported_and_nothing_changes(desk: Desk) -> None:
    log = desk.open(busy_timeout_ms=round(BUSY_S * 1000))
    log.publish_many([("a", 1), ("a", 2), ("a", 3)])
    subscription = log.subscribe("s", ">")
    (message,) = subscription.fetch(1)
    with write_lock(desk):
        with pytest.raises(LockedError) as caught:
            log.publish("a", 4)
        assert "busy_timeout" in caught.value.next
        with pytest.raises(LockedError):
            message.ack()
        with pytest.raises(LockedError):
            subscription.fetch(1)
        with pytest.raises(LockedError):
            log.subscribe("other", ">")
        assert log.last_seq() == 3, "reading needs no lock"
    message.ack()
    assert [message.seq for message in subscription.fetch(5)] == [2, 3]
    assert log.publish("a", 4) == 4


def test_many_waiters_wait_for_a_long_lock_together(desk: Desk) -> None:
    """Each waits one busy timeout, not one after the other."""
    log = desk.open(busy_timeout_ms=round(BUSY_S * 1000))
    count = 100
    reported: list[BaseException] = []

    def publish(number: int) -> None:
        try:
            log.publish("a", number)
        except LockedError as exc:
            reported.append(exc)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(count)]
    with write_lock(desk):
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        took_s = time.monotonic() - began
    assert len(reported) == count
    assert took_s < BUSY_S * count / 3, f"{count} publishers waited {took_s:.1f} s for a busy timeout of {BUSY_S} s"


def test_a_storm_of_short_locks_lets_every_write_through(desk: Desk) -> None:
    log = desk.open()
    over = threading.Event()

    def storm() -> None:
        connection = apsw.Connection(str(desk.path))
        connection.set_busy_timeout(10_000)
        while not over.is_set():
            connection.execute("BEGIN IMMEDIATE")
            over.wait(0.005)
            connection.execute("ROLLBACK")
            over.wait(0.002)  # or it would take the lock again before another connection can see that it is free
        connection.close()

    threads = [threading.Thread(target=storm) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        seqs = [log.publish("a", number) for number in range(20)]
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert seqs == [*range(1, 21)]


def test_opening_waits_for_a_lock_or_says_so(desk: Desk) -> None:
    desk.open().publish("a", 1)
    with write_lock(desk):
        assert desk.elsewhere(busy_timeout=BUSY_S).last_seq() == 1, "an existing log opens without the lock"
    fresh = Desk(desk.path.parent.joinpath("fresh").absolute())
    fresh.path.parent.mkdir()
    blocker = apsw.Connection(str(fresh.path))
    blocker.execute("BEGIN EXCLUSIVE")
    with pytest.raises(LockedError) as caught:
        fresh.open(busy_timeout_ms=100)
    assert caught.value.next
    blocker.execute("ROLLBACK")
    blocker.close()
    assert fresh.open().publish("a", 1) == 1
    fresh.close()
