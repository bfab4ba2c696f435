"""What replicas pushed."""

from __future__ import annotations

from datetime import date
from typing import Any

from headwater.pipeline.page.charts import sparkline
from headwater.pipeline.page.facts import Report, by_day, days_drawn, name, number, ranked, second
from headwater.pipeline.page.layout import Column, empty, left_out, named, panel, table
from headwater.pipeline.page.markup import Html
from headwater.pipeline.page.words import brief_moment, count, day, short, size, some

REPLICAS_SHOWN = 15

Rows = list[dict[str, Any]]


def replication_section(report: Report) -> Html:
    by_replica: dict[str, Rows] = {}
    for row in report.rows("replication"):
        by_replica.setdefault(name(row.get("replica")), []).append(row)
    if not by_replica:
        why = "No replica has pushed to this log, or replication is not in use; accepted pushes would be counted here."
        return panel("replication", "Replication", empty(why))
    pushes = {key: sum(number(row.get("pushes")) for row in rows) for key, rows in by_replica.items()}
    last = max((row["day"] for rows in by_replica.values() for row in rows if row.get("day")), default=None)
    first = days_drawn(report.rows("replication"), last) if last else None
    shown = ranked(pushes, REPLICAS_SHOWN)
    columns = [
        Column("Replica", kind="name"),
        Column("Pushes", number=True),
        Column("By day", kind="spark-cell"),
        Column("Sent", number=True),
        Column("Version", number=True),
        Column("Last push", number=True),
    ]
    cells = [_cells(replica, by_replica[replica], pushes[replica], first, last) for replica in shown]
    left = left_out(len(shown), len(pushes), "replicas, by pushes")
    return panel(
        "replication",
        "Replication",
        table("Pushes by replica", columns, cells),
        note=left or some(len(pushes), "replica"),
    )


def _cells(replica: str, rows: Rows, pushes: float, first: date | None, last: date | None) -> list[str]:
    latest = max(rows, key=lambda row: second(row.get("last_at")) or 0)
    return [
        named(replica),
        count(pushes),
        _by_day(rows, first, last),
        size(sum(number(row.get("bytes")) for row in rows)),
        count(max(number(row.get("last_version")) for row in rows)),
        brief_moment(latest["last_at"]) if latest.get("last_at") else "–",
    ]


def _by_day(rows: Rows, first: date | None, last: date | None) -> str:
    if first is None or last is None:
        return "–"
    values = by_day(rows, "pushes", first, last)
    return sparkline(values, f"Pushes a day from {day(first)} to {day(last)}; at most {short(max(values))}")
