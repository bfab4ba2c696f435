"""What a push, pull or copy tells: while it runs, and when it is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

Phase = Literal["preparing", "moving", "finishing"]


class Progress(NamedTuple):
    sent: int
    received: int
    total_estimate: int
    """Bytes that move at most: those of the whole database. What is there already does not move."""
    phase: Phase


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    kind: Literal["push", "pull", "copy"]
    local: str
    remote: str
    """Of a copy: the target."""
    version: int | None
    """Of the replica, after it; none for a copy and for a dry push."""
    is_new: bool
    """False: nothing had changed. Of a dry run: whether anything would."""
    base: int | None
    size: int
    pages: int
    page_size: int
    sent: int
    received: int
    seconds: float
    changed_pages: int
    dbhash: str | None
    dry: bool
    """Nothing was changed; `sent` or `received` and `changed_pages` are what would have moved."""
    speedup: float = 0.0
    """The size of the database over the bytes that moved."""

    def __post_init__(self) -> None:
        moved = self.sent + self.received
        msgspec.structs.force_setattr(self, "speedup", round(self.size / moved, 2) if moved else float(self.size))


OnProgress = Callable[[Progress], None]
OnOutcome = Callable[[Outcome], None]
OnFailure = Callable[[Exception], None]
