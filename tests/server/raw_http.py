"""HTTP by hand: bytes out, responses in. What a polite library would not send can be sent here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

from headwater.server.server import Server

PATIENCE_S = 20.0
UPGRADE = (
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


class Response(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class RawConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: str | bytes) -> None:
        self.writer.write(data.encode() if isinstance(data, str) else data)

    async def response(self, *, to_head: bool = False) -> Response:
        async with asyncio.timeout(PATIENCE_S):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
            length = 0 if to_head else int(headers.get("content-length", 0))
            return Response(int(lines[0].split()[1]), headers, await self.reader.readexactly(length))

    async def get(self, path: str, more: str = "", method: str = "GET") -> Response:
        self.send(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n")
        return await self.response(to_head=method == "HEAD")

    async def ended(self) -> bytes:
        """What is left until the server hangs up."""
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read()
            return b""


@contextlib.asynccontextmanager
async def dial(server: Server) -> AsyncIterator[RawConnection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield RawConnection(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def get(server: Server, path: str, more: str = "", method: str = "GET") -> Response:
    async with dial(server) as raw:
        return await raw.get(path, more, method)
