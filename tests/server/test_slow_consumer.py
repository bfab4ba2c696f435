"""A client that does not read is paused; what waits for it is bounded, and no other client waits with it."""

from __future__ import annotations

import asyncio

from foreign_client import PATIENCE_S, Client, Serve, connect, turn

from headwater.server.connection import Connection
from headwater.server.live import SLICE_BYTES
from headwater.server.server import Server

OUTBOUND = 256 * 1024
LARGE = "x" * 100_000


def connection_of(server: Server, others: list[Connection]) -> Connection:
    [mine] = [each for each in server.connections if each not in others]
    return mine


def buffered(connection: Connection) -> int:
    return connection._transport.buffered_bytes()


async def full(connection: Connection) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not connection.is_full and not connection._room_waiters:
            await turn()


async def all_is_delivered_in_order(client: Client, id: str, last: int) -> None:
    got: list[int] = []
    while not got or got[-1] < last:
        got.append((await client.delivery())["sequence_id"])
        await client.ack(id, got[-1])
    assert got == list(range(1, last + 1))


async def test_a_slow_consumer_is_paused_and_loses_nothing(serve: Serve) -> None:
    async with serve(limits_outbound_bytes=OUTBOUND) as server, connect(server) as quick:
        others = server.connections
        async with connect(server) as slow:
            connection = connection_of(server, others)
            for id, client in (("slow", slow), ("quick", quick)):
                await client.subscribe(id, "a", max_in_flight=10_000)
            slow.stop_reading()
            most = 0
            for number in range(1, 301):  # 30 MB, a hundred times of what may wait
                await quick.publish("a", LARGE)
                assert await quick.delivered_seqs(1) == [number]
                await quick.ack("quick", number)  # the others are not held up by it
                most = max(most, buffered(connection))
            assert connection._room_waiters, "the delivery waits for room"
            assert most <= OUTBOUND + 10 * len(LARGE)  # what was there before it was full, and one push
            assert await delivered_to(quick, "slow") < 200
            slow.read_again()
            await all_is_delivered_in_order(slow, "slow", 300)


async def delivered_to(client: Client, id: str) -> int:
    info = await client.call("rpc.subscription", {"subscription_id": id})
    return int(info["position"] + info["in_flight"])


async def test_a_large_backlog_does_not_fill_the_memory_of_the_server(serve: Serve) -> None:
    """All of it is there at once, and would be claimed at once if its size were not checked."""
    async with serve(limits_outbound_bytes=OUTBOUND) as server, connect(server) as publisher:
        for _ in range(40):
            messages = [{"topic": "a", "data": "x" * 500_000} for _ in range(3)]
            await publisher.call("rpc.publish.batch", {"messages": messages})
        others = server.connections
        async with connect(server) as slow:
            connection = connection_of(server, others)
            slow.stop_reading()
            await slow.ask("rpc.subscribe.persistent", {"subscription_id": "s", "topic": "a"})
            await full(connection)
            most = 0
            for _ in range(50):  # rounds in which a push that should not be could come
                await publisher.call("rpc.last_seq")
                most = max(most, buffered(connection))
            assert 0 < most < 10 * 1024 * 1024  # of 60 MB
            slow.read_again()
            await all_is_delivered_in_order(slow, "s", 120)


async def test_a_slow_live_listener_misses_messages_and_it_is_counted(serve: Serve) -> None:
    async with serve(limits_outbound_bytes=OUTBOUND) as server, connect(server) as quick:
        others = server.connections
        async with connect(server) as slow:
            connection = connection_of(server, others)
            for client in (slow, quick):
                await client.call("rpc.subscribe", {"topic": "a"})
            slow.stop_reading()
            most = 0
            for number in range(1, 201):
                await quick.publish("a", LARGE)
                assert (await quick.note("rpc.notification"))["sequence_id"] == number
                most = max(most, buffered(connection))
            assert most <= OUTBOUND + 2 * len(LARGE)
            dropped = int(server.metrics._live_dropped._value.get())
            assert dropped > 0
            slow.read_again()
            heard = [(await slow.note("rpc.notification"))["sequence_id"] for _ in range(200 - dropped)]
            assert heard == list(range(1, 200 - dropped + 1))  # up to where it stopped reading, nothing is missing
            await quick.publish("a", "now")
            assert (await slow.note("rpc.notification"))["data"] == "now"  # there is room, so it hears again


async def test_a_flood_in_one_go_is_bounded_for_a_live_listener_too(serve: Serve) -> None:
    async with serve(limits_outbound_bytes=OUTBOUND) as server, connect(server) as quick:
        others = server.connections
        async with connect(server) as slow:
            connection = connection_of(server, others)
            await slow.call("rpc.subscribe", {"topic": "a"})
            slow.stop_reading()
            for _ in range(10):  # each of them larger than what may wait, and read from the log at once
                messages = [{"topic": "a", "data": LARGE} for _ in range(40)]
                await quick.call("rpc.publish.batch", {"messages": messages})
            await full(connection)
            await quick.call("rpc.last_seq")
            assert buffered(connection) <= OUTBOUND + SLICE_BYTES + 2 * len(LARGE)
            slow.vanish()


async def test_answers_to_a_client_that_does_not_read_are_bounded_too(serve: Serve) -> None:
    """Calls are read no further while their answers pile up."""
    async with serve(limits_outbound_bytes=OUTBOUND, limits_requests_in_flight=10) as server:

        @server.method("large")
        def large() -> str:
            return LARGE

        async with connect(server) as quick:
            others = server.connections
            async with connect(server, write_limit=1024) as slow:
                connection = connection_of(server, others)
                slow.stop_reading()
                asking = asyncio.create_task(ask_all(slow, 600))  # 60 MB of answers
                await full(connection)
                most = 0
                for _ in range(200):
                    await quick.call("rpc.last_seq")
                    most = max(most, buffered(connection))
                at_once = 10 + 1
                # Those that were answered in the turn of the loop that filled it, and those that were being answered.
                assert most <= OUTBOUND + 2 * at_once * (len(LARGE) + 100)
                slow.read_again()
                for id in range(1, 601):
                    assert await slow.answer(id) == LARGE
                await asking


async def ask_all(client: Client, count: int) -> None:
    for _ in range(count):
        await client.ask("large")
