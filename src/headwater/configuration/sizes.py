"""Numbers of bytes as people write them: `4096 10kB 1.5GB 512MiB`. Pure."""

from __future__ import annotations

import re
from fractions import Fraction

SIZE_DIGITS_MAX = 30
SIZE_HELP = "like 4096, 10kB, 500MB, 2GB or 512MiB"

_DIGITS = f"[0-9]{{1,{SIZE_DIGITS_MAX}}}"
_SIZE = re.compile(rf"({_DIGITS}(?:\.{_DIGITS})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def size_bytes(text: str) -> int | None:
    """The number of bytes, to the nearest whole one; None if `text` is no size."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return None
    number, unit, binary = found.groups()
    factor: int = (1024 if binary else 1000) ** _POWER[unit.lower()]
    return round(Fraction(number) * factor)
