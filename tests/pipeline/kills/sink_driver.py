"""A Spark driver to be killed: it streams the lines of a folder's files into a log, one file a batch, until there are
none left. Arguments: log, checkpoint folder, source folder, scratch folder."""

from __future__ import annotations

import sys
from pathlib import Path

from headwater.pipeline import session


def run(path: str, checkpoint: str, source: str, scratch: str) -> None:
    spark = session("sink", master="local[2]", short=True, scratch=Path(scratch))
    lines = spark.readStream.option("maxFilesPerTrigger", "1").text(source).withColumnRenamed("value", "data")
    query = (
        lines.repartition(2)
        .writeStream.format("headwater")
        .options(path=path, topic="numbers", checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    print("started", flush=True)
    batch = None
    while not query.awaitTermination(0.05):
        progress = query.lastProgress
        if progress is not None and progress["batchId"] != batch:
            batch = progress["batchId"]
            print("batch", batch, flush=True)
    print("finished", flush=True)


if __name__ == "__main__":
    run(*sys.argv[1:])
