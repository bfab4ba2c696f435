"""A log and its lake, for tests that run the jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw
from pyspark.sql import SparkSession

import headwater
from headwater.pipeline.audit.auditing import audit
from headwater.pipeline.datasets.types import Types, load_types
from headwater.pipeline.jobs.bronze import start_bronze
from headwater.pipeline.jobs.running import Ran, bind, run_once
from headwater.pipeline.jobs.silver import advance_silver
from headwater.pipeline.lake.lake import Lake
from headwater.pipeline.lake.sweeping import remove_checkpoints

TAKEN_IN_S_MAX = 120


@dataclass
class World:
    spark: SparkSession
    folder: Path
    types: Types = field(default_factory=Types)
    log_path: str = ""

    def __post_init__(self) -> None:
        self.log_path = self.log_path or str(self.folder / "events.db")
        self.lake = Lake(self.folder / "lake", create=True)

    def log(self) -> headwater.Log:
        return headwater.open(self.log_path, housekeeping=None)

    def run(self) -> Ran:
        return run_once(self.spark, self.lake, self.log_path, self.types)

    def take_in(self) -> None:
        """Bronze alone, for tests that look at nothing else: the other tables are most of a run."""
        bind(self.lake, self.log_path)
        assert start_bronze(self.spark, self.lake, self.log_path).awaitTermination(TAKEN_IN_S_MAX)
        remove_checkpoints(self.lake.path)

    def make_silver(self) -> None:
        advance_silver(self.spark, self.lake, self.types)

    def audit(self) -> dict[str, Any]:
        return audit(self.spark, self.lake, self.log_path)

    def insert_by_hand(self, topic: str, data: str, **columns: Any) -> None:
        """Past all checks, as somebody with an SQL shell and no scruples can."""
        named = {"topic": topic, "data": data, "checked": 2, **columns}
        marks = ", ".join("?" * len(named))
        names = ", ".join(f'"{name}"' for name in named)
        with headwater.open(self.log_path, housekeeping=None):
            pass  # makes it
        apsw.Connection(self.log_path).execute(
            f"INSERT INTO messages ({names}) VALUES ({marks})", tuple(named.values())
        )

    def register(self, schemas: Mapping[str, Any]) -> None:
        directory = self.folder / "types"
        directory.mkdir(exist_ok=True)
        for name, schema in schemas.items():
            (directory / f"{name}.json").write_text(json.dumps(schema))
        self.types = load_types(directory)

    def seqs(self, table: str = "bronze.messages") -> list[int]:
        return sorted(row["seq"] for row in self.lake.rows(table))
