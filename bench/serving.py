"""A server and its client on loopback, compared with NATS JetStream and Redis Streams, each with its Python client.

Headwater answers when the message is on disk (`durability = "full"`). So do JetStream with `sync_interval: always` and
Redis with `appendfsync always`; their other results are for weaker guarantees.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvloop
import websockets.asyncio.client

import headwater
import rivals
from common import MESSAGE, MESSAGE_JSON, TOPIC, fresh_directory, medians, served
from report import Line, against
from serving_rivals import LATENCY_COUNT, LATENCY_RATE_PER_S, paced, percentiles_ms, rival_figures

REPEATS = 5
TASKS, MESSAGES, BATCH, PIPES = 1_000, 60_000, 1_000, 4
ONE_BY_ONE = 1_500


@contextmanager
def served_log() -> Iterator[str]:
    with fresh_directory() as directory, served(directory) as url:
        yield url


@asynccontextmanager
async def client(url: str) -> AsyncIterator[headwater.AsyncLog]:
    async with headwater.open_async(url) as log:
        yield log


async def pipelined(log: headwater.AsyncLog) -> float:
    """One request per message, a thousand in flight."""

    async def publish() -> None:
        for _ in range(MESSAGES // TASKS):
            await log.publish(TOPIC, MESSAGE)

    began = time.perf_counter()
    await asyncio.gather(*(publish() for _ in range(TASKS)))
    return MESSAGES / (time.perf_counter() - began)


async def in_batches(log: headwater.AsyncLog) -> float:
    """A few batches in flight, so that the client writes one while the server stores another."""

    async def publish() -> None:
        for _ in range(MESSAGES // BATCH // PIPES):
            await log.publish_many([(TOPIC, MESSAGE)] * BATCH)

    began = time.perf_counter()
    await asyncio.gather(*(publish() for _ in range(PIPES)))
    return MESSAGES / (time.perf_counter() - began)


async def one_by_one(log: headwater.AsyncLog) -> float:
    began = time.perf_counter()
    for _ in range(ONE_BY_ONE):
        await log.publish(TOPIC, MESSAGE)
    return ONE_BY_ONE / (time.perf_counter() - began)


async def delivered(log: headwater.AsyncLog, id: str) -> float:
    """Payloads are not decoded, as with the other systems."""
    async with log.subscribe(id, TOPIC) as subscription:
        began, count = time.perf_counter(), 0
        while count < MESSAGES:
            messages = await subscription.fetch(BATCH)
            count += len(messages)
            await subscription.ack_many(messages)
        return count / (time.perf_counter() - began)


async def latency_ms(log: headwater.AsyncLog) -> tuple[float, float]:
    """Time from before the publish until the handler gets the message, at a steady rate."""
    delays_s: list[float] = []
    done = asyncio.Event()

    @log.on("pace.>", id=f"pace-{time.monotonic_ns()}", start="new")
    async def take(message: headwater.AsyncReceivedMessage) -> None:
        delays_s.append(time.perf_counter() - message.data)
        if len(delays_s) == LATENCY_COUNT:
            done.set()

    await log.start()
    publishes = []
    async for _ in paced():
        publishes.append(asyncio.ensure_future(log.publish("pace.tick", time.perf_counter())))
    await asyncio.gather(*publishes)
    await asyncio.wait_for(done.wait(), 30)
    await log.stop()
    return percentiles_ms(delays_s)


async def our_figures(url: str) -> dict[str, float]:
    async with client(url) as log:
        rounds = []
        for number in range(REPEATS):
            async with client(url) as fresh:  # a handler stays declared for as long as its log is open
                p50, p99 = await latency_ms(fresh)
            rounds.append(
                {
                    "pipelined": await pipelined(log),
                    "in batches": await in_batches(log),
                    "one by one": await one_by_one(log),
                    "delivered": await delivered(log, f"reader-{number}"),
                    "p50": p50,
                    "p99": p99,
                }
            )
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
    with fresh_directory() as directory:
        names = iter(range(REPEATS))
        echo, commit = medians(
            REPEATS, echo_per_s, lambda: rivals.bare_inserts(directory / f"{next(names)}.db", 1, ONE_BY_ONE)
        )
    return 1 / (1 / echo + 1 / commit)


def measure() -> list[Line]:
    others = rival_figures()
    floor = floor_per_s()
    with served_log() as url:
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
            f"publish to handler at {LATENCY_RATE_PER_S:,}/s",
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
