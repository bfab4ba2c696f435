"""Calls beside the log's own, in both directions."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from typing import Any

import pytest
from client_states import break_off, cut_off
from served import RunningServer

import headwater
from headwater.errors import (
    CallError,
    InvalidDataError,
    InvalidOptionError,
    RequestTimeoutError,
    TooLargeError,
    UnreachableError,
)
from headwater.protocol.jsonrpc import Fault

QUICKLY_S = 10.0


async def test_a_method_of_the_server_is_called_with_params_by_name_and_by_place(serve: Any) -> None:
    server = serve()

    @server.method("add")
    def add(a: int, b: int = 10) -> int:
        return a + b

    @server.method("later")
    async def later(call: Any, text: str) -> dict[str, str]:
        await asyncio.sleep(0)
        return {"text": text, "by": call.method}

    async with server, headwater.open_async(server.url) as log:
        assert await log.remote.call("add", [1, 2]) == 3
        assert await log.remote.call("add", {"a": 1}) == 11
        assert await log.remote.call("later", {"text": "ü"}) == {"text": "ü", "by": "later"}


async def test_an_answer_to_no_call_or_to_an_answered_one_is_ignored(serve: Any) -> None:
    async with serve() as server, headwater.open_async(server.url) as log:
        connection = log._core._connection
        first = asyncio.ensure_future(log.remote.call("rpc.last_seq"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        [id] = connection._unanswered
        for answer in (f'{{"result":{{"sequence_id":7}},"id":{id}', '{"result":8,"id":99', '{"result":9,"id":null'):
            connection._receive(f'{answer},"jsonrpc":"2.0"}}'.encode())
        assert await first == {"sequence_id": 7}  # and the server's own answer is the second one
        assert await log.last_seq() == 0


async def test_errors_of_the_server_arrive_as_what_they_are(serve: Any) -> None:
    server = serve()

    @server.method("fault")
    def fault() -> None:
        raise Fault(-1234, "not today", {"because": "rain"})

    @server.method("ours")
    def ours() -> None:
        raise TooLargeError("too much", where="there", next="less")

    @server.method("bug")
    def bug() -> None:
        raise KeyError("a secret of the server")

    async with server, headwater.open_async(server.url) as log:
        with pytest.raises(CallError) as raised:
            await log.remote.call("fault")
        assert (raised.value.code, raised.value.why, raised.value.data) == (-1234, "not today", {"because": "rain"})
        with pytest.raises(TooLargeError) as large:
            await log.remote.call("ours")
        assert (large.value.why, large.value.where, large.value.next) == ("too much", "there", "less")
        with pytest.raises(CallError) as broken:
            await log.remote.call("bug")
        assert broken.value.code == -32603
        assert "secret" not in str(broken.value)
        with pytest.raises(CallError) as unknown:
            await log.remote.call("no such method")
        assert unknown.value.code == -32601
        for wrong in ({"no": "such"}, [1, 2, 3]):
            with pytest.raises(headwater.HeadwaterError):
                await log.remote.call("bug", wrong)
        with pytest.raises(InvalidDataError):
            await log.remote.call("bug", "neither object nor array")
        assert log.remote.state == "connected"


DEEPEST = 2_000  # levels, more than any end reads


def nested(depth: int) -> list[Any]:
    return functools.reduce(lambda inner, _: [inner], range(depth - 1), [])


async def test_a_result_nested_too_deeply_is_an_error_at_once_in_both_directions(serve: Any) -> None:
    server = serve()

    @server.method("deep")
    async def deep(call: Any, depth: int) -> Any:
        return nested(depth)

    @server.method("ask_back")
    async def ask_back(call: Any, depth: int) -> Any:
        return await call.peer.call("deep", [depth])

    async with server, headwater.open_async(server.url) as log:
        log.remote.method("deep")(nested)
        for method in ("deep", "ask_back"):
            assert await log.remote.call(method, [100]) == nested(100)
            # At all depths around the limit, that of the reader as well as that of the writer.
            outcomes = [log.remote.call(method, [depth]) for depth in (*range(900, 1_000), DEEPEST)]
            found = await asyncio.wait_for(asyncio.gather(*outcomes, return_exceptions=True), QUICKLY_S)
            assert isinstance(found[-1], CallError)
            assert all(isinstance(each, list | CallError | UnreachableError) for each in found)


async def test_params_nested_too_deeply_are_refused_and_spare_the_calls_beside_them(serve: Any) -> None:
    async with serve() as server, headwater.open_async(server.url) as log:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(DEEPEST)
        try:  # this end writes what the server does not read
            calls = [asyncio.ensure_future(log.publish("a", data)) for data in (1, nested(limit), 2)]
            await asyncio.sleep(0)
        finally:
            sys.setrecursionlimit(limit)
        found = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), QUICKLY_S)
        assert str(found[1]).startswith("params: nested too deeply")
        assert [found[0], found[2]] == [1, 2]


async def test_an_answer_that_takes_too_long(serve: Any) -> None:
    server = serve()
    never = asyncio.Event()
    server.method("slow")(never.wait)
    async with server, headwater.open_async(server.url) as log:
        with pytest.raises(RequestTimeoutError) as raised:
            await log.remote.call("slow", timeout=0.1)
        assert raised.value.where == "slow"
        assert await log.publish("a", 1) == 1  # the others do not wait for it
        never.set()


async def test_a_notification_is_heard_and_not_answered(serve: Any) -> None:
    server = serve()
    heard: asyncio.Queue[Any] = asyncio.Queue()
    server.method("note")(heard.put_nowait)
    async with server, headwater.open_async(server.url) as log:
        log.remote.notify("note", ["hello"])
        log.remote.notify("no such method", ["whatever"])
        assert await asyncio.wait_for(heard.get(), QUICKLY_S) == "hello"


async def test_the_server_calls_what_a_client_offers(serve: Any) -> None:
    async with serve() as server, headwater.open_async(server.url) as log:

        @log.remote.method("twice")
        def twice(n: int) -> int:
            return 2 * n

        @log.remote.method("thrice")
        async def thrice(n: int) -> int:
            return 3 * n

        @log.remote.method("bug")
        def bug() -> None:
            raise KeyError("a secret of the client")

        @log.remote.method("fault")
        async def fault() -> None:
            raise Fault(-77, "no")

        [peer] = server.connections
        assert await peer.call("twice", [4]) == 8
        assert await peer.call("thrice", {"n": 4}) == 12
        with pytest.raises(CallError) as raised:
            await peer.call("bug")
        assert "secret" not in str(raised.value)
        with pytest.raises(CallError) as refused:
            await peer.call("fault")
        assert refused.value.code == -77
        with pytest.raises(CallError) as unknown:
            await peer.call("no such")
        assert unknown.value.code == -32601
        with pytest.raises(headwater.HeadwaterError):
            await peer.call("twice", {"m": 1})
        assert log.remote.state == "connected"


async def test_a_notification_of_the_server(serve: Any) -> None:
    async with serve() as server, headwater.open_async(server.url) as log:
        heard: asyncio.Queue[str] = asyncio.Queue()

        @log.remote.method("note")
        async def note(text: str) -> None:
            heard.put_nowait(text)

        server.connections[0].notify("note", {"text": "hello"})
        assert await asyncio.wait_for(heard.get(), QUICKLY_S) == "hello"


async def test_what_is_offered_is_offered_on_the_next_connection_too(proxied: Any) -> None:
    async with proxied() as (server, proxy, log):
        log.remote.method("twice")(lambda n: 2 * n)
        await break_off(proxy, log)
        peer = server.connections[-1]
        assert await peer.call("twice", [4]) == 8


def test_what_cannot_be_offered(server: RunningServer) -> None:
    async def coroutine() -> None:
        """It would run on the client's own loop, which whatever it waits for needs."""

    with headwater.open(server.url) as log:
        with pytest.raises(InvalidOptionError):
            log.remote.method("rpc.publish")(print)
        with pytest.raises(InvalidOptionError) as raised:
            log.remote.method("later")(coroutine)
        assert "headwater.open_async()" in raised.value.next


def test_both_ways_with_the_sync_api(server: RunningServer) -> None:
    called = threading.Event()
    server._server.method("add")(lambda a, b: a + b)
    with headwater.open(server.url) as log:

        @log.remote.method("note")
        def note() -> str:
            called.set()
            return "noted"

        assert log.remote.call("add", [1, 2]) == 3
        log.remote.notify("add", [1, 2])
        [peer] = server._server.connections
        asking = asyncio.run_coroutine_threadsafe(peer.call("note"), server._loop)
        assert asking.result(QUICKLY_S) == "noted"
        assert called.is_set()


async def test_without_a_connection_a_notification_is_lost_and_a_call_waits(serve: Any, proxied: Any) -> None:
    server = serve()
    heard: list[str] = []
    server.method("note")(heard.append)
    server.method("ask")(lambda: "answer")
    async with proxied(server) as (_, proxy, log):
        await cut_off(proxy, log)
        log.remote.notify("note", ["lost"])
        asking = asyncio.ensure_future(log.remote.call("ask"))
        await asyncio.sleep(0)
        proxy.accept()
        assert await asking == "answer"
        log.remote.notify("note", ["heard"])
        assert await log.remote.call("ask") == "answer"
        assert heard == ["heard"]


async def test_a_client_that_went_leaves_its_caller_an_error(proxied: Any) -> None:
    async with proxied() as (server, proxy, log):
        begun, never = asyncio.Event(), asyncio.Event()

        @log.remote.method("slow")
        async def slow() -> None:
            begun.set()
            await never.wait()

        asking = asyncio.ensure_future(server.connections[0].call("slow"))
        await begun.wait()
        proxy.reset()
        with pytest.raises((RequestTimeoutError, UnreachableError)):
            await asking
        never.set()
        assert await log.publish("a", 1) == 1
