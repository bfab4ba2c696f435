"""A log in PostgreSQL: publish, claim and ack, compared with bare SQL and other queues in the same server."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Callable

import uvloop

import headwater
import lines
import postgres_rivals as rivals
from common import MESSAGE, TOPIC, Child, fill, median_columns, medians, wait_for_go
from headwater.ports.records import Mode
from postgres_ground import Ground
from report import Line, against

REPEATS = 5
PUBLISHED, PUBLISHED_BY_TASKS = 40_000, 10_000
TAKEN = {500: 40_000, 10: 4_000, 1: 500}  # batch size: number of messages
FILLED_MIN = 10_000  # in the log and in the queue table
QUEUED, QUEUED_BY_TASKS, QUEUE_REPEATS = 5_000, 1_000, 3
SPLIT_PUBLISHED, SPLIT_TAKEN, SPLIT_REPEATS = 40_000, 60_000, 3


def fresh(ground: Ground, measure: Callable[[str], float]) -> Callable[[], float]:
    """Run the measure on its own database."""

    def run() -> float:
        with ground.database() as url:
            return measure(url)

    return run


# Publishing


def many(url: str, count: int) -> float:
    return lines.publish(1_000, count // 1_000, url, [])[0]


def by_tasks(url: str, count: int) -> float:
    return uvloop.run(lines.by_tasks(rivals.TASKS, count, url, []))[0]


def publishing(ground: Ground) -> list[Line]:
    batches = PUBLISHED // 1_000
    ours, tasks, copies, texts, inserts = medians(
        REPEATS,
        fresh(ground, lambda url: many(url, PUBLISHED)),
        fresh(ground, lambda url: by_tasks(url, PUBLISHED_BY_TASKS)),
        fresh(ground, lambda url: rivals.bare_copies(url, 1_000, batches)),
        fresh(ground, lambda url: rivals.bare_texts(url, 1_000, batches)),
        fresh(ground, lambda url: rivals.bare_inserts(url, 1_000, batches // 2)),
    )
    return [
        against("publish_many of 1,000", ours, "bare COPY, row by row, in 1,000s", copies, 0.5),
        against("", ours, "bare COPY of text made before", texts),
        against("", ours, "executemany in 1,000s", inserts, 1),
        against("100 tasks, each awaits its seq", tasks, "bare COPY, row by row, in 1,000s", copies),
        against("", tasks, "executemany in 1,000s", inserts),
    ]


# Claiming


def taken(mode: Mode, batch: int, count: int) -> Callable[[str], float]:
    return lambda url: lines.fetch_and_ack(mode, batch, count, url, [])[0]


def claiming(ground: Ground) -> list[Line]:
    found = []
    for batch, count in TAKEN.items():
        shared, exclusive, plain = medians(
            REPEATS,
            fresh(ground, taken("shared", batch, count)),
            fresh(ground, taken("exclusive", batch, count)),
            # Each is called before the next iteration.
            fresh(ground, lambda url: rivals.queue_takes(url, batch, count, max(count, FILLED_MIN))),  # noqa: B023
        )
        name = f"SKIP LOCKED table, {batch}s"
        found += [
            against(f"shared, fetch and ack {batch}s", shared, name, plain, 1),
            against(f"exclusive, fetch and ack {batch}s", exclusive, name, plain, 1.5 if batch == 1 else 1),
        ]
    return found


# Other queues


def handled(url: str, mode: Mode, count: int) -> float:
    """Handled by a no-op handler, with the same concurrency as procrastinate."""

    async def work() -> float:
        async with headwater.open_async(url) as log:
            numbers, done = itertools.count(1), asyncio.Event()

            @log.on("orders.>", id=f"handler-{mode}", mode=mode, concurrency=rivals.CONCURRENCY)
            async def handle(message: headwater.AsyncReceivedMessage) -> None:
                if next(numbers) == count:
                    done.set()

            began = time.perf_counter()
            await log.start()
            await done.wait()
            await log.stop()  # sends the acks that are still pending
            return count / (time.perf_counter() - began)

    return uvloop.run(work())


def our_rates(url: str) -> tuple[rivals.Rates, float]:
    """Enough messages for a stable result; the second value is for an exclusive handler."""
    batches, tasks = many(url, PUBLISHED), by_tasks(url, PUBLISHED_BY_TASKS)
    count = PUBLISHED + PUBLISHED_BY_TASKS
    return rivals.Rates(batches, tasks, handled(url, "shared", count)), handled(url, "exclusive", count)


def queues(ground: Ground) -> list[Line]:
    ours, exclusive, others = [], [], {"procrastinate": [], "pgqueuer": []}  # type: ignore[var-annotated]
    for _ in range(QUEUE_REPEATS):
        with ground.database() as url:
            rates, alone = our_rates(url)
            ours.append(rates)
            exclusive.append(alone)
        with ground.database() as url:
            others["procrastinate"].append(rivals.procrastinate_rates(url, QUEUED, QUEUED_BY_TASKS))
        with ground.database() as url:
            others["pgqueuer"].append(rivals.pgqueuer_rates(url, QUEUED * 2, QUEUED_BY_TASKS))
    print(f"{rivals.procrastinate_settings()}; {rivals.pgqueuer_settings()}")
    our = middle(ours)
    lines = []
    for name, rounds in others.items():
        other = middle(rounds)
        lines += [
            against("publish_many of 1,000", our.batches, f"{name}, 1,000 at a time", other.batches, 5),
            against("100 tasks, each waits for its message", our.tasks, f"{name}, so too", other.tasks, 5),
            against(
                f"shared handler, concurrency {rivals.CONCURRENCY}", our.worked, f"{name}, a worker", other.worked, 5
            ),
            against(
                f"exclusive handler, concurrency {rivals.CONCURRENCY}",
                statistics.median(exclusive),
                f"{name}, a worker",
                other.worked,
                5,
            ),
            against("published and handled", our.through, f"{name}, so too", other.through, 5),
        ]
    return lines


def middle(rounds: list[rivals.Rates]) -> rivals.Rates:
    return rivals.Rates(*median_columns(rounds))


# Several processes


def publish_here(url: str) -> None:
    """Runs in its own process: publishes its share, and reports when it finished."""
    messages = [(TOPIC, MESSAGE)] * 1_000
    with headwater.open(url) as log:
        share = wait_for_go()
        for _ in range(share // 1_000):
            log.publish_many(messages)
        print(time.monotonic(), flush=True)


def take_here(url: str) -> None:
    """Runs in its own process: claims messages until none is left."""
    with headwater.open(url) as log, log.subscribe("split", "orders.>", mode="shared") as subscription:
        wait_for_go()
        while messages := subscription.fetch(500):
            subscription.ack_many(messages)
        print(time.monotonic(), flush=True)


def split(ground: Ground, role: str, processes: int, count: int, filled: int) -> float:
    with ground.database() as url:
        fill(url, filled)
        children = [Child(__file__, role, url) for _ in range(processes)]
        began = time.monotonic()
        for child in children:
            child.go(count // processes)
        ended = max(float(child.line()) for child in children)
        for child in children:
            child.end()
        return count / (ended - began)


def several(ground: Ground) -> list[Line]:
    one_publishes, two_publish, one_takes, two_take = medians(
        SPLIT_REPEATS,
        lambda: split(ground, "publish", 1, SPLIT_PUBLISHED, 0),
        lambda: split(ground, "publish", 2, SPLIT_PUBLISHED, 0),
        lambda: split(ground, "take", 1, SPLIT_TAKEN, SPLIT_TAKEN),
        lambda: split(ground, "take", 2, SPLIT_TAKEN, SPLIT_TAKEN),
    )
    return [
        against("two processes publish 1,000s", two_publish, "one", one_publishes),
        against("two claim 500s from one shared subscription", two_take, "one", one_takes),
    ]


if __name__ == "__main__":
    {"publish": publish_here, "take": take_here}[sys.argv[1]](sys.argv[2])
