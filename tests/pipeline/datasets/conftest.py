"""Hand-made tables, and their comparison as a whole."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType
from pyspark.testing import assertDataFrameEqual

from headwater.message.model import derived_id
from headwater.pipeline.schema import MESSAGE_SCHEMA

SALT = 12_345

Frame = Callable[..., DataFrame]


@pytest.fixture(scope="session")
def frame(spark: SparkSession) -> Frame:
    """A table from a schema and rows."""

    def make(schema: StructType | str, rows: list[tuple[Any, ...]]) -> DataFrame:
        return spark.createDataFrame(rows, schema)

    return make


@pytest.fixture(scope="session")
def messages(frame: Frame) -> Frame:
    """A table of messages; what is not said of one is as the log would have it."""

    def make(*rows: dict[str, Any]) -> DataFrame:
        return frame(MESSAGE_SCHEMA, [message(**row) for row in rows])

    return make


@pytest.fixture(scope="session")
def check(frame: Frame) -> Callable[..., None]:
    """Whether a table has exactly this schema and these rows, in any order."""

    def compare(found: DataFrame, schema: StructType, rows: list[tuple[Any, ...]]) -> None:
        assert [(each.name, each.dataType) for each in found.schema] == [(each.name, each.dataType) for each in schema]
        assertDataFrameEqual(found, frame(schema, rows))

    return compare


def message(seq: int, **said: Any) -> tuple[Any, ...]:
    at = said.get("published_at", datetime(2026, 11, 15, 10, 30, tzinfo=UTC))
    values = {
        "topic": "orders.new",
        "data": "{}",
        "size": 2,
        "priority": 0,
        "published_at": at,
        "id": derived_id(int(at.timestamp() * 1000) if at else 0, SALT, seq),
        **said,
        "seq": seq,
    }
    assert values.keys() <= set(MESSAGE_SCHEMA.names)
    return tuple(values.get(name) for name in MESSAGE_SCHEMA.names)
