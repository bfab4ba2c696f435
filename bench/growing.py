"""How costs grow: with 1 to 1,000 subscriptions, 10,000 to 10 million messages, 1 to 64 connections. The log of 10
million takes 3 GB of disk and about a minute to fill."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from pathlib import Path

import headwater
from common import MESSAGE, TOPIC, fill, fresh_directory, median_columns, seconds, served
from processes import used_ns
from report import Line, at_most

SUBSCRIPTIONS = 1_000
SMALL, LARGE = 10_000, 10_000_000
CONNECTIONS = (1, 8, 64)
MESSAGES_OVER_CONNECTIONS = 3_200


def publish_cost_us(log: headwater.Log, batches: int = 60) -> float:
    """Microseconds per message, in batches of 1,000; the median batch."""
    messages = [(TOPIC, MESSAGE)] * 1_000
    return statistics.median(seconds(lambda: log.publish_many(messages)) for _ in range(batches)) * 1_000


def with_subscriptions(directory: Path) -> tuple[float, float]:
    """With one, and with many; in turn, so that a noisy minute affects both."""
    with headwater.open(directory / "one.db") as one, headwater.open(directory / "many.db") as many:
        one.subscribe("s0", "orders.0", start="new")
        for number in range(SUBSCRIPTIONS):
            many.subscribe(f"s{number}", f"orders.{number}", start="new")
        costs = [(publish_cost_us(one, 20), publish_cost_us(many, 20)) for _ in range(5)]
        first, second = median_columns(costs)
        return first, second


def grow(path: Path, to: int) -> None:
    fill(path, to)
    with headwater.open(path, durability="relaxed") as log:
        log.run_maintenance()


def measure(large: int = LARGE) -> list[Line]:
    with fresh_directory() as directory:
        one, many = with_subscriptions(directory)
        print(f"  publish_many: {one:.2f} µs with 1 subscription, {many:.2f} µs with {SUBSCRIPTIONS:,}", flush=True)
        small, big = directory / "small.db", directory / "large.db"
        grow(small, SMALL)
        print(f"  a log of {large:,} filled in {seconds(lambda: grow(big, large)):.0f} s", flush=True)
        with headwater.open(small) as small_log, headwater.open(big) as large_log:
            costs = [(publish_cost_us(small_log, 20), publish_cost_us(large_log, 20)) for _ in range(5)]
            small_us, large_us = median_columns(costs)
            resumes = [resume_ms(large_log, large // 2) for _ in range(5)]
    return [
        growth(f"publish_many with {SUBSCRIPTIONS:,} subscriptions", many, "with 1", one, 1.1),
        growth(f"publish_many in a log of {large:,}", large_us, f"in one of {SMALL:,}", small_us, 1.2),
        Line(
            f"resume and fetch 1 in a log of {large:,}",
            f"{statistics.median(resumes):.1f} ms",
            "",
            None,
            "milliseconds",
            statistics.median(resumes) < 20,
        ),
        *over_all_connections(),
    ]


def growth(what: str, much_us: float, where: str, little_us: float, most: float) -> Line:
    return at_most(what, f"{much_us:.2f} µs", f"{where}: {little_us:.2f} µs", much_us / little_us, most)


def over_all_connections() -> list[Line]:
    found = {count: over_connections(count) for count in CONNECTIONS}
    alone_us, alone_rate = found[CONNECTIONS[0]]
    return [
        at_most(
            f"server: publish one by one over {count} connections",
            f"{server_us:,.0f} µs",
            f"of the server's CPU, over 1: {alone_us:,.0f} µs; {rate:,.0f}/s in all, over 1: {alone_rate:,.0f}/s",
            server_us / alone_us,
            1,
        )
        for count, (server_us, rate) in found.items()
    ]


def over_connections(count: int) -> tuple[float, float]:
    """Server's processor time per message (µs) and messages per second, one publisher on each connection."""

    async def work(url: str, pids: list[int]) -> tuple[float, float]:
        async with contextlib.AsyncExitStack() as stack:
            logs = [await stack.enter_async_context(headwater.open_async(url)) for _ in range(count)]

            async def publisher(log: headwater.AsyncLog) -> None:
                for _ in range(MESSAGES_OVER_CONNECTIONS // count):
                    await log.publish(TOPIC, MESSAGE)

            before, began = used_ns(pids), time.perf_counter()
            await asyncio.gather(*map(publisher, logs))
            took_s = time.perf_counter() - began
            return (used_ns(pids) - before) / 1_000 / MESSAGES_OVER_CONNECTIONS, MESSAGES_OVER_CONNECTIONS / took_s

    with fresh_directory() as directory, served(directory) as (url, pids):
        return asyncio.run(work(url, pids))


def resume_ms(log: headwater.Log, after: int) -> float:
    """Close and resume a subscription in the middle of the log."""
    with log.subscribe("resumed", "orders.>", start=after + 1) as subscription:
        subscription.ack_many(subscription.fetch(10))

    def work() -> None:
        with log.subscribe("resumed", "orders.>", start=after + 1) as subscription:
            (message,) = subscription.fetch(1)
            message.ack()

    return seconds(work) * 1_000
