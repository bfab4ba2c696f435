"""Spark looks into packages named `pyspark_*` for data sources: so `format("headwater")` needs no registration."""

from headwater.pipeline.source import HeadwaterDataSource


class DefaultSource(HeadwaterDataSource):
    pass


__all__ = ["DefaultSource"]
