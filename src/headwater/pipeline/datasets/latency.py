"""Gold: percentiles of the time from publish to delivery and to ack, per subscription and hour.

They come from a histogram, so each is the upper bound of the bucket that it falls into: at most 19 % too high, never
too low.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from headwater.pipeline.datasets.columns import DOUBLE, LONG, STRING, TIME, schema

SCHEMA = schema(
    ("subscription", STRING),
    ("hour", TIME),
    ("stage", STRING),
    ("count", LONG),
    ("p50_ms", DOUBLE),
    ("p90_ms", DOUBLE),
    ("p99_ms", DOUBLE),
    ("max_ms", DOUBLE),
)
BUCKETS_PER_DOUBLING = 4
_SERIES = ("subscription", "hour", "stage")


def latency(timings: DataFrame) -> DataFrame:
    """`timings` are readings of counters that only grow, so the greatest of a bucket is the newest."""
    up_to_bucket = Window.partitionBy(*_SERIES).orderBy("bucket").rowsBetween(Window.unboundedPreceding, 0)
    all_buckets = Window.partitionBy(*_SERIES)
    buckets = timings.groupBy(*_SERIES, "bucket").agg(F.max("count").alias("count")).where(F.col("count") > 0)
    return (
        buckets.withColumn("reached", F.sum("count").over(up_to_bucket))
        .withColumn("total", F.sum("count").over(all_buckets))
        .withColumn("bound_ms", _upper_bound_ms(F.col("bucket")))
        .groupBy(*_SERIES)
        .agg(
            F.sum("count").alias("count"),
            _percentile(50).alias("p50_ms"),
            _percentile(90).alias("p90_ms"),
            _percentile(99).alias("p99_ms"),
            F.max("bound_ms").alias("max_ms"),
        )
        .select(*SCHEMA.names)
    )


def _upper_bound_ms(bucket: Column) -> Column:
    return F.when(bucket <= 0, F.lit(0.0)).otherwise(F.pow(F.lit(2.0), bucket / BUCKETS_PER_DOUBLING))


def _percentile(percent: int) -> Column:
    # In whole numbers: 0.9 * 10 need not be 9.
    is_reached = F.col("reached") * 100 >= F.col("total") * percent
    return F.min(F.when(is_reached, F.col("bound_ms")))
