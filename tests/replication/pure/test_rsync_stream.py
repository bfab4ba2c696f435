"""The output of an origin, counted without being parsed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.replication.rsync import OriginStream


def u32(number: int) -> bytes:
    return number.to_bytes(4, "big")


TALK = b"\x41\x02\x0c" + u32(9) + b"\x47" + u32(1) + u32(3) + b"\x48"
TAIL = b"\x45" + u32(9) + b"\x42"


def pages(*numbers: int) -> bytes:
    return b"".join(b"\x44" + u32(number) + b"\x44" * 4096 for number in numbers)


@settings(deadline=None)
@given(st.lists(st.integers(1, 6000), min_size=1, max_size=30))
def test_however_it_is_cut_the_pages_are_counted(sizes: list[int]) -> None:
    for numbers, counted in (((1, 7), 2), ((7,), 1), ((1,), 0), ((), 0)):
        stream, whole, at = OriginStream(4096), TALK + pages(*numbers) + TAIL, 0
        while at < len(whole):
            assert not stream.has_ended
            size = sizes[at % len(sizes)]
            stream.feed(whole[at : at + size])
            at += size
        assert (stream.has_ended, stream.may_have_committed, stream.bytes) == (True, True, len(whole))
        assert stream.changed_pages(is_first_page_same=False) == len(numbers)
        assert stream.changed_pages(is_first_page_same=True) == counted


def test_a_stream_that_is_cut_off_has_not_ended() -> None:
    stream = OriginStream(4096)
    assert not stream.has_ended
    stream.feed(TALK + pages(1))
    assert (stream.has_ended, stream.may_have_committed) == (False, False)
    stream.feed(TAIL[:3])
    assert (stream.has_ended, stream.may_have_committed) == (False, True)
