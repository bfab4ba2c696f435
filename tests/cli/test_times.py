"""What users type for times, spans, sizes and places."""

from datetime import UTC, datetime, timedelta

import pytest

from headwater.cli.times import parse_size, parse_span, parse_start, parse_time, say_size, say_span
from headwater.errors import InvalidOption

NOW = datetime(2026, 7, 29, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("3s", 3), ("10m", 600), ("1h", 3600), ("1h30m", 5400), ("3d", 259200), ("2w", 1209600)],
)
def test_spans(text, seconds):
    assert parse_span(text, "x") == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "10", "m", "-5s", "1h 30m", "5x", "1.5h", "3mo", "9" * 30 + "w"])
def test_spans_that_are_refused(text):
    with pytest.raises(InvalidOption):
        parse_span(text, "x")


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
def test_times(text, moment):
    assert parse_time(text, "x", NOW) == moment
    assert parse_start(text, "x", NOW) == moment


@pytest.mark.parametrize("text", ["", "yesterday", "-", "-1", "25:00", "2026-13-01", "-" + "9" * 12 + "w"])
def test_times_that_are_refused(text):
    with pytest.raises(InvalidOption):
        parse_time(text, "x", NOW)
    with pytest.raises(InvalidOption, match="no place in a log"):
        parse_start(text, "x", NOW)


def test_starts():
    assert [parse_start(text, "x", NOW) for text in ("first", "new", "17")] == ["first", "new", 17]


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("10kB", 10_000), ("1.5GB", 1_500_000_000), ("512MiB", 512 * 1024**2)]
)
def test_sizes(text, size):
    assert parse_size(text, "x") == size


@pytest.mark.parametrize("text", ["", "big", "10 bananas", "-1"])
def test_sizes_that_are_refused(text):
    with pytest.raises(InvalidOption):
        parse_size(text, "x")


def test_said_to_people():
    spans = [0, 35, 12_000, 200_000, 7_500_000, 360_000_000, 3_600_000]
    assert [say_span(ms) for ms in spans] == ["0ms", "35ms", "12s", "3m 20s", "2h 5m", "4d 4h", "1h"]
    assert [say_size(size) for size in (0, 812, 77_800, 999_999, 1_300_000_000)] == [
        "0 B",
        "812 B",
        "77.8 kB",
        "1.0 MB",
        "1.3 GB",
    ]
