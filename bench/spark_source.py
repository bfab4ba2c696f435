"""Reading a log into Spark in a warm session: whole rows into the noop sink."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common import medians, seconds
from report import Line, against
from spark_ground import Ground
from spark_jdbc import PARTITIONS, jdbc

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def measure(ground: Ground) -> list[Line]:
    spark, log, messages = ground.spark, str(ground.log), ground.messages

    def rate(frame: DataFrame) -> float:
        return messages / seconds(frame.write.format("noop").mode("overwrite").save)

    measures = (
        lambda: rate(spark.read.format("headwater").options(path=log, minPartitions=str(PARTITIONS)).load()),
        lambda: rate(jdbc(spark, log, partitions=PARTITIONS, upto=messages)),
        lambda: rate(jdbc(spark, log)),
    )
    medians(1, *measures)  # warm up the JVM
    ours, two, one = medians(ground.repeats, *measures)
    return [
        against("whole rows, 2 partitions", ours, "JDBC in two partitions", two, 1.5),
        against("", ours, "JDBC as it comes", one, 3),
    ]
