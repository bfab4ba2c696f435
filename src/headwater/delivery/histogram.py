"""Times as a histogram: four buckets to a doubling, so that a percentile is right within a fifth, be it ms or years.

Bucket 0 is 0 ms. Bucket b above it holds the times from 2^((b-1)/4) ms up to, not including, 2^(b/4) ms.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

SAMPLES_MAX = 16


def bucket_of(ms: int) -> int:
    """floor(4 · log2(ms)) + 1, which in whole numbers is exact. A time below 0, by a clock set back, counts as 0."""
    return (ms**4).bit_length() if ms > 0 else 0


def upper_bound_ms(bucket: int) -> float:
    """All times of the bucket are below this; those of bucket 0 are 0."""
    return 2.0 ** (bucket / 4) if bucket > 0 else 0.0


@lru_cache(maxsize=2048)
def sample(count: int) -> tuple[tuple[int, int], ...]:
    """(index, weight) for some of `count` things in a row, spread evenly: each stands for those around it, and the
    weights add up to `count`. All of them, if they are few."""
    parts = min(count, SAMPLES_MAX)
    edges = [part * count // parts for part in range(parts + 1)] if parts else []
    return tuple(((low + high) // 2, high - low) for low, high in pairwise(edges))
