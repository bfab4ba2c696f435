"""How long a commit takes to wake a reader in another process, and the cost of an idle reader."""

from __future__ import annotations

import resource
import statistics
import sys
import time

import headwater
from common import TOPIC
from postgres_ground import Child, Ground, wait_for_go
from report import Line

ROUNDS, POLLED_ROUNDS = 300, 50
PAUSE_S = 0.005  # a single message each time, not a stream
SETTLE_S, IDLE_S = 1.0, 10.0


def reader(url: str, notify: str) -> None:
    """Runs in its own process: reports the arrival of each message, then the cost of idling."""
    with headwater.open(url, notify=notify) as log, log.subscribe("reader", "orders.>") as subscription:
        for _ in range(wait_for_go()):
            (message,) = subscription.fetch(1, timeout=30)
            print(time.monotonic_ns(), flush=True)
            message.ack()
        time.sleep(SETTLE_S)  # wait for the last ack
        before = resource.getrusage(resource.RUSAGE_SELF)
        subscription.fetch(1, timeout=IDLE_S)
        after = resource.getrusage(resource.RUSAGE_SELF)
        used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(used_s / IDLE_S * 100, flush=True)


def woken(ground: Ground, notify: str, rounds: int) -> tuple[float, float, float]:
    """Milliseconds from the return of publish to the arrival of the message, p50 and p99; percent of a CPU if idle."""
    with ground.database() as url, headwater.open(url) as log:
        child = Child(__file__, url, notify)
        child.go(rounds)
        delays_ms = []
        for _ in range(rounds):
            time.sleep(PAUSE_S)
            log.publish(TOPIC, {"n": 1})
            returned_ns = time.monotonic_ns()
            delays_ms.append((int(child.line()) - returned_ns) / 1e6)
        idle_percent = float(child.line())
        child.end()
    delays_ms.sort()
    return statistics.median(delays_ms), delays_ms[int(len(delays_ms) * 0.99)], idle_percent


def measure(ground: Ground) -> list[Line]:
    p50, p99, idle = woken(ground, "listen", ROUNDS)
    polled_p50, polled_p99, polled_idle = woken(ground, "poll", POLLED_ROUNDS)
    return [
        Line("woken by NOTIFY across processes, p50", f"{p50:.2f} ms", "", None, "< 3 ms", p50 < 3),
        Line("the same, p99", f"{p99:.2f} ms", ""),
        Line("idle subscriber that listens", f"{idle:.2f} % CPU", ""),
        Line('with notify="poll", p50 / p99', f"{polled_p50:.0f} / {polled_p99:.0f} ms", ""),
        Line("idle subscriber that polls", f"{polled_idle:.2f} % CPU", ""),
    ]


if __name__ == "__main__":
    reader(sys.argv[1], sys.argv[2])
