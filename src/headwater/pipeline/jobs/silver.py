"""Silver: what bronze has gained, checked, deduplicated and typed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headwater.pipeline.datasets import given_ids as given
from headwater.pipeline.datasets import silver_messages as silver
from headwater.pipeline.datasets.checked import checked
from headwater.pipeline.datasets.quarantine import SCHEMA as WRONG
from headwater.pipeline.datasets.quarantine import quarantine
from headwater.pipeline.datasets.typed import typed
from headwater.pipeline.datasets.types import Types
from headwater.pipeline.jobs.progress import SILENT, Progress
from headwater.pipeline.jobs.tables import GIVEN_IDS, GOLD_MARK, QUARANTINE, SILVER
from headwater.pipeline.lake.lake import Lake, now_ms
from headwater.pipeline.lake.layout import BRONZE
from headwater.pipeline.lake.manifest import Change

BATCH_BYTES = 32 * 1024 * 1024
BATCH_ROWS_MIN, BATCH_ROWS_MAX = 16, 4_096
_ROWS_AT_ONCE = ("spark.sql.parquet.columnarReaderBatchSize", "spark.sql.execution.arrow.maxRecordsPerBatch")
SLICE_SEQS = 2_000_000
"""How much is worked on at once: it bounds the memory, and what a kill makes to be done again."""


def advance_silver(spark: SparkSession, lake: Lake, types: Types, progress: Progress = SILENT) -> None:
    """Bring silver up to bronze, slice by slice; all tables of a slice and the mark in one step."""
    begun_at, upto = lake.manifest.mark(SILVER), lake.manifest.mark(BRONZE)
    progress.step("silver", upto - begun_at)
    if begun_at < upto:
        _give_ids_their_topics(spark, lake)
    while (after := lake.manifest.mark(SILVER)) < upto:
        following = lake.manifest.files(BRONZE, after)
        if not following:
            lake.publish([], marks={SILVER: upto})
            break
        begin = max(after, following[0].seq_from - 1)  # seqs may be far apart
        end = min(upto, begin + SLICE_SEQS)
        largest = lake.largest_message(file for file in following if file.seq_from <= end)
        with _batches_for(spark, largest):
            _take_slice(spark, lake, types, after, end)
        progress.reached(lake.manifest.mark(SILVER) - begun_at)


@contextmanager
def _batches_for(spark: SparkSession, largest: int) -> Iterator[None]:
    """Spark reads and hands on so many rows at a time, whatever their size: 4,096 of a megabyte would be too many."""
    rows = max(BATCH_ROWS_MIN, min(BATCH_ROWS_MAX, BATCH_BYTES // max(1, largest)))
    before = {name: spark.conf.get(name) for name in _ROWS_AT_ONCE}
    for name in _ROWS_AT_ONCE:
        spark.conf.set(name, str(rows))
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, str(value))


def forget_silver(lake: Lake) -> None:
    """To be made anew from bronze, as after a change of the registered types."""
    tables = [table for table in lake.manifest.tables() if table.startswith(("silver.", "typed.", "gold."))]
    lake.publish([(table, [], None) for table in tables], marks={SILVER: 0, GOLD_MARK: 0})


def _give_ids_their_topics(spark: SparkSession, lake: Lake) -> None:
    """Those of a lake from before ids were told apart by topic; silver has the topics."""
    files = lake.manifest.files(GIVEN_IDS)
    if all("topic" in pq.read_schema(lake.path / file.path).names for file in files):
        return
    have = given.given_ids(lake.read_files(spark, lake.manifest.files(SILVER), silver.SCHEMA))
    seqs = min(file.seq_from for file in files), max(file.seq_to for file in files)
    lake.manifest.swap(files, lake.write(GIVEN_IDS, have.repartition(1), seqs=seqs), now_ms())


def _known_ids(spark: SparkSession, lake: Lake, new: DataFrame) -> DataFrame:
    """Ids that silver has: those that were given, and those that follow from a row which a new one may be a copy of."""
    given_before = lake.read_files(spark, lake.manifest.files(GIVEN_IDS), given.SCHEMA)
    before = lake.read_files(spark, lake.manifest.files(SILVER), silver.SCHEMA)
    copied = before.join(F.broadcast(given.originals(new)), on="seq", how="left_semi")
    return given_before.unionByName(copied.select(*given.SCHEMA.names))


def _take_slice(spark: SparkSession, lake: Lake, types: Types, after: int, upto: int) -> None:
    """What is wrong is written first, and left out then: checking is what costs, so it is done once."""
    seqs = after + 1, upto
    new = lake.bronze(spark, after).where(F.col("seq") <= upto)
    bad = lake.write(QUARANTINE, quarantine(checked(new, types)).repartition(1), seqs=seqs)
    bad_seqs = lake.read_files(spark, bad, WRONG).select("seq")
    right = new.join(bad_seqs, on="seq", how="left_anti") if bad else new
    known_ids = _known_ids(spark, lake, right)
    files = lake.write(
        SILVER,
        silver.silver_messages(right.withColumn("problem", F.lit(None).cast("string")), known_ids),
        by_day=True,
        seqs=seqs,
    )
    written = lake.read_files(spark, files, silver.SCHEMA)
    changes: list[Change] = [
        (SILVER, files, []),
        (QUARANTINE, bad, []),
        (GIVEN_IDS, lake.write(GIVEN_IDS, given.given_ids(written).repartition(1), seqs=seqs), []),
    ]
    for type, name in types.table_names.items():
        changes.append((f"typed.{name}", lake.write(f"typed.{name}", typed(written, type, types), seqs=seqs), []))
    lake.publish(changes, marks={SILVER: upto})
