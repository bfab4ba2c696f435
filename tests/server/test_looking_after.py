"""Methods that look after a log: topics, subscriptions, dead letters, retention."""

from __future__ import annotations

from typing import Any

import pytest
from foreign_client import Client, Serve, connect

import headwater
from headwater import ManualClock
from headwater.protocol import methods as rpc
from headwater.server import subscriptions


async def test_topics_and_seqs(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        assert await client.call("rpc.topics") == []
        assert await client.call("rpc.last_seq") == {"sequence_id": 0}
        await client.publish_many("a", 3)
        await client.publish("b.c", "xyz")
        rows = await client.call("rpc.topics")
        assert [row[:4] for row in rows] == [["a", 3, 3, 3], ["b.c", 1, 5, 4]]  # topic, count, bytes, last seq
        assert await client.call("rpc.topic_max_seq", {"topic": "a"}) == {"sequence_id": 3}
        assert await client.call("rpc.topic_max_seq", {"topic": "never"}) == {"sequence_id": 0}
        assert await client.code("rpc.topic_max_seq", {"topic": "a.*"}) == -32004
        assert await client.call("rpc.last_seq") == {"sequence_id": 4}


async def test_topics_come_in_pages(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*sorted(f"a.{number}" for number in range(7)), "b", "ü"]
    async with serve() as server, connect(server) as client:
        for name in reversed(names):
            await client.publish(name)

        async def page(**params: Any) -> list[str]:
            return [row[0] for row in await client.call("rpc.topics", params)]

        assert await page() == names
        assert await page(limit=3) == names[:3]
        assert await page(limit=3, after=names[2]) == names[3:6]
        assert await page(after="a.2x") == names[3:]  # after a name that is no topic
        assert await page(after="ü") == []
        assert await client.code("rpc.topics", {"limit": 0}) == -32005
        assert await client.code("rpc.topics", {"limit": 10_001}) == -32005
        monkeypatch.setattr(rpc, "TOPICS_MAX", 4)
        statistics = await client.call("rpc.stats")
        assert [row[0] for row in statistics["topics"]] == names[:4]
        assert (statistics["messages"], statistics["topics_left_out"]) == (9, 5)


@pytest.mark.parametrize("topics", [1, rpc.TOPICS_MAX, rpc.TOPICS_MAX + 1])
async def test_a_client_asks_for_all_pages_of_the_topics(serve: Serve, topics: int) -> None:
    names = [f"a.{number:05}" for number in range(topics)]
    async with serve() as server, await headwater.open_async(server.url) as log:
        await log.publish_many([(name, 1) for name in names])
        assert [each.topic for each in await log.topics()] == names


async def test_subscribing_counts_what_waits_among_a_bounded_number_of_messages(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "UNDELIVERED_LOOKED_AT_MAX", 5)
    async with serve() as server, connect(server) as client:
        await client.publish_many("a", 3)
        await client.publish_many("b", 10)
        await client.publish_many("a", 1)
        assert (await client.subscribe("s", "a"))["undelivered_count"] == 3
        assert (await client.subscribe("t", "b"))["undelivered_count"] == 2


async def test_subscriptions_as_they_are(serve: Serve) -> None:
    clock = ManualClock(1_700_000_000_000)
    async with serve(clock=clock) as server, connect(server) as client:
        await client.publish_many("a", 5)
        await client.subscribe("s", "a", max_in_flight=3)
        await client.deliveries(3)
        await client.ack("s", 1)
        await client.delivery()
        clock.advance(0.25)
        info = await client.call("rpc.subscription", {"subscription_id": "s"})
        holder = info.pop("holder")
        assert isinstance(holder, str)
        assert info == {
            "id": "s",
            "pattern": "a",
            "mode": "exclusive",
            "position": 1,
            "lag": 4,
            "lag_is_least": False,
            "in_flight": 3,
            "waiting": 0,
            "oldest_unacked_ms": 250,
            "acked": 1,
            "redelivered": 0,
            "dead": 0,
            "gaps": 0,
            "created_ms": 1_700_000_000_000,
            "active_ms": 1_700_000_000_000,
            "owner": None,
            "consumers": [],
            "problem": None,
            "paused_ms": None,
        }
        assert await client.call("rpc.subscriptions") == [{**info, "holder": holder}]
        assert await client.code("rpc.subscription", {"subscription_id": "x"}) == -32002


async def test_subscriptions_are_listed_in_pages(serve: Serve) -> None:
    ids = [f"s{number:04}" for number in range(rpc.SUBSCRIPTIONS_MAX + 3)]
    async with serve() as server, connect(server) as client, connect(server) as other:
        one = {"topic": "a", "mode": "shared"}
        for each, part in ((client, ids[:500]), (client, ids[500:1000]), (other, ids[1000:])):
            params = {"subscriptions": [{"subscription_id": id, **one} for id in part]}
            await each.call("rpc.subscribe.persistent.batch", params)
        page = await client.call("rpc.subscriptions")
        assert [each["id"] for each in page] == ids[:1000]
        page = await client.call("rpc.subscriptions", {"after": ids[999]})
        assert [each["id"] for each in page] == ids[1000:]
        page = await client.call("rpc.subscriptions", {"after": "s0001", "limit": 2})
        assert [each["id"] for each in page] == ["s0002", "s0003"]
        assert await client.code("rpc.subscriptions", {"limit": 1001}) == -32005
        async with headwater.open_async(f"ws://127.0.0.1:{server.port}") as log:
            assert [info.id for info in await log.subscriptions()] == ids


async def test_seeking_moves_a_subscription(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.publish_many("a", 4)
        await client.subscribe("s", "a")
        await client.deliveries(4)
        params: dict[str, Any] = {"subscription_id": "s", "start": "first"}
        assert await client.code("rpc.seek", params) == -32001
        await client.ack("s", 1, 2, 3, 4)
        await client.release("s")
        for start, position in (("first", 0), ("new", 4), (3, 2), (2**70, 4)):
            assert await client.call("rpc.seek", {**params, "start": start}) == {"sequence_id": position}
        assert await client.code("rpc.seek", {**params, "start": "sometime"}) == -32602
        assert await client.code("rpc.seek", {**params, "start": -1}) == -32602
        await client.call("rpc.seek", {**params, "start": 3})
        assert (await client.subscribe("s", "a"))["resumed_from_sequence"] == 2
        assert await client.delivered_seqs(2) == [3, 4]


async def test_statistics_and_health(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.publish_many("a", 3)
        await client.subscribe("s", "a")
        statistics = await client.call("rpc.stats")
        assert (statistics["last_seq"], statistics["messages"], statistics["bytes"]) == (3, 3, 3)
        assert [each["id"] for each in statistics["subscriptions"]] == ["s"]
        health = await client.call("rpc.health")
        assert (health["store"], health["durability"], health["integrity"]) == ("sqlite", "full", "ok")


async def test_retention_is_set_shown_and_taken_away(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        rule = {"topic": "a.>", "max_count": 3, "max_bytes": 100, "max_age": 1.5, "keep_unacked": True}
        assert await client.call("rpc.retain", rule) == {"ok": True}
        [stored] = await client.call("rpc.retention")
        assert stored["pattern"] == "a.>"
        assert stored["limits"] == {"max_age_ms": 1_500, "max_count": 3, "max_bytes": 100, "keep_unacked": True}
        assert await client.call("rpc.retention.remove", {"topic": "a.>"}) == {"removed": True}
        assert await client.call("rpc.retention.remove", {"topic": "a.>"}) == {"removed": False}
        for wrong, code in [
            ({"topic": "a..b", "max_count": 1}, -32004),
            ({"topic": "a", "max_count": -1}, -32602),
            ({"topic": "a", "max_count": 2**64}, -32602),
            ({"topic": "a", "max_age": -1}, -32602),
            ({"topic": "a", "max_count": 1, "dialect": "mqtt"}, -32602),
        ]:
            assert await client.code("rpc.retain", wrong) == code, wrong
        assert await client.call("rpc.retention") == []


# --- dead letters -----------------------------------------------------------------------------------------------------


async def dead_letter_three(client: Client) -> list[dict[str, Any]]:
    await client.publish("a", 1, type="Order")
    await client.publish("a", 2)
    await client.publish("b", 3)
    await client.subscribe("s", ">")
    for delivery, reason in zip(await client.deliveries(3), ("no stock", "no address", "no stock"), strict=True):
        seq = delivery["sequence_id"]
        await client.call("rpc.reject", {"subscription_id": "s", "sequence_id": seq, "reason": reason, "handler": "h"})
    return list(await client.call("rpc.dead_letters"))


async def test_dead_letters_are_listed_and_found(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        letters = await dead_letter_three(client)
        assert [letter["message"]["seq"] for letter in letters] == [1, 2, 3]
        assert letters[0]["message"].items() >= {"topic": "a", "data": 1, "type": "Order"}.items()
        assert (
            letters[0].items()
            >= {
                "subscription": "s",
                "reason": "rejected",
                "attempts": 1,
                "error": "no stock",
                "handler": "h",
                "redrives": 0,
            }.items()
        )
        for wanted, seqs in [
            ({"topic": "a"}, [1, 2]),
            ({"type": "Order"}, [1]),
            ({"error": "stock"}, [1, 3]),
            ({"reason": "max_attempts"}, []),
            ({"subscription": "x"}, []),
            ({"ids": [letters[1]["id"]]}, [2]),
            ({"limit": 1}, [1]),
            ({"limit": 1, "after": letters[0]["id"]}, [2]),
        ]:
            found = await client.call("rpc.dead_letters", wanted)
            assert [letter["message"]["seq"] for letter in found] == seqs, wanted
        assert await client.call("rpc.dead_letters.get", {"id": letters[2]["id"]}) == letters[2]
        assert await client.code("rpc.dead_letters.get", {"id": 99}) == -32002
        assert await client.code("rpc.dead_letters", {"limit": 0}) == -32005
        assert await client.code("rpc.dead_letters", {"error": "("}) == -32602
        counts = await client.call("rpc.dead_letters.stats")
        assert (counts["total"], counts["by_topic"], counts["by_reason"]) == (3, {"a": 2, "b": 1}, {"rejected": 3})
        assert counts["by_error"] == {"no stock": 2, "no address": 1}


async def test_messages_are_searched_in_pages(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        for n in range(5):
            params = {"topic": "a.b" if n % 2 else "c", "data": {"n": n}, "headers": {"n": str(n)}}
            await client.call("rpc.publish", params)
        page = await client.call("rpc.messages", {"limit": 2})
        assert ([each["seq"] for each in page["messages"]], page["looked_to"], page["more"]) == ([5, 4], 3, True)
        assert page["messages"][0]["preview"] == '{"n": 4}'
        page = await client.call("rpc.messages", {"topic": "a.*", "order": "oldest"})
        assert ([each["seq"] for each in page["messages"]], page["more"]) == ([2, 4], False)
        page = await client.call("rpc.messages", {"where": "headers.n == '3'"})
        assert [each["seq"] for each in page["messages"]] == [4]
        found = await client.call("rpc.messages", {"since": "2000-01-01T00:00:00Z", "until": "2000-01-01T00:00:01Z"})
        assert (found["messages"], found["more"]) == ([], False)
        assert await client.code("rpc.messages", {"limit": 0}) == -32005
        assert await client.code("rpc.messages", {"limit": 501}) == -32005
        assert await client.code("rpc.messages", {"order": "random"}) == -32602
        assert await client.code("rpc.messages", {"since": "yesterday"}) == -32602
        assert await client.code("rpc.messages", {"where": "data.n ="}) == -32602
        assert await client.code("rpc.messages", {"topic": "a..b"}) == -32004


async def test_one_message_comes_with_its_deliveries_and_dead_letters(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.subscribe("s", "a")
        seq = await client.publish("a", {"n": 1})
        await client.delivery()
        found = await client.call("rpc.message", {"sequence_id": seq})
        assert (found["message"]["data"], found["message"]["topic"]) == ({"n": 1}, "a")
        [state] = found["deliveries"]
        assert (state["subscription"], state["state"], state["attempts"]) == ("s", "in_flight", 1)
        await client.call("rpc.reject", {"subscription_id": "s", "sequence_id": seq, "reason": "no"})
        found = await client.call("rpc.message", {"sequence_id": seq})
        assert [each["state"] for each in found["deliveries"]] == ["dead"]
        assert [each["error"] for each in found["dead_letters"]] == ["no"]
        [group] = await client.call("rpc.dead_letters.groups")
        assert (group["subscription"], group["reason"], group["error"], group["count"]) == ("s", "rejected", "no", 1)
        chosen = {"subscription": "s", "handler": group["handler"], "error_kind": group["error"], "dry_run": True}
        assert await client.call("rpc.dead_letters.redrive", chosen) == {"redriven": 1, "failed": {}}
        assert await client.call("rpc.dead_letters.purge", chosen) == 1
        assert len(await client.call("rpc.dead_letters")) == 1
        gone = await client.call("rpc.message", {"sequence_id": 99})
        assert gone == {"message": None, "pruned": False, "deliveries": [], "dead_letters": []}


async def test_a_seek_is_previewed(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.subscribe("s", "a")
        await client.publish_many("a", 3)
        await client.call(
            "rpc.acknowledge.persistent",
            {"subscription_id": "s", "sequence_id": (await client.delivery())["sequence_id"]},
        )
        assert await client.code("rpc.seek", {"subscription_id": "s", "start": "first", "dry_run": True}) == -32001
        await client.release("s")
        would = await client.call("rpc.seek", {"subscription_id": "s", "start": "new", "dry_run": True})
        assert (would["sequence_id"], would["again"], would["skipped"]) == (3, 0, 2)
        assert [each["seq"] for each in would["first_skipped"]] == [2, 3]
        assert (await client.call("rpc.subscription", {"subscription_id": "s"}))["lag"] == 2
