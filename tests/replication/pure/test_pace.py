"""How slow a client may be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.replication.host.session import BYTES_A_SECOND_MIN, Pace, patience_s

DAY_S = 24 * 3600
PATIENCE_S = 900.0


def ends_at(pace: Pace, *, every_s: int, size: int, until_s: int = DAY_S) -> int | None:
    """When patience is over with a client that moves so much so often, from 0 on."""
    pace.wait(0)
    for now_s in range(every_s, until_s, every_s):
        if pace.left_s(now_s) <= 0:
            return now_s
        pace.moved(size, now_s)
        pace.waited(now_s)
        pace.wait(now_s)
    return None


@pytest.mark.parametrize("every_s", [1, 32, 100, 500])
def test_a_line_of_8_kilobytes_a_second_may_take_a_day_however_large_the_pieces(every_s: int) -> None:
    assert ends_at(Pace(0, PATIENCE_S), every_s=every_s, size=8_000 * every_s) is None


@pytest.mark.parametrize(("every_s", "size"), [(1, 1), (500, 9), (60, 60 * 1_000)])
def test_drops_are_not_enough(every_s: int, size: int) -> None:
    end_s = ends_at(Pace(0, PATIENCE_S), every_s=every_s, size=size)
    assert end_s is not None
    assert PATIENCE_S <= end_s < 2 * PATIENCE_S


def test_a_pause_is_allowed_and_much_data_is_no_credit_for_a_longer_one() -> None:
    pace = Pace(0, PATIENCE_S)
    pace.moved(1 << 40, 0)
    pace.wait(0)
    assert pace.left_s(PATIENCE_S - 1) == 1
    assert pace.left_s(PATIENCE_S) == 0


def test_what_our_side_takes_is_not_the_client_s() -> None:
    pace = Pace(0, PATIENCE_S)
    pace.wait(0)
    for hour in range(1, 24):  # the client waits for our words, and we for its own
        pace.worked(hour * 3600)
    pace.waited(DAY_S - 3600 + 1)
    assert pace.left_s(2 * DAY_S) == PATIENCE_S - 1  # nor is what we do between two waits
    pace.wait(2 * DAY_S)
    pace.wait(2 * DAY_S + 10)
    pace.waited(2 * DAY_S + 20)
    assert pace.left_s(2 * DAY_S + 30) == PATIENCE_S - 31  # two waits at once count once


def test_a_client_may_be_silent_for_as_long_as_its_database_takes_to_be_read() -> None:
    assert patience_s(60.0, 12_000) == pytest.approx(60, abs=0.01)
    assert patience_s(60.0, 10 * 1024**3) < 600


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, BYTES_A_SECOND_MIN // 2)), min_size=1))
def test_no_client_stays_at_half_the_least_rate(steps: list[tuple[int, int]]) -> None:
    pace, now_s = Pace(0, PATIENCE_S), 0
    pace.wait(0)
    while pace.left_s(now_s) > 0:
        for span_s, rate in steps:
            now_s += span_s
            pace.moved(rate * span_s, now_s)
        assert now_s <= 2 * PATIENCE_S + sum(span_s for span_s, _ in steps)
