"""Which seqs are missing, and which are excused."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headwater.pipeline.audit.coverage import BUCKET_SEQS, Run, count_of, in_both, joined, runs_held, without

UPTO = 200
runs = st.lists(
    st.tuples(st.integers(1, UPTO), st.integers(0, 30)).map(lambda run: (run[0], min(UPTO, run[0] + run[1]))),
    max_size=12,
)


def seqs_of(found: list[Run]) -> set[int]:
    return {seq for low, high in found for seq in range(low, high + 1)}


@given(runs, runs)
def test_runs_are_subtracted_as_sets_are(some: list[Run], others: list[Run]) -> None:
    one, other = joined(some), joined(others)
    assert seqs_of(without(one, other)) == seqs_of(some) - seqs_of(others)
    assert seqs_of(in_both(one, other)) == seqs_of(some) & seqs_of(others)


@given(runs)
def test_joined_runs_are_the_same_seqs_apart(given_runs: list[Run]) -> None:
    found = joined(given_runs)
    assert seqs_of(found) == seqs_of(given_runs)
    assert all(high + 1 < low for (_, high), (low, _) in pairwise(found))
    assert count_of(found) == len(seqs_of(given_runs))


@given(st.sets(st.integers(1, 3 * BUCKET_SEQS), max_size=50))
def test_bitmaps_become_runs(seqs: set[int]) -> None:
    bitmaps: dict[int, bytes] = {}
    for bucket in {(seq - 1) // BUCKET_SEQS + 1 for seq in seqs}:
        bits = np.zeros(BUCKET_SEQS, dtype=np.uint8)
        bits[[seq - 1 - (bucket - 1) * BUCKET_SEQS for seq in seqs if (seq - 1) // BUCKET_SEQS + 1 == bucket]] = 1
        bitmaps[bucket] = np.packbits(bits, bitorder="little").tobytes()
    assert seqs_of(runs_held(bitmaps)) == seqs


def test_seqs_that_are_far_apart_cost_nothing() -> None:
    assert without([(1, 10**15)], [(5, 10**15 - 5)]) == [(1, 4), (10**15 - 4, 10**15)]
