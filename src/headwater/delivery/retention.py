"""How much of a topic pattern's history may stay, and the seqs of deleted messages.

Deleted seqs are recorded as runs: `(first, last)` stands for all from the first to the last. A list of runs that is
returned is ascending, and no two of its runs overlap or touch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from headwater.arguments import INT64_MAX, check_flag, check_whole
from headwater.errors import InvalidOptionError
from headwater.formats import Span, span_ms

Run = tuple[int, int]


class Limits(msgspec.Struct, frozen=True, omit_defaults=True):
    """None is unlimited, 0 keeps nothing. `keep_unacked` spares what some subscription has yet to settle."""

    max_age_ms: int | None = None
    max_count: int | None = None
    max_bytes: int | None = None
    keep_unacked: bool = False

    def __post_init__(self) -> None:
        for name, value in (
            ("max_age", self.max_age_ms),
            ("max_count", self.max_count),
            ("max_bytes", self.max_bytes),
        ):
            if value is not None and value < 0:
                raise InvalidOptionError(f"{name} must not be negative")
        if self.max_age_ms is None and self.max_count is None and self.max_bytes is None:
            raise InvalidOptionError("retention without a limit", next="Set max_age, max_count or max_bytes")


def make_limits(*, max_age: Span | None, max_count: int | None, max_bytes: int | None, keep_unacked: bool) -> Limits:
    """The limits that a caller gives as options of `retain`; raises InvalidOptionError."""
    for name, limit in (("max_count", max_count), ("max_bytes", max_bytes)):
        if limit is not None:
            check_whole(name, limit, 0, INT64_MAX)
    check_flag("keep_unacked", keep_unacked)
    return Limits(None if max_age is None else span_ms(max_age, "max_age"), max_count, max_bytes, keep_unacked)


class Kept(NamedTuple):
    """What retention needs to know of one stored message."""

    seq: int
    topic: str
    size: int
    published_ms: int


class Total(NamedTuple):
    messages: int
    bytes: int


def surplus(limits: Limits, oldest: Sequence[Kept], total: Total, now_ms: int) -> int:
    """How many of `oldest` (in seq order) have to go. `total` is what is stored under the pattern in all."""
    count, size = total
    for index, kept in enumerate(oldest):
        too_old = limits.max_age_ms is not None and now_ms - kept.published_ms > limits.max_age_ms
        too_many = limits.max_count is not None and count > limits.max_count
        too_big = limits.max_bytes is not None and size > limits.max_bytes
        if not (too_old or too_many or too_big):
            return index
        count -= 1
        size -= kept.size
    return len(oldest)


def runs_of(seqs: Sequence[int]) -> list[Run]:
    """The runs of ascending seqs."""
    if not seqs:
        return []
    if seqs[-1] - seqs[0] == len(seqs) - 1:  # retention mostly deletes neighbours
        return [(seqs[0], seqs[-1])]
    runs: list[Run] = []
    first = last = seqs[0]
    for seq in seqs:
        if seq > last + 1:
            runs.append((first, last))
            first = seq
        last = seq
    runs.append((first, last))
    return runs


def merged(runs: Iterable[Run]) -> list[Run]:
    """The union of runs in any order, which may overlap and touch."""
    union: list[Run] = []
    for first, last in sorted(runs):
        if union and first <= union[-1][1] + 1:
            union[-1] = (union[-1][0], max(union[-1][1], last))
        else:
            union.append((first, last))
    return union
