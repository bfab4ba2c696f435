"""One operation on the disk fails, the nth one, whichever n is: callers get an error, retries work, nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import apsw
import pytest
from fault_desk import Desk
from faulty_vfs import Operation

import headwater
from headwater.broker import consumer as consumers
from headwater.errors import InputOutputError, StoreError
from headwater.ports.clock import Clock, SystemClock

T = TypeVar("T")
TRIES = 4
PATIENCE_S = 20.0


class Caller:
    """Calls until it works, and counts how often it did not. What it may give up, a hasty one does not repeat."""

    def __init__(self, *, hasty: bool) -> None:
        self.hasty = hasty
        self.reported = 0

    def __call__(self, verb: Callable[[], T]) -> T:
        for _ in range(TRIES):
            try:
                return verb()
            except StoreError as exc:
                if not isinstance(exc, InputOutputError) or not exc.next:
                    raise
                self.reported += 1
        raise AssertionError("the fault does not end")

    def ack(self, acked: set[int], messages: Sequence[headwater.ReceivedMessage], ack: Callable[[], None]) -> None:
        reported = self.reported
        try:
            self(ack) if not self.hasty else ack()
        except InputOutputError:
            self.reported = reported + 1  # left alone: then it is no ack, and must be delivered again
        else:
            acked.update(message.seq for message in messages)


def live(desk: Desk, mode: str, call: Caller) -> tuple[dict[int, object], set[int], headwater.Log]:
    """A little life with all verbs; what was published, what was acked, and the log, still open."""
    log = desk.open()
    published: dict[int, object] = {}
    acked: set[int] = set()
    for number in range(3):
        published[call(lambda number=number: log.publish("a", number))] = number
    seqs = call(lambda: log.publish_many([("a", number) for number in range(3, 9)]))
    published.update(zip(seqs, range(3, 9), strict=True))
    subscription = call(lambda: log.subscribe("s", ">", mode=mode, max_attempts=100))
    messages = call(lambda: subscription.fetch(5))
    assert [message.seq for message in messages] == [*published][:5], "a failed fetch skipped something"
    for message in (messages[3], messages[0], messages[1]):
        call.ack(acked, [message], message.ack)
    call(lambda: messages[2].nack(0))
    messages = call(lambda: subscription.fetch(1))
    assert [(message.seq, message.attempt) for message in messages] == [(3, 2)]
    call.ack(acked, messages, messages[0].ack)
    messages = call(lambda: subscription.fetch(2))
    assert [message.seq for message in messages] == [*published][5:7]
    call.ack(acked, messages, lambda: subscription.ack_many(messages))
    published[call(lambda: log.publish("a", 9))] = 9
    call(log.last_seq)
    return published, acked, log


def verify(desk: Desk, mode: str, published: dict[int, object], acked: set[int]) -> None:
    """As another process finds it, after the first one died."""
    log = desk.elsewhere()
    subscription = log.subscribe("s", ">", mode=mode)
    found: dict[int, object] = {}
    while messages := subscription.fetch(100):
        found.update((message.seq, message.data) for message in messages)
        subscription.ack_many(messages)  # suspects come one at a time
    assert found == {seq: data for seq, data in published.items() if seq not in acked}
    whole = log.subscribe("whole", ">").fetch(100)
    assert {message.seq: message.data for message in whole} == published
    assert log.health()["integrity"] == "ok"


@pytest.mark.parametrize("hasty", [False, True], ids=["patient", "hasty"])
@pytest.mark.parametrize("mode", ["exclusive", "shared"])
@pytest.mark.parametrize("operation", ["write", "sync", "read"])
def test_each_single_fault_is_survived(tmp_path: Path, operation: Operation, mode: str, hasty: bool) -> None:
    """Every n in turn. The faults before the log is open are the business of the next test."""
    nth, reported = 1, 0
    while True:
        directory = tmp_path / str(nth)
        directory.mkdir()
        desk = Desk(directory)
        try:
            desk.elsewhere().close()  # made without faults
            before = desk.vfs.counts[operation]
            desk.open().close()
            to_open = desk.vfs.counts[operation] - before
            desk.vfs.fail_at(operation, to_open + nth)
            failures = desk.vfs.failures
            call = Caller(hasty=hasty)
            published, acked, log = live(desk, mode, call)
            if desk.vfs.failures == failures:
                break  # the life was over before the fault came
            reported += call.reported
            desk.vfs.heal()
            desk.forget(log)
            verify(desk, mode, published, acked)
        except BaseException as exc:
            exc.add_note(f"the {operation} number {nth} failed")
            raise
        finally:
            desk.close()
        nth += 1
    assert nth > 3
    assert reported > 0


@pytest.mark.parametrize("operation", ["write", "sync", "read"])
def test_a_log_can_be_made_after_its_making_failed(tmp_path: Path, operation: Operation) -> None:
    nth = 1
    while True:
        directory = tmp_path / str(nth)
        directory.mkdir()
        desk = Desk(directory)
        try:
            desk.vfs.fail_at(operation, nth)
            try:
                desk.open()
            except StoreError as exc:
                assert exc.next, repr(exc)  # noqa: PT017
            if desk.vfs.failures == 0:
                break
            desk.vfs.heal()
            assert desk.open().publish("a", 1) == 1
        except BaseException as exc:
            exc.add_note(f"the {operation} number {nth} failed")
            raise
        finally:
            desk.close()
        nth += 1
    assert nth > 1


@pytest.mark.parametrize("clock", [None, SystemClock()], ids=["by the writer", "at once"])
def test_a_failed_sync_is_never_taken_for_a_commit(desk: Desk, clock: Clock | None) -> None:
    log = desk.open(clock=clock)
    log.publish("a", 1)
    desk.vfs.fail_at("sync", 1, times=1_000)
    with pytest.raises(InputOutputError):
        log.publish("a", 2)
    with pytest.raises(InputOutputError):
        log.publish("a", 3)
    desk.vfs.heal()
    assert log.publish("a", 4) == 2
    assert [message.data for message in desk.elsewhere().subscribe("s", ">").fetch(10)] == [1, 4]


@pytest.mark.parametrize("clock", [None, SystemClock()], ids=["by the writer", "at once"])
def test_a_sync_that_failed_once_is_reported(desk: Desk, clock: Clock | None) -> None:
    """A second sync would tell nothing: the kernel may have dropped what it could not write."""
    log = desk.open(clock=clock)
    log.publish("a", 1)
    for publish in (lambda: log.publish("a", 2), lambda: log.publish_many([("a", 3), ("a", 4)])):
        desk.vfs.fail_at("sync", 1)
        with pytest.raises(InputOutputError):
            publish()
    assert log.publish("a", 5) == 2
    assert [message.data for message in desk.elsewhere().subscribe("s", ">").fetch(10)] == [1, 5]


def test_a_failed_checkpoint_harms_nothing(desk: Desk) -> None:
    """Publishing on until the WAL is full makes SQLite checkpoint after a commit; that failing is not the commit's."""
    log = desk.open()
    text = "x" * 3_000
    published = [log.publish("a", text)]
    desk.vfs.fail_at("write", 1_000, times=400)
    reported = 0
    for _ in range(900):
        try:
            published.append(log.publish("a", text))
        except InputOutputError:
            reported += 1
    assert desk.vfs.failures > 0
    desk.vfs.heal()
    published.append(log.publish("a", text))
    found = []
    subscription = desk.elsewhere().subscribe("s", ">")
    while messages := subscription.fetch(1_000):
        found += [message.seq for message in messages]
        subscription.ack_many(messages)
    assert set(found) >= set(published)
    assert len(found) <= len(published) + reported


def test_the_watcher_outlives_a_read_error(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a waiting reader would from then on hear of other processes only through its own slow poll."""
    monkeypatch.setattr(consumers, "FALLBACK_POLL_S", 600.0)
    log = desk.open(watching=True)
    log.publish("a", 0)
    subscription = log.subscribe("s", ">")
    assert [message.data for message in subscription.fetch(1)] == [0]
    other = desk.elsewhere()
    desk.vfs.reads_fail_in = "headwater-watcher"
    failures = desk.vfs.failures
    got: list[object] = []
    first, second = threading.Event(), threading.Event()

    def wait_for_them() -> None:
        for heard in (first, second):
            got.extend(message.data for message in subscription.fetch(1, timeout=PATIENCE_S))
            heard.set()

    thread = threading.Thread(target=wait_for_them, daemon=True)
    thread.start()
    other.publish("a", "x" * 100_000)  # large, so that the watcher has pages to read
    for _ in range(round(PATIENCE_S / 0.01)):  # its failures are not reported
        if desk.vfs.failures > failures or first.wait(0.01):
            break
    desk.vfs.heal()
    assert first.wait(PATIENCE_S)
    assert any(each.name == "headwater-watcher" for each in threading.enumerate()), "the watcher died of one read error"
    other.publish("a", 2)
    assert second.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert len(got) == 2


def test_corruption_is_named(desk: Desk) -> None:
    log = desk.open()
    for number in range(300):
        log.publish("a", "x" * 500 + str(number))
    log.close()
    pages = apsw.Connection(str(desk.path))
    (page_size,) = pages.execute("PRAGMA page_size").fetchone()
    (last_root,) = pages.execute("SELECT max(rootpage) FROM sqlite_schema").fetchone()
    pages.close()
    content = bytearray(desk.path.read_bytes())
    for page in range(last_root, len(content) // page_size):  # pages of messages alone, counted from 0
        content[page * page_size : page * page_size + 100] = b"\xff" * 100
    desk.path.write_bytes(content)
    again = desk.open()
    with pytest.raises(headwater.errors.CorruptError) as caught:
        again.subscribe("s", ">").fetch(1_000)
    assert "backup" in caught.value.next
