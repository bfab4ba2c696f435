"""Gold: times in which a subscription mostly delivered what it had delivered before."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from headwater.pipeline.datasets.columns import DOUBLE, LONG, STRING, TIME, schema

SCHEMA = schema(
    ("subscription", STRING),
    ("from_at", TIME),
    ("to_at", TIME),
    ("acked", LONG),
    ("redelivered", LONG),
    ("ratio", DOUBLE),
)
REDELIVERED_MIN = 10
RATIO_MIN = 0.5


def retry_storms(subscriptions: DataFrame) -> DataFrame:
    """A storm lasts from one observation to the next; the counts are what was added in between."""
    has_begin = F.col("from_at").isNotNull()
    is_storm = (F.col("redelivered") >= REDELIVERED_MIN) & (F.col("ratio") >= RATIO_MIN)
    return (
        subscriptions.dropDuplicates(["id", "observed_at"])
        .select(
            F.col("id").alias("subscription"),
            _before("observed_at").alias("from_at"),
            F.col("observed_at").alias("to_at"),
            _growth("acked").alias("acked"),
            _growth("redelivered").alias("redelivered"),
        )
        .where(has_begin)
        .withColumn("ratio", F.try_divide(F.col("redelivered"), F.col("redelivered") + F.col("acked")))
        .where(is_storm)
        .select(*SCHEMA.names)
    )


def _growth(counter: str) -> Column:
    """Since the observation before; from zero where the subscription was dropped and made anew in between."""
    is_same = F.col("created_at").eqNullSafe(_before("created_at"))
    has_fallen = (F.col("acked") < _before("acked")) | (F.col("redelivered") < _before("redelivered"))
    begins_at = F.when(is_same & ~has_fallen, _before(counter)).otherwise(F.lit(0))
    return F.col(counter) - begins_at


def _before(column: str) -> Column:
    history = Window.partitionBy("id").orderBy("observed_at")
    return F.lag(column).over(history)
