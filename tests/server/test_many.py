"""Many clients at once: what each costs, and that none is forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from foreign_client import PATIENCE_S, Client, Serve, connect, gone
from raw_http import UPGRADE, RawConnection

EACH, ROOMS, MESSAGES = 5, 100, 3
FILES_TO_SPARE = 500
OPENING_AT_ONCE = 100

SERVER = """
import headwater, resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
server = headwater.serve("log.db", port=0, limits_connections=20_000, limits_connections_per_address=20_000)
server.method("count")(lambda: len(server.connections))
server.run(on_ready=lambda server: print(server.url, flush=True))
"""


# --- many subscriptions -----------------------------------------------------------------------------------------------


async def subscribe_to_some(client: Client, number: int) -> None:
    ids = range(number * EACH, (number + 1) * EACH)
    wanted = [{"subscription_id": f"s{id}", "topic": f"room.{id % ROOMS}"} for id in ids]
    await client.call("rpc.subscribe.persistent.batch", {"subscriptions": wanted})


async def gets_its_own(client: Client, number: int) -> None:
    got: dict[str, list[tuple[str, int]]] = {}
    for _ in range(EACH * MESSAGES):
        delivery = await client.delivery()
        got.setdefault(delivery["subscription_id"], []).append((delivery["topic"], delivery["data"]))
        await client.ack(delivery["subscription_id"], delivery["sequence_id"])
    ids = range(number * EACH, (number + 1) * EACH)
    assert got == {f"s{id}": [(f"room.{id % ROOMS}", turn) for turn in range(MESSAGES)] for id in ids}


@pytest.mark.parametrize("connections", [60, pytest.param(200, marks=pytest.mark.long)])
async def test_five_subscriptions_on_each_of_many_connections(
    serve: Serve, figures: Callable[[str], None], connections: int
) -> None:
    async with serve() as server:
        async with AsyncExitStack() as sockets:
            clients = [await sockets.enter_async_context(connect(server)) for _ in range(connections)]
            began_s = time.perf_counter()
            await asyncio.gather(*(subscribe_to_some(client, number) for number, client in enumerate(clients)))
            subscribed_s = time.perf_counter()
            messages = [{"topic": f"room.{room}", "data": turn} for turn in range(MESSAGES) for room in range(ROOMS)]
            await clients[0].call("rpc.publish.batch", {"messages": messages})
            await asyncio.gather(*(gets_its_own(client, number) for number, client in enumerate(clients)))
            done_s = time.perf_counter()
            infos = await clients[0].call("rpc.subscriptions")
            assert len(infos) == connections * EACH
            assert {(info["acked"], info["lag"], info["in_flight"]) for info in infos} == {(MESSAGES, 0, 0)}
        figures(
            f"{connections * EACH:,} subscriptions on {connections} connections: taken up in "
            f"{subscribed_s - began_s:.1f} s; {connections * EACH * MESSAGES:,} deliveries, each acked by a call of "
            f"its own, in {done_s - subscribed_s:.1f} s"
        )
        await gone(server)


# --- many connections -------------------------------------------------------------------------------------------------


def resident_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


async def upgraded(port: int) -> RawConnection:
    raw = RawConnection(*await asyncio.open_connection("127.0.0.1", port))
    raw.send(f"GET /rpc HTTP/1.1\r\nHost: x\r\n{UPGRADE}\r\n")
    assert (await raw.response()).status == 101
    return raw


@contextlib.asynccontextmanager
async def idle(port: int, count: int) -> AsyncIterator[None]:
    opened: list[RawConnection] = []
    try:
        while len(opened) < count:
            some = min(OPENING_AT_ONCE, count - len(opened))
            opened += await asyncio.gather(*(upgraded(port) for _ in range(some)))
        yield
    finally:
        for raw in opened:
            raw.writer.close()


async def open_idle_connections(directory: Path, count: int, figures: Callable[[str], None]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, stdout=PIPE, cwd=directory, env=environment
    )
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        async with connect(url) as client:
            assert await client.call("count") == 1
            before_kib, began_s = resident_kib(process.pid), time.perf_counter()
            async with idle(int(url.rpartition(":")[2]), count):
                opened_s = time.perf_counter() - began_s
                assert await client.call("count") == count + 1
                each_kib = (resident_kib(process.pid) - before_kib) / count
                began_s = time.perf_counter()
                await client.publish("a")
                answered_ms = (time.perf_counter() - began_s) * 1000
                figures(
                    f"{count:,} idle connections: {each_kib:.1f} KiB of the server's memory each, opened in "
                    f"{opened_s:.1f} s; a publish among them took {answered_ms:.1f} ms"
                )
                assert each_kib < 100
            async with asyncio.timeout(PATIENCE_S):
                while await client.call("count") > 1:
                    pass
    finally:
        process.kill()
        await process.wait()


async def test_five_hundred_idle_connections(tmp_path: Path, figures: Callable[[str], None]) -> None:
    await open_idle_connections(tmp_path, 500, figures)


@pytest.mark.long
async def test_ten_thousand_idle_connections(tmp_path: Path, figures: Callable[[str], None]) -> None:
    """Or as many as this machine lets one process open."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    await open_idle_connections(tmp_path, min(10_000, hard - FILES_TO_SPARE), figures)
