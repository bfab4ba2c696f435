"""A client that works as those of JROW do: it keeps a table of handlers, finds the handler of a notification by its
`method`, and hands it the `params` as they are. Like the one in Rust it reads answers in arrays, but no notifications.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from foreign_client import PATIENCE_S
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_socket

from headwater.server.server import Server

Json = Any


class JrowError(Exception):
    def __init__(self, error: dict[str, Json]) -> None:
        super().__init__(error)
        self.code = error["code"]


class JrowClient:
    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._handlers: dict[str, Callable[[Json], None]] = {}
        self._pending: dict[int, asyncio.Future[Json]] = {}
        self._last_id = 0
        self.unhandled: list[str] = []
        """Methods of notifications that no handler was registered for, and notifications inside arrays."""

    # --- calls --------------------------------------------------------------------------------------------------------

    async def request(self, method: str, params: Json) -> Json:
        [answer] = await self._exchange([(method, params)], as_batch=False)
        return answer

    async def batch(self, calls: list[tuple[str, Json]]) -> list[Json]:
        return await self._exchange(calls, as_batch=True)

    async def _exchange(self, calls: list[tuple[str, Json]], *, as_batch: bool) -> list[Json]:
        requests, futures = [], []
        for method, params in calls:
            self._last_id += 1
            requests.append({"jsonrpc": "2.0", "method": method, "params": params, "id": self._last_id})
            futures.append(asyncio.get_running_loop().create_future())
            self._pending[self._last_id] = futures[-1]
        await self._socket.send(json.dumps(requests if as_batch else requests[0]))
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.gather(*futures)

    # --- reading ------------------------------------------------------------------------------------------------------

    async def read_all(self) -> None:
        async for text in self._socket:
            message = json.loads(text)
            if isinstance(message, list):
                for each in message:
                    if "method" in each:
                        self.unhandled.append(f"in an array: {each['method']}")
                    else:
                        self._complete(each)
            elif "method" in message:
                self._dispatch(message)
            else:
                self._complete(message)

    def _complete(self, response: dict[str, Json]) -> None:
        future = self._pending.pop(response["id"])
        if "error" in response:
            future.set_exception(JrowError(response["error"]))
        else:
            future.set_result(response["result"])

    def _dispatch(self, notification: dict[str, Json]) -> None:
        handler = self._handlers.get(notification["method"])
        if handler is None:
            self.unhandled.append(notification["method"])
        else:
            handler(notification["params"])

    # --- verbs --------------------------------------------------------------------------------------------------------

    async def subscribe(self, topic: str, handler: Callable[[Json], None]) -> Json:
        self._handlers[topic] = handler
        return await self.request("rpc.subscribe", {"topic": topic})

    async def subscribe_persistent(self, id: str, topic: str, handler: Callable[[Json], None]) -> Json:
        self._handlers[topic] = handler
        return await self.request("rpc.subscribe_persistent", {"subscription_id": id, "topic": topic})

    async def ack_persistent(self, id: str, seq: int) -> Json:
        return await self.request("rpc.ack_persistent", {"subscription_id": id, "sequence_id": seq})

    async def unsubscribe(self, topic: str) -> Json:
        del self._handlers[topic]
        return await self.request("rpc.unsubscribe", {"topic": topic})


@asynccontextmanager
async def connect_jrow(server: Server, **options: Any) -> AsyncIterator[JrowClient]:
    async with connect_socket(f"{server.url}/jrow", proxy=None, **options) as socket:
        client = JrowClient(socket)
        reading = asyncio.create_task(client.read_all())
        try:
            yield client
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
