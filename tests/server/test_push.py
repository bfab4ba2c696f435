"""Durable subscriptions pushed over a socket: window, order, redelivery, gaps, taking over, sharing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from foreign_client import PATIENCE_S, Client, Serve, connect, gone

from headwater import ManualClock

QUIET = {"lease": 100_000, "backoff": 0.0, "jitter": 0.0}  # no lease ends, and retries come at once


async def in_flight(client: Client, id: str) -> int:
    return int((await client.call("rpc.subscription", {"subscription_id": id}))["in_flight"])


# --- the window -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
async def test_no_more_are_in_flight_than_asked_for(serve: Serve, mode: str) -> None:
    async with serve() as server, connect(server) as client:
        await client.publish_many("a", 10)
        await client.subscribe("s", "a", max_in_flight=3, mode=mode)
        assert await client.delivered_seqs(3) == [1, 2, 3]
        for seq in range(1, 8):
            assert await client.has_nothing_to_read()
            assert await in_flight(client, "s") == 3
            await client.ack("s", seq)
            assert await client.delivered_seqs(1) == [seq + 3]
        await client.ack("s", 8, 9, 10)
        assert await in_flight(client, "s") == 0
        assert await client.has_nothing_to_read()


async def test_a_client_that_never_sent_hello_gets_one_notification_a_frame(serve: Serve) -> None:
    async with serve() as server, connect(server) as plain, connect(server) as modern:
        await plain.publish_many("a", 20)
        await plain.ask("rpc.subscribe.persistent", {"subscription_id": "s", "topic": "a"})
        assert all([isinstance(await plain.frame(), dict) for _ in range(21)])
        await modern.call("rpc.hello")
        await modern.subscribe("t", "a")
        frame = await modern.frame()
        assert [each["params"]["sequence_id"] for each in frame] == list(range(1, 21))


# --- settling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
async def test_what_is_not_acked_in_time_comes_back_unless_it_is_extended(serve: Serve, mode: str) -> None:
    clock = ManualClock()
    async with serve(clock=clock) as server, connect(server) as client:
        await client.publish_many("a", 2)
        await client.subscribe("s", "a", ack_wait=10, mode=mode, **QUIET)
        await client.deliveries(2)
        clock.advance(9)
        assert await client.call("rpc.extend", {"subscription_id": "s", "sequence_id": 1}) == {"ok": True}
        clock.advance(9)
        again = await client.delivery()
        assert (again["sequence_id"], again["attempt"]) == (2, 2)
        await client.ack("s", 1)
        await client.ack("s", 2)
        clock.advance(60)
        assert await client.has_nothing_to_read()
        assert (await client.call("rpc.subscription", {"subscription_id": "s"}))["acked"] == 2


async def test_an_ack_that_was_not_waited_for_is_not_lost_by_leaving(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.publish_many("a", 3)
        for round in range(20):  # the ack and the leaving race each other, if anything lets them
            await client.subscribe(f"s{round}", "a")
            await client.deliveries(3)
            await client.notify("rpc.ack_persistent", {"subscription_id": f"s{round}", "sequence_id": 1})
            await client.notify("rpc.acknowledge.persistent", {"subscription_id": f"s{round}", "sequence_id": 2})
            await client.release(f"s{round}")
            info = await client.call("rpc.subscription", {"subscription_id": f"s{round}"})
            assert (info["acked"], info["position"]) == (2, 2)


# --- coming and going -------------------------------------------------------------------------------------------------


async def test_what_a_client_had_when_it_closed_comes_back(serve: Serve) -> None:
    async with serve() as server:
        for attempt in (1, 2):
            async with connect(server) as client:
                if attempt == 1:
                    await client.publish_many("a", 3)
                await client.subscribe("s", "a", max_attempts=2)
                seqs = [(each["sequence_id"], each["attempt"]) for each in await client.deliveries(3)]
                assert seqs == [(1, attempt), (2, attempt), (3, attempt)]
            await gone(server)
        await check_dead(server, "released unsettled")


async def test_what_a_client_had_when_it_vanished_comes_back_one_at_a_time(serve: Serve) -> None:
    async with serve() as server:
        for expected in ([(1, 1), (2, 1), (3, 1)], [(1, 2)], [(2, 2)], [(3, 2)]):
            async with connect(server) as client:
                if len(expected) == 3:
                    await client.publish_many("a", 3)
                await client.subscribe("s", "a", max_attempts=2)
                found = await client.deliveries(len(expected))
                assert [(each["sequence_id"], each["attempt"]) for each in found] == expected
                client.vanish()
            await gone(server)
        await check_dead(server, "its consumer was gone")


async def check_dead(server: Any, why: str) -> None:
    """The log distinguishes a client that vanished from one that closed."""
    async with connect(server) as client:
        await client.subscribe("s", "a", max_attempts=2)
        await client.publish("a", "new")
        assert (await client.delivery())["data"] == "new"
        while len(letters := await client.call("rpc.dead_letters")) < 3:
            pass  # suspects are looked at one at a time
        assert [why in letter["error"] for letter in letters] == [True, True, True]


async def test_a_taken_over_holder_is_reported_and_its_acks_are_refused(serve: Serve) -> None:
    async with serve() as server, connect(server) as first, connect(server) as second:
        await first.publish_many("a", 2)
        await first.subscribe("s", "a")
        await first.deliveries(2)
        await second.subscribe("s", "a", takeover=True)
        lost = await first.note("rpc.lost")
        assert lost["subscription_id"] == "s"
        assert "taken over" in lost["why"]
        assert await first.code("rpc.acknowledge.persistent", {"subscription_id": "s", "sequence_id": 1}) in (
            -32002,
            -32003,
        )
        assert (await second.delivery())["sequence_id"] == 1
        await second.ack("s", 1)
        assert (await second.delivery())["sequence_id"] == 2
        assert await first.has_nothing_to_read()
        await second.release("s")
        await first.subscribe("s", "a")  # the first may have it again
        assert (await first.delivery())["sequence_id"] == 2


async def test_a_waiting_subscribe_gets_the_subscription_when_it_is_free(serve: Serve) -> None:
    async with serve() as server, connect(server) as first, connect(server) as second:
        await first.subscribe("s", "a")
        params = {"subscription_id": "s", "topic": "a", "wait": 10}
        waiting = await second.ask("rpc.subscribe.persistent", params)
        await first.release("s")
        assert (await second.answer(waiting))["subscribed"] is True


# --- gaps -------------------------------------------------------------------------------------------------------------


async def test_what_retention_took_is_reported(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.subscribe("s", "a")
        await client.release("s")
        await client.publish_many("a", 5)
        await client.call("rpc.retain", {"topic": "a", "max_count": 2})
        assert (await client.call("rpc.maintenance.run"))["gaps"] == 3
        await client.subscribe("s", "a")
        gap = await client.note("rpc.gap")
        reported = {name: gap[name] for name in ("subscription_id", "from", "to", "count", "why")}
        assert reported == {"subscription_id": "s", "from": 1, "to": 3, "count": 3, "why": "retention"}
        assert await client.delivered_seqs(2) == [4, 5]
        await client.ack("s", 4, 5)
        await client.release("s")
        await client.subscribe("s", "a")
        assert await client.has_nothing_to_read()  # once is enough


# --- modes and filters ------------------------------------------------------------------------------------------------


async def test_shared_work_is_done_once_by_all_together(serve: Serve) -> None:
    async with serve() as server, connect(server) as one, connect(server) as two, connect(server) as three:
        seen: list[tuple[int, int]] = []
        done = asyncio.Event()

        async def work(worker: int, client: Client) -> None:
            while True:
                delivery = await client.delivery()
                assert delivery["attempt"] == 1
                seen.append((delivery["sequence_id"], worker))
                await client.ack("s", delivery["sequence_id"])
                if len(seen) >= 60:
                    done.set()

        for worker in (one, two, three):
            await worker.subscribe("s", "a", mode="shared", max_in_flight=2)
        async with connect(server) as publisher:
            await publisher.publish_many("a", 60)
        working = [asyncio.create_task(work(number, each)) for number, each in enumerate((one, two, three))]
        async with asyncio.timeout(PATIENCE_S):
            await done.wait()
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        assert sorted(seq for seq, _ in seen) == list(range(1, 61))
        assert {worker for _, worker in seen} == {0, 1, 2}


async def test_one_connection_may_work_with_more_than_one_pair_of_hands(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        for id in ("s", "s#2"):
            assert (await client.subscribe(id, "a", mode="shared", max_in_flight=1))["subscription_id"] == id
        await client.publish_many("a", 2)
        seq_of = {each["subscription_id"]: each["sequence_id"] for each in await client.deliveries(2)}
        assert (seq_of.keys(), sorted(seq_of.values())) == ({"s", "s#2"}, [1, 2])
        wrong = {"subscription_id": "s", "sequence_id": seq_of["s#2"]}
        assert await client.code("rpc.acknowledge.persistent", wrong) == -32003  # it is in the other hand
        for id, seq in seq_of.items():
            await client.ack(id, seq)
        assert [each["id"] for each in await client.call("rpc.subscriptions")] == ["s"]
        await client.release("s#2")
        assert await client.code("rpc.subscribe.persistent", {"subscription_id": "t#", "topic": "a"}) == -32602


async def test_another_takes_over_what_a_vanished_worker_shared(serve: Serve) -> None:
    async with serve() as server, connect(server) as stays:
        async with connect(server) as goes:
            await goes.subscribe("s", "a", mode="shared")
            await goes.publish_many("a", 3)
            await goes.deliveries(3)
            await stays.subscribe("s", "a", mode="shared")
            goes.vanish()
        for seq in (1, 2, 3):
            delivery = await stays.delivery()
            assert (delivery["sequence_id"], delivery["attempt"]) == (seq, 2)
            await stays.ack("s", seq)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"from": "admin"}, [1]),
        ({"to": "billing"}, [1, 2]),
        ({"to": "billing", "broadcast": True}, [1, 2, 4]),
        ({"broadcast": True}, [4]),
        ({"where": "data.total > 10"}, [2, 3]),
        ({"start": 3}, [3, 4]),
        ({"start": "first"}, [1, 2, 3, 4]),
        ({"start": "2023-11-14T22:13:20.003Z"}, [4]),
        ({"start": "new"}, []),
        ({"order": "priority"}, [3, 1, 2, 4]),
        ({"topic": "a.#", "dialect": "amqp"}, [1, 2, 3, 4]),  # here # is zero or more words
    ],
)
async def test_options_choose_what_is_delivered(serve: Serve, options: dict[str, Any], wanted: list[int]) -> None:
    clock = ManualClock(1_700_000_000_000)
    async with serve(clock=clock) as server, connect(server) as client:
        for more in (
            {"data": {"total": 1}, "headers": {"from": "admin"}, "to": "billing"},
            {"data": {"total": 11}, "from": "shop", "to": "billing"},
            {"data": {"total": 12}, "from": "shop", "to": "mail", "priority": 5},
            {"data": {}, "from": "shop"},
        ):
            await client.call("rpc.publish", {"topic": "a", **more})
            clock.advance(0.001)
        await client.subscribe("s", "a", **options)
        assert await client.delivered_seqs(len(wanted)) == wanted
        assert await client.has_nothing_to_read()


# --- fetching ---------------------------------------------------------------------------------------------------------


async def test_a_client_that_fetches_is_not_pushed_to(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.publish_many("a", 3)
        await client.subscribe("s", "a", deliver="fetch")
        assert await client.has_nothing_to_read()
        fetched = await client.call("rpc.fetch", {"subscription_id": "s", "count": 2})
        assert [message[0] for message, _, _ in fetched["messages"]] == [1, 2]
        assert [message[1:3] for message, _, _ in fetched["messages"]] == [["a", 0], ["a", 1]]
        await client.ack("s", 1, 2)
        waiting = await client.ask("rpc.fetch", {"subscription_id": "s", "count": 5, "wait": 10})
        assert [m[0] for m, _, _ in (await client.answer(waiting))["messages"]] == [3]
        waiting = await client.ask("rpc.fetch", {"subscription_id": "s", "count": 5, "wait": 10})
        seq = await client.publish("a", "new")  # other calls are answered while a fetch waits
        assert [m[0] for m, _, _ in (await client.answer(waiting))["messages"]] == [seq]
        assert (await client.call("rpc.fetch", {"subscription_id": "s"}))["messages"] == []
        assert await client.code("rpc.fetch", {"subscription_id": "x"}) == -32002
        assert await client.code("rpc.fetch", {"subscription_id": "s", "count": 0}) == -32602
