"""Silver: the messages that are wrong, with the reason."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headwater.pipeline.datasets.columns import LONG, STRING, TIME, schema

SCHEMA = schema(
    ("seq", LONG),
    ("id", STRING),
    ("topic", STRING),
    ("type", STRING),
    ("version", LONG),
    ("published_at", TIME),
    ("problem", STRING),
    ("data", STRING),
    ("size", LONG),
)


def quarantine(checked: DataFrame) -> DataFrame:
    is_wrong = F.col("problem").isNotNull()
    return checked.where(is_wrong).select(*SCHEMA.names)
