"""A log in a file: publish, deliver and ack, compared with bare APSW and other queues in SQLite."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import headwater
import rivals
from common import MESSAGE, TOPIC, fill, fresh_paths, medians, seconds
from lines import by_tasks, fetch_and_ack, handle, publish
from report import Line, against

PUBLISH_REPEATS, CONSUME_REPEATS, QUEUE_REPEATS = 7, 5, 3
CONSUMED = 200_000


def threads(path: Path, publishers: int, each: int) -> float:
    with headwater.open(path) as log:

        def publisher() -> None:
            for _ in range(each):
                log.publish(TOPIC, MESSAGE)

        running = [threading.Thread(target=publisher) for _ in range(publishers)]

        def work() -> None:
            for thread in running:
                thread.start()
            for thread in running:
                thread.join()

        return publishers * each / seconds(work)


def publishing() -> list[Line]:
    with fresh_paths() as paths:
        many_ours, many_bare, many_bare_large_pages = medians(
            PUBLISH_REPEATS,
            lambda: publish(1_000, 100, str(next(paths)), [])[0],
            lambda: rivals.bare_inserts(next(paths), 1_000, 100),
            lambda: rivals.bare_inserts(next(paths), 1_000, 100, page_bytes=8192),
        )
        concurrent, in_threads, single, bare, lite, persist = medians(
            PUBLISH_REPEATS,
            lambda: asyncio.run(by_tasks(100, 30_000, str(next(paths)), []))[0],
            lambda: threads(next(paths), 100, 50),
            lambda: publish(1, 1_000, str(next(paths)), [])[0],
            lambda: rivals.bare_inserts(next(paths), 1, 1_000),
            lambda: rivals.litequeue_puts(next(paths), 1_000),
            lambda: rivals.persist_queue_puts(next(paths), 500),
        )
    return [
        against("publish_many of 1,000", many_ours, "bare APSW in 1,000s", many_bare, 0.5),
        against("publish_many of 1,000", many_ours, "bare APSW, pages of 8 KiB too", many_bare_large_pages),
        against("100 tasks, each awaits its seq", concurrent, "litequeue, one by one", lite, 30),
        against("100 tasks, each awaits its seq", concurrent, "bare APSW, one by one", bare, 10),
        against("100 tasks, each awaits its seq", concurrent, "persist-queue, one by one", persist),
        against("100 threads, each awaits its seq", in_threads, "bare APSW, one by one", bare),
        against("publish one by one", single, "bare APSW, one by one", bare, 0.85),
        against("publish one by one", single, "litequeue, one by one", lite),
    ]


def consuming() -> list[Line]:
    with fresh_paths() as paths:
        filled = next(paths)
        fill(filled, CONSUMED)
        exclusive, shared, hundreds, handler, bare = medians(
            CONSUME_REPEATS,
            lambda: fetch_and_ack("exclusive", 1_000, CONSUMED, str(next(paths)), [])[0],
            lambda: fetch_and_ack("shared", 1_000, CONSUMED, str(next(paths)), [])[0],
            lambda: fetch_and_ack("exclusive", 100, CONSUMED, str(next(paths)), [])[0],
            lambda: handle(CONSUMED, str(next(paths)), [])[0],
            lambda: rivals.bare_reads(filled),
        )
        lite, persist = medians(
            QUEUE_REPEATS,
            lambda: rivals.litequeue_consumes(next(paths), 1_000),
            lambda: rivals.persist_queue_consumes(next(paths), 300),
        )
    reads = "bare APSW, reading the rows"
    return [
        against("exclusive, fetch and ack 1,000s", exclusive, reads, bare, 0.2),
        against("shared with leases, 1,000s", shared, reads, bare, 0.05),
        against("exclusive, fetch and ack 100s", hundreds, reads, bare, 0.15),
        against("exclusive, by a handler, one at a time", handler, "litequeue, pop and done", lite),
        against("exclusive, by a handler, one at a time", handler, "persist-queue, get and ack", persist),
    ]
