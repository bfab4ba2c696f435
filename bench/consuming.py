"""How fast messages are delivered and acked."""

from __future__ import annotations

import rivals
from common import fill, fresh_paths, medians
from lines import fetch_and_ack, handle
from report import Line, against

REPEATS = 5
COUNT = 200_000


def measure() -> list[Line]:
    with fresh_paths() as paths:
        filled = next(paths)
        fill(filled, COUNT)
        exclusive, shared, hundreds, handler, bare = medians(
            REPEATS,
            lambda: fetch_and_ack("exclusive", 1_000, COUNT, str(next(paths)), [])[0],
            lambda: fetch_and_ack("shared", 1_000, COUNT, str(next(paths)), [])[0],
            lambda: fetch_and_ack("exclusive", 100, COUNT, str(next(paths)), [])[0],
            lambda: handle(COUNT, str(next(paths)), [])[0],
            lambda: rivals.bare_reads(filled),
        )
        lite, persist = medians(
            3,
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
