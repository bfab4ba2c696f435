"""Publishing and resuming in a log with many subscriptions or messages cost the same as in a small one."""

from __future__ import annotations

import statistics
from pathlib import Path

import headwater
from common import MESSAGE, TOPIC, fresh_directory, seconds
from report import Line

SUBSCRIPTIONS = 1_000
SMALL, LARGE = 10_000, 5_000_000


def publish_cost_us(log: headwater.Log, batches: int = 60) -> float:
    """Microseconds per message, in batches of 1,000; the median batch."""
    messages = [(TOPIC, MESSAGE)] * 1_000
    return statistics.median(seconds(lambda: log.publish_many(messages)) for _ in range(batches)) * 1_000


def with_subscriptions(directory: Path, count: int) -> float:
    with headwater.open(directory / f"subscriptions-{count}.db") as log:
        for number in range(count):
            log.subscribe(f"s{number}", f"orders.{number}", start="new")
        return publish_cost_us(log)


def grow(path: Path, to: int) -> None:
    with headwater.open(path, durability="relaxed") as log:
        while log.last_seq() < to:
            log.publish_many([(TOPIC, MESSAGE)] * 10_000)
        log.run_maintenance()


def measure(large: int = LARGE) -> list[Line]:
    with fresh_directory() as directory:
        one = statistics.median(with_subscriptions(directory / "", 1) for _ in range(1))
        many = with_subscriptions(directory, SUBSCRIPTIONS)
        small, big = directory / "small.db", directory / "large.db"
        grow(small, SMALL)
        grow(big, large)
        # In turn, so that a noisy minute affects both.
        with headwater.open(small) as small_log, headwater.open(big) as large_log:
            costs = [(publish_cost_us(small_log, 20), publish_cost_us(large_log, 20)) for _ in range(5)]
            small_us, large_us = (statistics.median(column) for column in zip(*costs, strict=True))
            resumes = [resume_ms(large_log, large) for _ in range(5)]
    return [
        Line(
            f"publish_many with {SUBSCRIPTIONS:,} subscriptions",
            f"{many:.2f} µs",
            f"with 1: {one:.2f} µs",
            many / one,
            "≤ 1.10 ×",
            many / one <= 1.10,
        ),
        Line(
            f"publish_many in a log of {large:,}",
            f"{large_us:.2f} µs",
            f"in one of {SMALL:,}: {small_us:.2f} µs",
            large_us / small_us,
            "≤ 1.20 ×",
            large_us / small_us <= 1.20,
        ),
        Line(
            f"resume and fetch 1 in a log of {large:,}",
            f"{statistics.median(resumes):.1f} ms",
            "",
            None,
            "milliseconds",
            statistics.median(resumes) < 20,
        ),
    ]


def resume_ms(log: headwater.Log, large: int) -> float:
    """Close and resume a subscription in the middle of the log."""
    with log.subscribe("resumed", "orders.>", start=large // 2 + 1) as subscription:
        subscription.ack_many(subscription.fetch(10))

    def work() -> None:
        with log.subscribe("resumed", "orders.>", start=large // 2 + 1) as subscription:
            (message,) = subscription.fetch(1)
            message.ack()

    return seconds(work) * 1_000
