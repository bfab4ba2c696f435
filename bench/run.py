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
from importlib import import_module
from typing import NamedTuple

import postgres_ground
import spark_ground
from common import describe_machine
from report import Line, show


class Measure(NamedTuple):
    """A function of a module, which is imported on demand: one that cannot be imported does not keep the rest from
    running. Those on PostgreSQL and Spark get the ground of that name."""

    title: str
    module: str
    function: str = "measure"
    ground: str = ""


MEASURES = {
    "publishing": Measure("Publish", "files", "publishing"),
    "consuming": Measure("Consume and ack", "files", "consuming"),
    "growing": Measure("Growth", "growing"),
    "waking": Measure("Wake-up", "waking", "on_a_file"),
    "serving": Measure("Through a server", "serving"),
    "replicating": Measure("A SQLite database on a server", "replicating"),
    "starting": Measure("The command line", "starting"),
    "costs": Measure("Processor time per message", "costs"),
    "postgres-publishing": Measure("PostgreSQL: publish", "postgres", "publishing", "postgres"),
    "postgres-claiming": Measure("PostgreSQL: claim and ack", "postgres", "claiming", "postgres"),
    "postgres-queues": Measure("PostgreSQL: other queues in it", "postgres", "queues", "postgres"),
    "postgres-processes": Measure("PostgreSQL: several processes", "postgres", "several", "postgres"),
    "postgres-waking": Measure("PostgreSQL: wake-up", "waking", "on_postgres", "postgres"),
    "postgres-growing": Measure("PostgreSQL: growth", "postgres_growing", "growing", "postgres"),
    "postgres-churning": Measure("PostgreSQL: rows that come and go", "postgres_growing", "churning", "postgres"),
    "spark-first": Measure("Spark: the first run into a lake, whole commands", "spark_lake", "first", "spark"),
    "spark-million": Measure("Spark: a large first run", "spark_lake", "million", "spark"),
    "spark-sql": Measure("Spark: a question to the lake", "spark_lake", "counting", "spark"),
    "spark-memory": Measure("Spark: memory", "spark_lake", "memory", "spark"),
    "spark-new": Measure("Spark: a run with some new messages", "spark_lake", "some_new", "spark"),
    "spark-source": Measure("Spark: reading the log", "spark_streams", "reading_once", "spark"),
    "spark-streams": Measure("Spark: streams", "spark_streams", "measure", "spark"),
    "small": Measure("The small case", "small", "measure", "postgres"),
}
FAMILIES = ("postgres", "spark")
ONLY_IF_ASKED_FOR = ("small",)  # the others have most of it


def chosen(asked: list[str]) -> list[str]:
    """`postgres` and `spark` select all measurements whose names begin with them."""
    if unknown := [name for name in asked if name not in FAMILIES and name not in MEASURES]:
        known = ", ".join([*MEASURES, *FAMILIES])
        raise SystemExit(f"no such measurement: {', '.join(unknown)}; there are {known}")
    wanted = asked or [name for name in MEASURES if name not in ONLY_IF_ASKED_FOR]
    return [name for name in MEASURES if name in wanted or name.partition("-")[0] in wanted]


def lines_of(measure: Measure, *ground: object) -> list[Line]:
    """A measurement that fails must not lose the results of the others."""
    try:
        lines: list[Line] = getattr(import_module(measure.module), measure.function)(*ground)
    except Exception as exc:  # of any kind: another system's client raises its own
        lines = [Line(f"{measure.module}.{measure.function}", "failed", f"{type(exc).__name__}: {exc}")]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measurements", nargs="*", metavar="measurement", help=", ".join([*MEASURES, *FAMILIES]))
    parser.add_argument("--messages", type=int, default=spark_ground.MESSAGES, help="in the log that Spark reads")
    parser.add_argument("--large", type=int, default=postgres_ground.LARGE, help="messages in the large PostgreSQL log")
    parser.add_argument("--repeats", type=int, default=spark_ground.REPEATS, help="of each measurement on Spark")
    asked = parser.parse_args()
    names = chosen(asked.measurements)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also stops the servers that were started
    print(describe_machine())
    with (
        spark_ground.prepared(asked.messages, asked.repeats) as spark,
        postgres_ground.prepared(asked.large) as postgres,
    ):
        grounds: dict[str, spark_ground.Ground | postgres_ground.Ground] = {"spark": spark, "postgres": postgres}
        for name in {ground: None for ground in (MEASURES[name].ground for name in names) if ground}:
            print(grounds[name].describe())
        for measure in (MEASURES[name] for name in names):
            show(measure.title, lines_of(measure, *([grounds[measure.ground]] if measure.ground else [])))


if __name__ == "__main__":
    main()
