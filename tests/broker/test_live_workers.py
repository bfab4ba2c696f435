"""Live subscribers do not wait for each other, for the database or for the event loop, and learn what they lost."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually
from served import ServedFile

import headwater
from headwater import AsyncLog, Log, ManualClock
from headwater.broker import live

BLOCKED = 50
PATIENCE_S = 30.0


@asynccontextmanager
async def connected(place: str, directory: Path) -> AsyncIterator[AsyncLog]:
    if place == "served":
        served = ServedFile(directory / "log.db", maintenance_interval=None)
        async with served.connect() as log:
            yield log
        await asyncio.to_thread(served.stop)
        return
    async with headwater.open_async(
        "memory:" if place == "memory" else directory / "log.db", maintenance_interval=None
    ) as log:
        yield log


# --- one that blocks harms itself alone -----------------------------------------------------------------------------


def test_any_number_of_blocked_callbacks_hold_up_no_other_and_no_close(
    log: Log, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "CLOSE_SECONDS_MAX", 0.2)
    blocked, entered, released = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def block(message: Any) -> None:
        entered.release()
        released.wait()
        blocked.release()

    heard: queue.Queue[int] = queue.Queue()
    for n in range(BLOCKED):
        log.live.subscribe(f"blocked {n}", "a", block)
    log.live.subscribe("free", "a", lambda message: heard.put(message.data))
    log.publish_many([("a", n) for n in range(10)])
    for _ in range(BLOCKED):
        assert entered.acquire(timeout=PATIENCE_S)
    log.publish("a", 10)
    assert [heard.get(timeout=PATIENCE_S) for _ in range(11)] == list(range(11))
    began_s = time.monotonic()
    log.close()
    assert time.monotonic() - began_s < PATIENCE_S
    assert "while live callbacks still run: blocked 0, blocked 1" in caplog.text
    released.set()
    for _ in range(BLOCKED):
        assert blocked.acquire(timeout=PATIENCE_S)
    eventually(lambda: len(log.live._working), 0)
    assert not entered.acquire(blocking=False), "what still waited for them is not given to them any more"


@pytest.mark.parametrize("place", ["sqlite", "served"])
def test_the_same_for_coroutine_functions(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "CLOSE_SECONDS_MAX", 0.2)

    async def story() -> list[int]:
        threads_before = threading.active_count()
        entered, heard = 0, asyncio.Queue[int]()

        async def block(message: Any) -> None:
            nonlocal entered
            entered += 1
            await asyncio.Event().wait()

        async def hear(message: Any) -> None:
            await heard.put(message.data)

        async with connected(place, tmp_path) as log:
            for n in range(BLOCKED):
                log.live.subscribe(f"blocked {n}", "a", block)
            log.live.subscribe("free", "a", hear)
            await log.publish_many([("a", n) for n in range(10)])
            while entered < BLOCKED:
                await asyncio.sleep(0)
            await log.publish("a", 10)
            found = [await heard.get() for _ in range(11)]
            assert threading.active_count() - threads_before < BLOCKED, "they take no threads"
        return found

    assert asyncio.run(asyncio.wait_for(story(), PATIENCE_S)) == list(range(11))


def test_a_callback_may_close_the_log(log: Log) -> None:
    closed = threading.Event()

    def close(message: Any) -> None:
        log.close()
        closed.set()

    log.live.subscribe("x", "a", close)
    log.publish("a", 1)
    assert closed.wait(live.CLOSE_SECONDS_MAX), "it does not wait for itself"


def test_a_worker_ends_when_there_is_nothing_to_do_and_begins_anew(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "IDLE_S", 0.01)
    heard: queue.Queue[int] = queue.Queue()
    log.live.subscribe("x", "a", lambda message: heard.put(message.data))
    for n in range(3):
        log.publish("a", n)
        assert heard.get(timeout=PATIENCE_S) == n
        eventually(lambda: len(log.live._working), 0)


@pytest.mark.parametrize("mishap", [RuntimeError, asyncio.CancelledError, SystemExit])
def test_no_error_of_a_callback_ends_its_worker(log: Log, mishap: Any) -> None:
    heard: queue.Queue[int] = queue.Queue()

    def hear(message: Any) -> None:
        if message.data == 0:
            raise mishap
        heard.put(message.data)

    log.live.subscribe("x", "a", hear)
    log.publish_many([("a", n) for n in range(3)])
    assert [heard.get(timeout=PATIENCE_S) for _ in range(2)] == [1, 2]
    eventually(lambda: log.live.counts("x"), live.LiveCounts(delivered=2, failed=1))


async def test_a_coroutine_function_that_raises_cancelled_error_goes_on(tmp_path: Path) -> None:
    heard = asyncio.Queue[int]()

    async def hear(message: Any) -> None:
        if message.data == 0:
            raise asyncio.CancelledError
        await heard.put(message.data)

    async with connected("sqlite", tmp_path) as log:
        log.live.subscribe("x", "a", hear)
        await log.publish_many([("a", n) for n in range(3)])
        assert [await heard.get() for _ in range(2)] == [1, 2]


def test_a_coroutine_function_that_never_waits_leaves_the_loop_to_others(tmp_path: Path) -> None:
    async def story() -> None:
        gate, turns, heard = asyncio.Event(), 0, 0

        async def hear(message: Any) -> None:
            nonlocal heard
            heard += 1
            await gate.wait()  # only the first one waits

        async with connected("memory", tmp_path) as log:
            log.live.subscribe("x", "a", hear)
            await log.publish_many([("a", n) for n in range(500)])
            while not log.live._working or len(next(iter(log.live._working)).queue) < 499:
                await asyncio.sleep(0)
            gate.set()
            while heard < 500:
                turns += 1
                await asyncio.sleep(0)
        assert turns >= 499

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


# --- what it lost ---------------------------------------------------------------------------------------------------


def test_what_a_slow_callback_lost_is_reported_to_it_before_the_next_message(
    log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    reported: queue.Queue[Any] = queue.Queue()
    entered, held = threading.Semaphore(0), threading.Semaphore(0)

    def hear(message: Any) -> None:
        entered.release()
        assert held.acquire(timeout=PATIENCE_S)
        reported.put(message.data)

    log.live.subscribe("x", "a", hear, queue_max=3, on_dropped=lambda count: reported.put(f"lost {count}"))
    for first in (0, 100):
        log.publish("a", first)
        assert entered.acquire(timeout=PATIENCE_S)
        log.publish_many([("a", first + n) for n in range(1, 11)])
        eventually(lambda: log.live.counts("x").dropped, 7 if first == 0 else 14)
        held.release(4)
        assert [reported.get(timeout=PATIENCE_S) for _ in range(5)] == [
            first,
            "lost 7",
            *(first + n for n in (8, 9, 10)),
        ]
        for _ in range(3):
            assert entered.acquire(timeout=PATIENCE_S)
        eventually(lambda: next(iter(log.live._listeners.values())).is_behind, False)
    assert caplog.text.count("live callback x is too slow and loses messages") == 2


@pytest.mark.parametrize("is_plain", [True, False])
async def test_coroutine_functions_are_reported_too(tmp_path: Path, is_plain: bool) -> None:
    reported, gate = asyncio.Queue[Any](), asyncio.Event()

    async def hear(message: Any) -> None:
        await gate.wait()
        await reported.put(message.data)

    async def lost(count: int) -> None:
        await reported.put(f"lost {count}")

    async with connected("sqlite", tmp_path) as log:
        log.live.subscribe(
            "x", "a", (lambda message: hear(message)) if is_plain else hear, queue_max=1, on_dropped=lost
        )
        await log.publish("a", 0)
        while not log.live._working or next(iter(log.live._working)).queue:
            await asyncio.sleep(0.001)
        await log.publish_many([("a", n) for n in range(1, 4)])
        while log.live.counts("x").dropped < 2:
            await asyncio.sleep(0.001)
        gate.set()
        assert [await reported.get() for _ in range(3)] == [0, "lost 2", 3]


# --- where it begins ------------------------------------------------------------------------------------------------


@contextmanager
def two_logs(path: Path, clock: ManualClock) -> Iterator[tuple[Log, Log]]:
    options: Any = {"clock": clock, "maintenance_interval": None, "heartbeats": False}
    with headwater.open(path, **options) as here, headwater.open(path, **options) as there:
        yield here, there


def test_nothing_is_read_on_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with connected("sqlite", tmp_path) as log:
            store, seen, heard = log._core.engine.store, set[int](), asyncio.Queue[int]()  # type: ignore[attr-defined]
            for name in ("read", "write", "connect", "changed_by_others"):
                verb = getattr(store, name)

                def noted(*args: Any, verb: Any = verb, **named: Any) -> Any:
                    seen.add(threading.get_ident())
                    return verb(*args, **named)

                monkeypatch.setattr(store, name, noted)

            async def hear(message: Any) -> None:
                await heard.put(message.data)

            log.live.subscribe("x", "a", hear)
            await log.publish("a", 1)
            assert await heard.get() == 1
            log.live.subscribe("y", "a", hear)
            log.live.unsubscribe("x", "a")
            await log.publish("a", 2)
            assert await heard.get() == 2
            assert seen, "the database was used"
            assert threading.get_ident() not in seen

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_what_another_process_publishes_from_then_on_is_heard(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_logs(tmp_path / "log.db", clock) as (here, there):
        store, heard, published = here._core.engine.store, queue.Queue[int](), threading.Event()  # type: ignore[attr-defined]
        read = store.read

        def read_late(*given: Any) -> Any:
            assert published.wait(PATIENCE_S)
            return read(*given)

        monkeypatch.setattr(store, "read", read_late)
        here.live.subscribe("x", "a", lambda message: heard.put(message.data))
        there.publish_many([("a", 1), ("a", 2)])
        published.set()
        assert [heard.get(timeout=PATIENCE_S) for _ in range(2)] == [1, 2]


def test_what_was_there_before_is_not(tmp_path: Path, clock: ManualClock) -> None:
    with two_logs(tmp_path / "log.db", clock) as (here, there):
        there.publish_many([("a", "theirs, long ago"), ("a", "theirs, long ago")])
        clock.advance((live.JUST_BEFORE_MS + 1) / 1000)
        heard: queue.Queue[Any] = queue.Queue()
        here.live.subscribe("x", "a", lambda message: heard.put(message.data))
        there.publish("a", 1)
        assert heard.get(timeout=PATIENCE_S) == 1


def test_what_this_log_published_before_is_not_whatever_others_did(tmp_path: Path, clock: ManualClock) -> None:
    with two_logs(tmp_path / "log.db", clock) as (here, there):
        there.publish("a", "before the subscription")
        here.publish("a", "ours, just before")
        heard: queue.Queue[Any] = queue.Queue()
        for id in ("x", "y"):  # the second joins a reader that runs
            here.live.subscribe(id, "a", lambda message: heard.put(message.data))
            here.publish("a", id)
        assert sorted(heard.get(timeout=PATIENCE_S) for _ in range(3)) == ["x", "y", "y"]
