"""How fast messages are delivered and acked."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import headwater
import rivals
from common import MESSAGE, TOPIC, fresh_directory, medians, seconds
from headwater.ports.records import Mode
from report import Line, against

REPEATS = 5
COUNT = 200_000


def fill(path: Path, count: int) -> None:
    with headwater.open(path) as log:
        for _ in range(count // 1_000):
            log.publish_many([(TOPIC, MESSAGE)] * 1_000)


def in_batches(path: Path, id: str, mode: Mode, batch: int) -> float:
    with headwater.open(path) as log, log.subscribe(id, "orders.>", mode=mode) as subscription:
        count = 0

        def work() -> None:
            nonlocal count
            while messages := subscription.fetch(batch):
                subscription.ack_many(messages)
                count += len(messages)

        took_s = seconds(work)
        assert count == COUNT
        return count / took_s


def by_handler(path: Path, id: str, mode: Mode) -> float:
    with headwater.open(path) as log:
        numbers, done = itertools.count(1), threading.Event()

        @log.on("orders.>", id=id, mode=mode)
        def handle(message: headwater.ReceivedMessage) -> None:
            if next(numbers) == COUNT:
                done.set()

        def work() -> None:
            log.start()
            done.wait()
            log.stop()

        return COUNT / seconds(work)


def measure() -> list[Line]:
    with fresh_directory() as directory:
        names = (f"s{number}" for number in itertools.count())
        log = directory / "log.db"
        fill(log, COUNT)
        exclusive, shared, hundreds, handler, bare = medians(
            REPEATS,
            lambda: in_batches(log, next(names), "exclusive", 1_000),
            lambda: in_batches(log, next(names), "shared", 1_000),
            lambda: in_batches(log, next(names), "exclusive", 100),
            lambda: by_handler(log, next(names), "exclusive"),
            lambda: rivals.bare_reads(log),
        )
        lite, persist = medians(
            3,
            lambda: rivals.litequeue_consumes(directory / f"{next(names)}.db", 1_000),
            lambda: rivals.persist_queue_consumes(directory / f"{next(names)}.db", 300),
        )
    reads = "bare APSW, reading the rows"
    return [
        against("exclusive, fetch and ack 1,000s", exclusive, reads, bare, 0.2),
        against("shared with leases, 1,000s", shared, reads, bare, 0.05),
        against("exclusive, fetch and ack 100s", hundreds, reads, bare, 0.15),
        against("exclusive, by a handler, one at a time", handler, "litequeue, pop and done", lite),
        against("exclusive, by a handler, one at a time", handler, "persist-queue, get and ack", persist),
    ]
