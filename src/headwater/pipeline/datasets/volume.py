"""Gold: messages and bytes per hour, topic and type."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headwater.pipeline.datasets.columns import DAY, LONG, STRING, TIME, schema, utc_day, utc_hour

SCHEMA = schema(("day", DAY), ("hour", TIME), ("topic", STRING), ("type", STRING), ("messages", LONG), ("bytes", LONG))


def volume(messages: DataFrame) -> DataFrame:
    return (
        messages.withColumn("hour", utc_hour(F.col("published_at")))
        .groupBy("hour", "topic", "type")
        .agg(F.count(F.lit(1)).alias("messages"), F.coalesce(F.sum("size"), F.lit(0)).alias("bytes"))
        .withColumn("day", utc_day(F.col("hour")))
        .select(*SCHEMA.names)
    )
