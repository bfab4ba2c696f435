"""A server that was killed: what its clients held is free when its next self is there, not when leases run out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from foreign_client import Client, Refused, connect
from server_process import ServerProcess

import headwater

LONG_S = 3_600  # no test waits for a lease of this length


@pytest.fixture(params=["sqlite", "postgres"])
def log_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "log.db")
    url: str = request.getfixturevalue("postgres_schema_url")
    return url


@pytest.fixture
def process(tmp_path: Path, log_url: str) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "log.db", log_url) as server:
        yield server


async def hold(client: Client) -> None:
    await client.subscribe("s", "a", lease=LONG_S, ack_wait=LONG_S)


async def test_a_foreign_client_is_let_in_at_once(process: ServerProcess) -> None:
    async with connect(process.url) as client:
        await client.publish("a", 1)
        await hold(client)
        assert (await client.delivery())["attempt"] == 1
        process.kill()
    process.start()
    async with connect(process.url) as client:
        await hold(client)
        assert (await client.delivery())["attempt"] == 2


async def test_a_program_that_holds_it_by_itself_is_not_disturbed(process: ServerProcess, log_url: str) -> None:
    """Of other processes nothing is known but their lease."""
    async with headwater.open_async(log_url) as log:
        await log.subscribe("s", "a", lease=LONG_S)
        process.kill()
        process.start()
        await refused(process.url)


@pytest.mark.parametrize("holder", [0, 1])
async def test_what_another_server_holds_is_not_free(log_url: str, tmp_path: Path, holder: int) -> None:
    async with (
        headwater.serve(log_url, port=0, replicas_directory=str(tmp_path / "one")) as one,
        headwater.serve(log_url, port=0, replicas_directory=str(tmp_path / "other")) as other,
    ):
        urls = [one.url, other.url]
        async with connect(urls[holder]) as client:
            await hold(client)
            await refused(urls[1 - holder])


async def test_the_third_self_too(process: ServerProcess) -> None:
    for _ in range(2):
        async with connect(process.url) as client:
            await hold(client)
            process.kill()
        process.start()
    async with connect(process.url) as client:
        await hold(client)


async def refused(url: str) -> None:
    async with connect(url) as client:
        with pytest.raises(Refused) as error:
            await hold(client)
        assert error.value.error["code"] == -32001
