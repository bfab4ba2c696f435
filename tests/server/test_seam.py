"""Backlog, then live, without a seam: each seq once, in order, no hole, however publishers and readers race."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import chain

import pytest
from foreign_client import Client, Serve, connect

PUBLISHERS = 3
EACH = 150


async def publish_until(client: Client, topic: str, count: int, bell: asyncio.Event) -> list[int]:
    """One call after the other; the bell rings at a third of the way, when others may join in."""
    seqs = []
    for number in range(count):
        seqs.append(await client.publish(topic, number))
        if number == count // 3:
            bell.set()
    return seqs


@pytest.mark.parametrize("window", [1, 7, 1_000])
@pytest.mark.parametrize("mode", ["exclusive", "shared"])
async def test_a_replay_runs_into_the_live_end_without_a_seam(serve: Serve, mode: str, window: int) -> None:
    async with serve() as server, connect(server) as consumer:
        sockets = AsyncExitStack()
        publishers = [await sockets.enter_async_context(connect(server)) for _ in range(PUBLISHERS)]
        bell = asyncio.Event()
        at_work = [asyncio.create_task(publish_until(each, "a.x", EACH, bell)) for each in publishers]
        await bell.wait()  # a backlog is there, and it is growing
        begun = await consumer.subscribe("s", "a.>", max_in_flight=window, mode=mode)
        assert begun["undelivered_count"] > 0
        got: list[int] = []
        while len(got) < PUBLISHERS * EACH:
            delivery = await consumer.delivery()
            assert delivery["attempt"] == 1
            got.append(delivery["sequence_id"])
            await consumer.notify("rpc.acknowledge.persistent", {"subscription_id": "s", "sequence_id": got[-1]})
        assert got == list(range(1, PUBLISHERS * EACH + 1))
        assert sorted(chain(*await asyncio.gather(*at_work))) == got
        await consumer.release("s")
        assert (await consumer.subscribe("s", "a.>", mode=mode))["resumed_from_sequence"] == got[-1]
        await sockets.aclose()


async def test_leaving_and_coming_back_in_the_middle_misses_and_repeats_nothing(serve: Serve) -> None:
    async with serve() as server, connect(server) as consumer, connect(server) as publisher:
        at_work = asyncio.create_task(publish_until(publisher, "a", 400, asyncio.Event()))
        got: list[int] = []
        while len(got) < 400:
            begun = await consumer.subscribe("s", "a", max_in_flight=10)
            assert begun["resumed_from_sequence"] == len(got)
            for _ in range(min(37, 400 - len(got))):
                got.append((await consumer.delivery())["sequence_id"])
                await consumer.ack("s", got[-1])
            await consumer.release("s")
            consumer._notes.clear()  # delivered and never acked: they will come again
        assert got == list(range(1, 401))
        assert await at_work == got


async def test_live_listeners_hear_all_that_is_published_after_they_were_reported(serve: Serve) -> None:
    async with serve() as server, connect(server) as publisher, connect(server) as listener:
        bell = asyncio.Event()
        at_work = asyncio.create_task(publish_until(publisher, "a", 300, bell))
        await bell.wait()
        await listener.call("rpc.subscribe", {"topic": "a"})
        known = (await listener.call("rpc.last_seq"))["sequence_id"]
        got: list[int] = []
        while not got or got[-1] < 300:
            got.append((await listener.note("rpc.notification"))["sequence_id"])
        assert got == list(range(got[0], 301))
        assert got[0] <= known + 1
        await at_work
