"""Bronze on Spark, in small micro-batches, until it is killed: `python spark_loop.py LOG LAKE BATCH`."""

from __future__ import annotations

import sys
from pathlib import Path

from headwater.pipeline.jobs.bronze import start_bronze
from headwater.pipeline.jobs.running import bind
from headwater.pipeline.lake.compaction import compact
from headwater.pipeline.lake.lake import Lake, now_ms
from headwater.pipeline.lake.layout import BRONZE
from headwater.pipeline.lake.lock import LakeLock
from headwater.pipeline.lake.sweeping import vacuum
from headwater.pipeline.starting.session import session


def main(log: str, path: Path, batch_messages: int) -> None:
    spark = session("kills", conf={"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"})
    with LakeLock(path), Lake(path, create=True) as lake:
        bind(lake, log)
        vacuum(lake.path, lake.manifest, now_ms())
        query = start_bronze(spark, lake, log, continuous=True, trigger_s=0.1, batch_messages=batch_messages)
        while not query.awaitTermination(1):
            compact(lake.path, lake.manifest, BRONZE)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
