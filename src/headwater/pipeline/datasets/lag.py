"""Gold: how far behind each subscription was, whenever it was looked at."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headwater.pipeline.datasets.columns import LONG, STRING, TIME, schema

SCHEMA = schema(
    ("subscription", STRING),
    ("observed_at", TIME),
    ("lag", LONG),
    ("position", LONG),
    ("in_flight", LONG),
    ("waiting", LONG),
    ("oldest_unacked_ms", LONG),
)


def lag(subscriptions: DataFrame) -> DataFrame:
    return (
        subscriptions.withColumn("subscription", F.col("id"))
        .dropDuplicates(["subscription", "observed_at"])
        .select(*SCHEMA.names)
    )
