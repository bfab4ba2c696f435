"""Calls of one moment travel together, within what a frame may hold."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from frame_tap import FrameTap
from served import RunningServer

import headwater
from headwater.errors import TooLargeError

PUBLISHING = ("rpc.publish", "rpc.publish.batch")
FRAME_BYTES = 16_384


async def test_a_hundred_publishes_at_once_are_a_few_frames(serve: Any, tap: FrameTap) -> None:
    async with serve() as server, headwater.open_async(server.url) as log:
        assert await asyncio.gather(*(log.publish("a", n) for n in range(100))) == list(range(1, 101))
        assert tap.frames_with(*PUBLISHING) == 1
        tap.frames.clear()
        reported = [log.publish("a", n, type="T") if n % 2 else log.publish_many([("a", n)]) for n in range(100)]
        await asyncio.gather(*reported)
        assert tap.frames_with(*PUBLISHING) <= 101


async def test_acks_of_one_moment_are_one_frame(serve: Any, tap: FrameTap) -> None:
    async with serve() as server, headwater.open_async(server.url) as log:
        await log.publish_many([("a", n) for n in range(100)])
        async with log.subscribe("s", "a") as subscription:
            messages = await subscription.fetch(100)
            await asyncio.gather(*(message.ack() for message in messages))
            assert tap.frames_with("rpc.acknowledge.persistent") == 1
            assert (await subscription.info()).acked == 100


async def test_one_publish_does_not_wait_for_others(serve: Any, tap: FrameTap) -> None:
    async with serve() as server, headwater.open_async(server.url) as log:
        for n in range(5):
            await log.publish("a", n)
        assert tap.frames_with(*PUBLISHING) == 5
        assert tap.of("rpc.publish.batch") == []


def test_threads_that_publish_at_once_share_frames(server: RunningServer, tap: FrameTap) -> None:
    seqs: list[int] = []
    begin = threading.Barrier(20)
    with headwater.open(server.url) as log:

        def publish(name: int) -> None:
            begin.wait()
            for n in range(20):
                seqs.append(log.publish("a", [name, n]))

        threads = [threading.Thread(target=publish, args=(name,)) for name in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(seqs) == list(range(1, 401))
        assert tap.frames_with(*PUBLISHING) < 400
        with log.subscribe("s", "a") as subscription:
            output = [message.data for message in subscription.fetch(1_000)]
    for name in range(20):
        assert [n for by, n in output if by == name] == list(range(20))


async def test_more_than_a_frame_holds_goes_in_several(serve: Any, tap: FrameTap) -> None:
    async with serve(limits_frame_bytes=FRAME_BYTES) as server, headwater.open_async(server.url) as log:
        async with asyncio.timeout(10):
            seqs = await asyncio.gather(*(log.publish("a", str(n) + "x" * 1_000) for n in range(100)))
        assert seqs == list(range(1, 101))
        assert 7 <= tap.frames_with(*PUBLISHING) < 50


async def test_one_too_large_is_refused_before_anything_is_sent_and_costs_the_others_nothing(
    serve: Any, tap: FrameTap
) -> None:
    async with serve(limits_frame_bytes=FRAME_BYTES) as server, headwater.open_async(server.url) as log:
        sizes = [10, FRAME_BYTES, 20, FRAME_BYTES + 100, 30]
        async with asyncio.timeout(10):
            outcomes = await asyncio.gather(*(log.publish("a", "x" * size) for size in sizes), return_exceptions=True)
        assert [outcome for outcome in outcomes if not isinstance(outcome, TooLargeError)] == [1, 2, 3]
        assert isinstance(outcomes[1], TooLargeError)
        assert isinstance(outcomes[3], TooLargeError)
        assert str(FRAME_BYTES) in outcomes[1].why
        with pytest.raises(TooLargeError):
            await log.publish_many([("a", "x" * 1_000)] * 20)
        assert max(len(str(frame)) for frame in tap.frames) < 2 * FRAME_BYTES
        assert log.remote.state == "connected"
        assert await log.publish("a", 1) == 4


async def test_a_message_no_log_would_take_is_refused_here(serve: Any, tap: FrameTap) -> None:
    async with serve() as server, headwater.open_async(server.url) as log:
        with pytest.raises(TooLargeError):
            await log.publish("a", "x" * 2_000_000)
        assert tap.of(*PUBLISHING) == []


async def test_more_calls_than_may_be_on_their_way_wait_their_turn(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.client.connection.UNANSWERED_MAX", 3)
    async with serve() as server, headwater.open_async(server.url) as log:
        reported = [log.publish("a", n, type="T") for n in range(200)]
        assert await asyncio.gather(*reported) == list(range(1, 201))


async def test_a_cancelled_publish_is_stored_all_the_same(serve: Any) -> None:
    async with serve() as server, headwater.open_async(server.url) as log:
        publishing = asyncio.ensure_future(log.publish("a", 1))
        await asyncio.sleep(0)
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        assert await log.publish("a", 2) == 2
