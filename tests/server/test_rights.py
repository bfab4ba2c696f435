"""What each right is for, and that nothing is done without it."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from foreign_client import PATIENCE_S, Client, Make, Refused, Serve, bearer, connect, turn
from rights_table import BLOCK, DOCS, rights_table
from websockets.exceptions import InvalidStatus

import headwater
from headwater import ManualClock
from headwater.server import connection as connection_module
from headwater.server import server as server_module
from headwater.server.auth import EVERYTHING, RIGHTS, Scopes, TokenFile, id_of
from headwater.server.methods import METHODS
from headwater.server.registry import CallContext, Method, Middleware, ShortCircuit

ALONE: dict[str, Scopes] = {
    "publish": Scopes(publish=(">",)),
    "read": Scopes(read=(">",)),
    "consume": Scopes(consume=("*",)),
    "manage": Scopes(manage=(">",)),
    "call": Scopes(call=(">",)),
    "admin": Scopes(admin=True),
}
UNAUTHORIZED = -32000

# --- by construction --------------------------------------------------------------------------------------------------

ID = {"subscription_id": "s"}
SEQ = {**ID, "sequence_id": 1}
LINE = json.dumps(
    {
        "subscription": "s",
        "reason": "rejected",
        "attempts": 1,
        "died_at": "2024-01-01T00:00:00Z",
        "message": {"seq": 1, "id": "x", "topic": "a", "data": 1, "published_at": "2024-01-01T00:00:00Z", "size": 1},
    }
)
SCHEDULE = {"schedule": {"id": "s", "topic": "a", "every_ms": 60_000}, "publisher": "p"}
PARAMS: dict[str, Any] = {
    "rpc.hello": {},
    "rpc.authenticate": {"token": "x"},
    "rpc.publish": {"topic": "a", "data": 1},
    "rpc.publish.batch": {"messages": [{"topic": "a", "data": 1}]},
    "rpc.subscribe": {"topic": "a"},
    "rpc.unsubscribe": {"topic": "a"},
    "rpc.subscribe.batch": {"topics": ["a"]},
    "rpc.unsubscribe.batch": {"topics": ["a"]},
    "rpc.subscribe.persistent": {**ID, "topic": "a"},
    "rpc.subscribe.persistent.batch": {"subscriptions": [{**ID, "topic": "a"}]},
    "rpc.unsubscribe.persistent": ID,
    "rpc.unsubscribe.persistent.batch": {"subscription_ids": ["s"]},
    "rpc.acknowledge.persistent": SEQ,
    "rpc.acknowledge.persistent.batch": {"acknowledgments": [SEQ]},
    "rpc.nack": SEQ,
    "rpc.reject": SEQ,
    "rpc.extend": SEQ,
    "rpc.fetch": {**ID, "count": 1, "wait": 0},
    "rpc.credit": {**ID, "upto": 1},
    "rpc.fetch.end": ID,
    "rpc.release": {**ID, "sequence_ids": [1]},
    "rpc.subscription": ID,
    "rpc.subscription.remove": ID,
    "rpc.subscription.pause": ID,
    "rpc.subscription.resume": ID,
    "rpc.seek": {**ID, "start": 0},
    "rpc.topic_max_seq": {"topic": "a"},
    "rpc.last_seq": {},
    "rpc.messages": {},
    "rpc.message": {"sequence_id": 1},
    "rpc.topics": {},
    "rpc.subscriptions": {},
    "rpc.stats": {},
    "rpc.stats.history": {},
    "rpc.lake": {},
    "rpc.health": {},
    "rpc.maintenance.run": {},
    "rpc.retain": {"topic": "a", "max_count": 1},
    "rpc.retention.remove": {"topic": "a"},
    "rpc.retention": {},
    "rpc.schedules": {},
    "rpc.schedule.declare": SCHEDULE,
    "rpc.schedule.take": {**SCHEDULE, "due_ms": 60_000},
    "rpc.schedule.publish": {**SCHEDULE, "fence": 1, "at_ms": 60_000},
    "rpc.schedule.remove": {"schedule_id": "s"},
    "rpc.dead_letters": {},
    "rpc.dead_letters.get": {"id": 1},
    "rpc.dead_letters.stats": {},
    "rpc.dead_letters.groups": {},
    "rpc.dead_letters.redrive": {},
    "rpc.dead_letters.purge": {},
    "rpc.dead_letters.export": {},
    "rpc.dead_letters.import": {"lines": [LINE]},
    "rpc.housekeep": {},
    "rpc.unretain": {"topic": "a"},
    "rpc.subscribe_persistent": {**ID, "topic": "a"},
    "rpc.subscribe_persistent_batch": [{**ID, "topic": "a"}],
    "rpc.ack_persistent": SEQ,
    "rpc.ack_persistent_batch": [SEQ],
    "rpc.unsubscribe_persistent": ID,
    "rpc.unsubscribe_persistent_batch": ["s"],
    "mine": {},
}
BESIDES = {"rpc.dead_letters.import": "publish"}  # what one right alone does not do
BESIDES |= {name: "consume" for name in PARAMS if name.startswith(("rpc.subscribe.p", "rpc.subscribe_"))}


def test_a_method_cannot_be_declared_without_a_right() -> None:
    with pytest.raises(TypeError):
        Method(None, lambda *_: None)  # type: ignore[call-arg]


def test_no_method_is_missing_here_or_in_the_documentation() -> None:
    assert {*PARAMS} == {*METHODS, "mine"}
    [documented] = BLOCK.findall(DOCS.read_text())
    assert documented == rights_table(), "run: python tests/server/rights_table.py"
    assert not [name for name, method in METHODS.items() if not method.run.__doc__], "methods without a docstring"


async def outcome(client: Client, method: str) -> int | None:
    try:
        await client.call(method, PARAMS[method])
    except Refused as refused:
        return int(refused.error["code"])
    return None


@pytest.mark.parametrize("has_middleware", [False, True], ids=["plain", "with middleware"])
async def test_each_method_wants_its_right_and_no_other(serve_tokens: Serve, make: Make, has_middleware: bool) -> None:
    server = serve_tokens()
    server.method("mine")(lambda: 1)
    if has_middleware:  # calls then go another way
        server.use(Middleware())
    everything = make("everything", EVERYTHING)
    refused = 0
    async with server:
        for right in RIGHTS:
            async with connect(server, **bearer(make(right, ALONE[right]))) as client:
                for method in PARAMS:
                    needs = METHODS[method].needs.rights if method in METHODS else ("call",)
                    if method == "rpc.authenticate" or not needs:
                        continue
                    code = await outcome(client, method)
                    is_refused = right not in needs or method in BESIDES
                    assert (code == UNAUTHORIZED) == is_refused, (right, method, code)
                    refused += is_refused
        async with connect(server, **bearer(everything)) as client:
            for method in PARAMS:
                if method != "rpc.authenticate":
                    assert await outcome(client, method) != UNAUTHORIZED, method
        async with connect(server) as stranger:
            for method in PARAMS:
                if method not in ("rpc.hello", "rpc.authenticate"):
                    assert await outcome(stranger, method) == UNAUTHORIZED, method
            assert await stranger.code("no.such.method") == UNAUTHORIZED
            assert await stranger.code("rpc.no_such_method") == UNAUTHORIZED
    assert refused >= 182


# --- patterns ---------------------------------------------------------------------------------------------------------


async def test_rights_hold_for_what_their_patterns_cover(serve_tokens: Serve, make: Make) -> None:
    token = make("shop", read=["orders.>"], consume=["shop", "shop-*"], manage=["orders.>"], publish=["orders.*"])
    async with (
        serve_tokens() as server,
        connect(server, **bearer(make("all", EVERYTHING))) as other,
        connect(server, **bearer(token)) as client,
    ):
        for name, pattern in [("shop", "orders.new"), ("shop-1", "orders.>")]:
            await client.subscribe(name, pattern)
        assert (await client.refusal("rpc.subscribe.persistent", {**ID, "topic": "stock.new"}))["data"]["where"] == (
            "stock.new"
        )
        for pattern in (">", "*.new", "orders", "#", "orders.#"):
            dialect = "amqp" if "#" in pattern else "nats"
            params = {"subscription_id": "shop-2", "topic": pattern, "dialect": dialect}
            assert await client.code("rpc.subscribe.persistent", params) == UNAUTHORIZED, pattern
            retention = {"topic": pattern, "max_count": 1, "dialect": dialect}
            assert await client.code("rpc.retain", retention) == UNAUTHORIZED
            assert await client.code("rpc.retention.remove", {"topic": pattern, "dialect": dialect}) == UNAUTHORIZED
        for topic in (None, ">", "*.new", "orders"):
            for method in ("", ".stats", ".redrive", ".purge", ".export"):
                assert await client.code(f"rpc.dead_letters{method}", {"topic": topic}) == UNAUTHORIZED, topic
                assert await client.code(f"rpc.dead_letters{method}", {"ids": [1], "topic": topic}) == UNAUTHORIZED
        assert await client.call("rpc.dead_letters.purge", {"topic": "orders.>"}) == 0
        await client.call("rpc.retain", {"topic": "orders.new", "max_count": 9})
        await other.call("rpc.retain", {"topic": "stock.>", "max_count": 9})
        assert [each["pattern"] for each in await client.call("rpc.retention")] == ["orders.new"]
        assert len(await other.call("rpc.retention")) == 2


async def test_the_topic_of_a_schedule_that_is_not_ones_own_is_not_told(serve_tokens: Serve, make: Make) -> None:
    token = make("shop", manage=["orders.>"], publish=["orders.*"])
    theirs, mine = ({"id": "s", "topic": topic, "every_ms": 60_000} for topic in ("secret.merger", "orders.new"))
    async with (
        serve_tokens() as server,
        connect(server, **bearer(make("all", EVERYTHING))) as other,
        connect(server, **bearer(token)) as client,
    ):
        await other.call("rpc.schedule.declare", {"schedule": theirs, "publisher": "p"})
        for method, params in (
            ("rpc.schedule.declare", {"schedule": mine, "publisher": "p"}),
            ("rpc.schedule.remove", {"schedule_id": "s"}),
        ):
            error = await client.refusal(method, params)
            assert (error["code"], error["data"]["where"]) == (UNAUTHORIZED, "s")
            assert "secret" not in json.dumps(error)
        assert await client.call("rpc.schedules") == []
        assert [each["schedule"]["topic"] for each in await other.call("rpc.schedules")] == ["secret.merger"]


async def test_a_name_that_may_not_be_consumed_is_refused(serve_tokens: Serve, make: Make) -> None:
    token = make("shop", read=[">"], consume=["shop", "shop-*"])
    async with serve_tokens() as server, connect(server, **bearer(token)) as client:
        for name in ("shop", "shop-1", "shop-1#2"):
            await client.subscribe(name, "a", mode="shared")
        for name in ("shop2", "sho", "billing", "shopping#shop-"):
            error = await client.refusal("rpc.subscribe.persistent", {"subscription_id": name, "topic": "a"})
            assert (error["code"], error["message"]) == (UNAUTHORIZED, "the token has no consume right for this")
        await client.subscribe("anything", "a", mode="ephemeral")  # which leaves nothing behind
        assert [each["id"] for each in await client.call("rpc.subscriptions")] == ["shop", "shop-1"]


async def test_only_what_may_be_read_or_managed_is_shown(serve_tokens: Serve, make: Make) -> None:
    reader, manager = make("reader", read=["a.>"], consume=["mine"]), make("manager", manage=["b.*"])
    async with (
        serve_tokens() as server,
        connect(server, **bearer(make("all", EVERYTHING))) as other,
        connect(server, **bearer(reader)) as reading,
        connect(server, **bearer(manager)) as managing,
    ):
        for topic in ("a.x", "a.y", "b.x", "secret"):
            await other.publish(topic, "12345678")
        await other.subscribe("theirs", "b.x")
        await reading.subscribe("mine", "a.x")
        for client, topics, names in ((reading, ["a.x", "a.y"], ["mine"]), (managing, ["b.x"], ["theirs"])):
            assert [each[0] for each in await client.call("rpc.topics")] == topics
            statistics = await client.call("rpc.stats")
            assert [each[0] for each in statistics["topics"]] == topics
            assert statistics["messages"] == len(topics)
            assert statistics["bytes"] == 10 * len(topics)
            assert [each["id"] for each in statistics["subscriptions"]] == names
            assert [each["id"] for each in await client.call("rpc.subscriptions")] == names
            assert await client.code("rpc.topic_max_seq", {"topic": "secret"}) == UNAUTHORIZED
        [mine] = await reading.call("rpc.subscriptions")
        assert mine["owner"] == "label:reader"
        assert (await reading.call("rpc.topic_max_seq", {"topic": "a.y"}))["sequence_id"] == 2
        assert await reading.code("rpc.topic_max_seq", {"topic": "a.>"}) == -32004


async def test_methods_of_the_application_are_called_by_pattern(serve_tokens: Serve, make: Make) -> None:
    server = serve_tokens()
    for name in ("orders.count", "orders.cancel.all", "stock.count"):
        server.method(name)(lambda: 1)
    async with server, connect(server, **bearer(make("till", call=["orders.*"]))) as client:
        assert await client.call("orders.count") == 1
        for name in ("orders.cancel.all", "stock.count", "orders", "secret"):
            assert await client.code(name) == UNAUTHORIZED, name
        assert await client.code("orders.no_such") == -32601


# --- whose a subscription is ------------------------------------------------------------------------------------------


async def test_a_subscription_belongs_to_the_label_that_made_it(serve_tokens: Serve, make: Make) -> None:
    rights: dict[str, Any] = {"read": [">"], "consume": ["*"], "publish": [">"]}
    async with (
        serve_tokens() as server,
        connect(server, **bearer(make("billing", **rights))) as owner,
        connect(server, **bearer(make("thief", **rights))) as thief,
        connect(server, **bearer(make("", **rights))) as unnamed,
        connect(server, **bearer(make("", **rights))) as another,
        connect(server, **bearer(make("operator", manage=["a"], read=["a"]))) as operator,
    ):
        await owner.subscribe("bills", "a", deliver="fetch")
        await owner.release("bills")
        await owner.publish_many("a", 3)
        for client in (thief, unnamed):
            for options in ({}, {"takeover": True}, {"mode": "shared"}, {"topic": "b"}):
                params = {"subscription_id": "bills", "topic": "a", **options}
                error = await client.refusal("rpc.subscribe.persistent", params)
                assert (error["code"], error["data"]["where"]) == (UNAUTHORIZED, "bills"), options
                assert error["message"] == "the subscription belongs to another token"
            batch = {"subscriptions": [{"subscription_id": "mine", "topic": "a"}, {**params, "topic": "a"}]}
            assert await client.code("rpc.subscribe.persistent.batch", batch) == UNAUTHORIZED
            for method in (*(f"rpc.subscription{end}" for end in ("", ".remove", ".pause", ".resume")), "rpc.seek"):
                asked = {"subscription_id": "bills", **({"start": 0} if method == "rpc.seek" else {})}
                error, missing = [
                    await client.refusal(method, {**asked, "subscription_id": id}) for id in ("bills", "billz")
                ]
                assert json.dumps(error) == json.dumps(missing).replace("billz", "bills")
                assert error["code"] == -32002
            assert await client.call("rpc.subscriptions") == []
        await unnamed.subscribe("own", "a")  # without a label, the token itself is the owner
        assert await another.code("rpc.subscription", {"subscription_id": "own"}) == -32002
        assert (await operator.call("rpc.subscription", {"subscription_id": "bills"}))["lag"] == 3
        await operator.subscribe("bills", "a", deliver="fetch", takeover=True)
        await operator.release("bills")
        assert (await owner.call("rpc.subscription", {"subscription_id": "bills"}))["owner"] == "label:billing"
        await owner.call("rpc.seek", {"subscription_id": "bills", "start": "first"})
        await operator.call("rpc.seek", {"subscription_id": "bills", "start": "new"})
        await owner.call("rpc.subscription.remove", {"subscription_id": "bills"})


async def test_a_new_token_of_the_same_label_goes_on_where_the_old_one_ended(
    serve_tokens: Serve, make: Make, tokens: TokenFile
) -> None:
    rights: dict[str, Any] = {"read": ["a"], "consume": ["bills"], "publish": ["a"]}
    old = make("billing", **rights)
    async with serve_tokens() as server:
        async with connect(server, **bearer(old)) as client:
            await client.call("rpc.hello", {"publisher": "till-7"})
            assert await client.publish("a", number=1) == 1
            await client.subscribe("bills", "a")
            await client.delivery()
            await client.ack("bills", 1)
            await client.release("bills")
        new = make("billing", **rights)
        tokens.revoke(str(id_of(old)))
        async with connect(server, **bearer(new)) as client:
            await client.call("rpc.hello", {"publisher": "till-7"})
            again = {"topic": "a", "data": None, "number": 1}
            assert await client.call("rpc.publish", again) == {"sequence_id": 1, "duplicate": True}
            assert (await client.subscribe("bills", "a"))["resumed_from_sequence"] == 1


async def test_what_was_there_before_there_were_tokens_is_open(serve: Serve, serve_tokens: Serve, make: Make) -> None:
    async with serve() as server, connect(server) as client:
        await client.subscribe("old", "a")
    rights: dict[str, Any] = {"read": [">"], "consume": ["old"]}
    async with serve_tokens() as server:
        for label in ("one", "two"):
            async with connect(server, **bearer(make(label, **rights))) as client:
                await client.subscribe("old", "a")
                assert (await client.call("rpc.subscription", {"subscription_id": "old"}))["owner"] is None
                await client.release("old")
        async with connect(server, **bearer(make("three", read=[">"], consume=["other"]))) as client:
            assert await client.code("rpc.subscribe.persistent", {"subscription_id": "old", "topic": "a"}) == -32000


async def test_a_subscription_made_with_a_token_is_open_to_the_file_itself(
    serve_tokens: Serve, make: Make, tmp_path: Any, clock: ManualClock
) -> None:
    async with (
        serve_tokens() as server,
        connect(server, **bearer(make("billing", read=["a"], consume=["s"]))) as client,
    ):
        await client.subscribe("s", "a")
    with headwater.open(tmp_path / "log.db", clock=clock) as log:
        with log.subscribe("s", "a", max_in_flight=7):  # and it stays whose it is
            pass
        assert log.subscription("s").owner == "label:billing"


async def test_those_that_the_connections_of_a_token_hold_are_counted_too(serve_tokens: Serve, make: Make) -> None:
    """Also those without state: each costs as much, while it is held."""
    many, other = make("many", read=[">"]), make("other", read=[">"])
    async with (
        serve_tokens(limits_subscriptions_per_token=4) as server,
        connect(server, **bearer(many)) as one,
        connect(server, **bearer(many)) as two,
        connect(server, **bearer(other)) as free,
    ):
        for client in (one, two):
            for number in range(2):
                await client.subscribe(f"s{number}", "a", mode="ephemeral")
        third = {"subscription_id": "s3", "topic": "a", "mode": "ephemeral"}
        error = await two.refusal("rpc.subscribe.persistent", third)
        assert "limits.subscriptions_per_token" in error["data"]["next"]
        await free.subscribe("s0", "a", mode="ephemeral")
        await one.release("s0")
        await two.subscribe("s3", "a", mode="ephemeral")


async def test_the_connections_of_a_token_are_counted(serve_tokens: Serve, make: Make) -> None:
    many, other = make("many", read=[">"]), make("other", read=[">"])
    async with serve_tokens(limits_connections_per_token=2) as server:
        async with connect(server, **bearer(many)), connect(server) as second, connect(server) as stranger:
            assert await second.call("rpc.authenticate", {"token": many})
            assert await second.call("rpc.authenticate", {"token": many}), "again: it is one of the two"
            with pytest.raises(InvalidStatus) as refused:
                async with connect(server, **bearer(many)):
                    pass
            assert refused.value.response.status_code == 503
            error = await stranger.refusal("rpc.authenticate", {"token": many})
            assert "limits.connections_per_token" in error["data"]["next"]
            assert await second.call("rpc.authenticate", {"token": other}), "which gives one back"
            assert await stranger.call("rpc.authenticate", {"token": many})
        async with asyncio.timeout(PATIENCE_S):
            while server.connections:
                await turn()
        async with connect(server, **bearer(many)), connect(server, **bearer(many)):
            pass


async def test_the_subscriptions_of_a_token_are_counted(serve_tokens: Serve, make: Make) -> None:
    rights: dict[str, Any] = {"read": [">"], "consume": ["*"]}
    many, other = make("many", **rights), make("other", **rights)
    for first in (0, 2):  # they outlive the server and its connections
        async with (
            serve_tokens(limits_subscriptions_per_token=4) as server,
            connect(server, **bearer(many)) as client,
        ):
            for number in (first, first + 1):
                await client.subscribe(f"s{number}", "a")
                await client.release(f"s{number}")
            await client.subscribe("live", "a", mode="ephemeral")
    async with (
        serve_tokens(limits_subscriptions_per_token=4) as server,
        connect(server, **bearer(many)) as client,
        connect(server, **bearer(other)) as free,
    ):
        error = await client.refusal("rpc.subscribe.persistent", {"subscription_id": "s4", "topic": "a"})
        assert error["code"] == -32005
        assert "4 durable subscriptions of this token and the limit is 4" in error["message"]
        assert "limits.subscriptions_per_token" in error["data"]["next"]
        await client.subscribe("s3", "a")  # those there are may be resumed
        await free.subscribe("f", "a")
        await client.call("rpc.subscription.remove", {"subscription_id": "s0"})
        await client.subscribe("s4", "a")


# --- dead letters -----------------------------------------------------------------------------------------------------


async def dead_letter(client: Client, id: str, topic: str) -> int:
    await client.subscribe(id, topic)
    seq = await client.publish(topic, "secret")
    await client.delivery()
    await client.call("rpc.reject", {"subscription_id": id, "sequence_id": seq})
    await client.release(id)
    return seq


async def test_managing_is_not_publishing(serve_tokens: Serve, make: Make) -> None:
    manager = make("manager", manage=[">"], publish=["copy"], admin=True)
    async with (
        serve_tokens() as server,
        connect(server, **bearer(make("all", EVERYTHING))) as owner,
        connect(server, **bearer(manager)) as client,
    ):
        await dead_letter(owner, "s", "a")
        assert await client.code("rpc.dead_letters.redrive", {"to_topic": "orders.new"}) == UNAUTHORIZED
        [line] = (await client.call("rpc.dead_letters.export"))["lines"]
        assert await client.code("rpc.dead_letters.import", {"lines": [line]}) == UNAUTHORIZED
        assert await client.call("rpc.dead_letters.import", {"lines": []}) == 0
        assert await owner.call("rpc.dead_letters.import", {"lines": [line]}) == 1
        assert (await owner.call("rpc.last_seq"))["sequence_id"] == 1
        redriven = await client.call("rpc.dead_letters.redrive", {"to_topic": "copy", "ids": [1]})
        assert redriven == {"redriven": 1, "failed": {}}


async def test_dead_letters_of_other_topics_are_not_there(serve_tokens: Serve, make: Make) -> None:
    async with (
        serve_tokens() as server,
        connect(server, **bearer(make("all", EVERYTHING))) as owner,
        connect(server, **bearer(make("manager", manage=["a.>"]))) as client,
    ):
        await dead_letter(owner, "s", "b")
        await dead_letter(owner, "t", "a.x")
        hidden, missing = [await client.refusal("rpc.dead_letters.get", {"id": id}) for id in (1, 9)]
        assert hidden["code"] == -32002
        assert str(hidden) == str(missing).replace("9", "1")
        assert [each["id"] for each in await client.call("rpc.dead_letters", {"topic": "a.>"})] == [2]
        assert (await client.call("rpc.dead_letters.get", {"id": 2}))["subscription"] == "t"
        for pattern in ("a.>", "a.x", "a.*"):  # what the database tells alone, and what it does not
            own = {"topic": pattern}
            assert (await client.call("rpc.dead_letters.stats", own))["by_topic"] == {"a.x": 1}
            assert [each["subscription"] for each in await client.call("rpc.dead_letters.groups", own)] == ["t"]
            other = {**own, "ids": [1]}
            redriven = await client.call("rpc.dead_letters.redrive", {**other, "dry_run": True})
            assert (redriven, await client.call("rpc.dead_letters.purge", other)) == ({"redriven": 0, "failed": {}}, 0)
        for method in ("", ".stats", ".groups", ".redrive", ".purge"):
            for params in ({}, {"topic": ">"}, {"topic": "b"}, {"topic": "a.#"}, {"ids": [1]}, {"subscription": "s"}):
                assert await client.code(f"rpc.dead_letters{method}", params) == UNAUTHORIZED, (method, params)
        assert len(await owner.call("rpc.dead_letters")) == 2


async def test_dead_letters_are_found_by_a_pattern_as_the_token_has_it(serve_tokens: Serve, make: Make) -> None:
    async with (
        serve_tokens() as server,
        connect(server, **bearer(make("all", EVERYTHING))) as owner,
        connect(server, **bearer(make("manager", manage=["a.#"]))) as client,
    ):
        for id, topic in (("r", "ab"), ("s", "a"), ("t", "a.x")):
            await dead_letter(owner, id, topic)
        [pattern] = (await client.call("rpc.hello"))["rights"]["manage"]
        found = await client.call("rpc.dead_letters", {"topic": pattern})
        assert [each["message"]["topic"] for each in found] == ["a", "a.x"]
        assert (await client.call("rpc.dead_letters.stats", {"topic": pattern}))["by_topic"] == {"a": 1, "a.x": 1}


async def test_an_imported_letter_reaches_no_subscription_that_does_not_read_its_topic(
    serve_tokens: Serve, make: Make
) -> None:
    attacker = make("attacker", manage=["mine.>"], publish=["mine.>"])
    async with (
        serve_tokens() as server,
        connect(server, **bearer(make("all", EVERYTHING))) as victim,
        connect(server, **bearer(attacker)) as client,
    ):
        await dead_letter(victim, "bills", "orders.new")
        await victim.call("rpc.dead_letters.purge")
        await victim.call("rpc.retain", {"topic": "orders.>", "max_count": 0})
        await victim.call("rpc.maintenance.run")  # the message is gone: a redrive would deliver what the letter holds
        line = json.loads(LINE)
        line |= {"subscription": "bills", "message": {**line["message"], "topic": "mine.x", "data": "forged"}}
        await client.call("rpc.dead_letters.import", {"lines": [json.dumps(line)]})
        done = await client.call("rpc.dead_letters.redrive", {"topic": "mine.>"})
        assert done["redriven"] == 0
        assert [*done["failed"].values()] == ["subscription 'bills' does not read mine.x"]


# --- another token on the same connection -----------------------------------------------------------------------------


async def test_what_the_new_token_may_not_have_is_dropped_and_reported(serve_tokens: Serve, make: Make) -> None:
    wide = make("wide", read=[">"], consume=["*"], publish=[">"])
    narrow = make("narrow", read=["b", "open"], consume=["*"], publish=[">"])
    async with (
        serve_tokens() as server,
        connect(server, **bearer(wide)) as client,
        connect(server, **bearer(make("wide", read=[">"], consume=["*"], publish=[">"]))) as other,
        connect(server, **bearer(make("all", EVERYTHING))) as operator,
    ):
        await client.call("rpc.hello", {"publisher": "p"})
        await client.publish("x", number=1)
        for pattern in ("a", "b", ">"):
            await client.call("rpc.subscribe", {"topic": pattern})
        await client.subscribe("of-a", "a")
        await client.subscribe("of-b", "b")  # may be read, but belongs to the other label
        await client.subscribe("tail", "a", mode="ephemeral", deliver="fetch")
        await client.subscribe("open", "open", mode="ephemeral", deliver="fetch")
        waiting = await client.ask("rpc.fetch", {"subscription_id": "tail", "count": 1, "wait": 30})
        assert await client.call("rpc.authenticate", {"token": narrow}) == {"authenticated": True}
        assert await client.code_of(waiting) == -32002
        lost = {(each["subscription_id"], each.get("topic")) for each in client.unread_notes}
        assert lost == {("", "a"), ("", ">"), ("of-a", None), ("of-b", None), ("tail", None)}
        assert all("token" in each["why"] for each in client.unread_notes)
        client.forget_notes()
        assert await client.code("rpc.publish", {"topic": "x", "data": 1, "number": 2}) == -32602  # no publisher
        for id in ("of-a", "of-b", "tail"):
            assert await client.code("rpc.fetch", {"subscription_id": id, "count": 1, "wait": 0}) == -32002
        assert await client.call("rpc.fetch", {"subscription_id": "open", "count": 1, "wait": 0}) == {"messages": []}
        await other.subscribe("of-a", "a")  # it is free
        await operator.publish("a")
        await operator.publish("b")
        assert (await client.note("rpc.notification"))["topic"] == "b"
        assert await client.has_nothing_to_read()


async def test_a_subscription_that_begins_while_the_token_changes_is_not_kept(serve_tokens: Serve, make: Make) -> None:
    wide, narrow = make("wide", read=[">"], consume=["*"]), make("narrow", read=["b"], consume=["*"])
    async with serve_tokens() as server, connect(server, **bearer(wide)) as client:
        for _ in range(20):
            await client.send(
                [
                    {"jsonrpc": "2.0", "method": "rpc.subscribe.persistent", "params": {**ID, "topic": "a"}, "id": "s"},
                    {"jsonrpc": "2.0", "method": "rpc.authenticate", "params": {"token": narrow}, "id": "t"},
                ]
            )
            answers = {each["id"]: each for each in await client.frame() if "id" in each}
            assert "result" in answers["t"]
            assert answers["s"].get("error", {}).get("code") == UNAUTHORIZED
            [connection] = server.connections
            assert not len(connection.subscriptions)
            await client.call("rpc.authenticate", {"token": wide})


# --- losing it --------------------------------------------------------------------------------------------------------


async def test_what_came_by_a_revoked_token_ends(
    serve_tokens: Serve, make: Make, tokens: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SWEEP_S", 0.02)
    monkeypatch.setattr(connection_module, "REVOKED_CLOSE_S", 0.1)
    server = serve_tokens()
    began, cancelled = asyncio.Event(), asyncio.Event()

    @server.method("slow")
    async def slow() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    token = make("shop", EVERYTHING)
    async with (
        server,
        connect(server, **bearer(make("other", EVERYTHING))) as other,
        connect(server, **bearer(token)) as client,
    ):
        await client.subscribe("s", "a", deliver="fetch")
        await client.call("rpc.subscribe", {"topic": ">"})
        await client.ask("rpc.fetch", {"subscription_id": "s", "count": 1, "wait": 30})
        await client.ask("slow")
        await began.wait()
        client.stop_reading()  # and so it does not answer the close
        tokens.revoke(str(id_of(token)))
        async with asyncio.timeout(2):
            await cancelled.wait()
            while server._context is None or len(server._context.live):
                await turn()
        await other.subscribe("s", "a")
        async with asyncio.timeout(5):
            while len(server.connections) > 1:
                await turn()


def test_a_revoked_token_is_noticed_within_five_seconds() -> None:
    from headwater.replication.host import endpoint

    assert server_module.SWEEP_S + connection_module.REVOKED_CLOSE_S < 5
    assert endpoint.RIGHTS_S < 5


# --- publishers -------------------------------------------------------------------------------------------------------


async def test_a_time_of_its_own_needs_the_right_to_manage(serve_tokens: Serve, make: Make) -> None:
    old = {"topic": "a.b", "data": 1, "published_at": "2020-01-31T12:00:00Z"}
    async with (
        serve_tokens() as server,
        connect(server, **bearer(make("shop", publish=["a.>"], manage=["b.>"]))) as shop,
        connect(server, **bearer(make("importer", publish=["a.>"], manage=["a.>"], read=["a.>"]))) as importer,
    ):
        for method, params in (("rpc.publish", old), ("rpc.publish.batch", {"messages": [old]})):
            with pytest.raises(Refused) as caught:
                await shop.call(method, params)
            assert caught.value.error["code"] == UNAUTHORIZED
            await importer.call(method, params)
        assert await shop.publish("a.b") == 3


async def test_a_publisher_belongs_to_its_token(serve_tokens: Serve, make: Make) -> None:
    async with (
        serve_tokens() as server,
        connect(server, **bearer(make("shop", publish=["a"]))) as shop,
        connect(server, **bearer(make("thief", publish=["a"]))) as thief,
    ):
        await shop.call("rpc.hello", {"publisher": "till-7"})
        assert await shop.publish("a", number=1) == 1
        await thief.call("rpc.hello", {"publisher": "till-7"})
        stolen = await thief.call("rpc.publish", {"topic": "a", "data": 1, "number": 1, "confirmed": 100})
        assert stolen == {"sequence_id": 2, "duplicate": False}  # it learns nothing of the other one's numbers
        again = {"topic": "a", "data": None, "number": 1}
        assert await shop.call("rpc.publish", again) == {"sequence_id": 1, "duplicate": True}  # and ends nothing


# --- middleware and methods of the application ------------------------------------------------------------------------


class Nosy(Middleware):
    """Answers everything, as a cache might."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def before(self, call: CallContext) -> ShortCircuit | None:
        self.seen.append(call.method)
        return ShortCircuit("cached") if call.method in ("mine", "rpc.topics") else None


async def test_middleware_sees_no_call_of_a_stranger_or_without_the_right(serve_tokens: Serve, make: Make) -> None:
    server = serve_tokens()
    nosy = server.use(Nosy())
    assert isinstance(nosy, Nosy)
    server.method("mine")(lambda: 1)
    token = make("shop", publish=["a"])
    async with server, connect(server) as client:
        await client.call("rpc.hello")
        for method in ("mine", "rpc.topics", "rpc.publish", "no.such.method"):
            assert await client.code(method, PARAMS.get(method)) == UNAUTHORIZED
        assert await client.code("rpc.authenticate", {"token": "wrong"}) == UNAUTHORIZED
        await client.call("rpc.authenticate", {"token": token})
        assert nosy.seen == []
        for method in ("mine", "rpc.topics", "no.such.method"):
            assert await client.code(method) == UNAUTHORIZED
        assert nosy.seen == []
        await client.publish("a")
        assert nosy.seen == ["rpc.publish"]


async def test_a_synchronous_method_does_not_block_the_others(serve: Serve) -> None:
    server = serve(limits_method_threads=2)
    let_go = threading.Event()
    threads: set[int] = set()

    @server.method("slow")
    def slow() -> str:
        threads.add(threading.get_ident())
        return "done" if let_go.wait(PATIENCE_S) else "late"

    async with server, connect(server) as client:
        try:
            waiting = [await client.ask("slow") for _ in range(5)]
            assert await client.publish("a") == 1  # it would wait for ever if a method ran on the loop
            assert len(threads) <= 2
        finally:
            let_go.set()
        assert [await client.answer(each) for each in waiting] == ["done"] * 5
        assert threading.get_ident() not in threads


async def test_a_call_that_ran_out_of_time_keeps_its_thread(serve: Serve) -> None:
    server = serve(limits_method_threads=1, limits_request_timeout=0.2)
    let_go = threading.Event()
    server.method("slow")(lambda: let_go.wait(PATIENCE_S))
    server.method("quick")(lambda: 1)
    async with server, connect(server) as client:
        try:
            assert await client.code("slow") == -32006
            assert await client.code("quick") == -32006  # no thread is free, and no further one is made
        finally:
            let_go.set()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    assert await client.call("quick") == 1
                    return
                except Refused:
                    await turn()


async def test_a_synchronous_method_may_use_its_call(serve: Serve) -> None:
    server = serve()

    @server.method("ask_back")
    def ask_back(call: CallContext, name: str) -> Any:
        call.peer.notify("heard", {"name": name})
        return [call.method, call.peer.call("describe", [name], timeout=PATIENCE_S)]

    async with server, connect(server) as client:
        asked = await client.ask("ask_back", ["x"])
        heard, question = await client.notes(2)
        assert (heard["method"], heard["params"], question["method"]) == ("heard", {"name": "x"}, "describe")
        await client.send({"jsonrpc": "2.0", "id": question["id"], "result": "an x"})
        assert await client.answer(asked) == ["ask_back", "an x"]


async def test_messages_are_read_and_their_deliveries_seen_by_right(serve_tokens: Serve, make: Make) -> None:
    async with serve_tokens() as server, connect(server, **bearer(make("all", EVERYTHING))) as client:
        await client.subscribe("s", "a.>")
        for topic in ("a.b", "secret"):
            await client.publish(topic, {"n": 1})
        await client.delivery()
        await client.call("rpc.reject", {"subscription_id": "s", "sequence_id": 1})
        async with connect(server, **bearer(make("reader", read=["a.>"]))) as reader:
            assert await reader.code("rpc.messages", {}) == UNAUTHORIZED
            assert await reader.code("rpc.messages", {"topic": "secret"}) == UNAUTHORIZED
            found = await reader.call("rpc.messages", {"topic": "a.>"})
            assert [each["seq"] for each in found["messages"]] == [1]
            seen = await reader.call("rpc.message", {"sequence_id": 1})
            assert (seen["message"]["data"], seen["deliveries"], seen["dead_letters"]) == ({"n": 1}, [], [])
            assert (await reader.call("rpc.message", {"sequence_id": 2}))["message"] is None
        async with connect(server, **bearer(make("manager", read=["a.>"], manage=["a.>"]))) as manager:
            seen = await manager.call("rpc.message", {"sequence_id": 1})
            assert [each["state"] for each in seen["deliveries"]] == ["dead"]
            assert len(seen["dead_letters"]) == 1
        await client.release("s")
        async with connect(server, **bearer(make("mover", manage=["a.>"]))) as mover:
            would = await mover.call("rpc.seek", {"subscription_id": "s", "start": "first", "dry_run": True})
            assert [(each["seq"], each.get("preview")) for each in would["next"]] == [(1, None)]  # not to be read
