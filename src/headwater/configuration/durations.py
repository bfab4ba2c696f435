"""Lengths of time as people write them: `250ms 3s 10m 1h30m 3d 1w`. Pure."""

from __future__ import annotations

import re

DURATION_CHARS_MAX = 100
DURATION_HELP = "like 500ms, 10s, 5m, 1h30m, 7d or 2w"

_DURATION = re.compile(r"(?:[0-9]+(?:ms|[smhdw]))+")
_PART = re.compile(r"([0-9]+)(ms|[smhdw])")
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_SAID_UNITS = ("d", "h", "m", "s", "ms")  # no weeks: 10d is easier read than 1w3d


def duration_ms(text: str) -> int | None:
    """Milliseconds of numbers with units and nothing else; None if `text` is anything else."""
    if len(text) > DURATION_CHARS_MAX or not _DURATION.fullmatch(text):
        return None
    return sum(int(number) * _UNIT_MS[unit] for number, unit in _PART.findall(text))


def say_duration(ms: int) -> str:
    """The shortest text that `duration_ms` reads as this: nothing is rounded."""
    parts = []
    for unit in _SAID_UNITS:
        number, ms = divmod(ms, _UNIT_MS[unit])
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts) or "0s"
