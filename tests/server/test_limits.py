"""What one client may ask for, and what happens beyond it: refused, waited for, closed; never lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from foreign_client import PATIENCE_S, Client, Serve, connect, gone, turn
from raw_http import UPGRADE, dial, get
from websockets.exceptions import InvalidMessage, InvalidStatus

from headwater.server.server import Server

# --- how fast ---------------------------------------------------------------------------------------------------------


async def test_a_call_over_the_rate_is_refused_with_a_retry_time(serve: Serve) -> None:
    async with serve(limits_requests_per_second=1, limits_burst=3) as server, connect(server) as client:
        assert [await client.publish("a") for _ in range(3)] == [1, 2, 3]
        error = await client.refusal("rpc.publish", {"topic": "a", "data": 1})
        assert error["code"] == -32006
        assert 0 < error["data"]["retry_after"] <= 1
        batch = [{"jsonrpc": "2.0", "method": "rpc.last_seq", "id": number} for number in (1, 2)]
        answers = await client.exchange(batch)
        assert [answer["error"]["code"] for answer in answers] == [-32006, -32006]
        async with connect(server) as another:  # each connection for itself
            assert (await another.call("rpc.last_seq"))["sequence_id"] == 3  # nothing of it was stored


async def test_the_bucket_fills_again(serve: Serve) -> None:
    async with serve(limits_requests_per_second=50, limits_burst=1) as server, connect(server) as client:
        heard: list[str] = []  # changes between the two, however slow this machine is
        while heard[:4] != ["result", "error", "result", "error"]:
            answer = await client.exchange({"jsonrpc": "2.0", "method": "rpc.last_seq", "id": 1})
            kind = "result" if "result" in answer else "error"
            if heard[-1:] != [kind]:
                heard.append(kind)


# --- how many ---------------------------------------------------------------------------------------------------------


async def refused_with(server: Server) -> int:
    try:
        async with connect(server):
            return 101
    except InvalidStatus as refused:
        return refused.response.status_code
    except InvalidMessage:
        return 0


@pytest.mark.parametrize("limit", ["limits_connections", "limits_connections_per_address"])
async def test_beyond_the_limit_of_connections_there_is_503(serve: Serve, limit: str) -> None:
    async with serve("memory:", **{limit: 2}) as server:
        async with connect(server) as first:
            async with connect(server):
                assert await refused_with(server) == 503
                assert (await get(server, "/healthz")).status == 503  # the port is full for every client
                assert await first.publish("a") == 1
            async with asyncio.timeout(PATIENCE_S):
                while len(server.acceptor.connections) > 1:
                    await turn()
            assert await refused_with(server) == 101
        await gone(server)
        assert not server.acceptor.by_address or set(server.acceptor.by_address.values()) == {0}


async def test_a_client_that_never_finishes_its_head_gives_way_to_a_new_one(serve: Serve) -> None:
    async with serve("memory:", limits_connections=1) as server:
        async with dial(server) as raw:
            raw.send("GET / HT")
            async with asyncio.timeout(PATIENCE_S):
                while not server.acceptor.connections:
                    await turn()
            assert await refused_with(server) == 101
            await raw.ended()
        async with asyncio.timeout(PATIENCE_S):
            while server.acceptor.connections:
                await turn()


# --- how much at once -------------------------------------------------------------------------------------------------


class Gate:
    """A method that waits, and knows how many wait in it."""

    def __init__(self, server: Server) -> None:
        self.open = asyncio.Event()
        self.inside = 0
        self.most = 0
        server.method("gate")(self._pass)

    async def _pass(self, number: int) -> int:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await self.open.wait()
        self.inside -= 1
        return number

    async def has_inside(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.inside < count:
                await turn()


@pytest.mark.parametrize("most", [1, 5, 50])
async def test_calls_beyond_those_in_flight_wait_in_the_socket_and_none_is_lost(serve: Serve, most: int) -> None:
    server = serve("memory:", limits_requests_in_flight=most)
    gate = Gate(server)
    async with server, connect(server) as client, connect(server) as other:
        ids = [await client.ask("gate", [number]) for number in range(200)]
        await gate.has_inside(most)
        for _ in range(20):
            await other.call("rpc.last_seq")  # others are served, and time passes
        assert gate.most <= most + 1
        gate.open.set()
        assert [await client.answer(id) for id in ids] == list(range(200))
        assert await client.publish("a") == 1


async def test_a_client_that_waits_for_its_turn_is_not_taken_for_dead(serve: Serve) -> None:
    """While nothing is read from it, its pongs are not heard; that is our doing, not its."""
    server = serve("memory:", limits_requests_in_flight=1, limits_ping_interval=0.05, limits_ping_timeout=0.05)
    gate = Gate(server)
    async with server, connect(server) as client, connect(server) as watch:
        ids = [await client.ask("gate", [number]) for number in range(5)]
        await gate.has_inside(1)
        deadline_s = asyncio.get_running_loop().time() + 0.5  # five times as long as a silent one has
        while asyncio.get_running_loop().time() < deadline_s:
            await watch.call("rpc.hello")
        gate.open.set()
        assert [await client.answer(id) for id in ids] == [0, 1, 2, 3, 4]


async def test_refused_calls_are_not_counted_for_ever(serve: Serve) -> None:
    """Each kind of refusal gives back its place; or a connection that errs now and then would stop being read."""
    wrong: list[tuple[str, Any]] = [
        ("rpc.publish", {"topic": "a..b", "data": 1}),
        ("rpc.publish", {"topic": "a"}),
        ("rpc.publish", {"topic": "a", "data": 1, "number": 3}),
        ("rpc.publish.batch", {"messages": [{"topic": "a..b", "data": 1}]}),
        ("rpc.publish.batch", {"messages": 7}),
        ("rpc.subscribe", {"topic": "a..b"}),
        ("rpc.subscribe", {}),
        ("rpc.last_seq", {"x": 1}),
        ("nope", {}),
    ]
    async with serve("memory:", limits_requests_in_flight=2) as server, connect(server) as client:
        for _ in range(3):
            for method, params in wrong:
                assert await client.code(method, params) < 0
                await client.notify(method, params)
        assert (await client.call("rpc.last_seq")) == {"sequence_id": 0}
        [connection] = server.connections
        assert connection._working == 0


async def test_a_call_that_takes_too_long_is_refused(serve: Serve) -> None:
    server = serve("memory:", limits_request_timeout=0.05)
    Gate(server)
    async with server, connect(server) as client:
        error = await client.refusal("gate", [1])
        assert error["code"] == -32006
        assert error["data"]["kind"] == "RequestTimeoutError"
        assert await client.publish("a") == 1


async def test_a_fetch_waits_as_long_as_it_may_and_no_longer(serve: Serve) -> None:
    flags: dict[str, Any] = {"limits_request_timeout": 0.5, "limits_fetch_wait": 0.6}
    async with serve("memory:", **flags) as server, connect(server) as client:
        await client.subscribe("s", "a", deliver="fetch")
        began_s = asyncio.get_running_loop().time()
        assert (await client.call("rpc.fetch", {"subscription_id": "s", "wait": 3_600}))["messages"] == []
        assert 0.59 < asyncio.get_running_loop().time() - began_s < 5


async def test_an_upgrade_that_is_none_ends_and_leaves_nothing(serve: Serve) -> None:
    async with serve("memory:") as server:
        for head in (
            f"POST /rpc HTTP/1.1\r\nHost: x\r\n{UPGRADE}\r\n",
            "GET /rpc HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n\r\n",
            f"GET /rpc HTTP/1.1\r\nHost: x\r\n{UPGRADE}".replace("13", "99") + "\r\n",
            f"\0\0\0\r\n{UPGRADE}\r\n",
            f"GET /rpc HTTP/1.1\r\nHost: x\r\n{UPGRADE}Bad\r\n\r\n",
            f"GET /rpc HTTP/1.1\r\nHost: x\r\n{UPGRADE}X: {'y' * 10_000}\r\n\r\n",
        ):
            async with dial(server) as raw:
                raw.send(head)
                assert b" 101 " not in await raw.ended()
        await gone(server)
        assert server.metrics.connections._value.get() == 0


async def test_paths_without_json_rpc_refuse_an_upgrade(serve: Serve) -> None:
    async with serve("memory:") as server:
        with pytest.raises(InvalidStatus) as refused:
            async with connect(server, "/metrics"):
                pass
        assert refused.value.response.status_code == 404


async def test_frames_sent_along_with_the_head_are_not_lost(serve: Serve) -> None:
    """A client should wait for the answer to its head. One that does not is not punished by silence."""
    frame = b'{"jsonrpc":"2.0","method":"rpc.hello","id":1}'
    mask = b"\1\2\3\4"
    masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(frame))
    async with serve("memory:") as server, dial(server) as raw:
        head = f"GET /rpc HTTP/1.1\r\nHost: x\r\n{UPGRADE}\r\n".encode()
        raw.send(head + bytes([0x81, 0x80 | len(frame)]) + mask + masked)
        assert (await raw.response()).status == 101
        async with asyncio.timeout(PATIENCE_S):
            assert b'"headwater"' in await raw.reader.read(1_000)
    async with serve("memory:") as server, dial(server) as raw:
        raw.send(head + bytes([0x82, 0x80 | len(frame)]) + mask + masked)  # binary, which it may not be
        assert (await raw.response()).status == 101
        assert (await raw.ended())[2:4] == (1003).to_bytes(2, "big")


async def ask_and_leave(client: Client) -> None:
    await client.ask("rpc.subscribe.persistent", {"subscription_id": "s", "topic": "a"})
    client.vanish()


async def test_a_client_that_leaves_while_it_subscribes_holds_nothing(serve: Serve) -> None:
    """However the leaving meets the subscribing, the next one does not have to wait for a lease to run out."""
    async with serve() as server:
        for _ in range(30):
            async with connect(server) as client:
                await ask_and_leave(client)
            await gone(server)
            async with connect(server) as client:
                await client.subscribe("s", "a")
            await gone(server)
