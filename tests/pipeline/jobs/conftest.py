from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lake_world import World
from pyspark.sql import SparkSession


@pytest.fixture
def world(spark: SparkSession, tmp_path: Path) -> Iterator[World]:
    made = World(spark, tmp_path)
    yield made
    made.lake.close()
