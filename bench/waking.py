"""How long a commit takes to wake a reader in another process, and the cost of an idle reader."""

from __future__ import annotations

import json
import resource
import sys

import headwater
from common import Child, fresh_directory, wait_for_go
from lines import wake
from postgres_ground import Ground
from report import Line

ROUNDS, POLLED_ROUNDS = 300, 50
IDLE_S = 20.0


def idle_percent(url: str, **options: str) -> float:
    """Percent of a CPU that a subscriber takes while nothing is published."""
    child = Child(__file__, url, json.dumps(options))
    child.go(1)
    percent = float(child.line())
    child.end()
    return percent


def subscriber(url: str, options: str) -> None:
    """Runs in its own process, and reports what its idling cost."""
    with (
        headwater.open(url, **json.loads(options)) as log,
        log.subscribe("idle", "orders.>", start="new") as subscription,
    ):
        wait_for_go()
        before = resource.getrusage(resource.RUSAGE_SELF)
        subscription.fetch(1, timeout=IDLE_S)
        after = resource.getrusage(resource.RUSAGE_SELF)
        used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(used_s / IDLE_S * 100, flush=True)


def on_a_file() -> list[Line]:
    with fresh_directory() as directory:
        url = str(directory / "log.db")
        (p50, p99), idle = wake(url, [], ROUNDS), idle_percent(url)
    return [
        Line("wake-up across processes, p50", f"{p50:.2f} ms", "", None, "< 1 ms", p50 < 1),
        Line("wake-up across processes, p99", f"{p99:.2f} ms", "", None, "< 10 ms", p99 < 10),
        Line("idle subscriber", f"{idle:.3f} % CPU", "", None, "< 0.1 %", idle < 0.1),
    ]


def on_postgres(ground: Ground) -> list[Line]:
    with ground.database() as url:
        (p50, p99), idle = wake(url, [], ROUNDS, notify="listen"), idle_percent(url, notify="listen")
    with ground.database() as url:
        polled_p50, polled_p99 = wake(url, [], POLLED_ROUNDS, notify="poll")
        polled_idle = idle_percent(url, notify="poll")
    return [
        Line("woken by NOTIFY across processes, p50", f"{p50:.2f} ms", "", None, "< 2 ms", p50 < 2),
        Line("the same, p99", f"{p99:.2f} ms", ""),
        Line("idle subscriber that listens", f"{idle:.2f} % CPU", ""),
        Line('with notify="poll", p50 / p99', f"{polled_p50:.0f} / {polled_p99:.0f} ms", ""),
        Line("idle subscriber that polls", f"{polled_idle:.2f} % CPU", ""),
    ]


if __name__ == "__main__":
    subscriber(*sys.argv[1:])
