"""How long a commit takes to wake a reader in another process, and the cost of an idle reader."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import headwater
from common import TOPIC, fresh_directory
from report import Line

ROUNDS = 300
IDLE_S = 20.0


def reader(path: str) -> None:
    """Runs in its own process: reports the arrival of each message, then the cost of idling."""
    with headwater.open(path) as log, log.subscribe("reader", "orders.>") as subscription:
        print("ready", flush=True)
        for _ in range(ROUNDS):
            (message,) = subscription.fetch(1, timeout=30)
            print(time.monotonic_ns(), flush=True)
            message.ack()
        time.sleep(1)  # wait for the last ack and its checkpoint
        before = resource.getrusage(resource.RUSAGE_SELF)
        subscription.fetch(1, timeout=IDLE_S)
        after = resource.getrusage(resource.RUSAGE_SELF)
        used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(used_s / IDLE_S * 100, flush=True)


def measure() -> list[Line]:
    with fresh_directory() as directory:
        path = directory / "log.db"
        with headwater.open(path) as log:
            child = subprocess.Popen(
                [sys.executable, __file__, str(path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
            )
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            delays_ms = []
            for _ in range(ROUNDS):
                time.sleep(0.005)  # a single message each time, not a stream
                log.publish(TOPIC, {"n": 1})
                committed_ns = time.monotonic_ns()
                delays_ms.append((int(child.stdout.readline()) - committed_ns) / 1e6)
            idle_percent = float(child.stdout.readline())
            child.wait()
    delays_ms.sort()
    p50, p99 = statistics.median(delays_ms), delays_ms[int(len(delays_ms) * 0.99)]
    return [
        Line("wake-up across processes, p50", f"{p50:.2f} ms", "", None, "< 1 ms", p50 < 1),
        Line("wake-up across processes, p99", f"{p99:.2f} ms", "", None, "< 10 ms", p99 < 10),
        Line("idle subscriber", f"{idle_percent:.3f} % CPU", "", None, "< 0.1 %", idle_percent < 0.1),
    ]


if __name__ == "__main__":
    reader(sys.argv[1])
