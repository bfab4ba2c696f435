"""A driver without Spark, to be killed: it stages and commits one batch after the other, and keeps a checkpoint as
Spark does, which says a batch is done only after its commit.

Arguments: log, checkpoint folder, batches, rows in a batch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql.types import StringType, StructField, StructType

from headwater.pipeline.sink import StreamWriter

SCHEMA = StructType([StructField("data", StringType())])
PARTITIONS = 2


def rows(first: int, count: int) -> Iterator[pa.RecordBatch]:
    yield pa.record_batch([[str(first + at) for at in range(count)]], names=["data"])


def run(path: str, checkpoint: Path, batches: int, rows_each: int) -> None:
    done = checkpoint / "done"
    next_batch = int(done.read_text()) + 1 if done.exists() else 0
    for batch in range(next_batch, batches):
        options = {"path": path, "topic": "numbers", "checkpointLocation": str(checkpoint)}
        share = rows_each // PARTITIONS
        firsts = [batch * rows_each + share * partition for partition in range(PARTITIONS)]
        staged = [StreamWriter(options, SCHEMA).write(rows(first, share)) for first in firsts]
        StreamWriter(options, SCHEMA).commit(staged, batch)
        scratch = checkpoint / "scratch"
        scratch.write_text(str(batch))
        os.replace(scratch, done)
        print(batch, flush=True)


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
