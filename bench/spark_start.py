"""How long a Spark takes from nothing, in a process of its own: to a session, to the first query, to one over a log.

Run as a program, it is that process.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

from report import Line
from spark_ground import MASTER, REPEATS, Ground, run_child

STEPS = ("session", "query", "log")
QUERIED = 1_000


def measure(ground: Ground) -> list[Line]:
    log, with_archive, without = ground.small_log, ground.directory / "archive", ground.directory / "no-archive"
    train_s = _train(with_archive)
    kinds = {
        "stock": ("stock", without),
        "ours": ("ours", without),
        "with archive": ("ours", with_archive),
    }
    rounds = [{name: _start(kind, log, cache) for name, (kind, cache) in kinds.items()} for _ in range(REPEATS)]
    found = {name: {step: statistics.median(each[name][step] for each in rounds) for step in STEPS} for name in kinds}
    what = {"session": "to a session", "query": "to the first query's answer", "log": "to the first one over the log"}
    lines = []
    for step, title in what.items():
        stock = found["stock"][step]
        for name, label in (
            ("ours", f"{title}, JVM started directly"),
            ("with archive", "and with an archive of classes"),
        ):
            took = found[name][step]
            lines.append(Line(label, f"{took:.1f} s", f"SparkSession.builder {stock:.1f} s", stock / took))
    return [*lines, Line("making the archive, once", f"{train_s:.0f} s", "")]


def _train(cache: Path) -> float:
    cache.mkdir()
    began = time.perf_counter()
    code = "from headwater.pipeline.starting.archive import train_archive; print(train_archive().size)"
    run_child([sys.executable, "-c", code], {"XDG_CACHE_HOME": str(cache)})
    return time.perf_counter() - began


def _start(kind: str, log: Path, cache: Path) -> dict[str, float]:
    """Each step in seconds since the process was asked for."""
    command = [sys.executable, __file__, kind, str(log), repr(time.time())]
    found: dict[str, float] = json.loads(run_child(command, {"XDG_CACHE_HOME": str(cache)}))
    return found


def child(kind: str, log: str, asked_at: float) -> None:
    times: dict[str, float] = {}

    def reached(step: str) -> None:
        times[step] = time.time() - asked_at

    if kind == "stock":
        os.environ["PYSPARK_PYTHON"] = sys.executable  # else it finds no Arrow
        from pyspark.sql import SparkSession

        spark = SparkSession.builder.master(MASTER).getOrCreate()
    else:
        from headwater.pipeline.starting.session import session

        spark = session("bench", master=MASTER)
    reached("session")
    spark.range(1).count()
    reached("query")
    spark.read.format("headwater").options(path=log, endingSeq=str(QUERIED)).load().count()
    reached("log")
    print(json.dumps(times), flush=True)
    spark.stop()


if __name__ == "__main__":
    child(sys.argv[1], sys.argv[2], float(sys.argv[3]))
