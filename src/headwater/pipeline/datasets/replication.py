"""Gold: pushes of replicas per day, from the messages that each new version makes on `replica.<ns>.<name>`.

What such a message holds is not fixed: the version stands in `version`, in `data.version` or alone, the bytes in
`bytes` or `size`; what is missing is null.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headwater.pipeline.datasets.columns import DAY, LONG, STRING, TIME, schema, utc_day

SCHEMA = schema(
    ("replica", STRING),
    ("day", DAY),
    ("pushes", LONG),
    ("bytes", LONG),
    ("last_version", LONG),
    ("last_at", TIME),
)
_TOPIC = r"^replica\.([^.]+)\.(.+)$"


def replication(messages: DataFrame) -> DataFrame:
    is_of_a_replica = F.col("topic").rlike(_TOPIC)
    return (
        messages.where(is_of_a_replica)
        .withColumn("replica", F.regexp_replace("topic", _TOPIC, "$1/$2"))
        .withColumn("day", utc_day(F.col("published_at")))
        .withColumn("content", F.try_parse_json("data"))
        .withColumn("version", _whole_at("$.version", "$.data.version", "$"))
        .withColumn("moved", _whole_at("$.bytes", "$.size", "$.data.bytes", "$.data.size"))
        .groupBy("replica", "day")
        .agg(
            F.count(F.lit(1)).alias("pushes"),
            F.sum("moved").alias("bytes"),
            F.max("version").alias("last_version"),
            F.max("published_at").alias("last_at"),
        )
        .select(*SCHEMA.names)
    )


def _whole_at(*paths: str) -> Column:
    return F.coalesce(*(F.try_variant_get("content", path, "bigint") for path in paths))
