"""Numbers, spans and names as a page says them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.pipeline.page.words import (
    clean,
    cut,
    days,
    epoch_seconds,
    from_epoch,
    iso_moment,
    moment,
    share,
    short,
    size,
    some,
    span,
    without_password,
)


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, "0"), (7, "7"), (950, "950"), (999.6, "1k"), (1000, "1k"), (12_345, "12.3k"), (999_999, "1M"),
     (4_100_000, "4.1M"), (2.5e9, "2.5G"), (0.25, "0.25"), (-1500, "-1.5k")],
)  # fmt: skip
def test_numbers_are_short(number: float, said: str) -> None:
    assert short(number) == said


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, "0 B"), (512, "512 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**20 - 1, "1 MiB"), (241_400_000, "230 MiB")],
)
def test_sizes_have_binary_units(number: int, said: str) -> None:
    assert size(number) == said


@pytest.mark.parametrize(
    ("ms", "said"),
    [(0, "0 ms"), (3.2, "3.2 ms"), (999.9, "1 s"), (1200, "1.2 s"), (60_000, "1 min"), (5_400_000, "1.5 h"),
     (86_400_000 * 90, "90 d")],
)  # fmt: skip
def test_spans_have_the_unit_that_fits(ms: float, said: str) -> None:
    assert span(ms) == said


@given(st.floats(min_value=0, max_value=1e17))
def test_a_short_number_is_near_the_number(number: float) -> None:
    factor = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    said = short(number).replace(",", "")
    read = float(said[:-1]) * factor[said[-1]] if said[-1] in factor else float(said)
    assert read == pytest.approx(number, rel=0.0051, abs=0.0051)


def test_days_and_shares_are_no_finer_than_useful() -> None:
    assert (days(0.3), days(1.9), days(41.6), days(3650)) == ("under a day", "1 day", "41 days", "10 years")
    assert (share(0, 0), share(1, 10_000), share(1, 20), share(1, 2)) == ("0 %", "< 0.1 %", "5.0 %", "50 %")
    assert (some(1, "gap"), some(2, "gap"), some(2, "redelivery", "redeliveries")) == (
        "1 gap",
        "2 gaps",
        "2 redeliveries",
    )


def test_times_are_said_in_utc_whatever_zone_they_come_in() -> None:
    berlin = timezone(timedelta(hours=1))
    assert moment(datetime(2025, 11, 15, 0, 30, tzinfo=berlin)) == "14 Nov 2025, 23:30"
    assert moment(datetime(2025, 11, 15, 0, 30)) == "15 Nov 2025, 00:30"
    assert iso_moment("2025-11-15T00:30:00Z") == datetime(2025, 11, 15, 0, 30, tzinfo=UTC)
    assert iso_moment("yesterday") is None
    assert iso_moment(None) is None


def test_times_beyond_the_calendar_are_put_on_its_edge() -> None:
    assert from_epoch(10**18).year == 9999
    assert from_epoch(-(10**18)).year == 1
    assert epoch_seconds(from_epoch(1_763_204_400)) == 1_763_204_400


@given(st.text(st.characters(codec=None)))
def test_clean_text_can_be_written_and_hides_nothing(text: str) -> None:
    made = clean(text)
    made.encode()
    assert all(mark.isprintable() or mark in "\n\u200c\u200d" for mark in made)
    assert clean(made) == made


def test_what_would_steer_the_text_is_shown() -> None:
    assert clean("a\x1b[31m\u202eb\ud800\tc\0") == "a\\x1b[31m\\u202eb\\ud800\\x09c\\x00"
    assert clean("سفارش \u05d4\u05d6\u05de\u05e0\u05d4 👩\u200d💻") == "سفارش \u05d4\u05d6\u05de\u05e0\u05d4 👩\u200d💻"


@given(st.text(max_size=300), st.integers(min_value=8, max_value=100))
def test_a_cut_name_fits_and_keeps_both_ends(text: str, chars_max: int) -> None:
    made = cut(text, chars_max)
    assert len(made) <= chars_max
    whole = clean(text.replace("\n", " "))
    assert made == whole or (whole.startswith(made.split("…")[0]) and whole.endswith(made[-1]) and "…" in made)


def test_passwords_do_not_reach_the_page() -> None:
    assert without_password("postgres://me:s3cret@host/db") == "postgres://me:***@host/db"
    assert without_password("events.db") == "events.db"
