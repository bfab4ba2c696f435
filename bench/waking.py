"""How long a commit takes to wake a reader in another process, and the cost of an idle reader."""

from __future__ import annotations

import resource
import sys
import time

import headwater
from common import TOPIC, Child, fresh_directory, wait_for_go
from lines import PAUSE_S, percentiles
from postgres_ground import Ground
from report import Line

ROUNDS, POLLED_ROUNDS = 300, 50
SETTLE_S, IDLE_S = 1.0, 20.0


def reader(url: str, **options: str) -> None:
    """Runs in its own process: reports the arrival of each message, then the cost of idling."""
    with headwater.open(url, **options) as log, log.subscribe("reader", "orders.>") as subscription:  # type: ignore[arg-type]
        for _ in range(wait_for_go()):
            (message,) = subscription.fetch(1, timeout=30)
            print(time.monotonic_ns(), flush=True)
            message.ack()
        time.sleep(SETTLE_S)  # wait for the last ack and its checkpoint
        before = resource.getrusage(resource.RUSAGE_SELF)
        subscription.fetch(1, timeout=IDLE_S)
        after = resource.getrusage(resource.RUSAGE_SELF)
        used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(used_s / IDLE_S * 100, flush=True)


def woken(url: str, rounds: int, notify: str = "") -> tuple[float, float, float]:
    """Milliseconds from the return of publish to the arrival of the message, p50 and p99; percent of a CPU if idle."""
    with headwater.open(url) as log:
        child = Child(__file__, url, *filter(None, [notify]))
        child.go(rounds)
        delays_s = []
        for _ in range(rounds):
            time.sleep(PAUSE_S)  # a single message each time, not a stream
            log.publish(TOPIC, {"n": 1})
            returned_ns = time.monotonic_ns()
            delays_s.append((int(child.line()) - returned_ns) / 1e9)
        idle_percent = float(child.line())
        child.end()
    return *percentiles(delays_s), idle_percent


def on_a_file() -> list[Line]:
    with fresh_directory() as directory:
        p50, p99, idle = woken(str(directory / "log.db"), ROUNDS)
    return [
        Line("wake-up across processes, p50", f"{p50:.2f} ms", "", None, "< 1 ms", p50 < 1),
        Line("wake-up across processes, p99", f"{p99:.2f} ms", "", None, "< 10 ms", p99 < 10),
        Line("idle subscriber", f"{idle:.3f} % CPU", "", None, "< 0.1 %", idle < 0.1),
    ]


def on_postgres(ground: Ground) -> list[Line]:
    with ground.database() as url:
        p50, p99, idle = woken(url, ROUNDS, "listen")
    with ground.database() as url:
        polled_p50, polled_p99, polled_idle = woken(url, POLLED_ROUNDS, "poll")
    return [
        Line("woken by NOTIFY across processes, p50", f"{p50:.2f} ms", "", None, "< 2 ms", p50 < 2),
        Line("the same, p99", f"{p99:.2f} ms", ""),
        Line("idle subscriber that listens", f"{idle:.2f} % CPU", ""),
        Line('with notify="poll", p50 / p99', f"{polled_p50:.0f} / {polled_p99:.0f} ms", ""),
        Line("idle subscriber that polls", f"{polled_idle:.2f} % CPU", ""),
    ]


if __name__ == "__main__":
    reader(sys.argv[1], **dict(zip(["notify"], sys.argv[2:], strict=False)))
