"""`rpc.credit`: messages come unasked, as many as the client gave credit for. Headwater's own client works this way."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from foreign_client import PATIENCE_S, Client, Serve, connect

import headwater
from headwater.broker.consumer import FETCH_MAX
from headwater.server.server import Server

INVALID_PARAMS, UNKNOWN_SUBSCRIPTION = -32602, -32002


async def subscribe(client: Client, **options: Any) -> None:
    await client.call("rpc.hello", {})
    params = {"subscription_id": "s", "topic": "a", "deliver": "fetch", "start": "first", **options}
    await client.call("rpc.subscribe.persistent", params)


async def credit(client: Client, upto: Any) -> None:
    await client.call("rpc.credit", {"subscription_id": "s", "upto": upto})


async def delivered(client: Client, count: int) -> list[int]:
    """The seqs of the next messages, which come in the form of `rpc.fetch`."""
    seqs: list[int] = []
    while len(seqs) < count:
        params = await client.note("rpc.deliver")
        assert params["subscription_id"] == "s"
        seqs += [message[0] for message, attempt, _ in params["messages"] if attempt == 1]
    return seqs


@pytest.mark.parametrize("mode", ["exclusive", "shared", "ephemeral"])
async def test_as_many_come_as_credit_was_given(serve: Serve, mode: str) -> None:
    async with serve() as server, connect(server) as client, connect(server) as publisher:
        await publisher.publish_many("a", 3)
        await subscribe(client, mode=mode)
        assert await client.has_nothing_to_read()
        await credit(client, 5)
        assert await delivered(client, 3) == [1, 2, 3]
        await publisher.publish_many("a", 4)
        assert await delivered(client, 2) == [4, 5]
        assert await client.has_nothing_to_read(), "the credit is used up"
        await credit(client, 5)
        assert await client.has_nothing_to_read(), "a total, which may be repeated"
        await credit(client, 10)
        assert await delivered(client, 2) == [6, 7]


async def test_the_end_of_the_credit_leaves_messages_to_others(serve: Serve) -> None:
    async with serve() as server, connect(server) as client, connect(server) as other:
        await subscribe(client, mode="shared")
        await subscribe(other, mode="shared")
        await credit(client, 100)
        await credit(client, 0)
        await other.publish_many("a", 3)
        await credit(other, 100)
        assert await delivered(other, 3) == [1, 2, 3]
        assert await client.has_nothing_to_read()


async def test_what_was_not_acked_is_delivered_to_the_next_holder(serve: Serve) -> None:
    async with serve() as server, connect(server) as publisher:
        async with connect(server) as client:
            await subscribe(client)
            await credit(client, 10)
            await publisher.publish_many("a", 2)
            assert await delivered(client, 2) == [1, 2]
            await client.call("rpc.acknowledge.persistent", {"subscription_id": "s", "sequence_id": 1})
        async with connect(server) as client:
            await subscribe(client, wait=PATIENCE_S / 2)
            answer = await client.call("rpc.fetch", {"subscription_id": "s", "count": 10, "wait": 5})
            assert [(message[0], attempt) for message, attempt, _ in answer["messages"]] == [(2, 2)]


async def test_the_end_of_a_fetch_leaves_the_credit(serve: Serve) -> None:
    """A client may iterate and fetch at the same time."""
    async with serve() as server, connect(server) as client, connect(server) as publisher:
        await subscribe(client)
        await credit(client, 100)
        await client.call("rpc.fetch.end", {"subscription_id": "s"})
        await publisher.publish_many("a", 2)
        assert await delivered(client, 2) == [1, 2]


async def test_a_fetch_and_the_credit_send_in_order(serve: Serve) -> None:
    async with serve() as server, connect(server) as client, connect(server) as publisher:
        await subscribe(client)
        await credit(client, 1_000)
        seqs: list[int] = []
        fetch = await client.ask("rpc.fetch", {"subscription_id": "s", "count": 1, "wait": 5})
        sending = asyncio.create_task(publisher.publish_many("a", 200))
        while len(seqs) < 200:
            frame = await client.frame()
            for each in frame if isinstance(frame, list) else [frame]:
                found = each["params"] if "method" in each else each["result"]
                seqs += [message[0] for message, _, _ in found["messages"]]
                if each.get("id") == fetch and len(seqs) < 200:
                    fetch = await client.ask("rpc.fetch", {"subscription_id": "s", "count": 1, "wait": 5})
        await sending
        assert seqs == list(range(1, 201))


async def test_a_pushed_subscription_takes_no_credit(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await subscribe(client, deliver="push")
        assert await client.code("rpc.credit", {"subscription_id": "s", "upto": 1}) == INVALID_PARAMS


async def test_iterators_that_follow_each_other_get_everything(serve: Serve) -> None:
    async with serve() as server, headwater.open_async(server.url) as log:
        await log.publish_many([("a", number) for number in range(200)])
        async with log.subscribe("s", "a") as subscription, asyncio.timeout(PATIENCE_S):
            found: list[int] = []
            while len(found) < 200:
                async with contextlib.aclosing(subscription.messages(timeout=PATIENCE_S)) as messages:
                    async for message in messages:
                        found.append(message.data)
                        await message.ack()
                        break
                if len(found) % 7 == 0:
                    fetched = await subscription.fetch(1, timeout=0.001)
                    found += [message.data for message in fetched]
                    await subscription.ack_many(fetched)
            assert found == list(range(200))


@pytest.mark.parametrize("count", [-1, FETCH_MAX + 1, "x"])
async def test_a_credit_has_limits(serve: Serve, count: Any) -> None:
    async with serve() as server, connect(server) as client:
        await subscribe(client)
        assert await client.code("rpc.credit", {"subscription_id": "s", "upto": count}) == INVALID_PARAMS


async def test_credit_is_for_what_the_connection_holds(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        assert await client.code("rpc.credit", {"subscription_id": "s", "upto": 1}) == UNKNOWN_SUBSCRIPTION


async def given(server: Server) -> float:
    """The credit of the one subscription that is held."""
    [connection] = [each for each in server.connections if len(each.subscriptions)]
    [held] = connection.subscriptions._held.values()
    return held.credit


async def test_a_client_gives_credit_while_it_has_takers(serve: Serve) -> None:
    async with (
        serve() as server,
        headwater.open_async(server.url) as log,
        log.subscribe("s", "a", start="first") as subscription,
        asyncio.timeout(PATIENCE_S),
    ):
        await log.publish("a", 1)
        async with contextlib.aclosing(subscription.messages(timeout=PATIENCE_S)) as messages:
            async for message in messages:
                assert await given(server) > 100, "without a fetch for each message"
                await message.ack()
                break
        await log.last_seq()  # a call behind the end of the credit
        assert await given(server) == 0


async def test_a_handler_gives_credit_again_on_a_new_connection(serve: Serve) -> None:
    async with serve() as server, headwater.open_async(server.url, reconnect_min=0.01) as log:
        seen: asyncio.Queue[Any] = asyncio.Queue()

        @log.on("a", id="s")
        async def handle(message: headwater.AsyncReceivedMessage) -> None:
            await seen.put(message.data)

        await log.start()
        async with asyncio.timeout(PATIENCE_S):
            for number in range(5):
                await log.publish("a", number)
                assert await seen.get() == number
                for connection in server.connections:
                    connection._transport._transport.abort()  # type: ignore[attr-defined]
        await log.stop()
