import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.delivery.histogram import SAMPLES_MAX, bucket_of, sample, upper_bound_ms

YEARS_100_MS = 100 * 366 * 24 * 3_600_000
times = st.integers(0, 100) | st.integers(0, YEARS_100_MS)


@pytest.mark.parametrize(
    ("ms", "bucket"),
    [(-5, 0), (0, 0), (1, 1), (2, 5), (3, 7), (4, 9), (5, 10), (10, 14), (1_000, 40), (1_023, 40), (1_024, 41)],
)
def test_buckets_are_fixed(ms: int, bucket: int) -> None:
    """They are stored: another numbering would make nonsense of what is there."""
    assert bucket_of(ms) == bucket


@given(times.filter(bool))
def test_a_bucket_is_a_quarter_of_a_doubling(ms: int) -> None:
    assert abs(4 * math.log2(ms) + 1 - bucket_of(ms)) < 1.000_001
    assert upper_bound_ms(bucket_of(ms) - 1) * 0.999_999 <= ms < upper_bound_ms(bucket_of(ms)) * 1.000_001


@given(st.integers(0, 10_000).map(lambda eighth: int(2 ** (eighth / 250))))
def test_it_agrees_with_the_logarithm(ms: int) -> None:
    assert bucket_of(ms) == math.floor(4 * math.log2(ms)) + 1


@given(times, times)
def test_longer_is_never_in_a_lower_bucket(one: int, other: int) -> None:
    low, high = sorted([one, other])
    assert bucket_of(low) <= bucket_of(high)


def test_bounds_rise() -> None:
    bounds = [upper_bound_ms(bucket) for bucket in range(200)]
    assert bounds[:2] == [0.0, 2**0.25]
    assert bounds == sorted(set(bounds))
    assert (upper_bound_ms(4), upper_bound_ms(40)) == (2.0, 1024.0)


@given(st.integers(0, 20_000))
def test_each_of_a_sample_stands_for_its_share(count: int) -> None:
    found = sample(count)
    assert len(found) == min(count, SAMPLES_MAX)
    assert sum(weight for _, weight in found) == count
    after = 0
    for index, weight in found:
        assert after <= index < after + weight, "it is one of those it stands for"
        assert count // SAMPLES_MAX <= weight <= count // SAMPLES_MAX + 1
        after += weight


def test_few_are_all_taken() -> None:
    assert sample(3) == ((0, 1), (1, 1), (2, 1))
    assert sample(0) == ()
