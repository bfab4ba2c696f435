"""A client that shares no line with ours: JSON-RPC by hand over the `websockets` library.

It reads its socket only while a test waits for a frame, so a test decides when a client is slow.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_socket
from websockets.exceptions import ConnectionClosed

from headwater.server.server import Server

PATIENCE_S = 20.0  # no test waits so long, unless something is wrong

Json = Any
Serve = Callable[..., Server]
Make = Callable[..., str]


class Refused(Exception):
    """A call was answered with an error."""

    def __init__(self, error: dict[str, Json]) -> None:
        super().__init__(error)
        self.error = error


class Client:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self._last_id = 0
        self._notes: deque[dict[str, Json]] = deque()
        self._answers: dict[Json, dict[str, Json]] = {}

    # --- frames -------------------------------------------------------------------------------------------------------

    async def send(self, document: Json) -> None:
        """A frame; text goes as it is."""
        await self.socket.send(document if isinstance(document, str | bytes) else json.dumps(document))

    async def frame(self) -> Json:
        """The next frame as it comes, read as JSON."""
        async with asyncio.timeout(PATIENCE_S):
            return json.loads(await self.socket.recv())

    async def exchange(self, document: Json) -> Json:
        await self.send(document)
        return await self.frame()

    async def _sort_frame(self) -> None:
        frame = await self.frame()
        for each in frame if isinstance(frame, list) else [frame]:
            if "method" in each:
                self._notes.append(each)
            else:
                self._answers[each["id"]] = each

    # --- calls --------------------------------------------------------------------------------------------------------

    async def ask(self, method: str, params: Json = None) -> int:
        """Send a call and leave; `answer` has what becomes of it."""
        self._last_id += 1
        call = {"jsonrpc": "2.0", "method": method, "id": self._last_id}
        await self.send(call if params is None else {**call, "params": params})
        return self._last_id

    async def answer(self, id: Json) -> Json:
        while id not in self._answers:
            await self._sort_frame()
        answer = self._answers.pop(id)
        assert answer["jsonrpc"] == "2.0"
        if "error" in answer:
            raise Refused(answer["error"])
        return answer["result"]

    async def call(self, method: str, params: Json = None) -> Json:
        return await self.answer(await self.ask(method, params))

    async def refusal(self, method: str, params: Json = None) -> dict[str, Json]:
        """The error that a call is answered with."""
        try:
            result = await self.call(method, params)
        except Refused as refused:
            return refused.error
        raise AssertionError(f"{method} was not refused: {str(result)[:500]}")

    async def code(self, method: str, params: Json = None) -> int:
        return int((await self.refusal(method, params))["code"])

    async def code_of(self, id: Json) -> int:
        """The same for a call that was sent before."""
        try:
            result = await self.answer(id)
        except Refused as refused:
            return int(refused.error["code"])
        raise AssertionError(f"call {id} was not refused: {str(result)[:500]}")

    async def notify(self, method: str, params: Json = None) -> None:
        call = {"jsonrpc": "2.0", "method": method}
        await self.send(call if params is None else {**call, "params": params})

    async def note(self, method: str) -> Json:
        """The params of the next notification, which must be of this method."""
        while not self._notes:
            await self._sort_frame()
        note = self._notes.popleft()
        assert note["method"] == method, note
        assert "id" not in note
        return note["params"]

    async def notes(self, count: int) -> list[dict[str, Json]]:
        """The next ones, whole. Those too that came before the answer to a call: of a publish, both are on their way at
        the same time."""
        await self.until(lambda: len(self._notes) >= count)
        return [self._notes.popleft() for _ in range(count)]

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._sort_frame()

    @property
    def unread_notes(self) -> list[Json]:
        """Those that came while an answer was waited for."""
        return [note["params"] for note in self._notes]

    def forget_notes(self) -> None:
        self._notes.clear()

    async def has_nothing_to_read(self) -> bool:
        """What the server sent before answering a ping would be here by now."""
        async with asyncio.timeout(PATIENCE_S):
            await (await self.socket.ping())
        await self.call("rpc.hello")
        return not self._notes

    # --- verbs --------------------------------------------------------------------------------------------------------

    async def publish(self, topic: str, data: Json = None, **more: Json) -> int:
        return int((await self.call("rpc.publish", {"topic": topic, "data": data, **more}))["sequence_id"])

    async def publish_many(self, topic: str, count: int) -> list[int]:
        messages = [{"topic": topic, "data": number} for number in range(count)]
        return list((await self.call("rpc.publish.batch", {"messages": messages}))["sequence_ids"])

    async def subscribe(self, id: str, pattern: str, **options: Json) -> Json:
        return await self.call("rpc.subscribe.persistent", {"subscription_id": id, "topic": pattern, **options})

    async def release(self, id: str) -> None:
        assert await self.call("rpc.unsubscribe.persistent", {"subscription_id": id}) == {"unsubscribed": True}

    async def ack(self, id: str, *seqs: int) -> None:
        params = {"subscription_id": id, "sequence_ids": list(seqs)}
        assert await self.call("rpc.acknowledge.persistent", params) == {"acknowledged": True}

    async def delivery(self) -> dict[str, Json]:
        return dict(await self.note("rpc.notification.persistent"))

    async def deliveries(self, count: int) -> list[dict[str, Json]]:
        return [await self.delivery() for _ in range(count)]

    async def delivered_seqs(self, count: int) -> list[int]:
        return [each["sequence_id"] for each in await self.deliveries(count)]

    # --- ending -------------------------------------------------------------------------------------------------------

    async def close_code(self) -> int:
        """What the server closes with; frames on the way to it are dropped."""
        return (await self.closing())[0]

    async def closing(self) -> tuple[int, str]:
        async with asyncio.timeout(PATIENCE_S):
            try:
                while True:
                    await self.socket.recv()
            except ConnectionClosed as closed:
                received = closed.rcvd
                return (1006, "") if received is None else (received.code, received.reason)

    def vanish(self) -> None:
        """Gone without a word, as when the process is killed."""
        self.socket.transport.abort()

    def stop_reading(self) -> None:
        """From now on nothing is read from the socket, not even pings."""
        self.socket.transport.pause_reading()

    def read_again(self) -> None:
        self.socket.transport.resume_reading()


def without_settings(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Let nothing from outside decide how a server is set up."""
    monkeypatch.chdir(directory)  # where no headwater.toml lies
    for name in list(os.environ):
        if name.startswith("HEADWATER_"):
            monkeypatch.delenv(name)


@asynccontextmanager
async def connect(server: Server | str, path: str = "/rpc", **options: Any) -> AsyncIterator[Client]:
    url = server if isinstance(server, str) else server.url
    settings = {"proxy": None, "ping_interval": None, "max_size": None, "close_timeout": 1.0, **options}
    async with connect_socket(f"{url}{path}", **settings) as socket:
        yield Client(socket)


def bearer(token: str) -> dict[str, Any]:
    return {"additional_headers": {"Authorization": f"Bearer {token}"}}


async def gone(server: Server) -> None:
    """Wait until the server has let go of every client."""
    async with asyncio.timeout(PATIENCE_S):
        while server.connections or server._context.closing:
            await turn()


async def turn() -> None:
    """Let all other tasks run. There is nothing to wait for but the server's own loop, which is this one."""
    await asyncio.sleep(0.001)
