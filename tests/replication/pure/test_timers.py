"""The timers of a push: their flags, and when a push is due."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import InvalidOptionError
from headwater.formats import parse_duration
from headwater.replication.timers import DAY_MS, Debounce, Timers

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "durations.json").read_text())


@pytest.mark.parametrize(("text", "allowed"), VECTORS["wait_idle_allowed"].items())
def test_wait_idle_has_its_limits(text: str, allowed: bool) -> None:
    if allowed:
        assert Timers.of(text).wait_idle_ms == parse_duration(text) // timedelta(milliseconds=1)
    else:
        with pytest.raises(InvalidOptionError, match="waitIdle lies between 1s and 24d"):
            Timers.of(text)


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
        (("10m", "x", None), "minInterval must be a duration, not 'x'"),
    ],
)
def test_timers_that_contradict_each_other_are_refused(flags: tuple[str, str | None, str | None], why: str) -> None:
    with pytest.raises(InvalidOptionError, match=why):
        Timers.of(*flags)


def test_timers_do_not_change() -> None:
    with pytest.raises(AttributeError):
        Timers(1000).wait_idle_ms = 5  # type: ignore[misc]


DEBOUNCE_VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "debounce.json").read_text())


def timers_of(case: dict[str, Any]) -> Timers:
    shortest = case["min"]
    return Timers(case["idle"] * 1000, None if shortest is None else shortest * 1000, case["max"] * 1000)


def pushes_of(timers: Timers, writes_ms: list[int]) -> list[tuple[int, list[int]]]:
    """The moments of pushes that take no time, each with the writes it carries. 0 is the last push before."""
    debounce = Debounce(timers, 0)
    pushes: list[tuple[int, list[int]]] = []
    unpushed: list[int] = []
    now = 0
    for write_ms in [*writes_ms, None]:
        while (due_ms := debounce.due_ms()) is not None and (write_ms is None or due_ms < write_ms):
            now = max(now, due_ms)
            debounce.pushed(now)
            pushes.append((now, unpushed))
            unpushed = []
        if write_ms is not None:
            now = write_ms
            debounce.wrote(now)
            unpushed.append(now)
        assert debounce.dirty == bool(unpushed)
    return pushes


@pytest.mark.parametrize("case", DEBOUNCE_VECTORS["cases"], ids=str)
def test_pushes_are_due_when_the_vectors_say(case: dict[str, Any]) -> None:
    every = case.get("writes_every")
    writes = list(range(every, case["until"] + 1, every)) if every else case["writes"]
    found = [push for push, _ in pushes_of(timers_of(case), [at * 1000 for at in writes])]
    assert found == [at * 1000 for at in case["pushes"]]


@pytest.mark.parametrize("case", DEBOUNCE_VECTORS["refused"], ids=lambda case: case["why"])
def test_timers_are_refused_as_the_vectors_say(case: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        timers_of(case)


@st.composite
def timers(draw: st.DrawFn) -> Timers:
    idle_ms = draw(st.integers(1_000, 20_000))
    min_ms = draw(st.integers(0, 40_000))
    return Timers(idle_ms, min_ms, draw(st.integers(max(idle_ms, min_ms), 90_000)))


@settings(deadline=None)
@given(timers(), st.lists(st.integers(1, 200_000), max_size=40).map(sorted))
def test_every_write_is_pushed_neither_too_soon_nor_too_late(timers: Timers, writes: list[int]) -> None:
    pushes = pushes_of(timers, writes)
    last_push = 0
    for push, carried in pushes:
        assert carried, "a push while nothing was unpushed"
        at_most = last_push + timers.max_interval_ms
        assert push >= last_push + timers.min_interval_ms
        assert push >= min(carried[-1] + timers.wait_idle_ms, at_most)
        assert push <= max(at_most, carried[0])
        assert push <= max(carried[-1] + timers.wait_idle_ms, last_push + timers.min_interval_ms)
        last_push = push
    assert [write for _, carried in pushes for write in carried] == writes, "a write that no push follows"
