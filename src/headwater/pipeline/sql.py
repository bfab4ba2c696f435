"""The lake in Spark: its tables as DataFrames, and with the live log as views for SQL: `bronze_messages`, `live`,
`messages` and so on. Spark reads the files of a snapshot, so a query keeps the version it began with."""

from __future__ import annotations

import datetime as dt
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from headwater.pipeline.columns import COLUMNS, spark_schema
from headwater.pipeline.delta import Table
from headwater.pipeline.lake import BRONZE, REPLAYS, Lake
from headwater.pipeline.storage import DataFile, Storage, read_rows

SOURCE = "headwater_lake"
BATCH_ROWS = 16_384
_SEPARATOR = "\n"


# --- tables as DataFrames ---------------------------------------------------------------------------------------------


def frame(spark: SparkSession, table: Table, columns: Sequence[str] | None = None) -> DataFrame:
    """A snapshot of a table. With Delta's jar Spark reads it by itself; without, from a local disk its files, and from
    an object store through Arrow."""
    if has_delta(spark):
        root = table.storage.uri(table.name).replace("s3://", "s3a://")
        found = spark.read.format("delta").option("versionAsOf", table.version).load(root)
        return found if columns is None else found.select(*columns)
    schema = table.schema if columns is None else pa.schema([table.schema.field(name) for name in columns])
    return files_frame(spark, table, table.files, schema)


def files_frame(spark: SparkSession, table: Table, files: Sequence[DataFile], schema: pa.Schema) -> DataFrame:
    """Some files of a table."""
    storage, name, struct = table.storage, table.name, spark_schema(schema)
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


# --- views ------------------------------------------------------------------------------------------------------------

LOG_TABLES = ("subscriptions", "dead_letters")
_ASKS_FOR_NAMES = re.compile(r"\s*(show|describe|desc)\b", re.IGNORECASE)


def make_views(
    spark: SparkSession, query: str, lake: Lake | None = None, log: str | None = None, at: dt.datetime | None = None
) -> list[str]:
    """Make the views that a query names, for each over the log costs a process. Returns the names of all that there
    are. With `at` every table is as it was at that time, and one that was not there yet is absent."""
    views: dict[str, Callable[[], DataFrame]] = {}
    if lake is not None:
        for name in lake.tables():
            if name != REPLAYS and (at is None or lake.table(name, at).exists):
                views[name.replace("/", "_")] = partial(_of_lake, spark, lake, name, at)
    if log is not None:
        views["live"] = partial(_of_log, spark, log)
        views |= {f"live_{name}": partial(_of_log, spark, log, table=name) for name in LOG_TABLES}
    views["messages"] = partial(_messages, spark, lake, log, at)
    for name, make in views.items():
        if _ASKS_FOR_NAMES.match(query) or is_named(name, query):
            make().createOrReplaceTempView(name)
    return sorted(views)


def is_named(view: str, query: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(view)}(?!\w)", query, re.IGNORECASE) is not None


def _of_lake(spark: SparkSession, lake: Lake, name: str, at: dt.datetime | None) -> DataFrame:
    return frame(spark, lake.table_at(name, at))


def _of_log(spark: SparkSession, log: str, **options: str) -> DataFrame:
    return spark.read.format("headwater").options(path=log, failOnDataLoss="false", **options).load()


def _messages(spark: SparkSession, lake: Lake | None, log: str | None, at: dt.datetime | None) -> DataFrame:
    """History from the lake, and what came since from the log."""
    parts: list[DataFrame] = []
    last_seq = 0
    if lake is not None:
        bronze = lake.table_at(BRONZE, at)
        last_seq = bronze.transaction()
        parts.append(frame(spark, bronze, COLUMNS))
    if log is not None:
        parts.append(_of_log(spark, log, startingSeq=str(last_seq + 1)))
    return parts[0] if len(parts) == 1 else parts[0].unionByName(parts[1])


# --- errors -----------------------------------------------------------------------------------------------------------

# Classic and Connect agree on this much of an error's text; what follows is a plan or a stack trace.
_SPARK_ERROR = re.compile(r"\[([A-Z][A-Z0-9_.]+)\]\s(.*?)\s*SQLSTATE: \w+(.{0,60})", re.DOTALL)
_POSITION = re.compile(
    r"[;\s]*(?:\(line (\d+), pos (\d+)\)|line (\d+) pos (\d+)|== SQL \(line (\d+), position (\d+)\))"
)
_ADVICE = re.compile(r'\s*(?:If necessary set "spark\.|Parse Mode: |Verify the spelling).*', re.DOTALL)
_NAME = re.compile(r"(?:`[^`]+`\.)*`([^`]+)`")  # without catalog and schema
_KEYWORDS = ("SELECT", "FROM", "WHERE", "GROUP", "ORDER", "HAVING", "LIMIT", "JOIN", "UNION", "WITH", "SHOW")


def sql_error(error: Exception, tables: Sequence[str] = ()) -> str:
    """One sentence for what is wrong with a user's query: no stack trace, no plan, and where in the query it is."""
    found = _SPARK_ERROR.search(str(error))
    if found is None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[0] if lines else type(error).__name__
    condition, message, rest = found.groups()
    message = " ".join(_ADVICE.sub("", message).split()).rstrip(".")
    name = _NAME.search(message)
    if condition == "TABLE_OR_VIEW_NOT_FOUND" and name is not None:
        near = difflib.get_close_matches(name[1], tables)
        message = f"there is no table `{name[1]}`" + (f"; did you mean {' or '.join(near)}?" if near else "")
    elif condition.startswith("UNRESOLVED_COLUMN") and name is not None:
        column = message.partition("with name ")[2].partition(" cannot be")[0] or f"`{name[1]}`"
        proposals = _NAME.findall(message.partition("following? [")[2])
        near = difflib.get_close_matches(column.strip("`"), proposals) or proposals
        message = f"there is no column {column}" + (f"; did you mean `{near[0]}`?" if near else "")
    elif condition == "UNRESOLVED_ROUTINE" and name is not None:
        message = f"there is no function `{name[1]}`"
    elif condition == "PARSE_SYNTAX_ERROR" and (word := re.search("'([^']+)'", message)) is not None:
        near = difflib.get_close_matches(word[1].upper(), _KEYWORDS, n=1)
        message = f"{message[:1].lower()}{message[1:]}" + (f"; did you mean {near[0]}?" if near else "")
    if at := _POSITION.match(rest):
        line, column_number = (int(number) for number in at.groups() if number is not None)
        if at[6] is None:
            column_number += 1  # Spark counts these from 0, and the others from 1
        message = f"{message} (line {line}, column {column_number})"
    return message
