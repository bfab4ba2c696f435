"""How fast messages are published durably."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import headwater
import rivals
from common import MESSAGE, TOPIC, fresh_directory, medians, seconds
from report import Line, against

REPEATS = 7


def many(path: Path, batch: int, batches: int) -> float:
    with headwater.open(path) as log:
        messages = [(TOPIC, MESSAGE)] * batch

        def work() -> None:
            for _ in range(batches):
                log.publish_many(messages)

        return batch * batches / seconds(work)


def one_by_one(path: Path, count: int) -> float:
    with headwater.open(path) as log:

        def work() -> None:
            for _ in range(count):
                log.publish(TOPIC, MESSAGE)

        return count / seconds(work)


def tasks(path: Path, publishers: int, each: int) -> float:
    async def work() -> float:
        async with headwater.open_async(path) as log:

            async def publisher() -> None:
                for _ in range(each):
                    await log.publish(TOPIC, MESSAGE)

            loop = asyncio.get_running_loop()
            began = loop.time()
            await asyncio.gather(*(publisher() for _ in range(publishers)))
            return publishers * each / (loop.time() - began)

    return asyncio.run(work())


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


def measure() -> list[Line]:
    with fresh_directory() as directory:
        names = iter(range(10**6))

        def new() -> Path:
            return directory / f"{next(names)}.db"

        many_ours, many_bare, many_bare_large_pages = medians(
            REPEATS,
            lambda: many(new(), 1_000, 100),
            lambda: rivals.bare_inserts(new(), 1_000, 100),
            lambda: rivals.bare_inserts(new(), 1_000, 100, page_bytes=8192),
        )
        concurrent, in_threads, single, bare, lite, persist = medians(
            REPEATS,
            lambda: tasks(new(), 100, 300),
            lambda: threads(new(), 100, 50),
            lambda: one_by_one(new(), 1_000),
            lambda: rivals.bare_inserts(new(), 1, 1_000),
            lambda: rivals.litequeue_puts(new(), 1_000),
            lambda: rivals.persist_queue_puts(new(), 500),
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
