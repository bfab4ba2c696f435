"""What retention deletes, and how deleted seqs are recorded."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.delivery.retention import Kept, Limits, Run, Total, merged, runs_of, surplus
from headwater.errors import InvalidOptionError

NOW_MS = 10_000


@st.composite
def histories(draw: st.DrawFn) -> list[Kept]:
    """Messages in seq order, as a clock that runs forward would have published them."""
    sizes = draw(st.lists(st.integers(0, 50), max_size=20))
    ages = sorted(draw(st.lists(st.integers(0, 100), min_size=len(sizes), max_size=len(sizes))), reverse=True)
    return [Kept(seq, "a", size, NOW_MS - age) for seq, (size, age) in enumerate(zip(sizes, ages, strict=True), 1)]


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    some = st.none() | st.integers(0, 100)
    age, count, size = draw(st.tuples(some, some, some).filter(any_given))
    return Limits(age, count, size)


def any_given(values: tuple[int | None, ...]) -> bool:
    return any(value is not None for value in values)


def total(history: list[Kept]) -> Total:
    return Total(len(history), sum(kept.size for kept in history))


def fits(wanted: Limits, history: list[Kept]) -> bool:
    return (
        (wanted.max_count is None or len(history) <= wanted.max_count)
        and (wanted.max_bytes is None or sum(kept.size for kept in history) <= wanted.max_bytes)
        and (wanted.max_age_ms is None or all(NOW_MS - kept.published_ms <= wanted.max_age_ms for kept in history))
    )


@given(wanted=limits(), history=histories())
def test_what_is_left_fits_and_one_less_deleted_would_not(wanted: Limits, history: list[Kept]) -> None:
    gone = surplus(wanted, history, total(history), NOW_MS)
    assert fits(wanted, history[gone:])
    assert gone == 0 or not fits(wanted, history[gone - 1 :])


@given(wanted=limits(), history=histories(), page=st.integers(1, 20))
def test_working_in_pages_deletes_the_same(wanted: Limits, history: list[Kept], page: int) -> None:
    left = list(history)
    while gone := surplus(wanted, left[:page], total(left), NOW_MS):
        left = left[gone:]
    assert left == history[surplus(wanted, history, total(history), NOW_MS) :]


def test_exactly_the_limit_is_kept() -> None:
    old, young = Kept(1, "a", 10, NOW_MS - 7_200), Kept(2, "a", 10, NOW_MS - 3_600)
    assert surplus(Limits(max_age_ms=3_600), [old, young], Total(2, 20), NOW_MS) == 1
    assert surplus(Limits(max_count=1), [old, young], Total(2, 20), NOW_MS) == 1
    assert surplus(Limits(max_bytes=10), [old, young], Total(2, 20), NOW_MS) == 1
    assert surplus(Limits(max_age_ms=7_200, max_count=2, max_bytes=20), [old, young], Total(2, 20), NOW_MS) == 0


def test_zero_keeps_nothing_and_any_one_limit_is_enough() -> None:
    history = [Kept(1, "a", 5, NOW_MS), Kept(2, "a", 5, NOW_MS)]
    assert surplus(Limits(max_count=0), history, total(history), NOW_MS) == 2
    assert surplus(Limits(max_bytes=0), history, total(history), NOW_MS) == 2
    assert surplus(Limits(max_count=100, max_bytes=5), history, total(history), NOW_MS) == 1


@pytest.mark.parametrize(
    "wrong", [{}, {"keep_unacked": True}, {"max_age_ms": -1}, {"max_count": -1}, {"max_bytes": -1}], ids=str
)
def test_impossible_limits_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidOptionError):
        Limits(**wrong)  # type: ignore[arg-type]


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
