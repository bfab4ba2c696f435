"""Which pages a browser may show that speak to a server without tokens."""

import asyncio
from pathlib import Path

import pytest
import websockets

import headwater
from headwater.server.serving import is_unmistakable


@pytest.mark.parametrize("name", ["localhost", "console.localhost", "127.0.0.1", "192.168.1.7", "::1", "log.example"])
def test_a_name_that_nobody_else_can_point_here(name: str) -> None:
    assert is_unmistakable(name, "log.example")


@pytest.mark.parametrize("name", ["evil.example", "localhost.evil.example", "", "127.0.0.1.evil.example"])
def test_a_name_that_somebody_else_may_own(name: str) -> None:
    assert not is_unmistakable(name, "127.0.0.1")


async def ask(port: int, name: str) -> int:
    """The status of an upgrade asked for by a page under this name, which points at the server."""
    page = f"{name}:{port}"
    try:
        async with websockets.connect(
            f"ws://127.0.0.1:{port}/rpc", origin=f"http://{page}", additional_headers={"Host": page}
        ):
            return 101
    except websockets.InvalidStatus as exc:
        return exc.response.status_code


def test_a_page_whose_name_was_made_to_point_here_is_refused(tmp_path: Path) -> None:
    async def story() -> list[int]:
        async with headwater.serve(tmp_path / "log.db", port=0) as server:
            return [await ask(server.port, name) for name in ("evil.example", "localhost", "127.0.0.1")]

    assert asyncio.run(story()) == [403, 101, 101]


def test_with_tokens_the_name_does_not_matter_for_the_page_has_none(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text('{"version": 1, "tokens": []}')
    (tmp_path / "tokens").chmod(0o600)

    async def story() -> int:
        async with headwater.serve(tmp_path / "log.db", port=0, tokens=str(tmp_path / "tokens")) as server:
            return await ask(server.port, "log.example")

    assert asyncio.run(story()) == 101
