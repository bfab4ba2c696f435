"""Scripts to compare the pipeline with: short PySpark programs with Spark's default settings.

    python bench/spark_rivals.py session                start Spark, stop it
    python bench/spark_rivals.py start                  start Spark, one trivial job, stop it
    python bench/spark_rivals.py bare ROWS OUT          start, write, group and deduplicate rows given as Parquet
    python bench/spark_rivals.py jdbc LOG OUT           a SQLite log into bronze, silver and volume by hour
    python bench/spark_rivals.py count PARQUET          start, count rows

The last line on stdout is JSON: moments of interest, in seconds since the epoch, and counts. Nothing of Headwater is
imported here.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from collections.abc import Callable

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark_jdbc import MASTER, PARTITIONS, find_driver, jdbc

Said = dict[str, float]


def started(**conf: str) -> SparkSession:
    builder = SparkSession.builder.master(MASTER).config("spark.ui.enabled", "false")
    for name, value in conf.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def session() -> Said:
    started()
    return {}


def start() -> Said:
    spark = started()
    ready = time.time()
    spark.range(1).count()
    return {"session": ready, "job": time.time()}


def bare(rows: str, out: str) -> Said:
    """The minimum: one copy, one report, one count without duplicates."""
    spark = started()
    spark.read.parquet(rows).write.parquet(f"{out}/rows")
    written = spark.read.parquet(f"{out}/rows")
    hours = written.groupBy(F.date_trunc("hour", "published_at"), "topic").count().collect()
    return {"volume": len(hours), "distinct": written.select("id", "topic").distinct().count()}


def through_jdbc(log: str, out: str) -> Said:
    """The pipeline's tables, as a data engineer would script them; without checks, recovery or a second run."""
    spark = started(**find_driver().conf())
    with sqlite3.connect(f"file:{log}?mode=ro", uri=True) as connection:
        (upto,) = connection.execute("SELECT max(seq) FROM messages").fetchone()
    messages = jdbc(spark, log, partitions=PARTITIONS, upto=upto)
    day = F.to_date(F.timestamp_millis("published_at"))
    messages.withColumn("day", day).write.partitionBy("day").parquet(f"{out}/bronze")
    bronze = spark.read.parquet(f"{out}/bronze")
    bronze.dropDuplicates(["id", "topic"]).write.partitionBy("day").parquet(f"{out}/silver")
    silver = spark.read.parquet(f"{out}/silver")
    hour = F.date_trunc("hour", F.timestamp_millis("published_at")).alias("hour")
    volume = silver.groupBy(hour, "topic").agg(F.count("*").alias("messages"), F.sum("size").alias("bytes"))
    volume.write.parquet(f"{out}/volume")
    return {}


def count(parquet: str) -> Said:
    return {"rows": started().read.parquet(parquet).count()}


SCRIPTS: dict[str, Callable[..., Said]] = {
    "session": session,
    "start": start,
    "bare": bare,
    "jdbc": through_jdbc,
    "count": count,
}

if __name__ == "__main__":
    output = SCRIPTS[sys.argv[1]](*sys.argv[2:])
    if active := SparkSession.getActiveSession():
        active.stop()
    print(json.dumps(output), flush=True)
