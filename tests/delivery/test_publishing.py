"""Ids and numbers that keep a repeated publish from being stored twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.delivery import publishing
from headwater.delivery.publishing import RUN_MAX, DedupeWindow, Receipt, receipts_for, stored_seqs
from headwater.errors import InvalidOptionError
from headwater.message import BATCH_MESSAGES_MAX

# Numbers that a publisher sent and the log did not know, in order; some of a frame may be missing among them.
numbers = st.lists(st.integers(1, 60), unique=True, max_size=30).map(sorted)
# Seqs as they come: mostly neighbours, with jumps where a given id was a repeat or another publisher was between.
seqs = st.integers(1, 40)


@st.composite
def stored(draw: st.DrawFn) -> dict[int, int]:
    """What became of some numbers."""
    became, seq = {}, 0
    for number in draw(numbers):
        seq = draw(st.one_of(st.just(seq + 1), st.just(seq + 1), seqs))
        became[number] = seq
    return became


def noted(became: dict[int, int]) -> list[Receipt]:
    return receipts_for(list(became), list(became.values()))


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(publishing, "RUN_MAX", 3)
    return 3


@given(became=stored(), first=st.integers(0, 70), count=st.integers(0, 70))
def test_receipts_tell_of_any_part_what_it_became(became: dict[int, int], first: int, count: int) -> None:
    asked = range(first, first + count)
    assert stored_seqs(noted(became), first, count) == {n: seq for n, seq in became.items() if n in asked}


@given(became=stored())
def test_a_run_of_neighbours_is_one_receipt(became: dict[int, int]) -> None:
    runs = sum(1 for number, seq in became.items() if became.get(number - 1) != seq - 1)
    assert len(noted(became)) == runs


@given(became=stored())
def test_no_number_stands_in_two_receipts(became: dict[int, int]) -> None:
    reported = [number for each in noted(became) for number in range(each.number, each.number + each.length)]
    assert sorted(reported) == sorted(became)


@given(one=stored(), two=stored(), first=st.integers(0, 70), count=st.integers(0, 70))
def test_receipts_of_several_frames_add_up(one: dict[int, int], two: dict[int, int], first: int, count: int) -> None:
    two = {number: seq for number, seq in two.items() if number not in one}
    both = {n: seq for n, seq in (one | two).items() if first <= n < first + count}
    assert stored_seqs([*noted(one), *noted(two)], first, count) == both


def test_a_frame_that_got_neighbouring_seqs() -> None:
    assert receipts_for([5, 6, 7], [101, 102, 103]) == [Receipt(5, 3, 101)]


@pytest.mark.parametrize(
    ("numbers", "seqs", "expected"),
    [
        ([1, 2, 3], [7, 3, 8], [Receipt(1, 1, 7), Receipt(2, 1, 3), Receipt(3, 1, 8)]),
        ([1, 2, 3], [7, 7, 8], [Receipt(1, 1, 7), Receipt(2, 2, 7)]),
        ([1, 3, 4], [7, 8, 9], [Receipt(1, 1, 7), Receipt(3, 2, 8)]),
        ([1, 3, 4], [7, 9, 10], [Receipt(1, 1, 7), Receipt(3, 2, 9)]),
        ([9], [1], [Receipt(9, 1, 1)]),
        ([], [], []),
    ],
    ids=["an id that was known", "the same id twice", "a number left out", "both jump", "one", "none"],
)
def test_a_run_ends_where_numbers_or_seqs_jump(numbers: list[int], seqs: list[int], expected: list[Receipt]) -> None:
    assert receipts_for(numbers, seqs) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 7])
def test_no_receipt_stands_for_more_than_the_limit(short_runs: int, count: int) -> None:
    """Stores look no further back than that for a receipt that reaches up to a number."""
    numbers, seqs = list(range(1, count + 1)), list(range(11, count + 11))
    found = receipts_for(numbers, seqs)
    assert max(each.length for each in found) <= short_runs
    assert len(found) == -(-count // short_runs)
    assert stored_seqs(found, 1, count) == dict(zip(numbers, seqs, strict=True))


def test_a_whole_batch_is_one_receipt() -> None:
    assert RUN_MAX >= BATCH_MESSAGES_MAX
    found = receipts_for(range(1, RUN_MAX + 2), range(1, RUN_MAX + 2))
    assert found == [Receipt(1, RUN_MAX, 1), Receipt(RUN_MAX + 1, 1, RUN_MAX + 1)]


windows = st.builds(DedupeWindow, st.integers(0, 1_000), st.integers(0, 1_000))
window_seqs = st.integers(1, 2_000)
times = st.integers(0, 2_000)


def test_the_edges_in_time_and_count() -> None:
    window = DedupeWindow(span_ms=1_000, count=3)
    assert window.remembers(seq=8, published_ms=0, last_seq=10, now_ms=1_000)
    assert not window.remembers(seq=8, published_ms=0, last_seq=10, now_ms=1_001)
    assert not window.remembers(seq=7, published_ms=0, last_seq=10, now_ms=0)


@given(window=windows, seq=window_seqs, ahead=st.integers(0, 2_000), published_ms=times, waited_ms=times)
def test_an_id_is_remembered_while_it_is_recent_in_both_ways(
    window: DedupeWindow, seq: int, ahead: int, published_ms: int, waited_ms: int
) -> None:
    remembered = window.remembers(seq, published_ms, seq + ahead, published_ms + waited_ms)
    assert remembered == (ahead < window.count and waited_ms <= window.span_ms)


@given(window=windows, seq=window_seqs, ahead=st.integers(0, 2_000), published_ms=times, waited_ms=times)
def test_what_is_forgotten_stays_forgotten(
    window: DedupeWindow, seq: int, ahead: int, published_ms: int, waited_ms: int
) -> None:
    if not window.remembers(seq, published_ms, seq + ahead, published_ms + waited_ms):
        assert not window.remembers(seq, published_ms, seq + ahead + 1, published_ms + waited_ms)
        assert not window.remembers(seq, published_ms, seq + ahead, published_ms + waited_ms + 1)


@given(window=windows, seq=window_seqs, last_seq=window_seqs, published_ms=times, now_ms=times)
def test_maintenance_forgets_only_what_is_outside(
    window: DedupeWindow, seq: int, last_seq: int, published_ms: int, now_ms: int
) -> None:
    forgotten = seq <= window.oldest_seq(last_seq) or published_ms < window.oldest_ms(now_ms)
    assert forgotten != window.remembers(seq, published_ms, last_seq, now_ms)


def test_a_window_of_zero_messages_remembers_nothing() -> None:
    assert not DedupeWindow(count=0).remembers(5, 0, 5, 0)


@pytest.mark.parametrize("wrong", [{"span_ms": -1}, {"count": -1}], ids=str)
def test_a_negative_window_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidOptionError):
        DedupeWindow(**wrong)
