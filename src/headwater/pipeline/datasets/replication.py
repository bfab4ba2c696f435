"""Gold: pushes of replicas per day, from the messages that each new version makes on `replica.<ns>.<name>`.

Anybody may publish there; where `version` or `bytes` (moved over the wire) is missing, it is null.
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
        .withColumn("version", _whole_at("$.version"))
        .withColumn("moved", _whole_at("$.bytes"))
        .groupBy("replica", "day")
        .agg(
            F.count(F.lit(1)).alias("pushes"),
            F.sum("moved").alias("bytes"),
            F.max("version").alias("last_version"),
            F.max("published_at").alias("last_at"),
        )
        .select(*SCHEMA.names)
    )


def _whole_at(path: str) -> Column:
    return F.try_variant_get("content", path, "bigint")
