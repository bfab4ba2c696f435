"""The path `/jrow` has the shapes of JROW's implementation. Its clients find a handler by the `method` of a
notification: the topic or pattern exactly as they subscribed to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from foreign_client import PATIENCE_S, Serve, connect, turn
from jrow_client import JrowClient, JrowError, connect_jrow

Json = Any


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await turn()


async def settled(client: JrowClient) -> None:
    """What the server sent before answering this has been dispatched."""
    await client.request("rpc.last_seq", {})


# --- live -------------------------------------------------------------------------------------------------------------


async def test_a_handler_of_a_topic_gets_the_data_itself(serve: Serve) -> None:
    async with serve() as server, connect_jrow(server) as client, connect(server) as publisher:
        heard: list[Json] = []
        answer = await client.subscribe("stock.prices", heard.append)
        assert answer == {"subscribed": True, "topic": "stock.prices", "pattern": False}
        values = [{"symbol": "X", "price": 1.5}, [1, 2], 7, "text", None, True]  # any JSON value, not structures alone
        for value in values:
            await publisher.publish("stock.prices", value)
        await until(lambda: len(heard) == len(values))
        assert heard == values
        assert client.unhandled == []


async def test_a_handler_of_a_pattern_gets_the_topic_too(serve: Serve) -> None:
    async with serve() as server, connect_jrow(server) as client, connect(server) as publisher:
        heard: dict[str, list[Json]] = {"events.*": [], "events.>": [], "events.login": []}
        for pattern, each in heard.items():
            assert (await client.subscribe(pattern, each.append))["pattern"] is (pattern != "events.login")
        await publisher.publish("events.login", {"user": 1})
        await publisher.publish("events.a.b", 2)
        await until(lambda: len(heard["events.>"]) == 2)
        login = {"topic": "events.login", "data": {"user": 1}}
        assert heard == {
            "events.*": [login],
            "events.>": [login, {"topic": "events.a.b", "data": 2}],
            "events.login": [{"user": 1}],
        }
        assert client.unhandled == []


async def test_a_topic_longer_than_the_name_of_a_method_arrives(serve: Serve) -> None:
    async with serve() as server, connect_jrow(server) as client, connect(server) as publisher:
        heard: list[Json] = []
        await client.subscribe("x" * 250, heard.append)
        await publisher.publish("x" * 250, 1)
        await until(lambda: heard == [1])


async def test_notifications_come_one_a_frame_also_after_hello(serve: Serve) -> None:
    async with serve() as server, connect_jrow(server) as client, connect(server) as publisher:
        heard: list[Json] = []
        await client.request("rpc.hello", {})
        await client.subscribe("a", heard.append)
        await publisher.publish_many("a", 20)
        await until(lambda: heard == list(range(20)) or bool(client.unhandled))
        assert client.unhandled == []


async def test_unsubscribing_names_the_topic(serve: Serve) -> None:
    async with serve() as server, connect_jrow(server) as client, connect(server) as publisher:
        await client.subscribe("a.*", lambda _: None)
        assert await client.unsubscribe("a.*") == {"unsubscribed": True, "topic": "a.*"}
        assert await client.request("rpc.unsubscribe", {"topic": "b"}) == {"unsubscribed": False, "topic": "b"}
        await publisher.publish("a.b")
        await settled(client)
        assert client.unhandled == []


async def test_a_batch_of_calls_is_answered_by_an_array(serve: Serve) -> None:
    async with serve() as server, connect_jrow(server) as client:
        answers = await client.batch([("rpc.subscribe", {"topic": topic}) for topic in ("a", "b.*")])
        assert [each["topic"] for each in answers] == ["a", "b.*"]


# --- durable ----------------------------------------------------------------------------------------------------------


async def test_a_durable_handler_gets_seq_topic_and_data_and_acks(serve: Serve) -> None:
    async with serve() as server, connect_jrow(server) as client, connect(server) as publisher:
        await publisher.publish("orders.new", {"order": 1})
        for id, topic in (("billing", "orders.*"), ("audit", "orders.new")):
            got: list[Json] = []
            assert await client.subscribe_persistent(id, topic, got.append) == {
                "subscribed": True,
                "subscription_id": id,
                "topic": topic,
                "resumed_from_seq": 0,
                "undelivered_count": 1,
            }
            await until(lambda got=got: bool(got))  # type: ignore[misc]
            assert got == [{"sequence_id": 1, "topic": "orders.new", "data": {"order": 1}}]
            answer = {"acknowledged": True, "subscription_id": id, "sequence_id": 1}
            assert await client.ack_persistent(id, 1) == answer
            assert await client.ack_persistent(id, 1) == answer  # a client may send it again
            released = await client.request("rpc.unsubscribe_persistent", {"subscription_id": id})
            assert released == {"unsubscribed": True, "subscription_id": id}
        assert (await client.subscribe_persistent("billing", "orders.*", lambda _: None))["resumed_from_seq"] == 1
        with pytest.raises(JrowError) as refused:
            await client.ack_persistent("billing", 99)
        assert refused.value.code == -32003
        assert client.unhandled == []


async def test_batches_are_bare_arrays(serve: Serve) -> None:
    async with serve() as server, connect_jrow(server) as client, connect(server) as publisher:
        await publisher.publish("a", 1)
        wanted = [{"subscription_id": id, "topic": topic} for id, topic in (("s", "a"), ("t", "*"))]
        client._handlers = {"a": lambda _: None, "*": lambda _: None}
        assert await client.request("rpc.subscribe_persistent_batch", wanted) == [
            {**each, "success": True, "resumed_from_seq": 0, "undelivered_count": 1} for each in wanted
        ]
        acks = [{"subscription_id": id, "sequence_id": seq} for id, seq in (("s", 1), ("t", 1), ("t", 9), ("no", 1))]
        await settled(client)
        outcomes = await client.request("rpc.ack_persistent_batch", acks)
        assert [each.pop("acknowledged") for each in outcomes] == [True, True, False, False]
        assert [each.pop("error", "") != "" for each in outcomes] == [False, False, True, True]
        assert outcomes == acks
        assert await client.request("rpc.unsubscribe_persistent_batch", ["s", "t"]) == [
            {"subscription_id": id, "unsubscribed": True} for id in ("s", "t")
        ]
        assert client.unhandled == []


async def test_a_durable_handler_is_not_called_for_a_live_subscription_to_the_same_topic(serve: Serve) -> None:
    """JROW's clients take both: the playground to register its handler, the one in Rust after it has reconnected. Both
    kinds of notification have the same `method`, so the durable handler would get bare data, without a seq to ack."""
    async with serve() as server, connect_jrow(server) as client, connect(server) as publisher:
        got: list[Json] = []
        await client.subscribe("a.*", got.append)
        await client.subscribe_persistent("s", "a.*", got.append)
        live: list[Json] = []
        await client.subscribe("a.b", live.append)
        await publisher.publish("a.b", 1)
        await until(lambda: bool(got and live))
        assert (got, live) == ([{"sequence_id": 1, "topic": "a.b", "data": 1}], [1])
        await client.request("rpc.unsubscribe_persistent", {"subscription_id": "s"})
        await publisher.publish("a.b", 2)
        await until(lambda: len(got) > 1 and len(live) > 1)
        assert (got[1:], live) == ([{"topic": "a.b", "data": 2}], [1, 2])


async def test_the_other_paths_keep_the_shapes_of_the_specification(serve: Serve) -> None:
    async with serve() as server, connect(server) as client, connect(server, "/") as other:
        await client.call("rpc.subscribe", {"topic": "a"})
        await client.subscribe("s", "a")
        await other.publish("a", 1)
        notes = {note["method"]: note["params"] for note in await client.notes(2)}
        assert notes.keys() == {"rpc.notification", "rpc.notification.persistent"}
        assert notes["rpc.notification"].items() >= {"topic": "a", "data": 1, "pattern": "a"}.items()
        assert notes["rpc.notification.persistent"].items() >= {"subscription_id": "s", "sequence_id": 1}.items()
        assert await client.call("rpc.unsubscribe", {"topic": "a"}) == {"unsubscribed": True}
