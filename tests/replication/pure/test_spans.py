"""Spans and timers of the push flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import InvalidOption
from headwater.replication.spans import DAY_MS, Timers, span_ms_of, span_text

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "durations.json").read_text())


@pytest.mark.parametrize(("text", "seconds"), VECTORS["cases"].items())
def test_a_span_is_read_as_the_vectors_say(text: str, seconds: int | None) -> None:
    if seconds is None:
        with pytest.raises(InvalidOption, match="1h30m"):
            span_ms_of(text)
    else:
        assert span_ms_of(text) == seconds * 1000


@pytest.mark.parametrize(("text", "allowed"), VECTORS["wait_idle_allowed"].items())
def test_wait_idle_has_its_limits(text: str, allowed: bool) -> None:
    if allowed:
        assert Timers.of(text).wait_idle_ms == span_ms_of(text)
    else:
        with pytest.raises(InvalidOption, match="waitIdle lies between 1s and 3w3d"):
            Timers.of(text)


@pytest.mark.parametrize(
    "text", ["1m1h", "1s1s", "10 m", " 10m", "10m\n", "١m", "1M", "1e3s", "9999999999s", "+1s", "1hm"]
)
def test_other_spellings_are_refused(text: str) -> None:
    with pytest.raises(InvalidOption):
        span_ms_of(text)


@settings(deadline=None)
@given(st.integers(0, 10**12))
def test_a_span_is_told_as_it_is_read(seconds: int) -> None:
    if seconds < 7 * 86400 * 10**9:
        assert span_ms_of(span_text(seconds * 1000)) == seconds * 1000


def test_the_defaults_of_the_timers() -> None:
    assert Timers(600_000) == Timers(600_000, 600_000, DAY_MS)
    assert Timers.of("10m", "0s", "24h") == Timers(600_000, 0, DAY_MS)
    assert Timers(3 * DAY_MS).max_interval_ms == 3 * DAY_MS, "a long waitIdle alone is no contradiction"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("10m", "2h", "1h"), "shorter than minInterval 2h"),
        (("10m", None, "5m"), "shorter than waitIdle 10m"),
        (("10m", "25d", None), "minInterval lies between"),
        (("10m", None, "53w"), "maxInterval lies between"),
        (("10m", "x", None), "--minInterval: 'x' is no span"),
    ],
)
def test_timers_that_contradict_each_other_are_refused(flags: tuple[str, str | None, str | None], why: str) -> None:
    with pytest.raises(InvalidOption, match=why):
        Timers.of(*flags)


def test_timers_do_not_change() -> None:
    with pytest.raises(AttributeError):
        Timers(1000).wait_idle_ms = 5  # type: ignore[misc]
