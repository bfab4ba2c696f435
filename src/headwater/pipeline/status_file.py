"""`status.json` in a lake's folder or bucket: what the console of a server shows of the lake. A server imports nothing
of Spark or Arrow and reads this file alone. Each run writes it, and each audit its verdict into it."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headwater.formats import iso
from headwater.pipeline.columns import GOLD_SCHEMAS
from headwater.pipeline.lake import BRONZE, LOG_PROPERTY, QUARANTINE, Lake
from headwater.pipeline.storage import write_errors_translated
from headwater.server.lake import STATUS_FILE, VERSION

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
HOURLY_MS_MAX = 4 * DAY_MS  # of a chart by the hour; a longer time is drawn by the day
DAYS_MAX = 90
SERIES_MAX = 6
FAILED_MAX, TEXT_CHARS_MAX = 10, 300


def write_status(lake: Lake, now_ms: int) -> None:
    """Write the file that the console reads, after a run."""
    _write(lake, lake_document(lake, now_ms))


def write_verdict(lake: Lake, audit: dict[str, Any]) -> None:
    """Write the verdict of an audit into the file of the last run: the tables of a broken lake need not be readable."""
    try:
        document = msgspec.json.decode(lake.storage.read(STATUS_FILE), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return
    _write(lake, document | {"audit": _audit(audit)})


def _write(lake: Lake, document: dict[str, Any]) -> None:
    with write_errors_translated(lake.storage.uri(STATUS_FILE)), lake.storage.new_file("") as scratch:
        scratch.write_bytes(msgspec.json.encode(document))
        lake.storage.put(scratch, STATUS_FILE)


def lake_document(lake: Lake, now_ms: int) -> dict[str, Any]:
    found = lake.status()
    rows = {each["table"]: each["rows"] for each in found["tables"]}
    return {
        "version": VERSION,
        "ran_at": iso(now_ms),
        "log": _salt(lake),
        "last_seq": found["last_seq"],
        "derived_to": found["derived_to"],
        "messages": rows.get("bronze/messages", 0),
        "quarantined": rows.get(QUARANTINE, 0),
        "bytes": sum(each["bytes"] for each in found["tables"]),
        "tables": len(found["tables"]),
        "audit": None if found["audit"] is None else _audit(found["audit"]),
        "charts": _charts(lake),
    }


def _salt(lake: Lake) -> int:
    """The salt of the log, by which a server knows whether the lake is its own."""
    return int(lake.table(BRONZE).properties[LOG_PROPERTY].split("-")[0])


def _audit(document: dict[str, Any]) -> dict[str, Any]:
    checks = document["checks"]
    failed = [each for each in checks if each["status"] == "failed"]
    return {
        "whole": document["whole"],
        "checked_at": document["checked_at"],
        "seconds": document["seconds"],
        "lake_seq": document["lake_seq"],
        "checks": len(checks),
        "failed": [f"{each['name']}: {each['what']}"[:TEXT_CHARS_MAX] for each in failed[:FAILED_MAX]],
    }


# --- charts of the gold tables --------------------------------------------------------------------------------------


def _charts(lake: Lake) -> list[dict[str, Any]]:
    volume = _grouped(_gold(lake, "volume"), "hour", "topic", "messages", "sum")
    acked = _gold(lake, "latency").filter(pc.field("stage") == "ack")
    latency = _grouped(acked, "hour", "subscription", "p99_ms", "max")
    letters = _grouped(_gold(lake, "dead_letters"), "day", "subscription", "letters", "sum")
    charts = (
        _chart("Messages per {step}", "count", volume, 0),
        _chart("Published to acked, 99% within", "ms", latency, None),
        _chart("Dead letters per {step}", "count", letters, 0, step_ms=DAY_MS),
    )
    return [chart for chart in charts if chart is not None]


def _gold(lake: Lake, name: str) -> pa.Table:
    return lake.table(f"gold/{name}").read(GOLD_SCHEMAS[name])


def _grouped(table: pa.Table, at: str, by: str, column: str, how: str) -> list[dict[str, Any]]:
    """Rows of `at`, `name` and `value`, of the last days alone."""
    table = table.filter(pc.field(at).is_valid() & pc.field(column).is_valid())
    if not table.num_rows:
        return []
    since = pc.max(table[at]).as_py() - dt.timedelta(days=DAYS_MAX)
    table = table.filter(pc.field(at) > pa.scalar(since, table.schema.field(at).type))
    sums = table.group_by([at, by]).aggregate([(column, how)]).to_pylist()
    return [{"at": _ms(row[at]), "name": row[by] or "–", "value": row[f"{column}_{how}"]} for row in sums]


def _ms(at: dt.date | dt.datetime) -> int:
    moment = at if isinstance(at, dt.datetime) else dt.datetime(at.year, at.month, at.day, tzinfo=dt.UTC)
    return int(moment.timestamp() * 1000)


def _chart(
    title: str, unit: str, rows: list[dict[str, Any]], missing: int | None, *, step_ms: int | None = None
) -> dict[str, Any] | None:
    """The greatest series of these rows. `missing`: the value of a step in which there is no row."""
    if not rows:
        return None
    first, last = min(row["at"] for row in rows), max(row["at"] for row in rows)
    step_ms = step_ms or (HOUR_MS if last - first <= HOURLY_MS_MAX else DAY_MS)
    first -= first % step_ms
    steps = (last - first) // step_ms + 1
    totals: Counter[str] = Counter()
    for row in rows:
        totals[row["name"]] += row["value"]
    names = sorted(name for name, _ in totals.most_common(SERIES_MAX))
    values: dict[str, list[float | None]] = {name: [missing] * steps for name in names}
    for row in rows:
        if (series := values.get(row["name"])) is not None:
            at = (row["at"] - first) // step_ms
            known = series[at]
            if missing is None:
                series[at] = row["value"] if known is None else max(known, row["value"])
            else:
                series[at] = (known or 0) + row["value"]
    drawn = [{"name": name[:TEXT_CHARS_MAX], "values": values[name]} for name in names]
    more = len(totals) - len(names)
    title = title.format(step="hour" if step_ms == HOUR_MS else "day")
    return {"title": title, "unit": unit, "from_ms": first, "step_ms": step_ms, "series": drawn, "more": more}
