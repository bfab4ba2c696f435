"""Cutting a range of seqs into partitions. Pure."""

from __future__ import annotations

from itertools import pairwise

from headwater.pipeline.source.place import Range

PARTITION_ROWS_MIN = 5_000  # fewer are read faster than another task is started
PARTITIONS_MAX = 10_000


def split(whole: Range, partitions: int, rows_min: int = PARTITION_ROWS_MIN) -> list[Range]:
    """Neighbouring ranges of about equal length that cover the whole and nothing else: as many as asked for, unless
    that would make them shorter than `rows_min`. Nothing to read is no ranges."""
    seqs = whole.upto - whole.after
    if seqs <= 0:
        return []
    pieces = max(1, min(partitions, seqs // rows_min, PARTITIONS_MAX))
    ends = [whole.after + seqs * piece // pieces for piece in range(pieces + 1)]
    return [Range(after, upto) for after, upto in pairwise(ends)]


def overlap(one: Range, other: Range) -> Range:
    """What lies in both; an empty range if nothing does."""
    after = max(one.after, other.after)
    return Range(after, max(after, min(one.upto, other.upto)))
