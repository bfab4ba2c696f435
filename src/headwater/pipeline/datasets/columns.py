"""Columns that several datasets derive alike, whatever time zone the session has."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from headwater.pipeline.lake.layout import PREFIX_CHARACTERS_MAX

HOUR_SECONDS = 3_600
DAY_SECONDS = 86_400

LONG = LongType()
DOUBLE = DoubleType()
STRING = StringType()
BOOLEAN = BooleanType()
TIME = TimestampType()
DAY = DateType()


def schema(*columns: tuple[str, DataType]) -> StructType:
    return StructType([StructField(name, kind, True) for name, kind in columns])


def utc_day(at: Column) -> Column:
    """The day in UTC; `to_date` would take the session's time zone."""
    return F.date_from_unix_date(_whole(at, DAY_SECONDS).cast("int"))


def utc_hour(at: Column) -> Column:
    return F.timestamp_seconds(_whole(at, HOUR_SECONDS) * HOUR_SECONDS)


def topic_prefix(topic: Column) -> Column:
    return F.substring(F.substring_index(topic, ".", 1), 1, PREFIX_CHARACTERS_MAX)


def _whole(at: Column, seconds: int) -> Column:
    return F.floor(F.unix_seconds(at) / seconds)
