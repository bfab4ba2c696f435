"""Tables of the lake as DataFrames: Spark reads the files of a snapshot, so a query keeps the version it began with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from headwater.pipeline.columns import spark_schema
from headwater.pipeline.delta import Table
from headwater.pipeline.storage import DataFile, Storage, read_rows

SOURCE = "headwater_lake"
BATCH_ROWS = 16_384
_SEPARATOR = "\n"


def frame(spark: SparkSession, table: Table, columns: Sequence[str] | None = None) -> DataFrame:
    """A snapshot of a table. With Delta's jar Spark reads it by itself; without, from a local disk its files, and from
    an object store through Arrow."""
    if has_delta(spark):
        root = table.storage.uri(table.name).replace("s3://", "s3a://")
        found = spark.read.format("delta").option("versionAsOf", table.version).load(root)
        return found if columns is None else found.select(*columns)
    schema = table.schema if columns is None else pa.schema([table.schema.field(name) for name in columns])
    return files_frame(spark, table.storage, table.name, table.files, schema)


def files_frame(
    spark: SparkSession, storage: Storage, name: str, files: Sequence[DataFile], schema: pa.Schema
) -> DataFrame:
    """Some files of a table, committed or not."""
    struct = spark_schema(schema)
    if not files:
        return spark.createDataFrame([], struct)
    if storage.is_local:
        paths = [storage.uri(f"{name}/{file.path}") for file in files]
        found = spark.read.schema(struct).option("basePath", storage.uri(name)).parquet(*paths)
        return found.select(*schema.names)  # Spark adds the column of the partitions by itself
    spark.dataSource.register(LakeDataSource)
    paths = [f"{file.day or ''}:{name}/{file.path}" for file in files]
    options = {"root": storage.root, "files": _SEPARATOR.join(paths)}
    return spark.read.format(SOURCE).schema(struct).options(**options).load()


def has_delta(spark: SparkSession) -> bool:
    return "io.delta" in str(spark.conf.get("spark.sql.extensions", "") or "")


class LakeDataSource(DataSource):
    """Files of a table through Arrow. Each executor takes its credentials from its own environment."""

    @classmethod
    def name(cls) -> str:
        return SOURCE

    def reader(self, schema: StructType) -> LakeReader:
        from pyspark.sql.pandas.types import to_arrow_schema

        arrow = to_arrow_schema(schema, timezone="UTC")
        return LakeReader(self.options["root"], self.options["files"].split(_SEPARATOR), arrow)


class LakeReader(DataSourceReader):
    def __init__(self, root: str, files: Sequence[str], schema: pa.Schema) -> None:
        self._storage, self._files, self._schema = Storage(root), files, schema

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(file) for file in self._files]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        day, _, path = partition.value.partition(":")
        for rows in read_rows(self._storage, path, self._schema, day or None, BATCH_ROWS):
            yield from rows.to_batches()
