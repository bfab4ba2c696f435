"""A page whose name was made to point at the server reads nothing: its name comes as the Host of what it asks."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign_client import Serve
from raw_http import RawConnection, dial

from headwater.server.scopes import Scopes
from headwater.server.tokens import TokenFile

PATHS = ("/", "/metrics", "/healthz", "/sapi/shop/books.db")


async def status(raw: RawConnection, path: str, host: str) -> int:
    raw.send(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
    return (await raw.response()).status


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "[::1", "", "a@localhost.x"]
)
async def test_a_name_that_another_can_own_is_refused(serve: Serve, path: str, host: str) -> None:
    async with serve() as server, dial(server) as raw:
        assert await status(raw, path, host) == 421


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8765", "[::1]:8765", "localhost", "LOCALHOST:1", "app.localhost", "queue.example:8765"]
)
async def test_names_of_its_own_are_answered(serve: Serve, host: str) -> None:
    async with serve(origins=["https://queue.example:8765"]) as server, dial(server) as raw:
        assert await status(raw, "/metrics", host) == 200


async def test_where_tokens_are_wanted_a_name_opens_nothing(serve: Serve, tmp_path: Path) -> None:
    """Other machines know the server by a name, and what is asked without a token tells nothing."""
    TokenFile(tmp_path / "tokens.json").create("a", Scopes(publish=("a",)), now_ms=1)
    async with serve(tokens=str(tmp_path / "tokens.json")) as server, dial(server) as raw:
        assert await status(raw, "/healthz", "queue.example") == 200


async def test_a_malformed_origin_is_refused(serve: Serve) -> None:
    async with serve() as server, dial(server) as raw:
        raw.send("GET /sapi/a/b HTTP/1.1\r\nHost: localhost\r\nOrigin: http://[\r\nConnection: close\r\n\r\n")
        assert (await raw.response()).status == 403
