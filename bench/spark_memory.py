"""How much memory the first run into a lake takes at most. Run as a program, it is that run, in a Spark of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from spark_ground import MASTER
from spark_processes import Peak


def peak_memory(log: Path, lake: Path) -> int:
    """Bytes of the driver, the JVM and the Python workers together."""
    with subprocess.Popen([sys.executable, __file__, str(log), str(lake)]) as child, Peak(child.pid) as peak:
        if child.wait():
            raise RuntimeError("the run into the lake failed; what it said is above")
    return peak.bytes


def child(log: Path, path: Path) -> None:
    from headwater.pipeline.jobs.bronze import start_bronze
    from headwater.pipeline.starting.session import session
    from spark_lake import new_lake

    spark = session("bench", master=MASTER)
    with new_lake(path, log) as lake:
        start_bronze(spark, lake, str(log)).awaitTermination()
    spark.stop()


if __name__ == "__main__":
    child(Path(sys.argv[1]), Path(sys.argv[2]))
