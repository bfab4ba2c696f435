"""Seqs as runs: `(first, last)` stands for all from the first to the last. Deleted messages are remembered this way.

A list of runs that is returned is ascending, and no two of its runs overlap or touch: a set is written in one way only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Run = tuple[int, int]


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


def holes(seqs: Iterable[int], low: int, high: int) -> list[Run]:
    """The runs of what is missing among ascending seqs of [low, high]."""
    missing: list[Run] = []
    for seq in seqs:
        if seq > low:
            missing.append((low, seq - 1))
        low = seq + 1
    if low <= high:
        missing.append((low, high))
    return missing
