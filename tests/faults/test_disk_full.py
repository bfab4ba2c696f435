"""The disk is full for a while: every verb says so, nothing acknowledged is lost, all goes on when there is room."""

from __future__ import annotations

import contextlib
import threading

import apsw
import pytest
from fault_desk import Desk

import headwater
from headwater.errors import DiskFullError
from headwater.ports.clock import Clock, SystemClock

MODES = pytest.mark.parametrize("mode", ["exclusive", "shared"])
PATIENCE_S = 30.0


def left_for_the_next(desk: Desk, mode: str, id: str = "s") -> list[int]:
    """What another process gets, after this one died without a word."""
    log = desk.elsewhere()
    subscription = log.subscribe(id, ">", mode=mode)
    seqs = []
    while messages := subscription.fetch(100):
        seqs += [message.seq for message in messages]
        subscription.ack_many(messages)  # suspects come one at a time
    return sorted(seqs)


@pytest.mark.parametrize("clock", [None, SystemClock()], ids=["by the writer", "at once"])
def test_publish_says_so_and_works_again(desk: Desk, clock: Clock | None) -> None:
    log = desk.open(clock=clock)
    assert log.publish("a", 1) == 1
    desk.vfs.full = True
    for publish in (lambda: log.publish("a", 2), lambda: log.publish_many([("a", 3), ("a", 4)])):
        with pytest.raises(DiskFullError) as caught:
            publish()
        assert "space" in caught.value.next
        assert str(desk.path) in str(caught.value)
    desk.vfs.full = False
    assert log.publish("a", 5) == 2
    subscription = desk.elsewhere().subscribe("s", ">")
    assert [message.data for message in subscription.fetch(10)] == [1, 5]


def test_every_work_of_a_group_gets_the_answer(desk: Desk) -> None:
    log = desk.open()
    desk.vfs.full = True
    answers: list[BaseException] = []

    def publish(number: int) -> None:
        try:
            log.publish("a", number)
        except BaseException as exc:
            answers.append(exc)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [type(answer) for answer in answers] == [DiskFullError] * 12
    desk.vfs.full = False
    assert log.publish("a", 1) == 1


def test_an_id_that_failed_is_not_remembered(desk: Desk) -> None:
    log = desk.open()
    desk.vfs.full = True
    with pytest.raises(DiskFullError):
        log.publish("a", 1, id="x")
    desk.vfs.full = False
    assert log.publish("a", 2) == 1
    assert log.publish("a", 3, id="x") == 2
    assert log.publish("a", 3, id="x") == 2


@MODES
def test_a_fetch_that_failed_skips_nothing(desk: Desk, mode: str) -> None:
    log = desk.open()
    log.publish_many([("a", number) for number in range(10)])
    subscription = log.subscribe("s", ">", mode=mode)
    assert [message.seq for message in subscription.fetch(3)] == [1, 2, 3]
    desk.vfs.full = True
    for _ in range(2):
        with pytest.raises(DiskFullError):
            subscription.fetch(4)
    desk.vfs.full = False
    assert [message.seq for message in subscription.fetch(4)] == [4, 5, 6, 7]
    assert [message.seq for message in subscription.fetch(4)] == [8, 9, 10]


@MODES
def test_an_ack_that_failed_can_be_repeated(desk: Desk, mode: str) -> None:
    log = desk.open()
    log.publish_many([("a", number) for number in range(4)])
    subscription = log.subscribe("s", ">", mode=mode)
    messages = subscription.fetch(10)
    desk.vfs.full = True
    with pytest.raises(DiskFullError):
        messages[0].ack()
    with pytest.raises(DiskFullError):
        subscription.ack_many(messages[1:3])
    assert not any(message.settled for message in messages)
    desk.vfs.full = False
    messages[0].ack()
    subscription.ack_many(messages[1:3])
    assert log.subscription("s").lag == 1
    desk.forget(log)
    assert left_for_the_next(desk, mode) == [4]


@MODES
def test_an_ack_that_failed_and_was_not_repeated_is_no_ack(desk: Desk, mode: str) -> None:
    """Memory must agree with the database: the next thing written down may not count the failed ack in."""
    log = desk.open()
    log.publish_many([("a", number) for number in range(4)])
    subscription = log.subscribe("s", ">", mode=mode)
    messages = subscription.fetch(10)
    desk.vfs.full = True
    for message in messages[:2]:
        with pytest.raises(DiskFullError):
            message.ack()
    desk.vfs.full = False
    messages[3].ack()
    log.publish("a", 4)
    assert [message.seq for message in subscription.fetch(10)] == [5]
    assert log.subscription("s").lag == 4
    desk.forget(log)
    assert left_for_the_next(desk, mode) == [1, 2, 3, 5]


@MODES
def test_a_nack_and_a_reject_that_failed_can_be_repeated(desk: Desk, mode: str) -> None:
    log = desk.open()
    log.publish_many([("a", number) for number in range(3)])
    subscription = log.subscribe("s", ">", mode=mode)
    first, second, third = subscription.fetch(10)
    desk.vfs.full = True
    with pytest.raises(DiskFullError):
        first.nack(0)
    with pytest.raises(DiskFullError):
        second.reject("no use")
    desk.vfs.full = False
    third.ack()
    first.nack(0)
    second.reject("no use")
    assert [(message.seq, message.attempt) for message in subscription.fetch(10)] == [(1, 2)]
    assert [letter.message.seq for letter in log.dead_letters.list()] == [2]
    desk.forget(log)
    assert left_for_the_next(desk, mode) == [1]


@MODES
def test_a_delivery_given_up_during_the_fault_comes_again(desk: Desk, mode: str) -> None:
    log = desk.open()
    log.publish_many([("a", number) for number in range(2)])
    subscription = log.subscribe("s", ">", mode=mode, ack_wait=5, lease=1_000)
    assert len(subscription.fetch(10)) == 2
    desk.clock.advance(6)
    desk.vfs.full = True
    with pytest.raises(DiskFullError):
        subscription.fetch(10)
    desk.vfs.full = False
    for seq in (1, 2):  # one at a time
        (message,) = subscription.fetch(10)
        assert (message.seq, message.attempt) == (seq, 2)
        message.ack()


def test_a_transaction_that_cannot_commit_leaves_neither_work_nor_ack(desk: Desk) -> None:
    log = desk.open()
    log.publish("a", 1)
    subscription = log.subscribe("s", ">")
    (message,) = subscription.fetch(1)
    with message.transaction() as transaction:
        transaction.execute("CREATE TABLE done (seq INTEGER)")
        transaction.execute("INSERT INTO done VALUES (0)")
    log.publish("a", 2)
    (message,) = subscription.fetch(1)
    desk.vfs.full = True
    with pytest.raises(DiskFullError), message.transaction() as transaction:
        transaction.execute("INSERT INTO done VALUES (?)", (message.seq,))
    assert not message.settled
    desk.vfs.full = False
    with message.transaction() as transaction:
        assert transaction.execute("SELECT seq FROM done") == [(0,)]
        transaction.execute("INSERT INTO done VALUES (?)", (message.seq,))
    assert message.settled
    desk.forget(log)
    assert left_for_the_next(desk, "exclusive") == []


def test_subscribing_and_maintenance_say_so(desk: Desk) -> None:
    log = desk.open()
    log.publish("a", 1)
    desk.vfs.full = True
    with pytest.raises(DiskFullError):
        log.subscribe("s", ">")
    with pytest.raises(DiskFullError):
        log.run_maintenance()
    desk.vfs.full = False
    assert [message.seq for message in log.subscribe("s", ">").fetch(10)] == [1]
    assert not log.run_maintenance().skipped


def test_closing_on_a_full_disk_ends_and_loses_nothing(desk: Desk) -> None:
    log = desk.open()
    log.publish("a", 1)
    subscription = log.subscribe("s", ">")
    subscription.fetch(1)
    desk.vfs.full = True
    with contextlib.suppress(apsw.FullError):  # SQLite itself ignores it here; APSW tells what a Python VFS raised
        log.close()
    desk.vfs.full = False
    desk.clock.advance(3_600)
    assert left_for_the_next(desk, "exclusive") == [1]


@MODES
def test_handlers_go_on_when_there_is_room_again(desk: Desk, mode: str) -> None:
    """A handler's ack fails, and later fetches fail: when the disk is free again, the handler must get the rest."""
    log = desk.open()
    seen: list[int] = []
    first_seen, room_again, rest_seen = threading.Event(), threading.Event(), threading.Event()

    @log.on(">", id="s", mode=mode, ack_wait=1, lease=1_000)
    def handle(message: headwater.ReceivedMessage) -> None:
        seen.append(message.data)
        if message.data == 0 and len(seen) == 1:
            desk.vfs.full = True
            first_seen.set()
            return
        if set(seen) >= {0, 1, 2}:
            rest_seen.set()

    log.publish("a", 0)
    log.start()
    assert first_seen.wait(PATIENCE_S)
    while desk.vfs.failures == 0:  # the ack of the first one, on the handler's thread
        room_again.wait(0.01)
    desk.vfs.full = False
    desk.clock.advance(60)  # the delivery that could not be acked is given up
    log.publish("a", 1)
    log.publish("a", 2)
    assert rest_seen.wait(PATIENCE_S / 3), f"the handler stopped for good; it saw {seen}"


@MODES
def test_a_handler_whose_fetch_failed_fetches_again(desk: Desk, mode: str) -> None:
    """Its thread may not end, nor hold the subscription for ever without working on it."""
    log, other = desk.open(watching=True), desk.elsewhere()
    seen: list[int] = []
    first_seen, all_seen = threading.Event(), threading.Event()

    @log.on(">", id="s", mode=mode)
    def handle(message: headwater.ReceivedMessage) -> None:
        seen.append(message.data)
        first_seen.set()
        if message.data == 2:
            all_seen.set()

    log.publish("a", 0)
    log.start()
    assert first_seen.wait(PATIENCE_S)
    while log.subscription("s").lag:
        all_seen.wait(0.01)
    failures = desk.vfs.failures
    desk.vfs.full = True
    other.publish("a", 1)
    while desk.vfs.failures == failures:  # the handler's claim
        all_seen.wait(0.01)
    desk.vfs.full = False
    other.publish("a", 2)
    assert all_seen.wait(PATIENCE_S / 2), f"the handler stopped for good; it saw {seen}"
    assert seen == [0, 1, 2]
