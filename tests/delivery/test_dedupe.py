import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.delivery.dedupe import DedupeWindow
from headwater.errors import InvalidOption

windows = st.builds(DedupeWindow, st.integers(0, 1_000), st.integers(0, 1_000))
seqs = st.integers(1, 2_000)
times = st.integers(0, 2_000)


def test_the_edges_in_time_and_count() -> None:
    window = DedupeWindow(span_ms=1_000, count=3)
    assert window.remembers(seq=8, published_ms=0, last_seq=10, now_ms=1_000)
    assert not window.remembers(seq=8, published_ms=0, last_seq=10, now_ms=1_001)
    assert not window.remembers(seq=7, published_ms=0, last_seq=10, now_ms=0)


@given(window=windows, seq=seqs, ahead=st.integers(0, 2_000), published_ms=times, waited_ms=times)
def test_an_id_is_remembered_while_it_is_recent_in_both_ways(
    window: DedupeWindow, seq: int, ahead: int, published_ms: int, waited_ms: int
) -> None:
    remembered = window.remembers(seq, published_ms, seq + ahead, published_ms + waited_ms)
    assert remembered == (ahead < window.count and waited_ms <= window.span_ms)


@given(window=windows, seq=seqs, ahead=st.integers(0, 2_000), published_ms=times, waited_ms=times)
def test_what_is_forgotten_stays_forgotten(
    window: DedupeWindow, seq: int, ahead: int, published_ms: int, waited_ms: int
) -> None:
    if not window.remembers(seq, published_ms, seq + ahead, published_ms + waited_ms):
        assert not window.remembers(seq, published_ms, seq + ahead + 1, published_ms + waited_ms)
        assert not window.remembers(seq, published_ms, seq + ahead, published_ms + waited_ms + 1)


@given(window=windows, seq=seqs, last_seq=seqs, published_ms=times, now_ms=times)
def test_housekeeping_forgets_only_what_is_outside(
    window: DedupeWindow, seq: int, last_seq: int, published_ms: int, now_ms: int
) -> None:
    forgotten = seq <= window.oldest_seq(last_seq) or published_ms < window.oldest_ms(now_ms)
    assert forgotten != window.remembers(seq, published_ms, last_seq, now_ms)


def test_a_window_of_zero_messages_remembers_nothing() -> None:
    assert not DedupeWindow(count=0).remembers(5, 0, 5, 0)


@pytest.mark.parametrize("wrong", [{"span_ms": -1}, {"count": -1}], ids=str)
def test_a_negative_window_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidOption):
        DedupeWindow(**wrong)
