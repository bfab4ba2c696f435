"""Stopping: no new client, what runs is finished, answers are sent, 1001; all within its time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import apsw
import pytest
from foreign_client import PATIENCE_S, Client, Refused, Serve, connect
from websockets.exceptions import ConnectionClosed

import headwater

SERVER = """
import asyncio, headwater, sys

server = headwater.serve("log.db", port=0, shutdown_timeout=float(sys.argv[1]))

@server.method("outlast")
async def outlast():
    print("inside", flush=True)
    while server._context.is_ready:  # it ends only after the stopping has begun
        await asyncio.sleep(0.005)
    return "done"

@server.method("hang")
async def hang():
    print("inside", flush=True)
    await asyncio.Event().wait()

server.run(on_ready=lambda server: print(server.url, flush=True))
print("ended", flush=True)
"""


class Served:
    def __init__(self, process: Process, url: str) -> None:
        self.process = process
        self.url = url

    async def says(self, word: str) -> None:
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            assert (await self.process.stdout.readline()).decode().strip() == word

    async def ends(self) -> None:
        """Soon: unless a test says otherwise, long before the shutdown timeout."""
        async with asyncio.timeout(PATIENCE_S):
            assert await self.process.wait() == 0
        await self.says("ended")


@contextlib.asynccontextmanager
async def served(directory: Path, shutdown_timeout: float = 3 * PATIENCE_S) -> AsyncIterator[Served]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, str(shutdown_timeout), stdout=PIPE, cwd=directory, env=environment
    )
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        assert url.startswith("ws://"), url
        yield Served(process, url)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def publish_until_closed(client: Client) -> list[int]:
    """As fast as answers come; returns what was answered."""
    answered: list[int] = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            ids = [await client.ask("rpc.publish", {"topic": "b", "data": 1}) for _ in range(20)]
            for id in ids:
                answered.append((await client.answer(id))["sequence_id"])
    return answered


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_process_and_loses_nothing(tmp_path: Path, number: signal.Signals) -> None:
    async with served(tmp_path) as server, connect(server.url) as client, connect(server.url) as publisher:
        await client.publish_many("a", 10)
        await client.subscribe("s", "a")
        await client.deliveries(10)
        await client.ack("s", 1, 2, 3)
        await client.notify("rpc.acknowledge.persistent", {"subscription_id": "s", "sequence_id": 4})
        working = await client.ask("outlast")
        await server.says("inside")
        publishing = asyncio.create_task(publish_until_closed(publisher))
        server.process.send_signal(number)
        assert await client.answer(working) == "done"
        assert await client.closing() == (1001, "the server is going away")
        answered = await publishing
        assert publisher.socket.close_code == 1001
        await server.ends()
    with headwater.open(tmp_path / "log.db") as log:
        assert len(answered) == len(set(answered))
        assert log.last_seq() >= max(answered, default=0)
        stored = {count.topic: count.count for count in log.topics()}
        assert stored.get("b", 0) >= len(answered)
        subscription = log.subscribe("s", "a")  # at once: the lease was given back
        assert [message.seq for message in subscription.fetch(100)] == [5, 6, 7, 8, 9, 10]


async def test_what_hangs_is_cut_off_when_the_time_is_up(tmp_path: Path) -> None:
    async with served(tmp_path, 1.0) as server, connect(server.url) as client, connect(server.url) as silent:
        await client.publish("a")
        await client.ask("hang")
        await server.says("inside")
        silent.stop_reading()
        server.process.send_signal(signal.SIGTERM)
        await server.ends()
        silent.vanish()
    with headwater.open(tmp_path / "log.db") as log:
        assert log.last_seq() == 1


async def test_an_idle_server_stops_at_once(tmp_path: Path) -> None:
    async with served(tmp_path) as server, connect(server.url) as client:
        await client.call("rpc.subscribe", {"topic": "a"})
        await client.subscribe("s", "a")
        server.process.send_signal(signal.SIGTERM)
        assert await client.close_code() == 1001
        await server.ends()


async def test_publishes_under_way_are_answered_before_the_close(serve: Serve, tmp_path: Path) -> None:
    async with serve() as server, connect(server) as client:
        await client.publish("a")
        other = apsw.Connection(str(tmp_path / "log.db"))
        other.execute("BEGIN IMMEDIATE")  # so that the commit takes its time
        single = await client.ask("rpc.publish", {"topic": "a", "data": 1})
        batch = await client.ask("rpc.publish.batch", {"messages": [{"topic": "a", "data": 1}] * 3})
        await client.call("rpc.last_seq")  # both have been read
        stopping = asyncio.create_task(server.stop())
        while server._context is None or server._context.is_ready:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        other.execute("ROLLBACK")
        other.close()
        assert (await client.answer(single))["sequence_id"] == 2
        assert (await client.answer(batch))["sequence_ids"] == [3, 4, 5]
        assert await client.close_code() == 1001
        await stopping


async def test_a_waiting_fetch_is_answered_with_nothing(serve: Serve) -> None:
    async with serve("memory:") as server, connect(server) as client:
        await client.subscribe("s", "a", deliver="fetch")
        waiting = await client.ask("rpc.fetch", {"subscription_id": "s", "wait": 60})
        await client.call("rpc.hello")
        stopping = asyncio.create_task(server.stop())
        assert (await client.answer(waiting))["messages"] == []
        assert await client.close_code() == 1001
        await stopping


async def test_a_call_that_waits_for_a_held_subscription_does_not_delay_the_stop(serve: Serve) -> None:
    async with serve("memory:", shutdown_timeout=1.0) as server, connect(server) as holder, connect(server) as waiter:
        await holder.subscribe("s", "a")
        waiting = await waiter.ask("rpc.subscribe.persistent", {"subscription_id": "s", "topic": "a", "wait": 3_600})
        await waiter.call("rpc.hello")
        async with asyncio.timeout(PATIENCE_S):
            await server.stop()
        with contextlib.suppress(Refused, ConnectionClosed):
            await waiter.answer(waiting)


async def test_stopping_twice_is_harmless_and_a_server_may_start_again(serve: Serve) -> None:
    server = serve()
    async with server, connect(server) as client:
        assert await client.publish("a") == 1
        await server.stop()
        await server.stop()
    async with server, connect(server) as client:
        assert await client.publish("a") == 2
