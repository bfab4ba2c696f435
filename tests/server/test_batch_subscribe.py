"""Subscribing to many at once: all or none."""

from __future__ import annotations

import pytest
from foreign_client import Make, Serve, bearer, connect

BATCH = "rpc.subscribe.persistent.batch"


def wants(*pairs: tuple[str, str]) -> dict[str, list[dict[str, str]]]:
    return {"subscriptions": [{"subscription_id": id, "topic": topic} for id, topic in pairs]}


@pytest.mark.parametrize(
    ("last", "code"),
    [
        (("bad", "a..b"), -32004),
        (("", "a"), -32602),
        (("held", "a"), -32001),
        (("old", "another.pattern"), -32007),
        (("new1", "a"), -32001),  # twice the same
    ],
)
async def test_a_batch_of_which_one_is_refused_leaves_nothing(serve: Serve, last: tuple[str, str], code: int) -> None:
    async with serve() as server, connect(server) as client, connect(server) as other:
        await other.subscribe("held", "a")
        await client.subscribe("old", "a")
        await client.release("old")
        assert await client.code(BATCH, wants(("new1", "a"), ("new2", ">"), last)) == code
        stored = await client.call("rpc.subscriptions")
        assert sorted(each["id"] for each in stored) == ["held", "old"]
        assert [each["id"] for each in stored if each["holder"] is not None] == ["held"]
        for id in ("new1", "new2"):
            assert await client.code("rpc.unsubscribe.persistent", {"subscription_id": id}) == -32002
        await other.publish("a")
        assert (await other.delivery())["subscription_id"] == "held"
        assert await client.has_nothing_to_read()


async def test_what_was_stored_before_is_given_back_as_it_was(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.publish_many("a", 3)
        await client.subscribe("old", "a")
        await client.deliveries(3)
        await client.ack("old", 1)
        await client.release("old")
        assert await client.code(BATCH, wants(("old", "a"), ("bad", "a..b"))) == -32004
        assert (await client.subscribe("old", "a"))["resumed_from_sequence"] == 1


async def test_no_more_subscriptions_than_a_connection_may_have(serve: Serve) -> None:
    async with serve(limits_subscriptions_per_connection=2) as server, connect(server) as client:
        assert await client.code(BATCH, wants(("a", "a"), ("b", "b"), ("c", "c"))) == -32005
        assert await client.call("rpc.subscriptions") == []
        await client.call(BATCH, wants(("a", "a"), ("b", "b")))
        assert await client.code("rpc.subscribe.persistent", {"subscription_id": "c", "topic": "c"}) == -32005
        await client.release("a")
        await client.subscribe("c", "c")
        assert await client.code("rpc.subscribe.batch", {"topics": ["a", "b", "c"]}) == -32005
        await client.call("rpc.subscribe.batch", {"topics": ["a", "b"]})
        assert await client.code("rpc.subscribe", {"topic": "c"}) == -32005
        await client.call("rpc.subscribe", {"topic": "b"})  # no new one


async def test_of_batches_to_leave_all_are_known_or_none_is_left(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.subscribe("a", "a")
        params = {"subscription_ids": ["a", "never"]}
        assert await client.code("rpc.unsubscribe.persistent.batch", params) == -32002
        await client.publish("a")
        assert (await client.delivery())["subscription_id"] == "a"


async def test_undoing_leaves_what_another_token_began_meanwhile(serve_tokens: Serve, make: Make) -> None:
    attacker = make("attacker", read=["mine.>"], consume=["att-*"])
    victim = make("victim", read=["orders.>"], consume=["billing"])
    async with (
        serve_tokens() as server,
        connect(server, **bearer(attacker)) as client,
        connect(server, **bearer(attacker)) as holder,
        connect(server, **bearer(victim)) as other,
    ):
        await holder.subscribe("att-held", "mine.x")
        wanted = [
            {"subscription_id": "billing", "topic": "mine.x", "mode": "ephemeral"},
            {"subscription_id": "att-held", "topic": "mine.x", "wait": 15},
            {"subscription_id": "att-bad", "topic": "orders.x"},
        ]
        batch = await client.ask(BATCH, {"subscriptions": wanted})
        await other.subscribe("billing", "orders.>", mode="shared")
        await holder.release("att-held")
        assert await client.code_of(batch) == -32000
        assert [each["id"] for each in await other.call("rpc.subscriptions")] == ["billing"]


async def test_undoing_goes_on_past_what_is_gone_already(serve: Serve) -> None:
    async with serve() as server, connect(server) as client, connect(server) as holder:
        await holder.subscribe("held", "a")
        wanted = wants(("new1", "a"), ("new2", "a"), ("held", "a"), ("bad", "a..b"))
        wanted["subscriptions"][2]["wait"] = 15  # type: ignore[assignment]
        batch = await client.ask(BATCH, wanted)
        while len(await holder.call("rpc.subscriptions")) < 3:
            pass
        await client.release("new1")
        await holder.release("held")
        assert await client.code_of(batch) == -32004
        assert [each["id"] for each in await holder.call("rpc.subscriptions")] == ["held"]
