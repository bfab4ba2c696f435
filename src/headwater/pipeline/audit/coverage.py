"""Which seqs a table holds, exactly: bitmaps of 32,768 seqs each, as runs that can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

BUCKET_SEQS = 32_768
"""What Spark's `bitmap_bucket_number` puts together: bucket 1 holds the seqs 1 to 32,768."""

Run = tuple[int, int]
Bits = npt.NDArray[np.bool_]


def bits_of(bitmap: bytes) -> Bits:
    """A bucket's bitmap as Spark's `bitmap_construct_agg` makes it: bit 0 of byte 0 is the bucket's first seq."""
    return np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), bitorder="little").astype(np.bool_)


def first_seq(bucket: int) -> int:
    return (bucket - 1) * BUCKET_SEQS + 1


def runs_of(bucket: int, bits: Bits) -> Iterator[Run]:
    """The seqs whose bit is set, as inclusive runs."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], bits, [False])).astype(np.int8)))
    first = first_seq(bucket)
    for low, high in zip(edges[::2], edges[1::2], strict=True):
        yield first + int(low), first + int(high) - 1


def runs_held(bitmaps: Mapping[int, bytes]) -> list[Run]:
    return joined(run for bucket in sorted(bitmaps) for run in runs_of(bucket, bits_of(bitmaps[bucket])))


def joined(runs: Iterable[Run]) -> list[Run]:
    """The same seqs in as few runs as can be, ascending."""
    found: list[Run] = []
    for low, high in sorted(runs):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return found


def without(runs: Sequence[Run], taken: Sequence[Run]) -> list[Run]:
    """What is in the first and not in the second. Both are joined; it walks through each once."""
    left: list[Run] = []
    at = 0
    for low, high in runs:
        while at < len(taken) and taken[at][1] < low:
            at += 1
        here = at
        while low <= high and here < len(taken) and taken[here][0] <= high:
            if low < taken[here][0]:
                left.append((low, taken[here][0] - 1))
            low = taken[here][1] + 1
            here += 1
        if low <= high:
            left.append((low, high))
    return left


def in_both(runs: Sequence[Run], others: Sequence[Run]) -> list[Run]:
    return without(runs, without(runs, others))


def count_of(runs: Iterable[Run]) -> int:
    return sum(high - low + 1 for low, high in runs)
