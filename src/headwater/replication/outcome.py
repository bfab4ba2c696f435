"""The options, the progress and the outcome of a push, pull or copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

Phase = Literal["preparing", "moving", "finishing"]


class TransferOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of a push or a pull. `message` is for a push, `overwrite` for a pull."""

    client_id: str
    key: str | None = None
    ca: str | None = None
    dry: bool = False
    message: str = ""
    overwrite: bool = False


class Progress(NamedTuple):
    sent: int
    received: int
    total_estimate: int
    """The size of the whole database, the most bytes that can move."""
    phase: Phase


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a push, a pull or a copy did."""

    kind: Literal["push", "pull", "copy"]
    """What was done."""
    local: str
    """The file of this machine; for a copy, the source."""
    remote: str
    """The replica; for a copy, the target."""
    version: int | None
    """The version of the replica afterwards; None for a copy and for a dry push."""
    is_new: bool
    """False: nothing had changed."""
    base: int | None
    """The version that the file was based on; None if it had none."""
    size: int
    """Bytes of the database."""
    pages: int
    """Pages of the database."""
    page_size: int
    """Bytes of a page."""
    sent: int
    """Bytes sent."""
    received: int
    """Bytes received."""
    seconds: float
    """How long it took."""
    changed_pages: int
    """Pages that differed."""
    dbhash: str | None
    """The hash of the content; None if it could not be computed."""
    dry: bool
    """Neither database was changed; the pages were transferred and discarded."""
    speedup: float = 0.0
    """The size of the database over the bytes that moved."""

    def __post_init__(self) -> None:
        moved = self.sent + self.received
        msgspec.structs.force_setattr(self, "speedup", round(self.size / moved, 2) if moved else float(self.size))


OnProgress = Callable[[Progress], None]
OnOutcome = Callable[[Outcome], None]
OnFailure = Callable[[Exception], None]


class Callbacks(NamedTuple):
    """Of a subscription. `on_failure` is called before each retry."""

    on_outcome: OnOutcome | None = None
    on_progress: OnProgress | None = None
    on_failure: OnFailure | None = None
