"""Gold: who sends to whom, per day. `to` is null for what goes to everybody."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headwater.pipeline.datasets.columns import DAY, LONG, STRING, schema, utc_day

SCHEMA = schema(("day", DAY), ("from", STRING), ("to", STRING), ("messages", LONG), ("bytes", LONG))


def traffic(messages: DataFrame) -> DataFrame:
    names_an_entity = F.col("from").isNotNull() | F.col("to").isNotNull()
    return (
        messages.where(names_an_entity)
        .withColumn("day", utc_day(F.col("published_at")))
        .groupBy("day", "from", "to")
        .agg(F.count(F.lit(1)).alias("messages"), F.coalesce(F.sum("size"), F.lit(0)).alias("bytes"))
        .select(*SCHEMA.names)
    )
