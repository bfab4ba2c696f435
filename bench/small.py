"""The small case: one message or a few at a time, each line in turn with what it is compared with, in one run of some
minutes: `python bench/run.py small`. Each figure is printed when it is there."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial

import lines
import postgres_rivals
import rivals
import serving
import serving_rivals
import starting
from common import fill, fresh_paths, median_columns
from postgres_ground import Ground
from report import Line, against
from serving_rivals import jetstream_server, redis_server, run

REPEATS = 5
RIVAL_COUNT = 60_000
FLOOR_COUNT = 1_500
QUEUE = {1: 500, 10: 4_000, 500: 40_000}  # batch size: number of messages, as in `lines`
QUEUE_FILLED_MIN = 10_000

Other = Callable[[], float]


def in_turn(name: str, other: Other | None = None, ground: Ground | None = None) -> tuple[float, float, float | None]:
    """Medians: the two figures of Headwater's line, and the other's; None if that failed."""
    ours: list[lines.Measured] = []
    others: list[float] = []
    for _ in range(REPEATS):
        with contextlib.nullcontext("") if ground is None else ground.database() as url:
            ours.append(lines.run(sys.executable, name, url))
        if other is not None:
            with serving_rivals.left_out_if_it_fails(f"beside {name}"):
                others.append(other())
    first, second = median_columns(ours)
    beside = statistics.median(others) if others else None
    print(f"  {name}: {first:,.2f}, {second:,.2f}" + ("" if beside is None else f"; beside {beside:,.2f}"), flush=True)
    return first, second, beside


def compared(name: str, beside: str, other: Other, at_least: float, ground: Ground | None = None) -> Line:
    rate, _, theirs = in_turn(name, other, ground)
    return against(name, rate, beside, theirs, at_least)


def through_a_server() -> Iterator[Line]:
    with jetstream_server("always") as port:
        p50, p99, theirs = in_turn("server: publish to handler", lambda: run(serving_rivals.jetstream_latency(port))[0])
    met = theirs is not None and p50 < 1.2 and p99 < 5 and p50 <= 2 * theirs
    other = "JetStream always failed" if theirs is None else f"JetStream always {theirs:.2f} ms"
    ratio = None if theirs is None else p50 / theirs
    yield Line("server: publish to handler", f"{p50:.2f} / {p99:.2f} ms", other, ratio, "< 1.2 / < 5 ms, ≤ 2 ×", met)
    with fresh_paths() as paths:

        def floor() -> float:
            return 1 / (1 / serving.echo_per_s() + 1 / rivals.bare_inserts(next(paths), 1, FLOOR_COUNT))

        yield compared("server: publish one by one", "bare echo and commit", floor, 0.9)
    with jetstream_server(None) as port:

        def pipelined() -> float:
            return max(
                run(serving_rivals.jetstream_pipelined(port, pending, RIVAL_COUNT))
                for pending in serving_rivals.PENDING_MAX
            )

        yield compared("server: publish, 1,000 tasks", "JetStream", pipelined, 3)
    with redis_server("always") as port:
        run(serving_rivals.fill_redis(port))
        redis = partial(serving_rivals.redis_delivered, port, RIVAL_COUNT)
        yield compared("server: deliver and ack in 1,000s", "Redis always", lambda: run(redis()), 1)
        # As Redis is measured: each batch's XACK is sent with the next XREADGROUP.
        name = "server: deliver and ack in 1,000s, acks with the next fetch"
        yield compared(name, "Redis always", lambda: run(redis()), 1)


def on_postgres(ground: Ground) -> Iterator[Line]:
    for (size, count), mode in itertools.product(QUEUE.items(), ("exclusive", "shared")):

        def queue(size: int = size, count: int = count) -> float:
            with ground.database() as url:
                return postgres_rivals.queue_takes(url, size, count, max(count, QUEUE_FILLED_MIN))

        name = f"postgres: fetch and ack, {size} at a time, {mode}"
        yield compared(name, "SKIP LOCKED table", queue, 1.5 if (size, mode) == (1, "exclusive") else 1, ground)
    p50, p99, _ = in_turn("postgres: wake-up", ground=ground)
    yield Line("postgres: wake-up", f"{p50:.2f} / {p99:.2f} ms", "", None, "< 2 ms", p50 < 2)


def on_a_file() -> Iterator[Line]:
    with fresh_paths() as paths:
        bare = partial(rivals.bare_inserts, batch=1, batches=FLOOR_COUNT)
        yield compared("file: publish one by one", "bare APSW", lambda: bare(next(paths)), 0.85)
        filled = next(paths)
        fill(filled, RIVAL_COUNT)
        read = partial(rivals.bare_reads, filled)
        yield compared("file: fetch and ack in 100s", "bare APSW, reading the rows", read, 0.15)
    p50, p99, _ = in_turn("file: wake-up")
    yield Line("file: wake-up", f"{p50:.2f} / {p99:.2f} ms", "", None, "< 1 ms", p50 < 1)


def measure(ground: Ground) -> list[Line]:
    found: list[Line] = []
    parts = (through_a_server(), on_postgres(ground), on_a_file(), iter(starting.measure()))
    for part in parts:
        with serving_rivals.left_out_if_it_fails("the rest of this part"):
            found += part
    return found
