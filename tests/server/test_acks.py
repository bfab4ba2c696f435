"""Acks by seq over the wire: what is repeated, what is stale, and what was never delivered."""

from __future__ import annotations

from typing import Any

import pytest
from foreign_client import Client, Serve, connect

import headwater
from headwater import ManualClock
from headwater.errors import LeaseLostError

ACK = "rpc.acknowledge.persistent"
QUIET: dict[str, Any] = {"lease": 100_000, "jitter": 0.0}


@pytest.fixture(params=["exclusive", "shared"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**QUIET, "mode": request.param}


def ack_of(*seqs: int) -> dict[str, Any]:
    return {"subscription_id": "s", "sequence_ids": list(seqs)}


async def acked(client: Client) -> int:
    return int((await client.call("rpc.subscription", {"subscription_id": "s"}))["acked"])


async def test_an_ack_may_be_repeated(serve: Serve, options: Any) -> None:
    async with serve() as server, connect(server) as client, connect(server) as other:
        await client.publish_many("a", 3)
        await client.subscribe("s", "a", **options)
        await client.deliveries(3)
        for _ in range(2):
            await client.ack("s", 2)  # ahead of what is still in flight
            await client.ack("s", 2, 3)
        assert await client.call(ACK, {"subscription_id": "s", "sequence_id": 2}) == {"acknowledged": True}
        assert await acked(client) == 2
        await client.release("s")
        await other.subscribe("s", "a", **options)
        assert await other.delivered_seqs(1) == [1]
        await other.ack("s", 1, 2, 3)  # those that another connection acked before, too
        assert await acked(client) == 3


async def test_an_ack_may_be_repeated_after_retention_deleted_the_message(serve: Serve, options: Any) -> None:
    async with serve() as server, connect(server) as client:
        await client.publish_many("a", 2)
        await client.subscribe("s", "a", **options)
        await client.deliveries(2)
        await client.ack("s", 1, 2)
        await client.call("rpc.retain", {"topic": "a", "max_count": 0})
        await client.call("rpc.maintenance.run")
        await client.ack("s", 1)


async def test_one_stale_seq_does_not_void_the_others(serve: Serve, options: Any) -> None:
    async with serve() as server, connect(server) as client:
        await client.publish_many("a", 5)
        await client.publish("other")
        await client.subscribe("s", "a", **options)
        await client.deliveries(5)
        await client.call("rpc.reject", {"subscription_id": "s", "sequence_id": 2})
        await client.call("rpc.nack", {"subscription_id": "s", "sequence_id": 4, "delay": 100})
        stale = [2, 4, 6, 7, 2**70]  # dead, waiting, of another topic, not there yet, nonsense
        assert await client.call(ACK, ack_of(1, *stale, 3)) == {"acknowledged": True, "late": stale}
        assert await acked(client) == 2
        for seq in (*stale, 0, -1):
            assert await client.code(ACK, ack_of(seq)) == -32003, seq
            assert await client.code(ACK, {"subscription_id": "s", "sequence_id": seq}) == -32003, seq
        assert await client.code(ACK, ack_of(2, 7, 7)) == -32003  # none of them
        assert await client.call(ACK, ack_of(1, 2)) == {"acknowledged": True, "late": [2]}
        assert await client.call(ACK, {**ack_of(2, 7), "lenient": True}) == {"acknowledged": True, "late": [2, 7]}
        pairs = [{"subscription_id": "s", "sequence_id": seq} for seq in (1, 2, 5)]
        answer = await client.call("rpc.acknowledge.persistent.batch", {"acknowledgments": pairs})
        assert [each["success"] for each in answer["acknowledged"]] == [True, False, True]


async def test_what_was_passed_on_cannot_be_acked_until_its_new_holder_has(serve: Serve) -> None:
    clock = ManualClock(1_700_000_000_000)
    async with serve(clock=clock) as server, connect(server) as slow, connect(server) as quick:
        options: dict[str, Any] = {**QUIET, "mode": "shared", "ack_wait": 10, "max_in_flight": 1}
        await slow.publish("a")
        await slow.subscribe("s", "a", **options, deliver="fetch")
        await slow.call("rpc.fetch", {"subscription_id": "s"})
        await quick.subscribe("s", "a", **options)
        clock.advance(10)
        assert (await quick.delivery())["attempt"] == 2
        assert await slow.code(ACK, ack_of(1)) == -32003
        await quick.ack("s", 1)
        await slow.ack("s", 1)
        assert await acked(slow) == 1


async def test_a_redriven_message_that_is_acked_may_be_acked_again(serve: Serve, options: Any) -> None:
    async with serve() as server, connect(server) as client:
        await client.publish("a")
        await client.subscribe("s", "a", **options)
        await client.delivery()
        await client.call("rpc.reject", {"subscription_id": "s", "sequence_id": 1})
        assert await client.code(ACK, ack_of(1)) == -32003
        await client.call("rpc.dead_letters.redrive", {})
        await client.delivery()
        await client.ack("s", 1)
        await client.ack("s", 1)


async def test_the_python_client_keeps_its_own_promise(serve: Serve) -> None:
    """All or none, and nothing twice, as on a file."""
    clock = ManualClock(1_700_000_000_000)
    options: dict[str, Any] = {**QUIET, "mode": "shared", "ack_wait": 10}
    async with serve(clock=clock) as server, connect(server) as other, await headwater.open_async(server.url) as log:
        await log.publish_many([("a", number) for number in range(4)])
        subscription = await log.subscribe("s", "a", **options)
        messages = await subscription.fetch(timeout=10)
        for message in messages[0], messages[2], messages[3]:
            await message.extend(100)
        clock.advance(10)
        await other.subscribe("s", "a", **options)
        assert await other.delivered_seqs(1) == [2]
        with pytest.raises(LeaseLostError, match="message 2"):
            await subscription.ack_many(messages)
        assert await acked(other) == 0
        await messages[0].ack()
        for message in messages[:2]:
            with pytest.raises(LeaseLostError):
                await subscription.ack_many([message])
