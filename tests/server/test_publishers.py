"""Publishers that number their messages may send them again, over whatever connection."""

from __future__ import annotations

import pytest
from foreign_client import Make, Serve, bearer, connect

from headwater.server.connection import Connection


async def test_what_is_sent_again_is_recognised(serve: Serve) -> None:
    async with serve() as server:
        async with connect(server) as client:
            await client.call("rpc.hello", {"publisher": "till-7"})
            assert [await client.publish("a", n, number=n) for n in (1, 2, 3)] == [1, 2, 3]
            client.vanish()
        async with connect(server) as client:
            await client.call("rpc.hello", {"publisher": "till-7"})
            again = await client.call("rpc.publish", {"topic": "a", "data": 3, "number": 3})
            assert again == {"sequence_id": 3, "duplicate": True}
            batch = {"messages": [{"topic": "a", "data": n} for n in (2, 3, 4)], "number": 2}
            assert await client.call("rpc.publish.batch", batch) == {"sequence_ids": [2, 3, 4], "duplicates": [0, 1]}
        async with connect(server) as client:
            await client.call("rpc.hello", {"publisher": "another"})
            assert await client.publish("a", 1, number=1) == 5


async def test_a_frame_of_numbered_publishes_is_recognised_too(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.call("rpc.hello", {"publisher": "p"})
        calls = [
            {"jsonrpc": "2.0", "method": "rpc.publish", "params": {"topic": "a", "data": n, "number": n}, "id": n}
            for n in range(1, 51)
        ]
        first = await client.exchange(calls)
        second = await client.exchange(calls)
        assert [each["result"]["sequence_id"] for each in first] == list(range(1, 51))
        assert [each["result"] for each in second] == [{"sequence_id": n, "duplicate": True} for n in range(1, 51)]


async def test_a_publisher_speaks_through_one_connection(serve: Serve) -> None:
    async with serve() as server, connect(server) as old, connect(server) as new:
        await old.call("rpc.hello", {"publisher": "p"})
        await new.call("rpc.hello", {"publisher": "p"})
        assert await old.closing() == (1008, "this publisher has connected anew")
        assert await new.publish("a", 1, number=1) == 1


async def test_names_and_numbers_have_their_limits(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        for name in ("", "x" * 1_000):
            assert await client.code("rpc.hello", {"publisher": name}) == -32602
        await client.call("rpc.hello", {"publisher": "p"})
        for number in (0, -1, 2**54, 2**70):
            assert await client.code("rpc.publish", {"topic": "a", "data": 1, "number": number}) == -32602
        assert await client.code("rpc.publish", {"topic": "a", "data": 1, "number": 1, "confirmed": 2**70}) == -32602
        assert (await client.call("rpc.last_seq")) == {"sequence_id": 0}


async def test_no_label_and_name_make_the_name_of_another_tokens_publisher(serve_tokens: Serve, make: Make) -> None:
    mine, other = (make(label, publish=[">"]) for label in ("a/b", "a"))
    async with (
        serve_tokens() as server,
        connect(server, **bearer(mine)) as client,
        connect(server, **bearer(other)) as attacker,
    ):
        await client.call("rpc.hello", {"publisher": "p"})
        for number, name in enumerate(("b/p", "b\np", "b\x1fp"), 1):
            await attacker.call("rpc.hello", {"publisher": name})
            for each in (attacker, client):
                published = await each.call("rpc.publish", {"topic": "x", "data": 0, "number": number})
                assert published["duplicate"] is False


async def test_a_connection_has_one_publisher(serve: Serve) -> None:
    async with serve() as server, connect(server) as client, connect(server) as other:
        await client.call("rpc.hello", {"publisher": "first"})
        await client.call("rpc.hello", {"publisher": "second"})
        await other.call("rpc.hello", {"publisher": "first"})  # which is free
        assert await client.publish("a", 1, number=1) == 1
        assert await other.publish("a", 1, number=1) == 2


async def test_the_answer_to_the_only_call_is_sent_with_its_commit(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a turn of the event loop of its own, which every message would pay for."""
    turns: list[Connection] = []
    flush_due = Connection._flush_due

    def counted(connection: Connection) -> None:
        turns.append(connection)
        flush_due(connection)

    monkeypatch.setattr(Connection, "_flush_due", counted)
    async with serve() as server, connect(server) as client:
        await client.call("rpc.hello", {"publisher": "p"})
        turns.clear()
        assert [await client.publish("a", n, number=n) for n in (1, 2, 3)] == [1, 2, 3]
        assert not turns
        asked = [await client.ask("rpc.publish", {"topic": "a", "data": n}) for n in (4, 5)]
        assert [(await client.answer(id))["sequence_id"] for id in asked] == [4, 5]
