"""A lake: a folder with a manifest and the files it names."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DateType, StringType, StructField, StructType

from headwater.errors import InvalidOption
from headwater.pipeline.lake.disk import finish, make_directories, name_while_writing, settle, sync_directory
from headwater.pipeline.lake.layout import BRONZE, table_directory
from headwater.pipeline.lake.manifest import Change, LakeFile, Manifest
from headwater.pipeline.lake.sealing import COMPRESSION, filled
from headwater.pipeline.schema import MESSAGE_SCHEMA

BRONZE_SCHEMA = StructType(
    [*MESSAGE_SCHEMA.fields, StructField("day", DateType()), StructField("topic_prefix", StringType())]
)
_DAY_FOLDER = "_day"
_GLOB = re.compile(r"[][{}*?\\]")


class Lake:
    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path.resolve()
        if found := _GLOB.search(str(self.path)):
            raise InvalidOption(
                f"Spark takes {found[0]} in a path for a wildcard", where=str(self.path), next="Name another folder"
            )
        self.manifest = Manifest(self.path, create=create)

    def close(self) -> None:
        self.manifest.close()

    def __enter__(self) -> Lake:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def bronze(self, spark: SparkSession, after: int = -1, *, without: Collection[str] = ()) -> DataFrame:
        """Messages above a seq, as published; but for some files, if so wished."""
        files = [file.path for file in self.manifest.files(BRONZE, after) if file.path not in without]
        paths = [str(self.path / path) for path in files]
        if not paths:
            return spark.createDataFrame([], BRONZE_SCHEMA)
        base = str(self.path / table_directory(BRONZE))
        found = spark.read.schema(BRONZE_SCHEMA).option("basePath", base).parquet(*paths)
        return found if after < 0 else found.where(found["seq"] > after)

    def largest_message(self, files: Iterable[LakeFile]) -> int:
        """Bytes of the largest data in some files of bronze, by what their footers say."""
        largest = 0
        for file in files:
            footer = pq.read_metadata(self.path / file.path)
            at = next(n for n in range(footer.num_columns) if footer.schema.column(n).name == "size")
            for group in range(footer.num_row_groups):
                statistics = footer.row_group(group).column(at).statistics
                largest = max(largest, statistics.max if statistics is not None and statistics.has_min_max else 0)
        return largest

    def table(self, spark: SparkSession, table: str) -> DataFrame | None:
        """A table as it is now, with all the columns that its files have; None if it has no files."""
        if table == BRONZE:
            return self.bronze(spark)
        paths = [str(self.path / file.path) for file in self.manifest.files(table)]
        return spark.read.option("mergeSchema", "true").parquet(*paths) if paths else None

    def arrow(self, table: str, schema: pa.Schema) -> pa.Table:
        """A small table as it is now, without Spark."""
        found = [filled(self._read(file), schema) for file in self.manifest.files(table)]
        return pa.concat_tables([schema.empty_table(), *found])

    def rows(self, table: str) -> list[dict[str, Any]]:
        """The same as plain values."""
        return [row for file in self.manifest.files(table) for row in self._read(file).to_pylist()]

    def _read(self, file: LakeFile) -> pa.Table:
        return pq.ParquetFile(self.path / file.path).read()

    def write(
        self, table: str, frame: DataFrame, *, by_day: bool = False, seqs: tuple[int, int] = (0, 0)
    ) -> list[LakeFile]:
        """Write a frame into files of a folder of its own; they count from the manifest's next `publish` on. With
        `by_day`, by its column `day`, so that days can be replaced; `seqs` is the stretch of the log it was made from.
        """
        folder = f"{table_directory(table)}/{uuid.uuid4().hex}"
        if by_day:
            frame = frame.withColumn(_DAY_FOLDER, frame["day"])
            frame.write.partitionBy(_DAY_FOLDER).parquet(str(self.path / folder))
        else:
            frame.write.parquet(str(self.path / folder))
        return self._written(table, folder, seqs)

    def write_arrow(self, table: str, content: pa.Table) -> list[LakeFile]:
        """Write a small table without Spark; it counts from the manifest's next `publish` on."""
        if not content.num_rows:
            return []
        folder = self.path / table_directory(table)
        make_directories(self.path, folder)
        path = folder / f"{uuid.uuid4().hex}.parquet"
        written = name_while_writing(path)
        pq.write_table(content, written, compression=COMPRESSION)
        size = written.stat().st_size
        return [LakeFile(self._relative(path), table, content.num_rows, size, finish(written, path))]

    def _written(self, table: str, folder: str, seqs: tuple[int, int]) -> list[LakeFile]:
        """What Spark wrote, durable now: it does not do that itself."""
        found = []
        for path in sorted((self.path / folder).rglob("*.parquet")):
            size, digest = path.stat().st_size, settle(path)
            rows = pq.read_metadata(path).num_rows
            sync_directory(path.parent)
            if rows:
                day = path.parent.name.partition("=")[2] if path.parent.name.startswith(f"{_DAY_FOLDER}=") else None
                found.append(LakeFile(self._relative(path), table, rows, size, digest, *seqs, day))
        for directory in (self.path / folder, *(self.path / folder).parents):
            if directory == self.path.parent:
                break
            sync_directory(directory)
        return found

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()

    def read_files(self, spark: SparkSession, files: Sequence[LakeFile], schema: StructType) -> DataFrame:
        """Files that were written and are not published yet."""
        if not files:
            return spark.createDataFrame([], schema)
        return spark.read.schema(schema).parquet(*(str(self.path / file.path) for file in files))

    def publish(
        self,
        changes: Sequence[Change],
        marks: Mapping[str, int] | None = None,
    ) -> None:
        self.manifest.publish(changes, now_ms(), marks=dict(marks or {}))


def now_ms() -> int:
    return time.time_ns() // 1_000_000
