"""What `headwater doctor` finds: one thing looked at, how it is, and what to do next."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "note", "wrong"]


class Finding(NamedTuple):
    check: str
    level: Level
    what: str
    next: str = ""
