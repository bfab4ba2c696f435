"""Bronze: every message as it was published, once."""

from __future__ import annotations

import os
import uuid

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from headwater.pipeline.lake.lake import Lake
from headwater.pipeline.lake.publishing import PUBLISHING, LakeSink
from headwater.pipeline.lake.segments import MESSAGES_PER_BATCH, SEGMENTS, SegmentSource
from headwater.pipeline.lake.sweeping import CHECKPOINTS

TRIGGER_S = 5.0


def lake_subscription(lake: Lake) -> str:
    """Under this name the lake's position stands among the log's subscriptions."""
    return f"lake:{lake.manifest.fact('created_at') or 0:x}"


def start_bronze(
    spark: SparkSession,
    lake: Lake,
    log: str,
    *,
    continuous: bool = False,
    trigger_s: float = TRIGGER_S,
    batch_messages: int = MESSAGES_PER_BATCH,
    tasks: int | None = None,
) -> StreamingQuery:
    """Take in what the log has that bronze lacks, up to now, or for ever."""
    spark.dataSource.register(SegmentSource)
    spark.dataSource.register(LakeSink)
    options = {
        "path": log,
        "lake": str(lake.path),
        "subscription": lake_subscription(lake),
        "maxMessagesPerTrigger": str(batch_messages),
        "tasks": str(tasks or os.cpu_count() or 2),
    }
    checkpoint = lake.path / CHECKPOINTS / uuid.uuid4().hex
    stream = spark.readStream.format(SEGMENTS).options(**options).load()
    run = uuid.uuid4().hex
    lake.manifest.begin_run(run)
    writer = stream.writeStream.format(PUBLISHING).options(lake=str(lake.path), run=run)
    writer = writer.option("checkpointLocation", str(checkpoint)).queryName(f"bronze of {lake.path.name}")
    if continuous:
        return writer.trigger(processingTime=f"{trigger_s} seconds").start()
    return writer.trigger(availableNow=True).start()
