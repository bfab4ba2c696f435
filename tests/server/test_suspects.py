"""What a client had that vanished is pushed one at a time: the next only when the last one is settled."""

import asyncio
import json
from pathlib import Path
from typing import Any

import websockets

import headwater

SUBSCRIBE = {"subscription_id": "s", "topic": "a", "mode": "shared"}


ROUND_TRIPS = 20  # enough time for another push to come, were there one


async def call(socket: Any, method: str, params: dict[str, Any]) -> None:
    """And nothing is pushed before the answer."""
    await socket.send(json.dumps({"jsonrpc": "2.0", "method": method, "params": params, "id": 1}))
    answer = json.loads(await socket.recv())
    assert "result" in answer, answer


async def pushed(socket: Any) -> tuple[int, int]:
    params = json.loads(await socket.recv())["params"]
    return params["sequence_id"], params["attempt"]


def test_the_messages_of_a_client_that_vanished_come_one_by_one(tmp_path: Path) -> None:
    async def story() -> None:
        async with headwater.serve(tmp_path / "log.db", port=0) as server, headwater.connect(server.url) as log:
            await log.publish_many([("a", number) for number in range(1, 4)])
            dying = await websockets.connect(server.url)
            await call(dying, "rpc.subscribe.persistent", SUBSCRIBE)
            assert [await pushed(dying) for _ in range(3)] == [(1, 1), (2, 1), (3, 1)]
            dying.transport.abort()
            async with websockets.connect(server.url) as socket:
                await socket.send(
                    json.dumps({"jsonrpc": "2.0", "method": "rpc.subscribe.persistent", "params": SUBSCRIBE})
                )
                for seq in (1, 2, 3):
                    assert await pushed(socket) == (seq, 2)
                    for _ in range(ROUND_TRIPS):
                        await call(socket, "rpc.last_seq", {})
                    ack = {"subscription_id": "s", "sequence_id": seq}
                    await socket.send(
                        json.dumps({"jsonrpc": "2.0", "method": "rpc.acknowledge.persistent", "params": ack})
                    )

    asyncio.run(story())
