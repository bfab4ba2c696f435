import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.delivery.runs import Run, holes, merged, runs_of

seqs = st.sets(st.integers(1, 60)).map(sorted)
runs = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 9)).map(lambda run: (run[0], run[0] + run[1])), max_size=20
)


def members(runs: list[Run]) -> list[int]:
    return [seq for first, last in runs for seq in range(first, last + 1)]


def is_tidy(runs: list[Run]) -> bool:
    """Ascending, each with something in it, and at least one seq between any two."""
    return all(first <= last for first, last in runs) and all(
        before[1] + 1 < after[0] for before, after in itertools.pairwise(runs)
    )


@given(seqs)
def test_runs_hold_exactly_their_seqs(seqs: list[int]) -> None:
    found = runs_of(seqs)
    assert members(found) == seqs
    assert is_tidy(found)


@given(runs)
def test_merged_runs_are_the_exact_union(runs: list[Run]) -> None:
    found = merged(runs)
    assert members(found) == sorted(set(members(runs)))
    assert is_tidy(found)


@given(seqs, seqs)
def test_runs_of_two_batches_merge_to_the_runs_of_both(one: list[int], two: list[int]) -> None:
    assert merged([*runs_of(one), *runs_of(two)]) == runs_of(sorted({*one, *two}))


@given(seqs, st.integers(1, 60), st.integers(1, 60))
def test_holes_are_what_is_missing(seqs: list[int], low: int, high: int) -> None:
    there = [seq for seq in seqs if low <= seq <= high]
    found = holes(there, low, high)
    assert members(found) == [seq for seq in range(low, high + 1) if seq not in there]
    assert is_tidy(found)


@pytest.mark.parametrize(
    ("seqs", "expected"),
    [
        ([], []),
        ([7], [(7, 7)]),
        ([1, 2, 3], [(1, 3)]),
        ([1, 3], [(1, 1), (3, 3)]),
        ([1, 2, 5, 6, 7, 9], [(1, 2), (5, 7), (9, 9)]),
    ],
)
def test_neighbours_are_one_run(seqs: list[int], expected: list[Run]) -> None:
    assert runs_of(seqs) == expected


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([(1, 2), (3, 4)], [(1, 4)]),
        ([(1, 2), (4, 5)], [(1, 2), (4, 5)]),
        ([(4, 5), (1, 2), (3, 3)], [(1, 5)]),
        ([(1, 9), (2, 3)], [(1, 9)]),
    ],
    ids=["they touch", "one is between", "one joins two", "one inside another"],
)
def test_runs_that_touch_become_one(runs: list[Run], expected: list[Run]) -> None:
    assert merged(runs) == expected
