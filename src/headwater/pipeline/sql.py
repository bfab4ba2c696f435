"""The lake and the live log as views for SQL: `bronze_messages`, `silver_messages`, `gold_volume`, …, `live` and
`messages`. Only the views that a query names are made, for each over the log costs a process."""

from __future__ import annotations

import datetime as dt
import difflib
import re
from collections.abc import Callable, Sequence
from functools import partial

from pyspark.sql import DataFrame, SparkSession

from headwater.pipeline.columns import COLUMNS
from headwater.pipeline.frames import frame
from headwater.pipeline.lake import BRONZE, REPLAYS, Lake

LOG_TABLES = ("subscriptions", "dead_letters")
_ASKS_FOR_NAMES = re.compile(r"\s*(show|describe|desc)\b", re.IGNORECASE)
# Classic and Connect agree on this much of an error's text; what follows is a plan or a stack trace.
_SPARK_ERROR = re.compile(r"\[([A-Z][A-Z0-9_.]+)\]\s(.*?)\s*SQLSTATE: \w+(.{0,60})", re.DOTALL)
_POSITION = re.compile(
    r"[;\s]*(?:\(line (\d+), pos (\d+)\)|line (\d+) pos (\d+)|== SQL \(line (\d+), position (\d+)\))"
)
_ADVICE = re.compile(r'\s*(?:If necessary set "spark\.|Parse Mode: |Verify the spelling).*', re.DOTALL)
_NAME = re.compile(r"(?:`[^`]+`\.)*`([^`]+)`")  # without catalog and schema
_KEYWORDS = ("SELECT", "FROM", "WHERE", "GROUP", "ORDER", "HAVING", "LIMIT", "JOIN", "UNION", "WITH", "SHOW")

Views = dict[str, Callable[[], DataFrame]]


def make_views(
    spark: SparkSession, query: str, lake: Lake | None = None, log: str | None = None, at: dt.datetime | None = None
) -> list[str]:
    """Make the views that a query names; returns the names of all that there are. With `at` every table is as it was at
    that time, and one that was not there yet is absent."""
    views: Views = {}
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
    return frame(spark, lake.table(name) if at is None else lake.table_at(name, at))


def _of_log(spark: SparkSession, log: str, **options: str) -> DataFrame:
    return spark.read.format("headwater").options(path=log, failOnDataLoss="false", **options).load()


def _messages(spark: SparkSession, lake: Lake | None, log: str | None, at: dt.datetime | None) -> DataFrame:
    """History from the lake, and what came since from the log."""
    parts: list[DataFrame] = []
    last_seq = 0
    if lake is not None:
        bronze = lake.table(BRONZE) if at is None else lake.table_at(BRONZE, at)
        last_seq = bronze.transaction()
        parts.append(frame(spark, bronze, COLUMNS))
    if log is not None:
        parts.append(_of_log(spark, log, startingSeq=str(last_seq + 1)))
    return parts[0] if len(parts) == 1 else parts[0].unionByName(parts[1])


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
