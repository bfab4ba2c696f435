"""What every call passes through."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from foreign_client import Serve, connect

from headwater.errors import UnauthorizedError
from headwater.protocol.jsonrpc import Fault
from headwater.server.registry import CallContext, Middleware, Outcome, ShortCircuit


class Recorder(Middleware):
    """Records what it sees, and does as configured."""

    def __init__(self, name: str, seen: list[Any]) -> None:
        self.name = name
        self.seen = seen
        self.short: dict[str, ShortCircuit] = {}
        self.before_raises: Exception | None = None
        self.after_raises: Exception | None = None

    async def before(self, call: CallContext) -> ShortCircuit | None:
        self.seen.append((self.name, "before", call.method))
        call.metadata.setdefault("path", []).append(self.name)
        if self.before_raises is not None:
            raise self.before_raises
        return self.short.get(call.method)

    async def after(self, call: CallContext, outcome: Outcome) -> None:
        code = None if outcome.fault is None else outcome.fault.code
        self.seen.append((self.name, "after", outcome.result if code is None else code))
        if self.after_raises is not None:
            raise self.after_raises


async def test_before_in_order_after_in_the_opposite_order(serve: Serve) -> None:
    seen: list[Any] = []
    server = serve("memory:")
    server.use(Recorder("outer", seen))
    server.use(Recorder("inner", seen))

    @server.method("path")
    def path(call: CallContext) -> list[str]:
        seen.append("method")
        return list(call.metadata["path"])

    async with server, connect(server) as client:
        assert await client.call("path") == ["outer", "inner"]  # the metadata got there
        assert seen == [
            ("outer", "before", "path"),
            ("inner", "before", "path"),
            "method",
            ("inner", "after", ["outer", "inner"]),
            ("outer", "after", ["outer", "inner"]),
        ]


async def test_the_servers_own_methods_pass_through_it_too(serve: Serve) -> None:
    seen: list[Any] = []
    server = serve("memory:")
    server.use(Recorder("m", seen))
    async with server, connect(server) as client:
        batch = [
            ("rpc.publish", {"topic": "a", "data": 1}),
            ("rpc.publish.batch", {"messages": [{"topic": "a", "data": 2}]}),
            ("rpc.subscribe", {"topic": "live"}),
            ("rpc.subscribe.persistent", {"subscription_id": "s", "topic": "a"}),
            ("rpc.ack_persistent", {"subscription_id": "s", "sequence_id": 99}),
            ("no.such.method", {}),
        ]
        for method, params in batch:
            await client.send({"jsonrpc": "2.0", "method": method, "params": params, "id": method})
            while (await client.frame()).get("id") != method:
                pass
        assert [each[2] for each in seen if each[1] == "before"] == [method for method, _ in batch]
        assert [each[2] for each in seen if each[1] == "after"][-2:] == [-32003, -32601]
        await client.notify("rpc.publish", {"topic": "a", "data": 3})
        assert await client.publish("a") == 4
        assert [each[2] for each in seen if each[1] == "before"][-2:] == ["rpc.publish"] * 2


async def test_publishing_through_middleware_is_the_same_publishing(serve: Serve) -> None:
    server = serve()
    server.use(Middleware())
    async with server, connect(server) as client:
        assert await client.call("rpc.publish", {"topic": "a", "data": 1, "id": "x"}) == {
            "sequence_id": 1,
            "duplicate": False,
        }
        assert (await client.call("rpc.publish", {"topic": "a", "data": 1, "id": "x"}))["duplicate"] is True
        assert await client.code("rpc.publish", {"topic": "a.*", "data": 1}) == -32004
        assert await client.publish_many("a", 3) == [2, 3, 4]


async def test_a_short_circuit_answers_and_after_hooks_still_run(serve: Serve) -> None:
    seen: list[Any] = []
    server = serve("memory:")
    outer, middle, inner = (server.use(Recorder(name, seen)) for name in ("outer", "middle", "inner"))
    assert isinstance(middle, Recorder)
    middle.short["cached"] = ShortCircuit({"from": "cache"})

    @server.method("cached")
    def cached() -> None:
        raise AssertionError("not to be called")

    async with server, connect(server) as client:
        assert await client.call("cached") == {"from": "cache"}
        assert seen == [
            ("outer", "before", "cached"),
            ("middle", "before", "cached"),
            ("middle", "after", {"from": "cache"}),
            ("outer", "after", {"from": "cache"}),
        ]
        assert outer is not inner


async def test_a_short_circuit_may_answer_null(serve: Serve) -> None:
    server = serve("memory:")
    recorder = Recorder("m", [])
    recorder.short["rpc.publish"] = ShortCircuit(None)
    server.use(recorder)
    async with server, connect(server) as client:
        assert await client.call("rpc.publish", {"topic": "a", "data": 1}) is None
        assert (await client.call("rpc.last_seq"))["sequence_id"] == 0


@pytest.mark.parametrize(
    ("raised", "code"),
    [(Fault(-32099, "not today"), -32099), (UnauthorizedError("not you"), -32000), (ValueError("a secret"), -32603)],
)
async def test_what_before_raises_refuses_the_call(
    serve: Serve, raised: Exception, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []
    server = serve("memory:")
    recorder = Recorder("m", seen)
    recorder.before_raises = raised
    server.use(Recorder("outer", seen))
    server.use(recorder)
    server.use(Recorder("never", seen))
    async with server, connect(server) as client:
        with caplog.at_level(logging.CRITICAL):
            error = await client.refusal("rpc.publish", {"topic": "a", "data": 1})
        assert error["code"] == code
        assert "secret" not in error["message"]
        assert seen == [
            ("outer", "before", "rpc.publish"),
            ("m", "before", "rpc.publish"),
            ("m", "after", code),
            ("outer", "after", code),
        ]


async def test_what_after_raises_changes_nothing(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []
    server = serve("memory:")
    recorder = Recorder("m", seen)
    recorder.after_raises = ValueError("oh")
    server.use(Recorder("outer", seen))
    server.use(recorder)
    async with server, connect(server) as client:
        with caplog.at_level(logging.CRITICAL):
            assert await client.publish("a") == 1
        assert [each[:2] for each in seen][-2:] == [("m", "after"), ("outer", "after")]


async def test_middleware_knows_the_caller_and_whether_an_answer_is_wanted(serve: Serve) -> None:
    class Looks(Middleware):
        def __init__(self) -> None:
            self.saw: list[Any] = []

        async def before(self, call: CallContext) -> None:
            self.saw.append((call.is_notification, call.peer.address, call.peer.label, call.params))

    server = serve("memory:")
    looks = Looks()
    server.use(looks)
    async with server, connect(server) as client:
        await client.notify("nothing", {"x": 1})
        await client.call("rpc.publish", ["a", 1])
        assert looks.saw == [(True, "127.0.0.1", "", {"x": 1}), (False, "127.0.0.1", "", ["a", 1])]
