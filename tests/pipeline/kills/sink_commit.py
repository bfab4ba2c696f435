"""Commits one staged file in a process of its own, and says by how many MiB its memory grew at most while it did.
Arguments: log, name of the staging file, rows."""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql.types import StringType, StructField, StructType

from headwater.pipeline.logs import backend_of
from headwater.pipeline.sink import StagedPartition, StreamWriter

KIB_PER_MIB = 1024


def most_kib() -> int:
    """Not ru_maxrss: that one begins with what the parent had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def run(path: str, name: str, rows: int) -> None:
    schema = StructType([StructField("topic", StringType()), StructField("data", StringType())])
    writer = StreamWriter({"path": path, "sinkId": "s"}, schema)
    backend_of(path)  # imports what it takes
    before = most_kib()
    writer.commit([StagedPartition(name, rows)], 0)
    print((most_kib() - before) // KIB_PER_MIB)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], int(sys.argv[3]))
