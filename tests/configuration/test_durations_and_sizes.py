"""Lengths of time and sizes as people write them."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.configuration.durations import DURATION_CHARS_MAX, duration_ms, say_duration
from headwater.configuration.sizes import SIZE_DIGITS_MAX, size_bytes

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "durations.json").read_text())["cases"]
UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}


@pytest.mark.parametrize(("text", "seconds"), VECTORS.items(), ids=[repr(text) for text in VECTORS])
def test_durations_are_read_as_the_shared_cases_say(text, seconds):
    assert duration_ms(text) == (None if seconds is None else seconds * 1000)


@pytest.mark.parametrize(("text", "ms"), [("250ms", 250), ("0s", 0), ("1s1ms", 1001), ("1w1d", 691_200_000)])
def test_more_durations(text, ms):
    assert duration_ms(text) == ms


@pytest.mark.parametrize(
    "text", [" 3s", "3s ", "3s\n", "3S", "+3s", "٣s", "3s,4s", "1e3s", "1" * DURATION_CHARS_MAX + "s"]
)
def test_what_is_no_duration(text):
    assert duration_ms(text) is None


@given(st.integers(0, 10**15))
def test_a_duration_said_is_read_as_the_same(ms):
    assert duration_ms(say_duration(ms)) == ms


@given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(list(UNITS))), min_size=1, max_size=6))
def test_the_parts_of_a_duration_add_up(parts):
    text = "".join(f"{number}{unit}" for number, unit in parts)
    assert duration_ms(text) == sum(number * UNITS[unit] for number, unit in parts)


def test_durations_are_said_in_the_largest_units():
    spans = [0, 250, 10_000, 90_000, 5_400_000, 86_400_000, 694_861_001]
    assert [say_duration(ms) for ms in spans] == ["0s", "250ms", "10s", "1m30s", "1h30m", "1d", "8d1h1m1s1ms"]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("10kB", 10_000),
        ("10 kb", 10_000),
        ("512MB", 512_000_000),
        ("10GiB", 10 * 1024**3),
        ("1.5GB", 1_500_000_000),
        ("2T", 2 * 10**12),
        ("9007199254740993", 9007199254740993),  # through a float it would be one less
    ],
)
def test_sizes(text, size):
    assert size_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "big", "10 bananas", "-1", "1.", ".5kB", "1e6", "٣kB", "9" * (SIZE_DIGITS_MAX + 1)]
)
def test_what_is_no_size(text):
    assert size_bytes(text) is None


@given(st.integers(0, 2**63))
def test_a_whole_number_is_that_many_bytes(number):
    assert size_bytes(str(number)) == number
    assert size_bytes(f"{number}KiB") == number * 1024
