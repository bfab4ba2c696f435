"""What the report and `status` say of a lake: gold and the manifest, read without Spark."""

from __future__ import annotations

import datetime as dt
from typing import Any

import msgspec

from headwater.pipeline.jobs.tables import GOLD, GOLD_MARK, QUARANTINE
from headwater.pipeline.lake.lake import Lake
from headwater.pipeline.lake.layout import BRONZE
from headwater.pipeline.page.facts import Report

BEHIND = "Bronze has more than these tables: headwater pipeline run brings them up to it."


def report_of(lake: Lake) -> Report:
    manifest = lake.manifest
    volume = lake.rows("gold.volume")
    return Report(
        lake=str(lake.path),
        log=str(manifest.fact("log") or ""),
        made_at=dt.datetime.now(dt.UTC),
        high_water=manifest.mark(BRONZE),
        messages=sum(file.rows for file in manifest.files(BRONZE)),
        bytes=sum(row["bytes"] for row in volume),
        tables={"volume": volume, **{name: lake.rows(f"gold.{name}") for name in GOLD if name != "volume"}},
        audit=manifest.last_audit(),
        quarantined=sum(file.rows for file in manifest.files(QUARANTINE)),
        notes=[] if manifest.mark(GOLD_MARK) >= manifest.mark(BRONZE) else [BEHIND],
    )


def lake_status(lake: Lake) -> dict[str, Any]:
    manifest = lake.manifest
    last = manifest.batches(1)
    tables = []
    for table in manifest.tables():
        files = manifest.files(table)
        size = sum(file.bytes for file in files)
        tables.append({"table": table, "rows": sum(file.rows for file in files), "files": len(files), "bytes": size})
    return {
        "lake": str(lake.path),
        "log": manifest.fact("log"),
        "high_water": manifest.mark(BRONZE),
        "last_batch": msgspec.to_builtins(last[0]) if last else None,
        "audit": manifest.last_audit(),
        "tables": tables,
    }
