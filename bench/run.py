"""All measurements, side by side. `make bench`, or `python bench/run.py publishing consuming` for some of them.

Those on PostgreSQL begin with `postgres`; `python bench/run.py postgres` runs them all, on a server of their own.
Those on Spark begin with `spark`; `python bench/run.py spark --messages 300000` runs them all on a smaller log.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Collection
from importlib import import_module

import consuming
import growing
import postgres_ground
import publishing
import replicating
import serving
import spark_ground
import waking
from common import describe_machine
from report import Line, show

MEASURES = {
    "publishing": ("Publish", publishing.measure),
    "consuming": ("Consume and ack", consuming.measure),
    "growing": ("Growth", growing.measure),
    "waking": ("Wake-up", waking.measure),
    "serving": ("Through a server", serving.measure),
    "replicating": ("A SQLite database on a server", replicating.measure),
}
SPARK_MEASURES = {  # modules, imported when asked for: the others run without Spark
    "spark-source": ("Spark: reading the log", "spark_source"),
    "spark-lake": ("Spark: the lake", "spark_lake"),
    "spark-streams": ("Spark: streams", "spark_streams"),
    "spark-start": ("Spark: start", "spark_start"),
}
POSTGRES_MEASURES = {  # the same: the others run without PostgreSQL
    "postgres-publishing": ("PostgreSQL: publish", "postgres", "publishing"),
    "postgres-claiming": ("PostgreSQL: claim and ack", "postgres", "claiming"),
    "postgres-queues": ("PostgreSQL: other queues in it", "postgres", "queues"),
    "postgres-processes": ("PostgreSQL: several processes", "postgres", "several"),
    "postgres-waking": ("PostgreSQL: wake-up", "postgres_waking", "measure"),
    "postgres-growing": ("PostgreSQL: growth", "postgres_growing", "growing"),
    "postgres-churning": ("PostgreSQL: rows that come and go", "postgres_growing", "churning"),
}
FAMILIES: dict[str, Collection[str]] = {"postgres": POSTGRES_MEASURES, "spark": SPARK_MEASURES}
NAMES = [*MEASURES, *POSTGRES_MEASURES, *SPARK_MEASURES]


def chosen(asked: list[str]) -> list[str]:
    """`postgres` and `spark` stand for all whose names begin with it."""
    unknown = [name for name in asked if name not in FAMILIES and name not in NAMES]
    if unknown:
        raise SystemExit(f"no such measurement: {', '.join(unknown)}; there are {', '.join([*NAMES, *FAMILIES])}")
    wanted = {*asked, *(name for family in asked for name in FAMILIES.get(family, ()))}
    return [name for name in NAMES if not asked or name in wanted]


def spark_lines(module: str, ground: spark_ground.Ground) -> list[Line]:
    lines: list[Line] = import_module(module).measure(ground)
    return lines


def postgres_lines(module: str, function: str, ground: postgres_ground.Ground) -> list[Line]:
    lines: list[Line] = getattr(import_module(module), function)(ground)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measurements", nargs="*", metavar="measurement", help=", ".join([*NAMES, *FAMILIES]))
    parser.add_argument("--messages", type=int, default=spark_ground.MESSAGES, help="in the log that Spark reads")
    parser.add_argument("--large", type=int, default=postgres_ground.LARGE, help="messages in the large PostgreSQL log")
    asked = parser.parse_args()
    names = chosen(asked.measurements)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers that were started are ended too
    print(describe_machine())
    with spark_ground.prepared(asked.messages) as ground, postgres_ground.prepared(asked.large) as postgres:
        if any(name in SPARK_MEASURES for name in names):
            print(ground.describe())
        if any(name in POSTGRES_MEASURES for name in names):
            print(postgres.describe())
        for name in names:
            if name in SPARK_MEASURES:
                title, module = SPARK_MEASURES[name]
                show(title, spark_lines(module, ground))
            elif name in POSTGRES_MEASURES:
                title, module, function = POSTGRES_MEASURES[name]
                show(title, postgres_lines(module, function, postgres))
            else:
                title, measure = MEASURES[name]
                show(title, measure())


if __name__ == "__main__":
    main()
