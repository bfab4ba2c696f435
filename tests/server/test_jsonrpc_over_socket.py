"""JSON-RPC 2.0 over a socket: batches, limits and close codes. The frames themselves are tested in tests/protocol."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from foreign_client import PATIENCE_S, Serve, connect, gone
from raw_http import UPGRADE, dial
from websockets.frames import Frame, Opcode

from headwater.server.connection import OUTGOING_BYTES_MAX

HELLO = {"jsonrpc": "2.0", "method": "rpc.hello"}
PUBLISH = {"jsonrpc": "2.0", "method": "rpc.publish", "params": {"topic": "a", "data": 1}}


def error_of(frame: Any, id: Any) -> int:
    """The code of an error answer of the exact shape."""
    assert frame.keys() == {"jsonrpc", "error", "id"}
    assert (frame["jsonrpc"], frame["id"]) == ("2.0", id)
    assert frame["error"].keys() <= {"code", "message", "data"}
    assert isinstance(frame["error"]["message"], str)
    return int(frame["error"]["code"])


async def test_a_call_is_answered_with_its_id_and_result(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        answer = await client.exchange({**PUBLISH, "id": 7})
        assert answer == {"jsonrpc": "2.0", "result": {"sequence_id": 1, "duplicate": False}, "id": 7}


@pytest.mark.parametrize("path", ["/rpc", "/", "/rpc?from=here"])
async def test_both_paths_speak_json_rpc(serve: Serve, path: str) -> None:
    async with serve() as server, connect(server, path) as client:
        assert (await client.exchange({**HELLO, "id": 1}))["result"]["server"] == "headwater"


async def test_a_notification_is_carried_out_and_not_answered(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.send(PUBLISH)
        await client.send({"jsonrpc": "2.0", "method": "no.such.method"})
        await client.send({**PUBLISH, "id": 1})
        assert (await client.frame())["result"]["sequence_id"] == 2  # the next frame, and the second message


async def test_a_batch_is_answered_in_one_frame_in_its_order(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        batch = [
            {**PUBLISH, "id": "a"},
            {**HELLO, "id": "b"},
            {**PUBLISH, "id": "c"},
            {"jsonrpc": "2.0", "method": "nope", "id": "d"},
            {"jsonrpc": "2.0", "method": "rpc.publish", "params": {"topic": "a.*", "data": 1}, "id": "e"},
            7,
            {**PUBLISH, "id": "f"},
        ]
        answers = await client.exchange(batch)
        assert [answer["id"] for answer in answers] == ["a", "b", "c", "d", "e", None, "f"]
        assert [a["result"]["sequence_id"] for a in answers if a["id"] in ("a", "c", "f")] == [1, 2, 3]
        assert [a["error"]["code"] for a in answers if "error" in a] == [-32601, -32004, -32600]


async def test_all_publishes_of_a_frame_are_one_transaction(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        frames = []
        server._context.core._sampling.stop()  # type: ignore[union-attr]  # a sample is a commit too
        store = server._context.core.engine.store  # type: ignore[union-attr]
        write = store.write

        def counted(*given: Any, synced: bool = True, **options: Any) -> Any:
            frames.extend([1] if synced else [])  # a sample of the figures is not
            return write(*given, synced=synced, **options)

        store.write = counted  # type: ignore[method-assign]
        answers = await client.exchange([{**PUBLISH, "id": number} for number in range(500)])
        assert [answer["result"]["sequence_id"] for answer in answers] == list(range(1, 501))
        assert len(frames) == 1


async def test_batches_over_the_limit_are_refused_as_a_whole(serve: Serve) -> None:
    async with serve(limits_batch_calls=2) as server, connect(server) as client:
        assert error_of(await client.exchange([{**PUBLISH, "id": n} for n in range(3)]), None) == -32600
        answers = await client.exchange([{**PUBLISH, "id": n} for n in range(2)])
        assert [answer["result"]["sequence_id"] for answer in answers] == [1, 2]  # nothing of the first was stored


@pytest.mark.parametrize(("text", "code"), [("{", -32700), ("[]", -32600)])
async def test_what_is_no_request_is_refused_and_the_connection_lives(serve: Serve, text: str, code: int) -> None:
    async with serve("memory:") as server, connect(server) as client:
        assert error_of(await client.exchange(text), None) == code
        assert (await client.exchange({**HELLO, "id": 1}))["id"] == 1


async def test_a_broken_call_that_has_an_id_is_refused_under_it(serve: Serve) -> None:
    async with serve("memory:") as server, connect(server) as client:
        assert error_of(await client.exchange({"jsonrpc": "2.0", "method": 7, "id": "x"}), "x") == -32600
        assert error_of(await client.exchange({"jsonrpc": "2.0", "method": "nope", "id": "x"}), "x") == -32601
        wrong = {"jsonrpc": "2.0", "method": "rpc.publish", "params": {"topic": "a"}, "id": "x"}
        assert error_of(await client.exchange(wrong), "x") == -32602
        unknown = {**PUBLISH, "params": {"topic": "a", "data": 1, "prioritty": 3}, "id": "x"}
        frame = await client.exchange(unknown)
        assert error_of(frame, "x") == -32602
        assert "prioritty" in json.dumps(frame["error"])


async def test_errors_say_where_why_and_what_next(serve: Serve) -> None:
    async with serve("memory:") as server, connect(server) as client:
        error = await client.refusal("rpc.publish", {"topic": "orders..new", "data": 1})
        assert error["code"] == -32004
        assert error["data"].keys() >= {"where", "why", "next"}


async def test_a_binary_frame_closes_with_1003(serve: Serve) -> None:
    async with serve("memory:") as server:
        async with connect(server) as client:
            await client.send(json.dumps({**HELLO, "id": 1}).encode())
            assert await client.close_code() == 1003
        await gone(server)


async def test_a_frame_over_the_limit_closes_with_1009_and_stores_nothing(serve: Serve) -> None:
    async with serve(limits_frame_bytes=10_000) as server:
        async with connect(server) as client:
            fits = "x" * (10_000 - len(json.dumps({**PUBLISH, "params": {"topic": "a", "data": ""}, "id": 1})))
            frame = json.dumps({**PUBLISH, "params": {"topic": "a", "data": fits}, "id": 1})
            assert len(frame) == 10_000
            assert (await client.exchange(frame))["result"]["sequence_id"] == 1
            error = (await client.exchange(frame + " "))["error"]
            assert error["code"] == -32600
            assert error["data"] == {
                "where": "frame",
                "why": "the frame is longer than 10000 bytes",
                "next": "Send it in parts",
            }
            assert await client.close_code() == 1009
        async with connect(server) as client:
            assert (await client.call("rpc.last_seq"))["sequence_id"] == 1


async def test_the_limit_of_a_frame_also_holds_for_its_fragments_together(serve: Serve) -> None:
    async with serve(limits_frame_bytes=10_000) as server, connect(server) as client:
        await client.socket.send(["[" + " " * 4_000, " " * 4_000, " " * 4_000, "]"])
        assert error_of(await client.frame(), None) == -32600
        assert await client.close_code() == 1009


async def test_a_client_that_reads_when_it_has_sent_its_frame_learns_that_it_was_too_long(serve: Serve) -> None:
    async with serve(limits_frame_bytes=10_000) as server, dial(server) as raw:
        raw.send(f"GET /rpc HTTP/1.1\r\nHost: localhost\r\n{UPGRADE}\r\n")
        assert (await raw.response()).status == 101
        raw.send(Frame(Opcode.TEXT, b"x" * 20_000_000).serialize(mask=True))
        async with asyncio.timeout(PATIENCE_S):
            await raw.writer.drain()
        await gone(server)  # what it held is free already
        error, _, closing = (await raw.ended()).partition(b"\x88")
        assert b"-32600" in error
        assert closing[1:3] == (1009).to_bytes(2)


OFFERS = [(["jsonrpc"], "jsonrpc"), (["chat", "jsonrpc"], "jsonrpc"), (["chat"], None), (None, None)]


@pytest.mark.parametrize("path", ["/", "/rpc", "/jrow"])
async def test_the_subprotocol_jsonrpc_is_accepted_when_offered(serve: Serve, path: str) -> None:
    async with serve("memory:") as server:
        for offered, taken in OFFERS:
            async with connect(server, path, subprotocols=offered) as client:
                assert client.socket.subprotocol == taken
                assert await client.publish("a") > 0


async def test_a_frame_may_come_in_fragments(serve: Serve) -> None:
    async with serve("memory:") as server, connect(server) as client:
        text = json.dumps({**PUBLISH, "params": {"topic": "a", "data": "äöü€"}, "id": 1}, ensure_ascii=False)
        data = text.encode()
        await client.socket.send([data[at : at + 1] for at in range(len(data))], text=True)  # characters cut in two
        assert (await client.frame())["result"]["sequence_id"] == 1
        await client.subscribe("s", "a")
        assert (await client.delivery())["data"] == "äöü€"


async def test_an_answer_that_would_not_fit_into_a_frame_is_an_error_that_says_so(serve: Serve) -> None:
    server = serve("memory:")
    server.method("long")(lambda length: "x" * length)
    async with server, connect(server) as client:
        assert len(await client.call("long", [OUTGOING_BYTES_MAX - 100])) == OUTGOING_BYTES_MAX - 100
        error = await client.refusal("long", [OUTGOING_BYTES_MAX])
        assert error["code"] == -32005
        assert "ask for less" in error["data"]["next"]
