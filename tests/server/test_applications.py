"""An application's own methods, and calls from the server to its clients."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from typing import Any

import pytest
from foreign_client import Client, Serve, connect, gone

from headwater.errors import CallError, InvalidOptionError, OverloadedError, RequestTimeoutError, UnreachableError
from headwater.protocol.jsonrpc import Fault
from headwater.server.connection import WAITING_MAX
from headwater.server.registry import CallContext, MethodThreads
from headwater.server.server import Server


async def test_params_become_arguments_by_name_or_position(serve: Serve) -> None:
    server = serve("memory:")

    @server.method("shop.total")
    def total(price: float, count: int = 1, *more: int, note: str = "") -> list[Any]:
        return [price * count, list(more), note]

    @server.method("shop.slow_total")
    async def slow_total(price: float) -> float:
        await asyncio.sleep(0)
        return price

    async with server, connect(server) as client:
        assert await client.call("shop.total", {"price": 2, "count": 3}) == [6, [], ""]
        assert await client.call("shop.total", {"price": 2, "note": "x"}) == [2, [], "x"]
        assert await client.call("shop.total", [2, 3, 4, 5]) == [6, [4, 5], ""]
        assert await client.call("shop.slow_total", [7]) == 7
        for params in ({}, None, {"price": 1, "cuont": 2}, []):
            error = await client.refusal("shop.total", params)
            assert error["code"] == -32602
            assert error["message"].startswith("Invalid params")
        assert await client.code("shop.slow_total", [1, 2]) == -32602
        await client.send('{"jsonrpc": "2.0", "method": "shop.total", "params": [1e999], "id": 77}')
        assert await client.code_of(77) == -32602  # infinity


async def test_a_first_parameter_named_call_is_the_call(serve: Serve) -> None:
    server = serve("memory:")

    @server.method("caller")
    def caller(call: CallContext, greeting: str = "hello") -> dict[str, Any]:
        return {
            "method": call.method,
            "notification": call.is_notification,
            "params": call.params,
            "address": call.peer.address,
            "greeting": greeting,
        }

    async with server, connect(server) as client:
        assert await client.call("caller", {"greeting": "hi"}) == {
            "method": "caller",
            "notification": False,
            "params": {"greeting": "hi"},
            "address": "127.0.0.1",
            "greeting": "hi",
        }
        assert (await client.call("caller"))["params"] is None


async def test_what_a_method_raises_is_what_its_caller_learns(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve("memory:")

    @server.method("fault")
    def fault() -> None:
        raise Fault(-32050, "out of stock", {"left": 0})

    @server.method("ours")
    async def ours() -> None:
        raise InvalidOptionError("no such size", where="size", next="Choose another")

    @server.method("secret")
    def secret() -> None:
        raise RuntimeError("the password is 1234")

    @server.method("not_json")
    def not_json() -> object:
        return object()

    async with server, connect(server) as client:
        assert await client.refusal("fault") == {"code": -32050, "message": "out of stock", "data": {"left": 0}}
        error = await client.refusal("ours")
        assert (error["code"], error["message"]) == (-32602, "no such size")
        assert error["data"]["next"] == "Choose another"
        with caplog.at_level(logging.CRITICAL):
            assert await client.refusal("secret") == {"code": -32603, "message": "internal error"}
            assert await client.code("not_json") == -32603
        await client.notify("secret")
        assert (await client.call("rpc.hello"))["server"] == "headwater"


async def test_names_of_the_server_itself_and_names_taken_are_refused(serve: Serve) -> None:
    server = serve("memory:")
    server.method("mine")(lambda: 1)
    for name in ("rpc.mine", "rpc.publish", "mine"):
        with pytest.raises(InvalidOptionError):
            server.method(name)(lambda: 2)


async def test_slow_methods_do_not_hold_up_quick_ones(serve: Serve) -> None:
    server = serve("memory:")
    let_go = asyncio.Event()

    @server.method("slow")
    async def slow() -> str:
        await let_go.wait()
        return "slow"

    async with server, connect(server) as client:
        waiting = await client.ask("slow")
        assert await client.publish("a") == 1
        let_go.set()
        assert await client.answer(waiting) == "slow"


# --- calls to clients -------------------------------------------------------------------------------------------------


async def answer_one(client: Client, **outcome: Any) -> dict[str, Any]:
    """Take one call of the server and answer it."""
    call = await client.frame()
    await client.send({"jsonrpc": "2.0", "id": call["id"], **outcome})
    return dict(call)


def only(server: Server) -> Any:
    [connection] = server.connections
    return connection


async def test_the_server_calls_a_method_of_a_client(serve: Serve) -> None:
    async with serve("memory:") as server, connect(server) as client:
        answering = asyncio.create_task(answer_one(client, result={"left": 3}))
        assert await only(server).call("stock.count", {"item": 7}) == {"left": 3}
        call = await answering
        assert call.keys() == {"jsonrpc", "method", "params", "id"}
        assert (call["method"], call["params"]) == ("stock.count", {"item": 7})


async def test_a_clients_error_is_raised_to_the_caller(serve: Serve) -> None:
    async with serve("memory:") as server, connect(server) as client:
        answering = asyncio.create_task(answer_one(client, error={"code": 42, "message": "none left", "data": [1]}))
        with pytest.raises(CallError) as raised:
            await only(server).call("stock.count")
        assert (raised.value.code, raised.value.why, raised.value.data) == (42, "none left", [1])
        await answering


async def test_a_client_that_does_not_answer_is_waited_for_so_long(serve: Serve) -> None:
    async with serve("memory:") as server, connect(server) as client:
        with pytest.raises(RequestTimeoutError):
            await only(server).call("stock.count", timeout=0.05)
        late = await client.frame()
        for id in (late["id"], late["id"], 99, str(late["id"]), None):  # no call waits for one of them
            await client.send({"jsonrpc": "2.0", "id": id, "result": 1})
        assert (await client.call("rpc.hello"))["server"] == "headwater"


async def test_a_call_to_a_client_that_leaves_raises(serve: Serve) -> None:
    async with serve("memory:") as server:
        async with connect(server) as client:
            connection = only(server)
            calling = asyncio.create_task(connection.call("stock.count"))
            await client.frame()
        with pytest.raises(RequestTimeoutError, match="gone"):
            await calling
        await gone(server)
        with pytest.raises(RequestTimeoutError, match="gone"):  # at once, not when the time is up
            await asyncio.wait_for(connection.call("stock.count"), 5)


async def test_answers_are_distinguished_whatever_their_order(serve: Serve) -> None:
    async with serve("memory:") as server, connect(server) as client:
        calling = [asyncio.create_task(only(server).call("double", [number])) for number in range(10)]
        calls: list[Any] = []
        while len(calls) < 10:
            frame = await client.frame()
            calls += frame if isinstance(frame, list) else [frame]
        answers = [{"jsonrpc": "2.0", "id": call["id"], "result": call["params"][0] * 2} for call in calls]
        await client.send(list(reversed(answers)))
        assert await asyncio.gather(*calling) == [number * 2 for number in range(10)]


async def test_a_method_may_call_back_its_caller(serve: Serve) -> None:
    server = serve("memory:")

    @server.method("ask_me_back")
    async def ask_me_back(call: CallContext) -> Any:
        call.peer.notify("progress", {"done": 50})
        return await call.peer.call("name")

    async with server, connect(server) as client:
        asked = await client.ask("ask_me_back")
        frames: list[Any] = []
        while len(frames) < 2:
            frame = await client.frame()
            frames += frame if isinstance(frame, list) else [frame]
        assert frames[0] == {"jsonrpc": "2.0", "method": "progress", "params": {"done": 50}}
        await client.send({"jsonrpc": "2.0", "id": frames[1]["id"], "result": "foreign"})
        assert await client.answer(asked) == "foreign"


async def test_an_answer_of_a_client_that_cannot_be_read_is_an_error_of_headwater(serve: Serve) -> None:
    async with serve("memory:") as server, connect(server) as client:
        calling = asyncio.create_task(only(server).call("name"))
        call = await client.frame()
        await client.send(f'{{"jsonrpc": "2.0", "id": {call["id"]}, "result": 1e999}}')
        with pytest.raises(UnreachableError, match="the client's answer cannot be read"):
            await calling


async def test_no_more_calls_wait_for_one_client_than_the_limit(serve: Serve) -> None:
    async with serve("memory:") as server, connect(server):
        connection = only(server)
        calling = [asyncio.create_task(connection.call("x")) for _ in range(WAITING_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await connection.call("x")
        for task in calling:
            task.cancel()
        await asyncio.gather(*calling, return_exceptions=True)


async def test_a_thread_that_cannot_be_started_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = MethodThreads(1)

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as system:
        system.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError):
            await threads.run(lambda: 1)
    async with asyncio.timeout(5):
        assert await threads.run(lambda: 1) == 1


async def test_what_a_method_raises_after_its_caller_has_left_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    threads, goes_on = MethodThreads(1), threading.Event()

    def fails() -> None:
        goes_on.wait(5)
        raise ValueError("the password is 1234")

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await threads.run(fails)
    goes_on.set()
    assert await threads.run(lambda: 1) == 1  # on the same thread's place
    gc.collect()
    assert not caplog.records
