"""The lake and the live log as views for SQL: `bronze_messages`, `silver_messages`, `gold_volume`, …, `live` and
`messages`."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headwater.pipeline.lake.lake import Lake
from headwater.pipeline.lake.layout import BRONZE
from headwater.pipeline.schema import COLUMNS

LOG_TABLES = ("subscriptions", "dead_letters")


def make_views(spark: SparkSession, lake: Lake | None, log: str | None) -> list[str]:
    """Make a view of each table of the lake; of a log, `live` and `live_…`; `messages` is all there is of both: history
    from the lake, what came since from the log."""
    made: list[str] = []

    def make(name: str, frame: DataFrame) -> None:
        frame.createOrReplaceTempView(name)
        made.append(name)

    mark = 0 if lake is None else lake.manifest.mark(BRONZE)
    parts: list[DataFrame] = []
    if lake is not None:
        for table in lake.manifest.tables():
            frame = lake.table(spark, table)
            if frame is not None:
                make(table.replace(".", "_"), frame)
        parts.append(lake.bronze(spark).where(F.col("seq") <= mark).select(*COLUMNS))  # a run may go on meanwhile
    if log is not None:
        make("live", _read(spark, log))
        for table in LOG_TABLES:
            make(f"live_{table}", _read(spark, log, table=table))
        parts.append(_read(spark, log, startingSeq=str(mark + 1)))
    if parts:
        everything = parts[0] if len(parts) == 1 else parts[0].unionByName(parts[1])
        make("messages", everything)
    return sorted(made)


def _read(spark: SparkSession, log: str, **options: str) -> DataFrame:
    return spark.read.format("headwater").options(path=log, failOnDataLoss="false", **options).load()
