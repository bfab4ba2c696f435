"""A server and its client on loopback, compared with NATS JetStream and Redis Streams, each with its Python client.

Headwater answers when the message is on disk (`durability = "full"`). So do JetStream with `sync_interval: always` and
Redis with `appendfsync always`; their other results are for weaker guarantees.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import uvloop
import websockets.asyncio.client

import lines
import rivals
from common import MESSAGE_JSON, fresh_directory, fresh_paths, medians, served
from report import Line, against
from serving_rivals import rival_figures

REPEATS = 5
TASKS, MESSAGES, PIPES = 1_000, 60_000, 4
ONE_BY_ONE = 1_500


async def our_figures(url: str) -> dict[str, float]:
    rounds = []
    for _ in range(REPEATS):
        p50, p99 = await lines.to_handler(url, [])
        measures = {
            "pipelined": lines.by_tasks(TASKS, MESSAGES, url, []),
            "in batches": lines.in_batches(PIPES, MESSAGES, url, []),
            "one by one": lines.by_tasks(1, ONE_BY_ONE, url, []),
            "delivered": lines.delivered(MESSAGES, True, url, []),
        }
        rounds.append({"p50": p50, "p99": p99} | {name: (await each)[0] for name, each in measures.items()})
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


ECHO = """
import asyncio, websockets.asyncio.server
async def echo(client):
    async for text in client:
        await client.send(text)
async def main():
    server = await websockets.asyncio.server.serve(echo, "127.0.0.1", 0, compression=None)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Future()
asyncio.run(main())
"""


def echo_per_s() -> float:
    """The round trip of a bare `websockets` server and client, with the same message."""
    process = subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = f"ws://127.0.0.1:{process.stdout.readline().strip()}"

    async def work() -> float:
        async with websockets.asyncio.client.connect(url, compression=None) as client:
            began = time.perf_counter()
            for _ in range(ONE_BY_ONE):
                await client.send(MESSAGE_JSON)
                await client.recv()
            return ONE_BY_ONE / (time.perf_counter() - began)

    try:
        return uvloop.run(work())
    finally:
        process.terminate()
        process.wait(20)


def floor_per_s() -> float:
    """A bare echo and a bare commit, one after the other: what a publish through a server cannot do without."""
    with fresh_paths() as paths:
        echo, commit = medians(REPEATS, echo_per_s, lambda: rivals.bare_inserts(next(paths), 1, ONE_BY_ONE))
    return 1 / (1 / echo + 1 / commit)


def measure() -> list[Line]:
    others = rival_figures()
    floor = floor_per_s()
    with fresh_directory() as directory, served(directory) as (url, _):
        ours = uvloop.run(our_figures(url))
    publish, batches, single, deliver = ours["pipelined"], ours["in batches"], ours["one by one"], ours["delivered"]
    default, always = (others.get(f"jetstream publish pipelined, {sync}") for sync in ("default sync", "sync always"))
    pipeline, redis = others.get("redis publish pipelined, aof always"), "Redis, appendfsync always"
    latency = others.get("jetstream publish to deliver p50 ms, sync always")
    p50, p99 = ours["p50"], ours["p99"]
    return [
        against("publish, 1,000 tasks", publish, "JetStream", default, 3),
        against("", publish, "JetStream, sync always", always, 15),
        against("", publish, redis, pipeline, 1),
        against("publish_many of 1,000", batches, "JetStream", default, 3),
        against("", batches, "JetStream, sync always", always, 15),
        against("", batches, redis, pipeline, 1),
        against("publish one by one", single, "bare echo and commit", floor, 0.9),
        against("", single, "JetStream, sync always", others.get("jetstream publish one by one, sync always")),
        against("deliver and ack", deliver, "JetStream", others.get("jetstream deliver and ack, default sync"), 2.5),
        against("", deliver, redis, others.get("redis deliver and ack, aof always"), 1),
        Line(
            f"publish to handler at {lines.PACE_PER_S:,}/s",
            f"{p50:.2f} / {p99:.2f} ms",
            "p50 / p99",
            None,
            "< 1.2 / < 5 ms",
            p50 < 1.2 and p99 < 5,
        ),
        Line(
            "",
            f"{p50:.2f} ms",
            "JetStream, sync always, failed" if latency is None else f"JetStream, sync always {latency:.2f} ms",
            None if latency is None else p50 / latency,
            "≤ 2 ×",
            None if latency is None else p50 <= 2 * latency,
        ),
    ]
