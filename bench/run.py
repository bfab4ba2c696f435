"""All measurements. `make bench`, or `python bench/run.py publishing consuming` for some of them.

`python bench/run.py small` measures the small case alone, in some minutes, with what it is compared with.
`python bench/beside.py PATH` puts another checkout of Headwater beside this one.
Those on PostgreSQL begin with `postgres`; `python bench/run.py postgres` runs them all, on their own server.
Those on Spark begin with `spark`; `python bench/run.py spark --messages 100000` is a quick run.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Collection
from importlib import import_module

import postgres_ground
import spark_ground
from common import describe_machine
from report import Line, show

MEASURES = {  # imported on demand, as the others: one that cannot be imported does not keep the rest from running
    "publishing": ("Publish", "publishing", "measure"),
    "consuming": ("Consume and ack", "consuming", "measure"),
    "growing": ("Growth", "growing", "measure"),
    "waking": ("Wake-up", "waking", "on_a_file"),
    "serving": ("Through a server", "serving", "measure"),
    "replicating": ("A SQLite database on a server", "replicating", "measure"),
    "starting": ("The command line", "starting", "measure"),
    "costs": ("Processor time per message", "costs", "measure"),
}
SPARK_MEASURES = {  # modules, imported on demand: the others run without Spark
    "spark-first": ("Spark: the first run into a lake, whole commands", "spark_lake", "first"),
    "spark-million": ("Spark: a large first run", "spark_lake", "million"),
    "spark-sql": ("Spark: a question to the lake", "spark_lake", "counting"),
    "spark-memory": ("Spark: memory", "spark_lake", "memory"),
    "spark-new": ("Spark: a run with some new messages", "spark_lake", "some_new"),
    "spark-source": ("Spark: reading the log", "spark_source", "measure"),
    "spark-streams": ("Spark: streams", "spark_streams", "measure"),
}
POSTGRES_MEASURES = {  # the same: the others run without PostgreSQL
    "postgres-publishing": ("PostgreSQL: publish", "postgres", "publishing"),
    "postgres-claiming": ("PostgreSQL: claim and ack", "postgres", "claiming"),
    "postgres-queues": ("PostgreSQL: other queues in it", "postgres", "queues"),
    "postgres-processes": ("PostgreSQL: several processes", "postgres", "several"),
    "postgres-waking": ("PostgreSQL: wake-up", "waking", "on_postgres"),
    "postgres-growing": ("PostgreSQL: growth", "postgres_growing", "growing"),
    "postgres-churning": ("PostgreSQL: rows that come and go", "postgres_growing", "churning"),
}
SMALL = {"small": ("The small case", "small", "measure")}  # only when it is asked for: the others have most of it
FAMILIES: dict[str, Collection[str]] = {"postgres": POSTGRES_MEASURES, "spark": SPARK_MEASURES}
NAMES = [*MEASURES, *POSTGRES_MEASURES, *SPARK_MEASURES, *SMALL]


def chosen(asked: list[str]) -> list[str]:
    """`postgres` and `spark` select all measurements whose names begin with them."""
    unknown = [name for name in asked if name not in FAMILIES and name not in NAMES]
    if unknown:
        raise SystemExit(f"no such measurement: {', '.join(unknown)}; there are {', '.join([*NAMES, *FAMILIES])}")
    wanted = {*asked, *(name for family in asked for name in FAMILIES.get(family, ()))}
    return [name for name in NAMES if name in wanted or (not asked and name not in SMALL)]


def lines_of(module: str, function: str, *ground: object) -> list[Line]:
    """A measurement that fails must not lose the results of the others."""
    try:
        lines: list[Line] = getattr(import_module(module), function)(*ground)
    except Exception as exc:  # of any kind: another system's client raises its own
        lines = [Line(f"{module}.{function}", "failed", f"{type(exc).__name__}: {exc}")]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measurements", nargs="*", metavar="measurement", help=", ".join([*NAMES, *FAMILIES]))
    parser.add_argument("--messages", type=int, default=spark_ground.MESSAGES, help="in the log that Spark reads")
    parser.add_argument("--large", type=int, default=postgres_ground.LARGE, help="messages in the large PostgreSQL log")
    parser.add_argument("--repeats", type=int, default=spark_ground.REPEATS, help="of each measurement on Spark")
    asked = parser.parse_args()
    names = chosen(asked.measurements)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also stops the servers that were started
    print(describe_machine())
    with (
        spark_ground.prepared(asked.messages, asked.repeats) as ground,
        postgres_ground.prepared(asked.large) as postgres,
    ):
        if any(name in SPARK_MEASURES for name in names):
            print(ground.describe())
        if any(name in POSTGRES_MEASURES or name in SMALL for name in names):
            print(postgres.describe())
        for name in names:
            if name in SPARK_MEASURES:
                title, module, function = SPARK_MEASURES[name]
                show(title, lines_of(module, function, ground))
            elif name in POSTGRES_MEASURES or name in SMALL:
                title, module, function = (POSTGRES_MEASURES | SMALL)[name]
                show(title, lines_of(module, function, postgres))
            else:
                title, module, function = MEASURES[name]
                show(title, lines_of(module, function))


if __name__ == "__main__":
    main()
