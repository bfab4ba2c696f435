"""What the system must do on the wire, case by case as it was asked for."""

from __future__ import annotations

from foreign_client import Serve, connect, gone


async def test_publish_five_ack_three_leave_and_come_back(serve: Serve) -> None:
    async with serve() as server:
        async with connect(server) as client:
            assert [await client.publish("orders.new", n) for n in range(5)] == [1, 2, 3, 4, 5]
            assert (await client.subscribe("billing", "orders.new"))["resumed_from_sequence"] == 0
            assert await client.delivered_seqs(5) == [1, 2, 3, 4, 5]
            for seq in (1, 2, 3):
                await client.ack("billing", seq)
            await client.release("billing")
            again = await client.subscribe("billing", "orders.new")
            assert (again["resumed_from_sequence"], again["resumed_from_seq"]) == (3, 3)
            assert await client.delivered_seqs(2) == [4, 5]
        await gone(server)
        async with connect(server) as client:  # and from another connection
            assert (await client.subscribe("billing", "orders.new"))["resumed_from_sequence"] == 3
            assert await client.delivered_seqs(2) == [4, 5]
            assert await client.has_nothing_to_read()


async def test_it_survives_the_server(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.publish_many("a", 5)
        await client.subscribe("s", "a")
        await client.deliveries(5)
        await client.ack("s", 1, 2, 3)
    async with serve() as server, connect(server) as client:
        result = await client.subscribe("s", "a")
        assert (result["resumed_from_sequence"], result["undelivered_count"]) == (3, 2)
        assert await client.delivered_seqs(2) == [4, 5]
        assert await client.publish("a") == 6


async def test_a_second_client_with_the_same_id_is_refused(serve: Serve) -> None:
    async with serve() as server:
        async with connect(server) as first, connect(server) as second:
            await first.subscribe("billing", "orders.>")
            for client in (second, first):
                error = await client.refusal(
                    "rpc.subscribe.persistent", {"subscription_id": "billing", "topic": "orders.>"}
                )
                assert error["code"] == -32001
                assert error["message"] == "Subscription 'billing' is already active on another connection"
            await first.publish("orders.new")
            assert (await first.delivery())["sequence_id"] == 1  # the first one is none the worse
        await gone(server)
        async with connect(server) as second:
            await second.subscribe("billing", "orders.>")


async def test_each_subscription_gets_everything(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.publish_many("a", 3)
        for id in ("one", "two"):
            await client.subscribe(id, "a")
            assert await client.delivered_seqs(3) == [1, 2, 3]
        await client.ack("one", 1, 2, 3)
        await client.release("two")
        assert (await client.subscribe("two", "a"))["resumed_from_sequence"] == 0


async def test_a_wildcard_resumes_over_all_its_topics(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        first = await client.publish("orders.new", 1)
        shipped = await client.publish("orders.shipped", 1)
        second = await client.publish("orders.new", 2)
        await client.subscribe("s", "orders.*")
        assert await client.delivered_seqs(3) == [first, shipped, second]
        await client.ack("s", first)
        await client.release("s")
        assert (await client.subscribe("s", "orders.*"))["resumed_from_sequence"] == first
        assert [(d["topic"], d["data"]) for d in await client.deliveries(2)] == [
            ("orders.shipped", 1),
            ("orders.new", 2),
        ]


async def test_acks_neither_skip_nor_rewind(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.publish_many("a", 6)
        await client.subscribe("s", "a")
        await client.deliveries(6)
        await client.ack("s", 6)
        await client.ack("s", 1)
        params = {"subscription_id": "s", "sequence_id": 99}
        assert await client.code("rpc.acknowledge.persistent", params) == -32003
        await client.release("s")
        assert (await client.subscribe("s", "a"))["resumed_from_sequence"] == 1
        assert await client.delivered_seqs(4) == [2, 3, 4, 5]
        assert await client.has_nothing_to_read()


async def test_two_live_patterns_of_one_connection_are_two_notifications(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.call("rpc.subscribe", {"topic": "events.*"})
        await client.call("rpc.subscribe", {"topic": "*.login"})
        await client.publish("events.login", {"user": 7})
        notes = [await client.note("rpc.notification") for _ in range(2)]
        assert sorted(note["pattern"] for note in notes) == ["*.login", "events.*"]
        assert [(note["topic"], note["data"]) for note in notes] == [("events.login", {"user": 7})] * 2
        await client.publish("events.logout")
        assert (await client.note("rpc.notification"))["pattern"] == "events.*"
        assert await client.has_nothing_to_read()


async def test_two_durable_patterns_of_one_connection_are_distinguished_by_id(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        for id, pattern in (("exact", "orders.new"), ("one", "orders.*"), ("all", ">"), ("other", "events.>")):
            await client.subscribe(id, pattern)
        await client.publish("orders.new")
        assert sorted([(await client.delivery())["subscription_id"] for _ in range(3)]) == ["all", "exact", "one"]
        await client.publish("orders.shipped")
        assert sorted([(await client.delivery())["subscription_id"] for _ in range(2)]) == ["all", "one"]
        await client.publish("orders.new.fast")
        assert (await client.delivery())["subscription_id"] == "all"
        assert await client.has_nothing_to_read()


async def test_a_batch_limit_of_two_and_three_calls(serve: Serve) -> None:
    async with serve(limits_batch_calls=2) as server, connect(server) as client:
        calls = [{"jsonrpc": "2.0", "method": "rpc.last_seq", "id": number} for number in (1, 2, 3)]
        answer = await client.exchange(calls)
        assert isinstance(answer, dict)
        assert (answer["error"]["code"], answer["id"]) == (-32600, None)


async def test_persistent_methods_work_inside_batches(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.publish("a.x")
        calls = [
            {"method": "rpc.subscribe.persistent", "params": {"subscription_id": "s", "topic": "a.*"}},
            {"method": "rpc.subscribe", "params": {"topic": "a.*"}},
        ]
        answers = await client.exchange([{"jsonrpc": "2.0", "id": at, **call} for at, call in enumerate(calls)])
        assert [answer["result"]["subscribed"] for answer in answers] == [True, True]
        assert (await client.delivery())["topic"] == "a.x"
