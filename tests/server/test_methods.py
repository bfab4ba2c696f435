"""Every method of the wire, its exact result and its refusals; the persistent ones in both spellings."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
from foreign_client import Client, Serve, connect

from headwater import ManualClock


class Spelling(NamedTuple):
    """What the persistent methods are called, and how their batches are wrapped."""

    subscribe: str
    acknowledge: str
    unsubscribe: str
    batch: str
    is_bare: bool

    def many(self, name: str, items: list[Any]) -> Any:
        return items if self.is_bare else {name: items}


SPELLINGS = {
    "dots": Spelling(
        "rpc.subscribe.persistent", "rpc.acknowledge.persistent", "rpc.unsubscribe.persistent", ".batch", False
    ),
    "underscores": Spelling(
        "rpc.subscribe_persistent", "rpc.ack_persistent", "rpc.unsubscribe_persistent", "_batch", True
    ),
}


@pytest.fixture(params=SPELLINGS)
def spelling(request: pytest.FixtureRequest) -> Spelling:
    return SPELLINGS[request.param]


NEW = {"resumed_from_sequence": 0, "resumed_from_seq": 0, "undelivered_count": 0}


def promised_members(result: dict[str, Any]) -> dict[str, Any]:
    """The members that the wire promises; ours may have more."""
    names = ("subscription_id", "topic", "resumed_from_sequence", "resumed_from_seq", "undelivered_count")
    return {name: result[name] for name in names}


# --- publishing -------------------------------------------------------------------------------------------------------


async def test_publish(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        assert await client.call("rpc.publish", {"topic": "a", "data": 1, "id": "x"}) == {
            "sequence_id": 1,
            "duplicate": False,
        }
        again = await client.call("rpc.publish", {"topic": "a", "data": 2, "id": "x"})
        assert again == {"sequence_id": 1, "duplicate": True}


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"topic": "a.*", "data": 1}, -32004),
        ({"topic": "", "data": 1}, -32004),
        ({"topic": "a..b", "data": 1}, -32004),
        ({"topic": "a" * 2_000, "data": 1}, -32004),
        ({"topic": "a"}, -32602),
        ({"data": 1}, -32602),
        ({"topic": 7, "data": 1}, -32602),
        ({"topic": "a", "data": 1, "priority": "high"}, -32602),
        ({"topic": "a", "data": 1, "priority": 10**9}, -32602),
        ({"topic": "a", "data": 1, "deliver_at": "tomorrow"}, -32602),
        ({"topic": "a", "data": 1, "deliver_at": 5, "delay": 5}, -32602),
        ({"topic": "a", "data": 1, "headers": {"from": 7}}, -32602),
        ({"topic": "a", "data": 1, "headers": {"x": "y" * 70_000}}, -32005),
        ({"topic": "a", "data": "x" * 1_100_000}, -32005),
        ({"topic": "a", "data": 1, "id": "x" * 200}, -32005),
        ({"topic": "a", "data": 1, "number": 1}, -32602),  # without a publisher to number for
    ],
)
async def test_publish_refuses(serve: Serve, params: dict[str, Any], code: int) -> None:
    async with serve() as server, connect(server) as client:
        assert await client.code("rpc.publish", params) == code
        assert await client.code("rpc.publish.batch", {"messages": [{"topic": "a", "data": 0}, params]}) == code
        assert (await client.call("rpc.last_seq")) == {"sequence_id": 0}


async def test_publish_batch_is_all_or_nothing(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        two = [{"topic": "a", "data": 1}, {"topic": "b", "data": 2, "id": "x"}]
        assert (await client.call("rpc.publish.batch", {"messages": two}))["sequence_ids"] == [1, 2]
        assert (await client.call("rpc.publish.batch", {"messages": two}))["sequence_ids"] == [3, 2]
        assert (await client.call("rpc.publish.batch", {"messages": []}))["sequence_ids"] == []
        error = await client.refusal("rpc.publish.batch", {"messages": [*two, {"topic": "b.>", "data": 3}]})
        assert error["code"] == -32004
        assert "message 2" in error["data"]["where"]
        assert (await client.call("rpc.last_seq")) == {"sequence_id": 3}


async def test_what_was_published_is_what_is_delivered(serve: Serve) -> None:
    clock = ManualClock(1_700_000_000_123)
    async with serve(clock=clock) as server, connect(server) as client:
        data = {"text": "ü€😀", "whole": 2**63, "part": 0.1, "none": None, "list": [[], {}]}
        headers = {"from": "shop", "type": "Order", "version": 3, "traceparent": "00-ab", "mine": {"x": [1]}}
        await client.publish("orders.new", data, headers=headers, to="billing", correlation_id="c")
        await client.subscribe("s", "orders.>")
        delivery = await client.delivery()
        assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", delivery.pop("id"))
        assert delivery == {
            "subscription_id": "s",
            "topic": "orders.new",
            "sequence_id": 1,
            "timestamp": "2023-11-14T22:13:20.123Z",
            "data": data,
            "headers": {**headers, "to": "billing", "correlation_id": "c"},
            "attempt": 1,
        }


async def test_a_given_id_is_delivered_as_given(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.publish("a", 1, id="order-17")
        await client.subscribe("s", "a")
        assert (await client.delivery())["id"] == "order-17"


@pytest.mark.parametrize("at", ["2023-11-14T22:13:21Z", "2023-11-14T23:13:21+01:00", 1_700_000_001])
async def test_deliver_at_delays_and_expires_at_ends(serve: Serve, at: Any) -> None:
    clock = ManualClock(1_700_000_000_000)
    async with serve(clock=clock) as server, connect(server) as client:
        later = await client.publish("a", "later", deliver_at=at)
        await client.publish("a", "gone by then", deliver_at=at, expires_at=1_700_000_000.5)
        now = await client.publish("a", "now")
        await client.subscribe("s", "a")
        assert (await client.delivery())["sequence_id"] == now
        clock.advance(0.999)
        assert await client.has_nothing_to_read()
        clock.advance(0.001)
        assert (await client.delivery())["sequence_id"] == later
        assert await client.has_nothing_to_read()


# --- durable subscriptions, in both spellings -------------------------------------------------------------------------


async def test_subscribe_tells_where_it_goes_on(serve: Serve, spelling: Spelling) -> None:
    async with serve() as server, connect(server) as client:
        params = {"subscription_id": "s", "topic": "a.>"}
        result = await client.call(spelling.subscribe, params)
        assert promised_members(result) == {**params, **NEW}
        assert result["subscribed"] is True
        await client.publish_many("a.b", 5)
        assert await client.delivered_seqs(5) == [1, 2, 3, 4, 5]
        for seq in (1, 2, 3):
            acked = await client.call(spelling.acknowledge, {"subscription_id": "s", "sequence_id": seq})
            assert acked == {"acknowledged": True}
        assert await client.call(spelling.unsubscribe, {"subscription_id": "s"}) == {"unsubscribed": True}
        result = await client.call(spelling.subscribe, params)
        assert promised_members(result) == {
            **params,
            "resumed_from_sequence": 3,
            "resumed_from_seq": 3,
            "undelivered_count": 2,
        }


async def test_the_batches_of_the_persistent_methods(serve: Serve, spelling: Spelling) -> None:
    async with serve() as server, connect(server) as client:
        both = [{"subscription_id": "s", "topic": "a"}, {"subscription_id": "t", "topic": ">"}]
        begun = await client.call(spelling.subscribe + spelling.batch, spelling.many("subscriptions", both))
        assert begun.keys() == {"subscriptions"}
        assert [promised_members(each) for each in begun["subscriptions"]] == [{**each, **NEW} for each in both]
        await client.publish("a", 1)
        assert {(await client.delivery())["subscription_id"] for _ in both} == {"s", "t"}
        acks = [
            {"subscription_id": "s", "sequence_id": 1},
            {"subscription_id": "s", "sequence_id": 77},
            {"subscription_id": "nobody", "sequence_id": 1},
            {"subscription_id": "t", "sequence_id": 1},
        ]
        acked = await client.call(spelling.acknowledge + spelling.batch, spelling.many("acknowledgments", acks))
        successes = [True, False, False, True]
        assert acked == {"acknowledged": [{**a, "success": ok} for a, ok in zip(acks, successes, strict=True)]}
        ids = ["s", "t"]
        ended = await client.call(spelling.unsubscribe + spelling.batch, spelling.many("subscription_ids", ids))
        assert ended == {"unsubscribed": ids}
        assert (await client.subscribe("s", "a"))["resumed_from_sequence"] == 1
        assert (await client.subscribe("t", ">"))["resumed_from_sequence"] == 1


async def test_refusals_of_the_persistent_methods(serve: Serve, spelling: Spelling) -> None:
    async with serve() as server, connect(server) as client, connect(server) as other:
        subscribe, acknowledge, unsubscribe = spelling[:3]
        await client.subscribe("s", "a")
        await client.publish("a", 1)
        await client.delivery()
        for each in (other, client):
            refused = await each.refusal(subscribe, {"subscription_id": "s", "topic": "a"})
            assert (refused["code"], refused["message"]) == (
                -32001,
                "Subscription 's' is already active on another connection",
            )
        for params, code in [
            ({"subscription_id": "t", "topic": "a..b"}, -32004),
            ({"subscription_id": "t", "topic": "orders.*.>"}, -32004),
            ({"subscription_id": "t", "topic": ""}, -32004),
            ({"subscription_id": "", "topic": "a"}, -32602),
            ({"subscription_id": "t" * 200, "topic": "a"}, -32602),
            ({"subscription_id": "t"}, -32602),
            ({"subscription_id": "t", "topic": "a", "mode": "mine"}, -32602),
            ({"subscription_id": "t", "topic": "a", "max_in_flight": 0}, -32602),
            ({"subscription_id": "t", "topic": "a", "where": "data.x =="}, -32602),
            ({"subscription_id": "t", "topic": "a", "from": 123}, -32602),
            ({"subscription_id": "t", "topic": "a", "start": "yesterday"}, -32602),
            ({"subscription_id": "t", "topic": "a", "deliver": "by mail"}, -32602),
        ]:
            assert await client.code(subscribe, params) == code, params
        await client.subscribe("taken", "b")
        await client.release("taken")
        assert await client.code(subscribe, {"subscription_id": "taken", "topic": "c"}) == -32007
        for params, code in [
            ({"subscription_id": "nobody", "sequence_id": 1}, -32002),
            ({"subscription_id": "s", "sequence_id": 2}, -32003),
            ({"subscription_id": "s", "sequence_id": 2**80}, -32003),
            ({"subscription_id": "s", "sequence_id": -1}, -32003),
            ({"subscription_id": "s"}, -32602),
            ({"subscription_id": "s", "sequence_id": 1, "sequence_ids": [1]}, -32602),
            ({"subscription_id": "s", "sequence_id": "1"}, -32602),
        ]:
            assert await client.code(acknowledge, params) == code, params
        assert await other.code(acknowledge, {"subscription_id": "s", "sequence_id": 1}) == -32002  # not held there
        assert await other.code(unsubscribe, {"subscription_id": "s"}) == -32002
        await client.ack("s", 1)
        await client.ack("s", 1)  # again


async def test_nack_reject_and_extend(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.publish_many("a", 3)
        await client.subscribe("s", "a")
        await client.deliveries(3)
        for method, seq in (("rpc.nack", 1), ("rpc.reject", 2), ("rpc.extend", 3)):
            for params, code in [
                ({"subscription_id": "s", "sequence_id": 9}, -32003),
                ({"subscription_id": "x", "sequence_id": 1}, -32002),
                ({"subscription_id": "s"}, -32602),
            ]:
                assert await client.code(method, params) == code, (method, params)
            assert await client.call(method, {"subscription_id": "s", "sequence_id": seq}) == {"ok": True}
        assert await client.code("rpc.nack", {"subscription_id": "s", "sequence_id": 3, "delay": -1}) == -32602


# --- live -------------------------------------------------------------------------------------------------------------


async def test_live_subscribe_and_unsubscribe(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        assert await client.call("rpc.subscribe", {"topic": "a.*"}) == {"subscribed": True, "topic": "a.*"}
        assert await client.call("rpc.subscribe.batch", {"topics": ["b", "c.>"]}) == {"subscribed": ["b", "c.>"]}
        assert await client.call("rpc.unsubscribe", {"topic": "a.*"}) == {"unsubscribed": True}
        assert await client.call("rpc.unsubscribe", {"topic": "a.*"}) == {"unsubscribed": False}
        gone = await client.call("rpc.unsubscribe.batch", {"topics": ["b", "never"]})
        assert gone == {"unsubscribed": ["b"]}
        for method in ("rpc.subscribe", "rpc.subscribe.batch"):
            params = {"topic": "a..b"} if method == "rpc.subscribe" else {"topics": ["a", "a..b"]}
            assert await client.code(method, params) == -32004


async def test_of_live_patterns_in_a_batch_all_are_heard_or_none(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        assert await client.code("rpc.subscribe.batch", {"topics": ["a", "a.>.b"]}) == -32004
        await client.publish("a", 1)
        await client.call("rpc.subscribe", {"topic": "b"})
        await client.publish("a", 2)
        await client.publish("b", 3)
        assert (await client.note("rpc.notification"))["data"] == 3


async def hello(client: Client) -> Any:
    return await client.call("rpc.hello", {"client": "foreign"})


async def test_hello_names_the_limits(serve: Serve) -> None:
    async with serve(limits_frame_bytes=50_000, limits_batch_calls=7) as server, connect(server) as client:
        welcome = await hello(client)
        assert welcome["server"] == "headwater"
        assert (welcome["frame_bytes_max"], welcome["batch_calls_max"]) == (50_000, 7)
        assert welcome["authenticated"] is True
        assert welcome["log"] == "log.db"  # not the path, which stays private
