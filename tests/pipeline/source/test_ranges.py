"""Partitions cover what was asked for, once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headwater.pipeline.source.place import Range
from headwater.pipeline.source.ranges import overlap, split

SEQ = st.integers(0, 2**62)


@given(SEQ, st.integers(0, 10**9), st.integers(1, 300), st.integers(1, 10_000))
def test_partitions_are_neighbours_that_cover_the_whole(after: int, seqs: int, wanted: int, least: int) -> None:
    parts = split(Range(after, after + seqs), wanted, least)
    assert (parts == []) == (seqs == 0)
    edges = [after] + [part.upto for part in parts]
    assert [part.after for part in parts] == edges[:-1]
    assert edges[-1] == after + seqs
    assert len(parts) <= wanted
    if len(parts) > 1:
        assert min(part.upto - part.after for part in parts) >= least
        assert max(part.upto - part.after for part in parts) - min(part.upto - part.after for part in parts) <= 1
    if seqs >= wanted * least:
        assert len(parts) == wanted


@given(SEQ, SEQ, SEQ, SEQ, SEQ)
def test_a_seq_is_in_the_overlap_if_it_is_in_both(a: int, b: int, c: int, d: int, seq: int) -> None:
    found = overlap(Range(a, b), Range(c, d))
    assert found.after <= found.upto
    assert (found.after < seq <= found.upto) == (a < seq <= b and c < seq <= d)
