"""All measurements, side by side. `make bench`, or `python bench/run.py publishing consuming` for some of them.

Those on Spark begin with `spark`; `python bench/run.py spark --messages 300000` runs them all on a smaller log.
"""

from __future__ import annotations

import argparse
from importlib import import_module

import consuming
import growing
import publishing
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
}
SPARK_MEASURES = {  # modules, imported when asked for: the others run without Spark
    "spark-source": ("Spark: reading the log", "spark_source"),
    "spark-lake": ("Spark: the lake", "spark_lake"),
    "spark-streams": ("Spark: streams", "spark_streams"),
    "spark-start": ("Spark: start", "spark_start"),
}
NAMES = [*MEASURES, *SPARK_MEASURES]


def chosen(asked: list[str]) -> list[str]:
    """`spark` stands for all whose names begin with it."""
    unknown = [name for name in asked if name != "spark" and name not in NAMES]
    if unknown:
        raise SystemExit(f"no such measurement: {', '.join(unknown)}; there are {', '.join([*NAMES, 'spark'])}")
    return [name for name in NAMES if not asked or name in asked or ("spark" in asked and name in SPARK_MEASURES)]


def spark_lines(module: str, ground: spark_ground.Ground) -> list[Line]:
    lines: list[Line] = import_module(module).measure(ground)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measurements", nargs="*", metavar="measurement", help=", ".join([*NAMES, "spark"]))
    parser.add_argument("--messages", type=int, default=spark_ground.MESSAGES, help="in the log that Spark reads")
    asked = parser.parse_args()
    names = chosen(asked.measurements)
    print(describe_machine())
    with spark_ground.prepared(asked.messages) as ground:
        if any(name in SPARK_MEASURES for name in names):
            print(ground.describe())
        for name in names:
            if name in SPARK_MEASURES:
                title, module = SPARK_MEASURES[name]
                show(title, spark_lines(module, ground))
            else:
                title, measure = MEASURES[name]
                show(title, measure())


if __name__ == "__main__":
    main()
