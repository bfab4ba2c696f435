"""Single measurements, each in a process of its own, by this checkout's Headwater or another's: `small.py` puts other
systems beside them, `beside.py` another checkout. Written for the API of both.

    python bench/lines.py "file: publish one by one" file       messages per second and µs of processor time a message
    python bench/lines.py "postgres: wake-up" postgresql://…    milliseconds, p50 and p99
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import headwater
from common import MESSAGE, TOPIC, Child, fill, fresh_directory, served, wait_for_go
from processes import cpu_s

open_async: Any = getattr(headwater, "open_async", None) or headwater.connect  # type: ignore[attr-defined]
PACE_PER_S, PACED, WAKES, PAUSE_S = 1_000, 2_000, 200, 0.005
WAIT_S = 60.0
Measured = tuple[float, float]  # messages per second and µs of processor time per message, or ms p50 and p99


class Stopwatch:
    """Measures from now on: this process and others."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._began_s, self._cpu_s = time.perf_counter(), self._used_s()

    def _used_s(self) -> float:
        return time.process_time() + cpu_s(self._pids)

    def measured(self, count: int) -> Measured:
        return count / (time.perf_counter() - self._began_s), (self._used_s() - self._cpu_s) / count * 1e6


def rate(count: int, work: Callable[[], object], pids: list[int]) -> Measured:
    watch = Stopwatch(pids)
    work()
    return watch.measured(count)


async def rate_async(count: int, work: Coroutine[Any, Any, object], pids: list[int]) -> Measured:
    watch = Stopwatch(pids)
    await work
    return watch.measured(count)


def percentiles(delays_s: list[float]) -> Measured:
    ordered = sorted(delays_s)
    return ordered[len(ordered) // 2] * 1e3, ordered[int(len(ordered) * 0.99)] * 1e3


# Synchronous: on a file or on PostgreSQL


def publish(batch: int, batches: int, url: str, pids: list[int]) -> Measured:
    messages = [(TOPIC, MESSAGE)] * batch
    with headwater.open(url) as log:
        log.publish(TOPIC, MESSAGE)
        one = partial(log.publish, TOPIC, MESSAGE) if batch == 1 else partial(log.publish_many, messages)
        return rate(batch * batches, lambda: [one() for _ in range(batches)], pids)


def fetch_and_ack(mode: Any, batch: int, count: int, url: str, pids: list[int]) -> Measured:
    fill(url, max(count, 10_000))
    with headwater.open(url) as log, log.subscribe("reader", "orders.>", mode=mode) as subscription:

        def work() -> None:
            done = 0
            while done < count:
                messages = subscription.fetch(batch)
                assert messages
                subscription.ack_many(messages)
                done += len(messages)

        return rate(count, work, pids)


def handle(count: int, url: str, pids: list[int]) -> Measured:
    fill(url, count)
    with headwater.open(url) as log:
        numbers, done = itertools.count(1), threading.Event()

        @log.on("orders.>", id="handler")
        def handler(message: Any) -> None:
            if next(numbers) == count:
                done.set()

        def work() -> None:
            log.start()
            assert done.wait(WAIT_S)
            log.stop()

        return rate(count, work, pids)


def wake(url: str, pids: list[int], rounds: int = WAKES, **options: str) -> Measured:
    """From the return of a publish until a reader in another process has the message."""
    with headwater.open(url) as log:
        child = Child(__file__, "reader", url, json.dumps(options))
        child.go(rounds)
        delays_s = []
        for _ in range(rounds):
            time.sleep(PAUSE_S)  # a single message each time, not a stream
            log.publish(TOPIC, {"n": 1})
            returned_ns = time.monotonic_ns()
            delays_s.append((int(child.line()) - returned_ns) / 1e9)
        child.end()
    return percentiles(delays_s)


def reader(url: str, options: str) -> None:
    with headwater.open(url, **json.loads(options)) as log, log.subscribe("reader", "orders.>") as subscription:
        for _ in range(wait_for_go()):
            (message,) = subscription.fetch(1, WAIT_S)
            print(time.monotonic_ns(), flush=True)
            message.ack()


# Asynchronous: on a file or through a server


async def by_tasks(tasks: int, count: int, url: str, pids: list[int]) -> Measured:
    async with open_async(url) as log:

        async def publisher() -> None:
            for _ in range(count // tasks):
                await log.publish(TOPIC, MESSAGE)

        async def work() -> None:
            await asyncio.gather(*(publisher() for _ in range(tasks)))

        await log.publish(TOPIC, MESSAGE)
        return await rate_async(count, work(), pids)


async def in_batches(pipes: int, count: int, url: str, pids: list[int]) -> Measured:
    async with open_async(url) as log:

        async def publisher() -> None:
            for _ in range(count // 1_000 // pipes):
                await log.publish_many([(TOPIC, MESSAGE)] * 1_000)

        async def work() -> None:
            await asyncio.gather(*(publisher() for _ in range(pipes)))

        return await rate_async(count, work(), pids)


async def delivered(count: int, confirmed: bool, url: str, pids: list[int]) -> Measured:
    """`confirmed`: each batch of acks is awaited; otherwise it travels with the next fetch."""
    async with open_async(url) as log:
        for _ in range(count // 1_000):
            await log.publish_many([(TOPIC, MESSAGE)] * 1_000)
        subscription = await log.subscribe("reader", TOPIC)
        name = "confirm" if "confirm" in inspect.signature(subscription.ack_many).parameters else "wait"

        async def work() -> None:
            done = 0
            while done < count:
                messages = await subscription.fetch(1_000)
                await subscription.ack_many(messages, **{name: confirmed})
                done += len(messages)
            await subscription.close()

        return await rate_async(count, work(), pids)


async def paced() -> AsyncIterator[int]:
    began = time.perf_counter()
    for number in range(PACED):
        await asyncio.sleep(max(0.0, began + number / PACE_PER_S - time.perf_counter()))
        yield number


async def to_handler(url: str, pids: list[int]) -> Measured:
    async with open_async(url) as log:
        delays_s: list[float] = []
        done = asyncio.Event()

        @log.on("pace.>", id="pace", start="new")
        async def take(message: Any) -> None:
            delays_s.append(time.perf_counter() - message.data)
            if len(delays_s) == PACED:
                done.set()

        await log.start()
        publishes = []
        async for _ in paced():
            publishes.append(asyncio.ensure_future(log.publish("pace.tick", time.perf_counter())))
        await asyncio.gather(*publishes)
        await asyncio.wait_for(done.wait(), WAIT_S)
        await log.stop()
        return percentiles(delays_s)


LINES: dict[str, Callable[[str, list[int]], Any]] = {
    "server: publish to handler": to_handler,
    "server: publish one by one": partial(by_tasks, 1, 1_500),
    "server: publish, 1,000 tasks": partial(by_tasks, 1_000, 60_000),
    "server: publish_many of 1,000, four at a time": partial(in_batches, 4, 100_000),
    "server: deliver and ack in 1,000s": partial(delivered, 60_000, True),
    "server: deliver and ack in 1,000s, acks with the next fetch": partial(delivered, 60_000, False),
    "postgres: fetch and ack, 1 at a time, exclusive": partial(fetch_and_ack, "exclusive", 1, 500),
    "postgres: fetch and ack, 1 at a time, shared": partial(fetch_and_ack, "shared", 1, 500),
    "postgres: fetch and ack, 10 at a time, exclusive": partial(fetch_and_ack, "exclusive", 10, 4_000),
    "postgres: fetch and ack, 10 at a time, shared": partial(fetch_and_ack, "shared", 10, 4_000),
    "postgres: fetch and ack, 500 at a time, exclusive": partial(fetch_and_ack, "exclusive", 500, 40_000),
    "postgres: fetch and ack, 500 at a time, shared": partial(fetch_and_ack, "shared", 500, 40_000),
    "postgres: publish one by one": partial(publish, 1, 500),
    "postgres: publish_many of 1,000": partial(publish, 1_000, 40),
    "postgres: wake-up": wake,
    "file: publish one by one": partial(publish, 1, 2_000),
    "file: publish_many of 10": partial(publish, 10, 2_000),
    "file: publish_many of 1,000": partial(publish, 1_000, 200),
    "file: publish, 100 tasks": partial(by_tasks, 100, 30_000),
    "file: fetch and ack in 1s": partial(fetch_and_ack, "exclusive", 1, 1_000),
    "file: fetch and ack in 100s": partial(fetch_and_ack, "exclusive", 100, 100_000),
    "file: fetch and ack in 1,000s": partial(fetch_and_ack, "exclusive", 1_000, 200_000),
    "file: fetch and ack in 1,000s, shared": partial(fetch_and_ack, "shared", 1_000, 200_000),
    "file: handler": partial(handle, 100_000),
    "file: wake-up": wake,
}
IN_MS = {"server: publish to handler", "postgres: wake-up", "file: wake-up"}


def measure(name: str, url: str, pids: list[int]) -> Measured:
    found = LINES[name](url, pids)
    if not asyncio.iscoroutine(found):
        return found  # type: ignore[no-any-return]
    try:
        import uvloop

        if "BENCH_PLAIN_LOOP" not in os.environ:
            return uvloop.run(found)  # type: ignore[no-any-return]
    except ImportError:  # another checkout may be without it
        pass
    return asyncio.run(found)  # type: ignore[no-any-return]


def main(name: str, url: str) -> None:
    with fresh_directory() as directory:
        if name.startswith("server"):
            with served(directory) as (url, pids):
                found = measure(name, url, pids)
        else:
            found = measure(name, url if name.startswith("postgres") else str(directory / "log.db"), [])
    print(json.dumps(found))


def run(python: str, name: str, url: str = "", **environment: str) -> Measured:
    """A line as the Headwater of this interpreter measures it, in a process of its own."""
    command = [python, __file__, name, url]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=180)
    if done.returncode:
        raise RuntimeError(f"{name} by {python} failed: {done.stderr.strip().splitlines()[-1:]}")
    first, second = json.loads(done.stdout)
    return first, second


if __name__ == "__main__":
    if sys.argv[1] == "reader":
        reader(*sys.argv[2:])
    else:
        main(*sys.argv[1:3])
