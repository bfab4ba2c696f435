"""Values of a row of Spark, as they are printed."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

_PLAIN = str | int | float | None


def plain_value(value: Any, kind: str) -> Any:
    """What JSON can hold; `kind` is the column's type in Spark's words. Times are UTC, as everywhere in the lake: Spark
    hands them out in the time of this machine, without saying so."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, datetime):
        return value.isoformat() if "timestamp_ntz" in kind else _utc(value)
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, dict):
        return {str(plain_value(name, kind)): plain_value(each, kind) for name, each in value.items()}
    if hasattr(value, "asDict"):
        return {name: plain_value(each, kind) for name, each in value.asDict().items()}
    if isinstance(value, list | tuple):
        return [plain_value(each, kind) for each in value]
    return str(value)


def _utc(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
