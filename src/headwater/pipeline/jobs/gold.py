"""Gold: the reports. Those by day are made anew for the days that silver has gained rows in, late ones included; the
others are small and made anew each time."""

from __future__ import annotations

import datetime as dt

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from headwater.pipeline.datasets import (
    dead_letters,
    forecast,
    lag,
    latency,
    replication,
    retry_storms,
    traffic,
    volume,
)
from headwater.pipeline.datasets import silver_messages as silver
from headwater.pipeline.jobs.progress import SILENT, Progress
from headwater.pipeline.jobs.tables import GOLD, GOLD_BY_DAY, GOLD_MARK, SILVER
from headwater.pipeline.lake.lake import Lake
from headwater.pipeline.lake.layout import BRONZE
from headwater.pipeline.lake.manifest import Change
from headwater.pipeline.schema import TABLE_SCHEMAS


def advance_gold(spark: SparkSession, lake: Lake, progress: Progress = SILENT) -> None:
    upto = lake.manifest.mark(SILVER)
    progress.step("gold", len(GOLD))
    lake.publish(_by_day(spark, lake, progress), marks={GOLD_MARK: upto})
    lake.publish(_whole(spark, lake, progress), marks={})


def _by_day(spark: SparkSession, lake: Lake, progress: Progress) -> list[Change]:
    gained = lake.manifest.files(BRONZE, after=lake.manifest.mark(GOLD_MARK))
    days = sorted({file.day for file in gained if file.day is not None})
    if not days:
        return []
    upto = lake.manifest.mark(SILVER)
    published = lake.bronze(spark).where(F.col("day").isin([dt.date.fromisoformat(day) for day in days]))
    published = published.where(F.col("seq") <= upto)
    of_these_days = [file for file in lake.manifest.files(SILVER) if file.day in days]
    right = lake.read_files(spark, of_these_days, silver.SCHEMA)
    made = {
        "volume": volume.volume(published),  # also what is wrong was sent, and takes its room
        "traffic": traffic.traffic(right),
        "replication": replication.replication(right),
    }
    changes: list[Change] = []
    for name, frame in made.items():
        changes.append((f"gold.{name}", lake.write(f"gold.{name}", frame.coalesce(1), by_day=True), days))
        progress.reached(len(changes))
    return changes


def _whole(spark: SparkSession, lake: Lake, progress: Progress) -> list[Change]:
    def table(name: str, schema: StructType) -> DataFrame:
        return lake.read_files(spark, lake.manifest.files(name), schema)

    def raw(name: str) -> DataFrame:
        return table(f"raw.{name}", TABLE_SCHEMAS[name])

    made = {
        "latency": latency.latency(raw("timings")),
        "lag": lag.lag(raw("subscriptions")),
        "dead_letters": dead_letters.dead_letters(raw("dead_letters")),
        "retry_storms": retry_storms.retry_storms(raw("subscriptions")),
        "forecast": forecast.forecast(raw("topics"), raw("retention"), table("gold.volume", volume.SCHEMA)),
    }
    changes: list[Change] = []
    for name, frame in made.items():
        changes.append((f"gold.{name}", lake.write(f"gold.{name}", frame.coalesce(1)), None))
        progress.reached(len(GOLD_BY_DAY) + len(changes))
    return changes
