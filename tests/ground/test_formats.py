"""Durations, sizes, times, counts and urls as text."""

import json
import math
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidOptionError
from headwater.formats import (
    DURATION_CHARS_MAX,
    SIZE_DIGITS_MAX,
    TIME_MS_MAX,
    datetime_of,
    format_count,
    format_duration,
    format_seconds,
    format_size,
    iso,
    mask_url,
    ms_of_iso,
    parse_duration,
    parse_size,
    parse_time,
    plural,
    redact_url,
    span_ms,
    split_url,
    time_ms,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "durations.json").read_text())["cases"]
NOW = datetime(2026, 7, 29, 12, 0, tzinfo=UTC)
LONGEST_SPAN_S = 100 * 365.25 * 24 * 3600
MS = timedelta(milliseconds=1)


# --- times ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, TIME_MS_MAX))
def test_times_survive_the_way_to_text_and_back(ms: int) -> None:
    assert ms_of_iso(iso(ms)) == ms
    assert time_ms(datetime_of(ms)) == ms
    assert iso(ms).endswith("Z")


@given(st.datetimes(datetime(1971, 1, 1), datetime(9998, 1, 1)), st.integers(-23, 23))
def test_a_time_zone_changes_the_clock_not_the_moment(naive: datetime, hours: int) -> None:
    there = naive.replace(tzinfo=timezone(timedelta(hours=hours)))
    assert time_ms(there) == time_ms(there.astimezone(UTC))
    assert abs(time_ms(there) / 1000 - there.timestamp()) <= 0.001


@pytest.mark.parametrize("seconds", [0, 1_700_000_000, 1_700_000_000.25])
def test_numbers_are_seconds_since_1970(seconds: float) -> None:
    assert time_ms(seconds) == round(seconds * 1000)


@pytest.mark.parametrize(
    "wrong",
    [
        datetime(2024, 1, 1),  # no zone
        -1,
        TIME_MS_MAX / 1000 + 1,
        math.nan,
        math.inf,
        True,
        "2024-01-01",
        None,
    ],
)
def test_impossible_times_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidOptionError, match="start"):
        time_ms(wrong, "start")


@given(st.floats(0, LONGEST_SPAN_S))
def test_spans_are_seconds(seconds: float) -> None:
    assert span_ms(seconds, "delay") == round(seconds * 1000)


@pytest.mark.parametrize(("text", "seconds"), [case for case in VECTORS.items() if case[1] is not None])
def test_spans_are_texts_too(text: str, seconds: int) -> None:
    assert span_ms(text, "delay") == seconds * 1000


@pytest.mark.parametrize(
    "wrong", [-0.001, LONGEST_SPAN_S + 1, timedelta(days=-1), math.nan, math.inf, True, "5", "", "5 m", None]
)
def test_impossible_spans_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidOptionError, match="delay"):
        span_ms(wrong, "delay")


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("now", NOW),
        ("-1h", NOW - timedelta(hours=1)),
        ("2026-07-28", datetime(2026, 7, 28, tzinfo=UTC)),
        ("2026-07-28T10:30", datetime(2026, 7, 28, 10, 30, tzinfo=UTC)),
        ("2026-07-28T10:30:00+02:00", datetime(2026, 7, 28, 8, 30, tzinfo=UTC)),
        ("10:30", datetime(2026, 7, 29, 10, 30, tzinfo=UTC)),
        ("9:05:07", datetime(2026, 7, 29, 9, 5, 7, tzinfo=UTC)),
    ],
)
def test_times_as_text(text: str, moment: datetime) -> None:
    assert parse_time(text, "--at", NOW) == moment


@pytest.mark.parametrize("text", ["", "yesterday", "-", "-1", "25:00", "2026-13-01", "-" + "9" * 12 + "w"])
def test_other_texts_are_not_times(text: str) -> None:
    with pytest.raises(InvalidOptionError, match="--at"):
        parse_time(text, "--at", NOW)


# --- durations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "seconds"), VECTORS.items(), ids=[repr(text) for text in VECTORS])
def test_durations_follow_the_shared_cases(text: str, seconds: int | None) -> None:
    if seconds is None:
        with pytest.raises(InvalidOptionError, match="--wait must be a duration, not ") as refused:
            parse_duration(text, "--wait")
        assert ("1h30m" if text != "10" else "Did you mean 10s?") in refused.value.next
    else:
        assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(("text", "ms"), [("250ms", 250), ("0s", 0), ("1s1ms", 1001), ("1w1d", 691_200_000)])
def test_more_durations(text: str, ms: int) -> None:
    assert parse_duration(text) == timedelta(milliseconds=ms)


@pytest.mark.parametrize(
    "text",
    [" 3s", "3s ", "3s\n", "3S", "+3s", "\u0663s", "3s,4s", "1e3s", "1m1h", "1s1s", "1hm", "9" * 30 + "w",
     "1" * DURATION_CHARS_MAX + "s"],
)  # fmt: skip
def test_other_texts_are_not_durations(text: str) -> None:
    with pytest.raises(InvalidOptionError):
        parse_duration(text)


@given(st.integers(0, int(LONGEST_SPAN_S * 1000)))
def test_a_printed_duration_is_read_as_the_same(ms: int) -> None:
    assert parse_duration(format_duration(ms)) // MS == ms


def test_durations_are_printed_in_the_largest_units() -> None:
    spans = [0, 250, 10_000, 90_000, 5_400_000, 86_400_000, 694_861_001]
    assert [format_duration(ms) for ms in spans] == ["0s", "250ms", "10s", "1m30s", "1h30m", "1d", "8d1h1m1s1ms"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.0352, "0.035 s"), (0.9999, "1 s"), (1.25, "1.25 s"), (12, "12 s"), (59.99, "1 min"),
     (200, "3.33 min"), (9_000, "2.5 h"), (360_000, "4.17 d"), (86_400 * 90, "90 d")],
)  # fmt: skip
def test_measured_durations_are_rounded(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


# --- sizes and counts -------------------------------------------------------------------------------------------------


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
        ("1.0005kB", 1001),
        ("2T", 2 * 10**12),
        ("9007199254740993", 9007199254740993),  # through a float it would be one less
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "big", "10 bananas", "-1", "1.", ".5kB", "1e6", "\u0663kB", "9" * (SIZE_DIGITS_MAX + 1)]
)
def test_other_texts_are_not_sizes(text: str) -> None:
    with pytest.raises(InvalidOptionError, match="--max-bytes must be a size"):
        parse_size(text, "--max-bytes")


@given(st.integers(0, 2**63))
def test_a_whole_number_is_that_many_bytes(number: int) -> None:
    assert parse_size(str(number)) == number
    assert parse_size(f"{number}KiB") == number * 1024


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (812, "812 B"), (1536, "1.5 KiB"), (77_800, "76 KiB"), (2**20 - 1, "1 MiB"),
     (1_300_000_000, "1.21 GiB"), (2**60, "1,024 PiB")],
)  # fmt: skip
def test_sizes_are_printed_in_binary_units(size: int, text: str) -> None:
    assert format_size(size) == text


def test_counts() -> None:
    assert (plural(1, "gap"), plural(2_000, "gap")) == ("1 gap", "2,000 gaps")
    assert plural(2, "redelivery", "redeliveries") == "2 redeliveries"
    numbers = (0, 950, 999.6, 12_345, 999_999, 2.5e9, 0.25, -1500)
    assert [format_count(number) for number in numbers] == ["0", "950", "1k", "12.3k", "1M", "2.5G", "0.25", "-1.5k"]


# --- urls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "redacted", "masked"),
    [
        ("postgres://me:secret@db/shop", "postgres://me@db/shop", "postgres://me:***@db/shop"),
        ("postgres://me:s:e/c?r@et@db/shop", "postgres://me@db/shop", "postgres://me:***@db/shop"),
        ("headwater:postgres://me:secret@db/shop", "headwater:postgres://me@db/shop", None),
        ("redis://:secret@[::1]:1/0", "redis://[::1]:1/0", "redis://:***@[::1]:1/0"),
        ("postgres://db/shop?password=secret&sslmode=on", "postgres://db/shop", "postgres://db/shop?password=***&sslmode=on"),
        ("s3://bucket/a?secret_access_key=x&region=eu", "s3://bucket/a", "s3://bucket/a?secret_access_key=***&region=eu"),
        ("postgres://me@db/shop?schema=a", "postgres://me@db/shop", "postgres://me@db/shop?schema=a"),
        ("s3://bucket/a@b", "s3://bucket/a@b", "s3://bucket/a@b"),
        ("events.db", "events.db", "events.db"),
        ("memory:", "memory:", "memory:"),
    ],
)  # fmt: skip
def test_passwords_are_not_shown(url: str, redacted: str, masked: str | None) -> None:
    assert redact_url(url) == redacted
    assert masked is None or mask_url(url) == masked


def test_named_parameters_stay_in_a_redacted_url() -> None:
    url = "postgres://me:secret@db/shop?schema=a&sslpassword=secret&sslmode=on"
    assert redact_url(url, keep=("schema",)) == "postgres://me@db/shop?schema=a"
    assert redact_url(url, keep=None) == "postgres://me@db/shop?schema=a&sslmode=on"
    assert redact_url("postgres://db/shop?p%61ssword=x&a=1", keep=None) == "postgres://db/shop?a=1"
    assert redact_url("ws://token@host:1/a@b?x=1", user=False) == "ws://host:1/a@b"


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:se/cret@host",
        "redis://user:se?cret@host",
        "redis://user:se#cret@host",
        "redis://user:cret@host:port/0",
        "redis://[cret/0",
    ],
)
def test_a_url_that_cannot_be_read_is_not_quoted(url: str) -> None:
    with pytest.raises(InvalidOptionError, match="this url cannot be read") as refused:
        split_url(url)
    assert "cret" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_an_escaped_password_is_read() -> None:
    parts = split_url("redis://user:a%2Fb@host:6379/0?db=1")
    assert (parts.password, parts.port, parts.query) == ("a%2Fb", 6379, "db=1")
