"""Gold: dead letters per day by subscription, reason, handler and kind of error, and whether they become more."""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from headwater.pipeline.datasets.columns import DAY, DOUBLE, LONG, STRING, TIME, schema, utc_day
from headwater.pipeline.datasets.error_signature import error_signature

SCHEMA = schema(
    ("day", DAY),
    ("subscription", STRING),
    ("reason", STRING),
    ("handler", STRING),
    ("error_signature", STRING),
    ("letters", LONG),
    ("first_at", TIME),
    ("last_at", TIME),
    ("example_error", STRING),
    ("trend", DOUBLE),
)
TREND_DAYS = 7
EXAMPLE_CHARS_MAX = 2_000
_KIND = ("subscription", "reason", "handler", "error_signature")


def dead_letters(letters: DataFrame) -> DataFrame:
    """`letters` may hold several readings of a letter; the one in which it died last counts."""
    readings = Window.partitionBy("id").orderBy(F.col("died_at").desc())
    is_newest = F.col("reading") == 1
    days_before = Window.partitionBy(*_KIND).orderBy(F.unix_date("day")).rangeBetween(-TREND_DAYS, -1)
    letters_before = F.coalesce(F.sum("letters").over(days_before), F.lit(0))
    return (
        letters.withColumn("reading", F.row_number().over(readings))
        .where(is_newest)
        .withColumn("day", utc_day(F.col("died_at")))
        .withColumn("error_signature", error_signature(F.col("error")))
        .groupBy("day", *_KIND)
        .agg(
            F.count(F.lit(1)).alias("letters"),
            F.min("died_at").alias("first_at"),
            F.max("died_at").alias("last_at"),
            F.max_by(F.substring("error", 1, EXAMPLE_CHARS_MAX), F.struct("died_at", "id")).alias("example_error"),
        )
        .withColumn("trend", F.col("letters") - letters_before / TREND_DAYS)
        .select(*SCHEMA.names)
    )
