"""Silver and the typed tables gain small files with every run; where there are many, they become one."""

from __future__ import annotations

from itertools import groupby

from pyspark.sql import DataFrame, SparkSession

from headwater.pipeline.datasets import silver_messages as silver
from headwater.pipeline.jobs.tables import SILVER
from headwater.pipeline.lake.lake import Lake, now_ms
from headwater.pipeline.lake.manifest import LakeFile

MERGED_FROM = 32
SMALL_BYTES = 16 * 1024 * 1024


def merge_small_files(spark: SparkSession, lake: Lake) -> None:
    """By Spark, which knows how a VARIANT is written. The old files count until the manifest names the new ones."""
    for table in lake.manifest.tables():
        if table.startswith(("silver.", "typed.")):
            small = [file for file in lake.manifest.files(table) if file.bytes < SMALL_BYTES]
            for _, found in groupby(sorted(small, key=lambda file: file.day or ""), key=lambda file: file.day):
                group = list(found)
                if len(group) >= MERGED_FROM:
                    _merge(spark, lake, table, group)


def _merge(spark: SparkSession, lake: Lake, table: str, group: list[LakeFile]) -> None:
    seqs = min(file.seq_from for file in group), max(file.seq_to for file in group)
    merged = lake.write(
        table, _frame(spark, lake, table, group).coalesce(1), by_day=group[0].day is not None, seqs=seqs
    )
    lake.manifest.swap(group, merged, now_ms())


def _frame(spark: SparkSession, lake: Lake, table: str, group: list[LakeFile]) -> DataFrame:
    if table == SILVER:
        return lake.read_files(spark, group, silver.SCHEMA)
    paths = [str(lake.path / file.path) for file in group]
    return spark.read.option("mergeSchema", "true").parquet(*paths)
