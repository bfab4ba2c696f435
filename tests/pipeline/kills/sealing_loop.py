"""Bronze without a JVM: the two ends of the stream, driven as Spark does: `python sealing_loop.py LOG LAKE BATCH`."""

from __future__ import annotations

import sys
import uuid
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from headwater.pipeline.lake import segments
from headwater.pipeline.lake.compaction import compact
from headwater.pipeline.lake.layout import BRONZE
from headwater.pipeline.lake.manifest import Manifest
from headwater.pipeline.lake.publishing import SegmentPublisher
from headwater.pipeline.lake.segments import SegmentOptions, SegmentReader

_elsewhere = ProcessPoolExecutor(1, get_context("spawn"))


def seal_elsewhere(reader: SegmentReader, partition: InputPartition) -> list[pa.RecordBatch]:
    """Tasks run in other processes: there, and not where the position is held, the log is read through ADBC."""
    return _elsewhere.submit(sealed, reader, partition).result()


def sealed(reader: SegmentReader, partition: InputPartition) -> list[pa.RecordBatch]:
    return list(reader.read(partition))


def fenced_publisher(lake: Path, manifest: Manifest) -> SegmentPublisher:
    run = uuid.uuid4().hex
    manifest.begin_run(run)
    return SegmentPublisher({"lake": str(lake), "run": run})


def main(log: str, lake: Path, batch_messages: int) -> None:
    segments.MESSAGES_PER_TASK_MIN = 10
    reader = SegmentReader(SegmentOptions(log, lake, "lake:test", batch_messages, 2))
    manifest = Manifest(lake)
    publisher = fenced_publisher(lake, manifest)
    start, batch = reader.initialOffset(), 0
    print("began", flush=True)
    while True:
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        if end == start:
            continue
        messages = [publisher.write(iter(seal_elsewhere(reader, each))) for each in reader.partitions(start, end)]
        publisher.commit(messages, batch)
        start, batch = end, batch + 1
        print(end["seq"], flush=True)
        if batch % 10 == 0:
            compact(lake, manifest, BRONZE)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
