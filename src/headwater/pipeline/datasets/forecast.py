"""Gold: how large the log and what each retention policy covers is, and when the limits are reached.

One row for the whole log without a limit, and one for each limit of each policy. Growth is what is published, as
retention deletes only once a limit is reached. A maximal age is never "reached": what it covers settles at what is
published in that time, and that is its `bytes_in_30_days`.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headwater.pipeline.datasets.columns import DAY_SECONDS, DOUBLE, HOUR_SECONDS, LONG, STRING, schema
from headwater.pipeline.datasets.topic_patterns import pattern_regex

SCHEMA = schema(
    ("pattern", STRING),
    ("messages", LONG),
    ("bytes", LONG),
    ("messages_per_day", DOUBLE),
    ("bytes_per_day", DOUBLE),
    ("limit_kind", STRING),
    ("limit", LONG),
    ("days_left", DOUBLE),
    ("bytes_in_30_days", DOUBLE),
)
WHOLE_LOG = ">"
GROWTH_DAYS = 7
AHEAD_DAYS = 30
_LIMITS = {"max_age": "max_age_ms", "max_count": "max_count", "max_bytes": "max_bytes"}


def forecast(topics: DataFrame, retention: DataFrame, volume: DataFrame) -> DataFrame:
    """`topics` and `retention` as each run observed them, all with the time of that run: a policy that the newest run
    did not see is gone."""
    per_topic = _newest(topics).select("topic", "count", "bytes").join(_growth(volume), on="topic", how="full")
    matches = F.rlike("topic", pattern_regex(F.col("pattern"), F.col("dialect")))
    sums = {"count": "messages", "bytes": "bytes", "new_messages": "messages_per_day", "new_bytes": "bytes_per_day"}
    return (
        _limits(topics, retention)
        .join(F.broadcast(per_topic), on=matches, how="left")
        .groupBy("pattern", "dialect", "limit_kind", "limit")
        .agg(*(F.coalesce(F.sum(each), F.lit(0)).alias(name) for each, name in sums.items()))
        .withColumn("messages_per_day", F.col("messages_per_day").cast("double"))
        .withColumn("bytes_per_day", F.col("bytes_per_day").cast("double"))
        .withColumn("days_left", _days_left())
        .withColumn("bytes_in_30_days", _bytes_ahead())
        .select(*SCHEMA.names)
    )


def _newest(observations: DataFrame) -> DataFrame:
    newest = observations.agg(F.max("observed_at").alias("observed_at"))
    return observations.join(F.broadcast(newest), on="observed_at", how="left_semi")


def _growth(volume: DataFrame) -> DataFrame:
    """Messages and bytes a day by topic, over the last days of data; over a whole day at least."""
    ends = F.max(F.unix_seconds("hour")) + HOUR_SECONDS
    begins = F.greatest(F.min(F.unix_seconds("hour")), ends - GROWTH_DAYS * DAY_SECONDS)
    span = volume.agg(begins.alias("begins"), F.greatest((ends - begins) / DAY_SECONDS, F.lit(1.0)).alias("days"))
    is_recent = F.unix_seconds("hour") >= F.col("begins")
    return (
        volume.join(F.broadcast(span), how="cross")
        .where(is_recent)
        .groupBy("topic", "days")
        .agg(F.sum("messages").alias("messages"), F.sum("bytes").alias("bytes"))
        .select(
            "topic",
            (F.col("messages") / F.col("days")).alias("new_messages"),
            (F.col("bytes") / F.col("days")).alias("new_bytes"),
        )
    )


def _limits(topics: DataFrame, retention: DataFrame) -> DataFrame:
    """One row for each limit that is set, and one without a limit for the whole log."""
    last_run = topics.agg(F.max("observed_at").alias("last_run"))
    still_there = F.col("last_run").isNull() | (F.col("observed_at") >= F.col("last_run"))
    kinds = F.array(
        *(F.struct(F.lit(kind).alias("limit_kind"), F.col(column).alias("limit")) for kind, column in _LIMITS.items())
    )
    policies = (
        _newest(retention)
        .join(F.broadcast(last_run), how="cross")
        .where(still_there)
        .select("pattern", "dialect", F.explode(kinds).alias("each"))
        .select("pattern", "dialect", "each.limit_kind", "each.limit")
        .where(F.col("limit").isNotNull())
    )
    nothing = F.lit(None)
    whole_log = last_run.select(
        F.lit(WHOLE_LOG).alias("pattern"),
        F.lit("nats").alias("dialect"),
        nothing.cast("string").alias("limit_kind"),
        nothing.cast("long").alias("limit"),
    )
    return whole_log.unionByName(policies)


def _days_left() -> Column:
    limit_kind = F.col("limit_kind")
    return F.when(limit_kind == "max_count", _days_until(F.col("messages"), F.col("messages_per_day"))).when(
        limit_kind == "max_bytes", _days_until(F.col("bytes"), F.col("bytes_per_day"))
    )


def _days_until(now: Column, per_day: Column) -> Column:
    is_growing = per_day > 0
    return F.when(is_growing, F.greatest(F.col("limit") - now, F.lit(0)) / per_day)


def _bytes_ahead() -> Column:
    limit, limit_kind = F.col("limit"), F.col("limit_kind")
    unlimited = F.col("bytes") + F.col("bytes_per_day") * AHEAD_DAYS
    age_days = limit / (DAY_SECONDS * 1000)
    settled = F.col("bytes_per_day") * age_days
    settles_in_time = age_days <= AHEAD_DAYS
    mean_bytes = F.coalesce(
        F.try_divide(F.col("bytes"), F.col("messages")),
        F.try_divide(F.col("bytes_per_day"), F.col("messages_per_day")),
        F.lit(0.0),
    )
    return (
        F.when((limit_kind == "max_age") & settles_in_time, settled)
        .when(limit_kind == "max_age", F.least(unlimited, F.greatest(F.col("bytes"), settled)))
        .when(limit_kind == "max_count", F.least(unlimited, limit * mean_bytes))
        .when(limit_kind == "max_bytes", F.least(unlimited, limit.cast("double")))
        .otherwise(unlimited)
    )
