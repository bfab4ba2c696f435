"""Which old versions go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidOption
from headwater.replication.host.policy import Policy, surplus
from headwater.replication.host.records import Version


def versions(*times: int, announced: bool = True) -> list[Version]:
    return [
        Version(n, n - 1, "p", "", "", at, 1, 512, 1, 1, 1, None, "", announced=announced)
        for n, at in enumerate(times, 1)
    ]


def test_a_version_goes_when_it_is_beyond_either_limit() -> None:
    five = versions(10, 20, 30, 40, 50)
    assert surplus(five, Policy(keep_last=None), 100) == []
    assert surplus(five, Policy(keep_last=3), 100) == [1, 2]
    assert surplus(five, Policy(keep_last=None, keep_age_ms=70), 100) == [1, 2]
    assert surplus(five, Policy(keep_last=2, keep_age_ms=70), 100) == [1, 2, 3]
    assert surplus(five, Policy(keep_last=4, keep_age_ms=60), 100) == [1, 2, 3]


def test_the_newest_stays_however_old_it_is() -> None:
    assert surplus(versions(10), Policy(keep_last=1, keep_age_ms=1), 10**12) == []
    assert surplus(versions(10, 20), Policy(keep_last=1, keep_age_ms=1), 10**12) == [1]
    assert surplus([], Policy(), 0) == []


def test_what_was_not_announced_stays_until_it_is() -> None:
    assert surplus(versions(10, 20, 30, announced=False), Policy(keep_last=1), 100) == []


@given(st.lists(st.integers(0, 100), max_size=12), st.integers(1, 14), st.integers(1, 120))
def test_only_the_oldest_go_and_in_one_piece_whatever_clocks_said(times: list[int], last: int, age_ms: int) -> None:
    gone = surplus(versions(*times), Policy(keep_last=last, keep_age_ms=age_ms), 100)
    assert gone == list(range(1, len(gone) + 1))
    assert len(gone) < max(1, len(times))


def test_a_policy_that_keeps_nothing_is_refused() -> None:
    for impossible in ({"keep_last": 0}, {"keep_last": -1}, {"keep_age_ms": 0}):
        with pytest.raises(InvalidOption):
            Policy(**impossible)
