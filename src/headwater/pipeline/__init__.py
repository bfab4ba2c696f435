"""The history of a log as tables on Apache Spark.

spark = headwater.pipeline.session()
spark.read.format("headwater").option("path", "events.db").option("topics", "orders.>").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.pipeline.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register", "session"]


def register(spark: SparkSession) -> None:
    """Make the format `headwater` known to a session. Spark finds the format by itself where Headwater is installed
    beside PySpark. Call this for a session that does not search for formats, and for one on a remote server."""
    from headwater.pipeline.source import HeadwaterDataSource

    spark.dataSource.register(HeadwaterDataSource)
