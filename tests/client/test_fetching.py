"""Receiving from a server: nothing that was fetched gets lost, and a broken connection is taken up where it was."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from client_states import break_off, cut_off
from fault_lane import Direction
from frame_tap import FrameTap
from served import RunningServer

import headwater
from headwater.errors import LeaseLostError, SubscriptionActiveError

QUICKLY_S = 10.0


def seqs(messages: Any) -> list[int]:
    return [message.seq for message in messages]


# --- waiting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exclusive", "shared", "ephemeral"])
async def test_a_cancelled_fetch_loses_nothing(serve: Any, mode: Any, tap: FrameTap) -> None:
    async with (
        serve() as server,
        headwater.open_async(server.url) as log,
        log.subscribe("s", "a", mode=mode) as subscription,
    ):
        for n in range(1, 20):
            fetching = asyncio.ensure_future(subscription.fetch(10, timeout=None))
            await asyncio.sleep(0)
            publishing = asyncio.ensure_future(log.publish("a", n))
            for _ in range(n % 7):
                await asyncio.sleep(0)  # at one time before it is asked for, at another when the answer is here
            fetching.cancel()
            found = await asyncio.gather(fetching, return_exceptions=True)
            await publishing
            if not isinstance(found[0], list):
                found = [await asyncio.wait_for(subscription.fetch(10, timeout=None), QUICKLY_S)]
            [message] = found[0]
            assert (message.seq, message.attempt, message.data) == (n, 1, n)
            await message.ack()
        assert len(tap.of("rpc.fetch")) < 60  # cancelled fetches leave no queue behind


async def test_a_fetch_that_is_interrupted_returns(serve: Any) -> None:
    async with serve() as server, headwater.open_async(server.url) as log:
        subscription = await log.subscribe("s", "a")
        fetching = asyncio.ensure_future(subscription.fetch(10, timeout=None))
        await asyncio.sleep(0.01)
        subscription._consumer.interrupt()
        assert await asyncio.wait_for(fetching, QUICKLY_S) == []


async def test_what_is_fetched_while_another_fetch_waits_goes_to_one_of_them(serve: Any) -> None:
    async with (
        serve() as server,
        headwater.open_async(server.url) as log,
        await log.subscribe("s", "a") as subscription,
    ):
        fetching = [asyncio.ensure_future(subscription.fetch(1, timeout=None)) for _ in range(5)]
        await log.publish_many([("a", n) for n in range(5)])
        found = await asyncio.wait_for(asyncio.gather(*fetching), QUICKLY_S)
        assert sorted(message.seq for each in found for message in each) == [1, 2, 3, 4, 5]


async def test_the_first_heartbeat_is_not_due_at_once(serve: Any) -> None:
    async with serve() as server, headwater.open_async(server.url) as log:
        core: Any = log._core
        for ack_wait, due_s in ((300, 100), (30, 10), (300, 10)):
            await log.subscribe(f"s{ack_wait}{due_s}", "a", ack_wait=ack_wait)
            await asyncio.sleep(0)
            assert core._heartbeat_timer.when() - asyncio.get_running_loop().time() == pytest.approx(due_s, rel=0.3)


def test_threads_that_fetch_from_one_subscription_share_it(server: RunningServer) -> None:
    with headwater.open(server.url) as log, log.subscribe("s", "a") as subscription:
        log.publish_many([("a", n) for n in range(1_000)])
        found: list[int] = []

        def fetch() -> None:
            while messages := subscription.fetch(7):
                found.extend(seqs(messages))
                subscription.ack_many(messages)

        threads = [threading.Thread(target=fetch) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(QUICKLY_S)
            assert not thread.is_alive()
        assert sorted(found) == list(range(1, 1_001))
        assert subscription.info().lag == 0


# --- a broken connection ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
async def test_messages_in_flight_stay_with_the_client(proxied: Any, mode: Any) -> None:
    async with proxied() as (_, proxy, log):
        await log.publish_many([("a", n) for n in range(6)])
        async with log.subscribe("s", "a", mode=mode, max_attempts=2) as subscription:
            messages = await subscription.fetch(4)
            await messages[0].ack()
            for _ in range(4):  # more often than there are attempts
                await break_off(proxy, log)
            await messages[1].ack()
            await messages[2].nack(0)
            await messages[3].reject("no")
            found = [*await subscription.fetch(1, timeout=1), *await subscription.fetch(10, timeout=1)]
            assert sorted((message.seq, message.attempt) for message in found) == [(3, 2), (5, 1), (6, 1)]
            await subscription.ack_many(found)
            info = await subscription.info()
            assert (info.lag, info.dead, info.redelivered) == (0, 1, 1)


async def test_an_answer_that_got_lost_counts_as_no_attempt(proxied: Any, tap: FrameTap) -> None:
    async with proxied() as (_, proxy, log):
        await log.publish_many([("a", n) for n in range(50)])
        async with log.subscribe("s", "a", max_attempts=1) as subscription:
            for expected in range(1, 6):
                proxy.cut_after(30, Direction.TO_CLIENT)
                [message] = await subscription.fetch(1, timeout=QUICKLY_S)
                assert (message.seq, message.attempt) == (expected, 1)
                await message.ack()
            assert proxy.counts.cuts == 5
            assert (await subscription.info()).redelivered == 0
            assert await log.dead_letters.list() == []


async def test_a_fetch_goes_on_waiting_over_a_broken_connection(proxied: Any) -> None:
    async with proxied() as (_, proxy, log), log.subscribe("s", "a") as subscription:
        fetching = asyncio.ensure_future(subscription.fetch(1, timeout=None))
        await asyncio.sleep(0)
        await break_off(proxy, log)
        await log.publish("a", 1)
        assert seqs(await asyncio.wait_for(fetching, QUICKLY_S)) == [1]


async def test_what_was_fetched_ahead_is_handed_out_once(proxied: Any) -> None:
    async with proxied() as (_, proxy, log):
        await log.publish_many([("a", n) for n in range(30)])
        seen = []
        async with log.subscribe("s", "a") as subscription:
            async for message in subscription.messages():
                seen.append((message.seq, message.attempt))
                if message.seq % 10 == 5:
                    await break_off(proxy, log)
                await message.ack()
        assert seen == [(seq, 1) for seq in range(1, 31)]


async def test_handlers_go_on_over_a_broken_connection(proxied: Any) -> None:
    async with proxied() as (_, proxy, log):
        seen: list[tuple[int, int]] = []
        done = asyncio.Event()

        @log.on("a", id="s")
        async def handle(message: headwater.AsyncReceivedMessage) -> None:
            seen.append((message.seq, message.attempt))
            if message.seq in (3, 7):
                await break_off(proxy, log)
            if message.seq == 10:
                done.set()

        await log.start()
        await log.publish_many([("a", n) for n in range(10)])
        await asyncio.wait_for(done.wait(), QUICKLY_S)
        await log.stop()
        assert seen == [(seq, 1) for seq in range(1, 11)]
        assert (await log.subscription("s")).lag == 0


@pytest.mark.parametrize("options", [{}, {"takeover": True}, {"mode": "shared"}])
async def test_a_late_copy_of_a_subscribe_takes_nothing_away(proxied: Any, options: Any) -> None:
    """The network kept the first copy back, and delivers it when the second has long been answered."""
    async with proxied() as (_, proxy, log):
        await log.publish_many([("a", 1), ("a", 2)])
        proxy.hold_back()
        subscribing = asyncio.ensure_future(log.subscribe("s", "a", **options))
        await asyncio.to_thread(proxy.wait_until, lambda counts: counts.held_bytes > 0)
        await asyncio.to_thread(proxy.part_from_clients)
        subscription = await subscribing
        [first] = await subscription.fetch(1, timeout=QUICKLY_S)
        proxy.deliver_late()
        await asyncio.to_thread(proxy.wait_until, lambda counts: counts.late_bytes > 0 and counts.open == 1)
        await first.ack()
        [second] = await subscription.fetch(1, timeout=QUICKLY_S)
        assert (second.seq, second.attempt) == (2, 1)
        await second.ack()
        assert (await subscription.info()).lag == 0


async def test_without_a_state_there_is_no_hole_all_the_same(proxied: Any) -> None:
    """An ephemeral reader goes on behind the last message that it was given."""
    async with proxied() as (server, proxy, log), headwater.open_async(server.url) as direct:
        await direct.publish("a", "before")
        async with log.subscribe("s", "a", mode="ephemeral") as subscription:
            await direct.publish_many([("a", n) for n in range(3)])
            assert seqs(await subscription.fetch(2, timeout=QUICKLY_S)) == [2, 3]
            proxy.refuse()
            proxy.reset()
            await direct.publish("a", "meanwhile")
            proxy.accept()
            await direct.publish("a", "after")
            found: list[int] = []
            while len(found) < 3:
                found += seqs(await subscription.fetch(10, timeout=QUICKLY_S))
            assert found == [4, 5, 6]


async def test_an_ephemeral_reader_that_saw_nothing_yet_misses_nothing(proxied: Any) -> None:
    async with (
        proxied() as (server, proxy, log),
        headwater.open_async(server.url) as direct,
        log.subscribe("s", "a", mode="ephemeral") as subscription,
    ):
        await cut_off(proxy, log)
        await direct.publish("a", "meanwhile")
        proxy.accept()
        assert seqs(await subscription.fetch(10, timeout=QUICKLY_S)) == [1]


async def test_live_callbacks_hear_again_after_a_broken_connection(proxied: Any) -> None:
    async with proxied() as (server, proxy, log), headwater.open_async(server.url) as direct:
        heard: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

        async def all_of_it(message: headwater.Message) -> None:
            heard.put_nowait(("all", message.seq))

        async def part_of_it(message: headwater.Message) -> None:
            heard.put_nowait(("part", message.seq))

        log.live.subscribe("me", "news.>", all_of_it)
        log.live.subscribe("me", "news.local", part_of_it)
        await log.last_seq()  # what was asked before it has been done
        await direct.publish("news.local", 1)
        assert {await heard.get(), await heard.get()} == {("all", 1), ("part", 1)}
        await break_off(proxy, log)
        await log.last_seq()
        await direct.publish("news.world", 2)
        assert await asyncio.wait_for(heard.get(), QUICKLY_S) == ("all", 2)
        log.live.unsubscribe("me", "news.>")
        await break_off(proxy, log)
        await log.last_seq()
        await direct.publish("news.world", 3)
        await direct.publish("news.local", 4)
        assert await asyncio.wait_for(heard.get(), QUICKLY_S) == ("part", 4)
        assert heard.empty()


# --- leases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
async def test_a_handler_may_take_longer_than_the_ack_wait(serve: Any, tap: FrameTap, mode: Any) -> None:
    async with serve() as server, headwater.open_async(server.url) as log:
        seen: list[tuple[int, int]] = []
        extended, done = asyncio.Event(), asyncio.Event()

        @log.on("a", id="s", mode=mode, ack_wait=0.6)
        async def handle(message: headwater.AsyncReceivedMessage) -> None:
            seen.append((message.seq, message.attempt))
            if message.seq == 1:
                while len(tap.of("rpc.extend")) < 5:  # three of them are one ack wait
                    await asyncio.sleep(0.01)
                extended.set()
            if message.seq == 2:
                done.set()

        await log.start()
        await log.publish_many([("a", 1), ("a", 2)])
        await asyncio.wait_for(extended.wait(), QUICKLY_S)
        await asyncio.wait_for(done.wait(), QUICKLY_S)
        await log.stop()
        assert seen == [(1, 1), (2, 1)]
        assert (await log.subscription("s")).redelivered == 0


async def test_a_second_holder_waits_as_long_as_it_is_told_to(serve: Any) -> None:
    async with serve() as server, headwater.open_async(server.url) as one, headwater.open_async(server.url) as other:
        first = await one.subscribe("s", "a")
        waiting = asyncio.ensure_future(other.subscribe("s", "a", timeout=QUICKLY_S))
        await asyncio.sleep(0)
        await first.close()
        second = await waiting
        with pytest.raises(SubscriptionActiveError):
            await one.subscribe("s", "a", timeout=0.05)
        await second.close()


async def test_a_holder_that_comes_back_too_late_finds_it_taken(proxied: Any) -> None:
    async with proxied() as (server, proxy, log), headwater.open_async(server.url) as other:
        await other.publish("a", 1)
        subscription = await log.subscribe("s", "a")
        [message] = await subscription.fetch(1)
        states = await cut_off(proxy, log)
        async with other.subscribe("s", "a", timeout=QUICKLY_S) as taken:
            proxy.accept()
            await states.reach("reconnecting", "connected")
            with pytest.raises(LeaseLostError):
                await message.ack()
            with pytest.raises(LeaseLostError):
                await subscription.fetch(1, timeout=QUICKLY_S)
            [again] = await taken.fetch(1)
            assert (again.seq, again.attempt) == (1, 2)
            await again.ack()
        await subscription.close()
        assert (await other.subscription("s")).lag == 0
