"""Leaving: what was asked for is done, what is held is given back at once, and nothing hangs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from client_states import States, cut_off
from eventually import eventually
from fault_proxy import FaultProxy
from served import RunningServer

import headwater
from headwater.broker.flow import Blocking, run_blocking
from headwater.errors import ClosedError, LeaseLostError

QUICKLY_S = 8.0  # a close that waits for what cannot come takes 10 s


# --- in good order --------------------------------------------------------------------------------------------------


async def test_publishes_under_way_are_stored_and_answered(serve: Any) -> None:
    async with serve() as server:
        async with headwater.open_async(server.url) as log:
            publishing = [asyncio.ensure_future(log.publish("a", n)) for n in range(500)]
            batch = asyncio.ensure_future(log.publish_many([("a", n) for n in range(500)]))
            await asyncio.sleep(0)
        seqs = await asyncio.gather(*publishing)
        assert sorted([*seqs, *await batch]) == list(range(1, 1_001))
        async with headwater.open_async(server.url) as again:
            assert await again.last_seq() == 1_000


def test_publishes_of_other_threads_are_stored_and_answered_or_refused(server: RunningServer) -> None:
    log = headwater.open(server.url)
    seqs: list[int] = []
    begun = threading.Barrier(5)

    def publish() -> None:
        begun.wait()
        try:
            for n in range(1_000):
                seqs.append(log.publish("a", n))
        except ClosedError:
            pass

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    log.close()
    for thread in threads:
        thread.join(QUICKLY_S)
        assert not thread.is_alive()
    with headwater.open(server.url) as again:
        assert again.last_seq() == len(seqs)  # what was refused is not there, what is there was answered


async def test_unconfirmed_acks_hold(serve: Any) -> None:
    async with serve() as server:
        async with headwater.open_async(server.url) as log:
            await log.publish_many([("a", n) for n in range(100)])
            subscription = await log.subscribe("s", "a")
            for message in await subscription.fetch(100):
                await message.ack(confirm=False)
        async with headwater.open_async(server.url) as again:
            info = await again.subscription("s")
            assert (info.lag, info.acked, info.redelivered) == (0, 100, 0)


async def test_acks_of_handlers_hold(serve: Any) -> None:
    async with serve() as server:
        handled: list[int] = []
        done = asyncio.Event()
        async with headwater.open_async(server.url) as log:

            @log.on("a", id="s")
            async def handle(message: headwater.AsyncReceivedMessage) -> None:
                handled.append(message.seq)
                if len(handled) == 50:
                    done.set()

            await log.start()
            await log.publish_many([("a", n) for n in range(100)])
            await done.wait()
        async with headwater.open_async(server.url) as again:
            info = await again.subscription("s")
            assert info.acked == len(handled)
            async with again.subscribe("s", "a") as subscription:
                rest = await subscription.fetch(200)
                assert [message.seq for message in rest] == list(range(len(handled) + 1, 101))
                assert {message.attempt for message in rest} <= {1}  # what was fetched ahead and not begun counts not


@pytest.mark.parametrize("what", ["log", "subscription"])
async def test_what_was_held_is_anothers_at_once(serve: Any, what: str) -> None:
    async with serve() as server, headwater.open_async(server.url) as other:
        log = await headwater.open_async(server.url)
        await log.publish_many([("a", n) for n in range(3)])
        subscription = await log.subscribe("s", "a", lease=600, ack_wait=600)
        shared = await log.subscribe("t", "a", mode="shared", ack_wait=600)
        assert len(await subscription.fetch(2)) == 2
        assert len(await shared.fetch(2)) == 2
        waiting = asyncio.ensure_future(other.subscribe("s", "a", lease=600, timeout=None))
        other_shared = await other.subscribe("t", "a", mode="shared")
        began_s = time.monotonic()
        if what == "log":
            await log.close()
        else:
            await subscription.close()
            await shared.close()
        async with await waiting as taken_over:
            assert [message.seq for message in await taken_over.fetch(10, timeout=QUICKLY_S)] == [1, 2, 3]
        found: list[int] = []
        while len(found) < 3:
            found += [message.seq for message in await other_shared.fetch(10, timeout=QUICKLY_S)]
        assert sorted(found) == [1, 2, 3]
        assert time.monotonic() - began_s < QUICKLY_S
        await log.close()


async def test_an_ack_after_the_close_costs_what_was_never_seen_no_attempt(proxied: Any) -> None:
    """Closing waits for the acks under way; one that comes meanwhile is too late, and nothing more."""
    async with proxied() as (_, proxy, log):
        await log.publish_many([("a", n) for n in range(3)])
        subscription = await log.subscribe("s", "a")
        messages = subscription.messages()
        first, second = await anext(messages), await anext(messages)
        proxy.hold_back()
        await first.ack(confirm=False)
        closing = asyncio.ensure_future(subscription.close())
        await asyncio.sleep(0)
        await second.ack(confirm=False)
        proxy.deliver_late()
        await closing
        await messages.aclose()
        async with log.subscribe("s", "a") as again:
            rest = await again.fetch(10)
            assert [(message.seq, message.attempt) for message in rest] == [(2, 2), (3, 1)]


def test_what_arrives_while_its_holder_leaves_counts_as_no_attempt(server: RunningServer) -> None:
    """The answer is half taken in, by the thread of the connection, when another thread closes."""
    arrived, go_on = threading.Event(), threading.Event()

    class HalfTakenIn(dict[int, Any]):
        def update(self, *more: Any) -> None:  # type: ignore[override]
            super().update(*more)
            arrived.set()
            assert go_on.wait(QUICKLY_S)

    with headwater.open(server.url) as log, headwater.open(server.url) as other:
        core: Any = log._core
        subscription: Any = log.subscribe("s", "a")
        subscription._consumer._in_flight = HalfTakenIn()
        other.publish_many([("a", n) for n in range(3)])
        with ThreadPoolExecutor() as threads:
            fetching = threads.submit(subscription.fetch, 10)
            assert arrived.wait(QUICKLY_S)
            closing = threads.submit(subscription.close)
            eventually(lambda: [each.method for each in core._connection._inbox], ["rpc.unsubscribe.persistent"])
            go_on.set()
            closing.result(QUICKLY_S)
            with pytest.raises(ClosedError):
                fetching.result(QUICKLY_S)
        with other.subscribe("s", "a") as again:
            assert [(message.seq, message.attempt) for message in again.fetch(10)] == [(1, 1), (2, 1), (3, 1)]


class RecordedLock:
    """A lock that tells when a thread has to wait for it."""

    def __init__(self, waits: threading.Event) -> None:
        self._lock, self._waits = threading.RLock(), waits

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waits.set()
            self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


@pytest.mark.parametrize(
    ("verb", "between"),
    [("fetch", "_how_many"), ("ack", "_was_handed_out_last"), ("nack", "_was_handed_out_last")],
)
def test_what_another_thread_asks_for_while_its_holder_leaves_is_done_or_refused(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, verb: str, between: str
) -> None:
    """It has just been seen to be open. The server knows nothing of a subscription that is closed, and must not be
    asked about it."""
    with headwater.open(server.url) as log, ThreadPoolExecutor() as threads:
        log.publish("a", 1)
        subscription: Any = log.subscribe("s", "a")
        consumer = subscription._consumer
        [message] = subscription.fetch(1)
        closes_or_waits = threading.Event()
        consumer._lock = RecordedLock(closes_or_waits)
        go_on = getattr(consumer, between)

        def close_here(*arguments: Any) -> Any:
            monkeypatch.undo()
            threads.submit(subscription.close).add_done_callback(lambda _: closes_or_waits.set())
            assert closes_or_waits.wait(QUICKLY_S)
            return go_on(*arguments)

        monkeypatch.setattr(consumer, between, close_here)
        with contextlib.suppress(ClosedError, LeaseLostError):
            getattr(subscription if verb == "fetch" else message, verb)()


@pytest.mark.parametrize("place", ["memory", "server"])
def test_what_a_thread_takes_while_another_closes_counts_as_an_attempt(server: RunningServer, place: str) -> None:
    closes_or_waits = threading.Event()

    class Buffer(deque[Any]):
        def popleft(self) -> Any:
            if not closes_or_waits.is_set():
                threads.submit(subscription.close).add_done_callback(lambda _: closes_or_waits.set())
                assert closes_or_waits.wait(QUICKLY_S)
            return super().popleft()

    with headwater.open(server.url if place == "server" else "memory:") as log:
        log.publish_many([("a", n) for n in range(3)])
        subscription: Any = log.subscribe("s", "a")
        messages = subscription.messages()
        next(messages)
        consumer = subscription._consumer
        with ThreadPoolExecutor() as threads:
            consumer._lock, consumer._buffer = RecordedLock(closes_or_waits), Buffer(consumer._buffer)
            assert next(messages).seq == 2
        with log.subscribe("s", "a") as again:
            assert [(message.seq, message.attempt) for message in again.fetch(10)] == [(1, 2), (2, 2), (3, 1)]


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_what_a_fetch_is_about_to_take_when_its_holder_leaves_is_anothers_at_once(mode: Any) -> None:
    """As when a connection breaks between the look and the claim: nothing would be left to give it back."""
    with headwater.open("memory:") as log:
        core: Any = log._core
        log.publish("a", 1)
        leaving = run_blocking(core.subscribe("s", "a", mode=mode, ack_wait=600))
        fetching = leaving.take(10, 0.0)
        looked = next(fetching)
        if isinstance(looked, Blocking):
            outcome = looked.work()
            run_blocking(leaving.close(vanished=True))
            with contextlib.suppress(ClosedError, LeaseLostError):
                run_blocking(resumed_with(fetching, outcome))
        else:  # the look and the claim are one step
            run_blocking(leaving.close(vanished=True))
            assert looked.wait(QUICKLY_S)
            fetching.close()
        with log.subscribe("s", "a", mode=mode) as other:
            assert [message.seq for message in other.fetch(10, timeout=QUICKLY_S)] == [1]


def resumed_with(flow: Any, outcome: Any) -> Any:
    """The rest of a flow that waits for this outcome."""
    step = flow.send(outcome)
    while True:
        try:
            step = flow.send((yield step))
        except StopIteration as stop:
            return stop.value


# --- without a connection ---------------------------------------------------------------------------------------------


async def test_closing_without_a_connection_is_quick_and_fails_waiting_calls(proxied: Any) -> None:
    async with proxied() as (_, proxy, log):
        await log.publish_many([("a", n) for n in range(3)])
        subscription = await log.subscribe("s", "a")
        messages = await subscription.fetch(3)
        states = await cut_off(proxy, log)
        acking = asyncio.ensure_future(messages[0].ack())
        await messages[1].ack(confirm=False)
        publishing = asyncio.ensure_future(log.publish("a", 1))
        fetching = asyncio.ensure_future(subscription.fetch(1, timeout=None))
        await asyncio.sleep(0)
        began_s = time.monotonic()
        await log.close()
        assert time.monotonic() - began_s < QUICKLY_S
        for waiting in (acking, publishing, fetching):
            with pytest.raises(ClosedError):
                await waiting
        assert states.seen[-1] == "disconnected"


async def test_handlers_stop_quickly_without_a_connection(proxied: Any) -> None:
    async with proxied() as (_, proxy, log):
        begun, go_on = asyncio.Event(), asyncio.Event()

        @log.on("a", id="s")
        async def handle(message: headwater.AsyncReceivedMessage) -> None:
            begun.set()
            await go_on.wait()

        await log.start()
        await log.publish_many([("a", n) for n in range(3)])
        await begun.wait()
        await cut_off(proxy, log)
        go_on.set()
        began_s = time.monotonic()
        await log.close()
        assert time.monotonic() - began_s < QUICKLY_S


def test_the_sync_api_closes_quickly_without_a_connection(server: RunningServer) -> None:
    with FaultProxy("127.0.0.1", int(server.url.rpartition(":")[2])) as proxy:
        log = headwater.open(f"ws://127.0.0.1:{proxy.port}")
        states = States(log)
        subscription = log.subscribe("s", "a")
        outcome: list[type[BaseException]] = []

        def fetch() -> None:
            try:
                subscription.fetch(1, timeout=None)
            except ClosedError as exc:
                outcome.append(type(exc))

        proxy.refuse()
        proxy.reset()
        states.wait_for("reconnecting")
        fetching = threading.Thread(target=fetch)
        fetching.start()
        began_s = time.monotonic()
        log.close()
        fetching.join(QUICKLY_S)
        assert time.monotonic() - began_s < QUICKLY_S
        assert outcome == [ClosedError]


async def test_a_subscription_is_closed_quickly_without_a_connection(proxied: Any) -> None:
    async with proxied() as (_, proxy, log):
        await log.publish("a", 1)
        subscription = await log.subscribe("s", "a")
        [message] = await subscription.fetch(1)
        await cut_off(proxy, log)
        began_s = time.monotonic()
        await subscription.close()
        assert time.monotonic() - began_s < QUICKLY_S
        with pytest.raises((ClosedError, LeaseLostError)):
            await message.ack()
        proxy.accept()
        assert await log.publish("a", 2) == 2
        async with log.subscribe("s", "a") as again:  # it did not come back by itself
            assert [found.seq for found in await again.fetch(10, timeout=QUICKLY_S)] == [2, 1]


async def test_closing_while_the_server_is_silent_takes_a_moment_not_an_hour(serve: Any, proxied: Any) -> None:
    async with proxied(serve(shutdown_timeout=0.1), ping=0.2) as (_, proxy, log):
        await log.subscribe("s", "a")
        proxy.blackhole()
        began_s = time.monotonic()
        await log.close()
        assert time.monotonic() - began_s < 2 * QUICKLY_S


# --- afterwards -----------------------------------------------------------------------------------------------------


def test_twice_is_harmless_and_once_is_enough(server: RunningServer) -> None:
    log = headwater.open(server.url)
    subscription = log.subscribe("s", "a")
    log.close()
    log.close()
    subscription.close()
    for attempt in (
        lambda: log.publish("a", 1),
        lambda: log.publish_many([("a", 1)]),
        lambda: log.subscribe("t", "a"),
        lambda: log.last_seq(),
        lambda: log.remote.call("any"),
        lambda: log.remote.notify("any"),
        lambda: log.live.subscribe("me", "a", print),
        lambda: subscription.fetch(),
    ):
        with pytest.raises(ClosedError):
            attempt()
