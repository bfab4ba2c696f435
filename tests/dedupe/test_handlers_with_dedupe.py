"""Handlers with a dedupe queue: what was handled once is only acked when it comes again."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

import headwater
from headwater import Log, ManualClock, Reject
from headwater.broker import handlers as running
from headwater.errors import InvalidOptionError, UnavailableError
from headwater.ports.dedupe import Begun
from headwater.stores.dedupe import MemoryDedupe

PATIENCE_S = 30
CLAIM_MS = 30_000  # the ack wait of a subscription


@pytest.fixture
def log(clock: ManualClock) -> Iterator[Log]:
    """Its own window remembers no ids, so the same id can come twice, as after a redrive or from two publishers."""
    with headwater.open(
        "memory:", clock=clock, maintenance_interval=None, heartbeats=False, dedupe=0, dedupe_count=0
    ) as log:
        yield log


@pytest.fixture
def dedupe(clock: ManualClock) -> MemoryDedupe:
    return MemoryDedupe(clock=clock)


def acked(log: Log, id: str, count: int) -> None:
    """Acks are asked for after a handler returned, and committed in their turn."""
    for _ in range(10_000):
        log._core.engine.committer.submit(lambda writer, hooks: None).wait(PATIENCE_S)
        if log.subscription(id).acked == count:
            return
    pytest.fail(f"{log.subscription(id).acked} acked, not {count}")


def test_the_same_id_twice_is_handled_once_and_acked_twice(log: Log, dedupe: MemoryDedupe) -> None:
    seen: queue.Queue[Any] = queue.Queue()

    @log.on("a", id="h", dedupe=dedupe)
    def handle(message: Any) -> None:
        seen.put(message.seq)

    for id in ("x", "x", "y"):
        log.publish("a", id, id=id)
    log.start()
    acked(log, "h", 3)
    assert list(seen.queue) == [1, 3]
    assert [entry.id for entry in dedupe.entries("h")] == ["a#x", "a#y"]


def test_the_same_id_on_two_topics_is_handled_twice(log: Log, dedupe: MemoryDedupe) -> None:
    """Or a publisher of one topic could keep another one's messages from being handled."""
    seen: queue.Queue[Any] = queue.Queue()

    @log.on(">", id="h", dedupe=dedupe)
    def handle(message: Any) -> None:
        seen.put((message.topic, message.seq))

    for topic in ("a.x", "orders.new", "orders.new"):
        log.publish(topic, None, id="order-17")
    log.start()
    acked(log, "h", 3)
    assert list(seen.queue) == [("a.x", 1), ("orders.new", 2)]


def test_a_crash_between_the_end_of_handling_and_the_ack_costs_no_second_handling(
    log: Log, dedupe: MemoryDedupe
) -> None:
    log.publish("a", 1, id="x")
    dedupe.add("h", "a#x")  # as the process that died did

    @log.on("a", id="h", dedupe=dedupe)
    def handle(message: Any) -> None:
        pytest.fail("handled again")

    log.start()
    acked(log, "h", 1)


def test_a_failed_message_is_handled_again(log: Log, dedupe: MemoryDedupe) -> None:
    attempts: queue.Queue[int] = queue.Queue()

    @log.on("a", id="h", dedupe=dedupe, backoff=0)
    def handle(message: Any) -> None:
        attempts.put(message.attempt)
        if message.attempt == 1:
            raise RuntimeError("not yet")
        if message.attempt == 2:
            message.nack(0)

    log.publish("a", 1)
    log.start()
    acked(log, "h", 1)
    assert list(attempts.queue) == [1, 2, 3]


def test_a_rejected_message_is_handled_again_when_it_is_redriven(log: Log, dedupe: MemoryDedupe) -> None:
    results = iter([Reject("no"), None, None])
    rejects_itself = iter([False, True, False])
    handled: queue.Queue[int] = queue.Queue()

    @log.on("a", id="h", dedupe=dedupe)
    def handle(message: Any) -> None:
        handled.put(message.seq)
        if next(rejects_itself):
            message.reject("no")
        result = next(results)
        if result is not None:
            raise result

    log.publish("a", 1)
    log.start()
    for _ in range(2):
        handled.get(timeout=PATIENCE_S)
        for _ in range(10_000):
            if any(not letter.redriving for letter in log.dead_letters.list()):
                break
        assert log.dead_letters.redrive().redriven == 1
    acked(log, "h", 1)
    assert handled.get(timeout=PATIENCE_S) == 1


def test_it_waits_for_the_claim_of_another_and_spends_no_attempts_on_that(
    log: Log, dedupe: MemoryDedupe, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "DEDUPE_BUSY_S", 0.001)
    asked = threading.Semaphore(0)

    class Witnessed(MemoryDedupe):
        def begin(self, *given: Any) -> Begun:
            asked.release()
            return super().begin(*given)

    witnessed = Witnessed(clock=clock)
    witnessed.begin("h", "a#x", clock.now_ms(), CLAIM_MS)  # a handler that will not come back
    attempts: queue.Queue[int] = queue.Queue()

    @log.on("a", id="h", dedupe=witnessed, max_attempts=2)
    def handle(message: Any) -> None:
        attempts.put(message.attempt)

    log.publish("a", 1, id="x")
    log.start()
    for _ in range(12):
        assert asked.acquire(timeout=PATIENCE_S)
    assert attempts.empty()
    clock.advance(CLAIM_MS / 1000)
    assert attempts.get(timeout=PATIENCE_S) == 1
    acked(log, "h", 1)
    assert log.dead_letters.list() == []


def test_while_it_is_handled_no_other_can_begin_it_however_long_it_takes(log: Log) -> None:
    claim_ms, seen_by = 100, ManualClock()
    extended = threading.Semaphore(0)
    others: queue.Queue[Begun] = queue.Queue()

    class Witnessed(MemoryDedupe):
        def extend(self, *given: Any) -> bool:
            answer = super().extend(*given)
            extended.release()
            return answer

    witnessed = Witnessed(clock=seen_by)

    @log.on("a", id="h", dedupe=witnessed, ack_wait=claim_ms / 1000)
    def handle(message: Any) -> None:
        for _ in range(2):
            seen_by.advance((claim_ms - 1) / 1000)
            while extended.acquire(blocking=False):
                continue
            for _ in range(2):  # the second began after the time had passed
                assert extended.acquire(timeout=PATIENCE_S)
        others.put(witnessed.begin("h", "a#x", seen_by.now_ms(), claim_ms))

    log.publish("a", 1, id="x")
    log.start()
    assert others.get(timeout=PATIENCE_S) == "busy"
    acked(log, "h", 1)


def test_an_id_that_the_queue_does_not_take_is_known_by_its_digest(tmp_path: Path, dedupe: MemoryDedupe) -> None:
    path = tmp_path / "log.db"
    with headwater.open(path, maintenance_interval=None) as log:
        with contextlib.closing(apsw.Connection(str(path))) as plain:  # as plain SQL may insert
            plain.execute("INSERT INTO messages (topic, data, id) VALUES ('a', '1', ?)", ("x" * 600,))
        seen: queue.Queue[Any] = queue.Queue()

        @log.on("a", id="h", dedupe=dedupe)
        def handle(message: Any) -> None:
            seen.put(message.data)

        log.publish("a", 2, id="y")
        log.start()
        assert [seen.get(timeout=PATIENCE_S) for _ in range(2)] == [1, 2]
        acked(log, "h", 2)
    assert [len(entry.id) for entry in dedupe.entries("h")] == [64, 3]
    assert len({running.key_of(id) for id in ("a", "", "a\0b", "\ud800", "x" * 513)}) == 5


def test_what_waits_for_anothers_claim_at_the_end_is_given_back_untouched(
    log: Log, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    class Witnessed(MemoryDedupe):
        def begin(self, *given: Any) -> Begun:
            answer = super().begin(*given)
            if answer == "busy":
                asked.set()
            return answer

    witnessed = Witnessed(clock=clock)
    witnessed.begin("h", "a#x", clock.now_ms(), CLAIM_MS)

    @log.on("a", id="h", dedupe=witnessed)
    def handle(message: Any) -> None:
        pytest.fail("another is at it")

    log.publish("a", 1, id="x")
    log.start()
    assert asked.wait(PATIENCE_S)
    log.stop()
    with log.subscribe("h", "a") as subscription:
        assert [message.attempt for message in subscription.fetch()] == [1]


def test_a_queue_that_is_away_is_asked_again(
    log: Log, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(running, "RETRY_S", 0.001)

    class Away(MemoryDedupe):
        outages = 3

        def begin(self, *given: Any) -> Begun:
            self.outages -= 1
            if self.outages >= 0:
                raise UnavailableError("the server went away", where=self.name)
            return super().begin(*given)

        def finish(self, handler: str, id: str) -> None:
            raise UnavailableError("the server went away", where=self.name)

    seen: queue.Queue[Any] = queue.Queue()

    @log.on("a", id="h", dedupe=Away(clock=clock))
    def handle(message: Any) -> None:
        seen.put(message.attempt)

    log.publish("a", 1)
    log.start()
    acked(log, "h", 1)  # though it could not be recorded as done
    assert list(seen.queue) == [1]
    assert "waits for its dedupe queue: memory:: the server went away" in caplog.text


def test_of_workers_that_get_the_same_id_at_the_same_time_one_handles_it(
    log: Log, dedupe: MemoryDedupe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "DEDUPE_BUSY_S", 0.001)
    handled: queue.Queue[str] = queue.Queue()

    @log.on("a", id="h", dedupe=dedupe, concurrency=4, mode="shared")
    def handle(message: Any) -> None:
        handled.put(message.id)

    for number in range(80):
        log.publish("a", None, id=f"id-{number // 4}")
    log.start()
    acked(log, "h", 80)
    assert sorted(handled.queue) == sorted(f"id-{number}" for number in range(20))


def test_the_asyncio_face_does_the_same_without_blocking_its_loop(clock: ManualClock) -> None:
    loops: list[bool] = []

    class Witnessed(MemoryDedupe):
        def begin(self, *given: Any) -> Begun:
            loops.append(asyncio._get_running_loop() is None)
            return super().begin(*given)

    async def story() -> list[int]:
        handled: list[int] = []
        options: Any = {
            "clock": clock,
            "maintenance_interval": None,
            "heartbeats": False,
            "dedupe": 0,
            "dedupe_count": 0,
        }
        async with headwater.open_async("memory:", **options) as log:
            last = asyncio.Event()

            @log.on("a", id="h", dedupe=Witnessed(clock=clock), backoff=0)
            async def handle(message: Any) -> None:
                handled.append(message.seq)
                if message.attempt == 1 and message.seq == 1:
                    raise RuntimeError("not yet")
                if message.data == "last":
                    last.set()

            for id in ("x", "x", "last"):
                await log.publish("a", id, id=id)
            await log.start()
            await asyncio.wait_for(last.wait(), PATIENCE_S)
        return handled

    handled = asyncio.run(story())
    assert sorted(handled) in ([1, 1, 3], [1, 2, 3])  # 2 if it came before the second try of 1
    assert loops
    assert all(loops)


def test_dedupe_without_auto_ack_and_things_that_are_no_queue_are_refused(log: Log, dedupe: MemoryDedupe) -> None:
    with pytest.raises(InvalidOptionError, match="auto_ack"):
        log.on("a", id="h", auto_ack=False, dedupe=dedupe)
    with pytest.raises(InvalidOptionError, match="dedupe queue"):
        log.on("a", id="h", dedupe="dedupe.db")  # type: ignore[arg-type]
