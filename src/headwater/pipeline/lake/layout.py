"""Where a table's files lie. Bronze goes by day and by the first token of the topic, in directories that Spark, DuckDB
and others read as columns: `bronze/messages/day=2026-11-15/topic_prefix=orders/`."""

from __future__ import annotations

import datetime as dt
import re
import uuid

BRONZE = "bronze.messages"
OTHER_PREFIXES = "~"
"""Where those lie that have no place of their own."""
PREFIX_CHARACTERS_MAX = 32
DAY_MS = 86_400_000
_EPOCH = dt.date(1970, 1, 1)
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_TABLE = re.compile(r"[a-z]+(\.[a-z0-9_]+)+")


def table_directory(table: str) -> str:
    if not _TABLE.fullmatch(table):
        raise ValueError(f"{table!r} is no table of the lake")
    return table.replace(".", "/")


def topic_prefix(topic: str) -> str:
    return topic.partition(".")[0][:PREFIX_CHARACTERS_MAX]


def day_text(day: int) -> str:
    """Days since 1970 as `2026-11-15`."""
    return (_EPOCH + dt.timedelta(days=day)).isoformat()


def place_of(table: str, day: str, prefix: str) -> str:
    return f"{table_directory(table)}/day={day}/topic_prefix={_escaped(prefix)}"


def file_name(seq_from: int, seq_to: int) -> str:
    """Says what is inside, and is never used twice: a task that is tried again writes another file."""
    return f"{seq_from:015d}-{seq_to:015d}-{uuid.uuid4().hex[:12]}.parquet"


def _escaped(value: str) -> str:
    """As Hive and Spark write a column's value into a path: ASCII that is not plain as %XX, all else as it is."""
    if not value:
        return "__HIVE_DEFAULT_PARTITION__"
    return "".join(each if _PLAIN.fullmatch(each) or not each.isascii() else f"%{ord(each):02X}" for each in value)
