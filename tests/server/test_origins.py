"""Origin and Host: a page whose name points at a server without tokens (DNS rebinding) reads and sends nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import websockets
from foreign_client import Serve
from raw_http import RawConnection, dial

from headwater.server.auth import Scopes, TokenFile
from headwater.server.server import is_own_name

PATHS = ("/", "/metrics", "/healthz", "/sapi/shop/books.db")


@pytest.mark.parametrize("name", ["localhost", "console.localhost", "127.0.0.1", "192.168.1.7", "::1", "log.example"])
def test_a_name_of_the_server(name: str) -> None:
    assert is_own_name(name, "log.example")


@pytest.mark.parametrize("name", ["evil.example", "localhost.evil.example", "", "127.0.0.1.evil.example"])
def test_a_name_that_may_belong_to_another_owner(name: str) -> None:
    assert not is_own_name(name, "127.0.0.1")


async def upgrade(port: int, name: str) -> int:
    """The status of an upgrade asked for by a page under this name, which points at the server."""
    page = f"{name}:{port}"
    try:
        async with websockets.connect(
            f"ws://127.0.0.1:{port}/rpc", origin=f"http://{page}", additional_headers={"Host": page}
        ):
            return 101
    except websockets.InvalidStatus as exc:
        return exc.response.status_code


async def test_a_page_whose_name_points_here_is_refused(serve: Serve) -> None:
    async with serve() as server:
        names = ("evil.example", "localhost", "127.0.0.1")
        assert [await upgrade(server.port, name) for name in names] == [403, 101, 101]


async def status(raw: RawConnection, path: str, host: str) -> int:
    raw.send(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
    return (await raw.response()).status


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "[::1", "", "a@localhost.x"]
)
async def test_a_host_that_may_belong_to_another_owner_is_refused(serve: Serve, path: str, host: str) -> None:
    async with serve() as server, dial(server) as raw:
        assert await status(raw, path, host) == 421


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8765", "[::1]:8765", "localhost", "LOCALHOST:1", "app.localhost", "queue.example:8765"]
)
async def test_hosts_of_the_server_are_answered(serve: Serve, host: str) -> None:
    async with serve(origins=["https://queue.example:8765"]) as server, dial(server) as raw:
        assert await status(raw, "/metrics", host) == 200


async def test_with_tokens_the_name_does_not_matter(serve: Serve, tmp_path: Path) -> None:
    """Other machines know the server by a name, and a page has no token."""
    TokenFile(tmp_path / "tokens.json").create("a", Scopes(publish=("a",)), now_ms=1)
    async with serve(tokens=str(tmp_path / "tokens.json")) as server, dial(server) as raw:
        assert await status(raw, "/healthz", "queue.example") == 200
        assert await upgrade(server.port, "log.example") == 101


async def test_a_malformed_origin_is_refused(serve: Serve) -> None:
    async with serve() as server, dial(server) as raw:
        raw.send("GET /sapi/a/b HTTP/1.1\r\nHost: localhost\r\nOrigin: http://[\r\nConnection: close\r\n\r\n")
        assert (await raw.response()).status == 403
