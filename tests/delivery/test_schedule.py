"""Timetables as pure functions: intervals, cron expressions over both changes of clocks, and missed occurrences."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.delivery.schedule import (
    LATE_MS,
    MISSED_MAX,
    Plan,
    Schedule,
    check_schedule,
    local_time,
    newest,
    next_after,
    occurrences,
    plan,
)
from headwater.errors import InvalidOptionError
from headwater.formats import time_ms

BERLIN = "Europe/Berlin"  # forward on 2026-03-29 at 02:00 to 03:00, back on 2026-10-25 at 03:00 to 02:00
MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000


def cron(expression: str, tz: str = BERLIN, **options: object) -> Schedule:
    return Schedule("s", "t", cron=expression, tz=tz, **options)  # type: ignore[arg-type]


def every(ms: int, **options: object) -> Schedule:
    return Schedule("s", "t", every_ms=ms, **options)  # type: ignore[arg-type]


def utc(text: str) -> int:
    return time_ms(datetime.fromisoformat(text).replace(tzinfo=UTC))


def in_utc(schedule: Schedule, start: str, count: int) -> list[str]:
    found = islice(occurrences(schedule, utc(start)), count)
    return [datetime.fromtimestamp(ms / 1000, UTC).strftime("%m-%d %H:%M") for ms in found]


# --- changes of clocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "start", "expected"),
    [
        # The hour from 02:00 to 03:00 of 29 March does not exist: 03:00 summer time is 01:00 UTC.
        ("0 3 * * *", "2026-03-28T00:00", ["03-28 02:00", "03-29 01:00", "03-30 01:00"]),
        ("30 2 * * *", "2026-03-28T00:00", ["03-28 01:30", "03-29 01:00", "03-30 00:30"]),
        ("0,30 2 * * *", "2026-03-28T12:00", ["03-29 01:00", "03-30 00:00", "03-30 00:30"]),
        ("30 * * * *", "2026-03-29T00:00", ["03-29 00:30", "03-29 01:30", "03-29 02:30"]),
        ("*/30 * * * *", "2026-03-29T00:00", ["03-29 00:30", "03-29 01:00", "03-29 01:30"]),
        # The hour from 02:00 to 03:00 of 25 October comes twice, from 00:00 and from 01:00 UTC.
        ("0 3 * * *", "2026-10-24T00:00", ["10-24 01:00", "10-25 02:00", "10-26 02:00"]),
        ("30 2 * * *", "2026-10-24T00:00", ["10-24 00:30", "10-25 00:30", "10-26 01:30"]),
        ("30 * * * *", "2026-10-25T00:00", ["10-25 00:30", "10-25 01:30", "10-25 02:30"]),
        # Begun inside the second of the two hours: what ran in the first does not run again.
        ("45 2 * * *", "2026-10-25T01:15", ["10-26 01:45", "10-27 01:45"]),
        ("15,45 2 * * *", "2026-10-25T00:20", ["10-25 00:45", "10-26 01:15"]),
    ],
)
def test_cron_over_both_changes_of_clocks(expression: str, start: str, expected: list[str]) -> None:
    assert in_utc(cron(expression), start, len(expected)) == expected


def test_the_other_hemisphere_and_a_change_by_half_an_hour() -> None:
    """Lord Howe moves by 30 minutes: back on 5 April 2026 at 02:00 to 01:30, forward on 4 October at 02:00 to 02:30."""
    zone = "Australia/Lord_Howe"
    assert in_utc(cron("45 1 * * *", zone), "2026-04-03T00:00", 3) == ["04-03 14:45", "04-04 14:45", "04-05 15:15"]
    assert in_utc(cron("15 2 * * *", zone), "2026-10-02T00:00", 3) == ["10-02 15:45", "10-03 15:30", "10-04 15:15"]


def test_every_does_not_know_of_clocks() -> None:
    found = list(islice(occurrences(every(6 * HOUR_MS), utc("2026-03-28T18:00")), 8))
    assert {after - before for before, after in pairwise(found)} == {6 * HOUR_MS}


def test_an_occurrence_is_shown_in_its_zone() -> None:
    at = local_time(cron("30 2 * * *"), utc("2026-10-25T00:30"))
    assert (at.hour, at.minute, at.utcoffset()) == (2, 30, timedelta(hours=2))


# --- properties -------------------------------------------------------------------------------------------------------

_minutes = st.sampled_from(["*", "*/7", "0", "30", "0,30", "59", "*/15"])
_hours = st.sampled_from(["*", "2", "3", "1-3", "*/2", "2,3"])
_days = st.sampled_from(["* * *", "* * 0", "29 3 *", "25 10 *", "1 * *"])
_zones = st.sampled_from([BERLIN, "UTC", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"])
_crons = st.builds(lambda m, h, d, z: cron(f"{m} {h} {d}", z), _minutes, _hours, _days, _zones)
_schedules = st.one_of(_crons, st.builds(every, st.integers(1_000, 40 * DAY_MS)))
# Around the changes of 2026 in Berlin, New York and on Lord Howe, to the second.
_changes = st.sampled_from(["2026-03-29T01:00", "2026-10-25T01:00", "2026-03-08T07:00", "2026-11-01T06:00"])
_times = st.builds(lambda text, s: utc(text) + s * 1000, _changes, st.integers(-3 * 86_400, 3 * 86_400))


@given(_schedules, _times, st.integers(0, 5 * DAY_MS))
def test_where_a_process_begins_to_look_changes_nothing(schedule: Schedule, start_ms: int, later_ms: int) -> None:
    """Else two processes would publish different occurrences."""
    from_start = [ms for ms in islice(occurrences(schedule, start_ms), 500) if ms > start_ms + later_ms]
    if from_start:
        assert next_after(schedule, start_ms + later_ms) == from_start[0]


@given(_schedules, _times)
def test_occurrences_ascend_and_lie_after_the_start(schedule: Schedule, start_ms: int) -> None:
    found = [start_ms, *islice(occurrences(schedule, start_ms), 50)]
    assert all(before < after for before, after in pairwise(found))


@given(_schedules, _times, st.integers(0, 3 * DAY_MS), st.integers(1, 20))
def test_the_newest_are_the_last_of_all(schedule: Schedule, after_ms: int, span_ms: int, count: int) -> None:
    upto_ms = after_ms + span_ms
    everything = []
    for ms in occurrences(schedule, after_ms):
        if ms > upto_ms:
            break
        everything.append(ms)
        if len(everything) > 5_000:
            return
    assert newest(schedule, after_ms, upto_ms, count) == (everything[-count:], len(everything) > count)


@given(_crons, _times)
def test_a_fixed_time_runs_once_a_day(schedule: Schedule, start_ms: int) -> None:
    assert schedule.cron is not None
    minute, hour, *rest = schedule.cron.split()
    if not (minute.isdigit() and hour.isdigit() and rest == ["*"] * 3):
        return
    days = [local_time(schedule, ms).date() for ms in islice(occurrences(schedule, start_ms), 8)]
    assert all(after - before == timedelta(days=1) for before, after in pairwise(days))


# --- missed occurrences -----------------------------------------------------------------------------------------------

NOON = utc("2026-01-01T12:00")


def test_what_is_due_on_time_is_published_by_every_policy() -> None:
    for missed in ("once", "skip", "all"):
        found = plan(every(HOUR_MS, missed=missed), NOON - 1, NOON + 5)
        assert found == Plan([NOON], False, NOON, NOON + HOUR_MS)
        assert plan(every(HOUR_MS, missed=missed), NOON, NOON + 5) == Plan([], False, None, NOON + HOUR_MS)


def test_missed_occurrences_by_policy() -> None:
    now_ms, last_ms = NOON + LATE_MS + 1, NOON - 3 * HOUR_MS
    next_ms = NOON + HOUR_MS
    assert plan(every(HOUR_MS, missed="once"), last_ms, now_ms) == Plan([NOON], True, NOON, next_ms)
    assert plan(every(HOUR_MS, missed="skip"), last_ms, now_ms) == Plan([], True, NOON, next_ms)
    due = [NOON - 2 * HOUR_MS, NOON - HOUR_MS, NOON]
    assert plan(every(HOUR_MS, missed="all"), last_ms, now_ms) == Plan(due, False, NOON, next_ms)
    assert plan(every(HOUR_MS, missed="all", missed_max=2), last_ms, now_ms) == Plan(due[1:], True, NOON, next_ms)


def test_a_clock_that_went_back_publishes_nothing_again() -> None:
    assert plan(every(HOUR_MS), NOON, NOON - DAY_MS) == Plan([], False, None, NOON + HOUR_MS)


def test_years_without_a_process_cost_a_moment() -> None:
    found = plan(cron("* * * * *", missed="all", missed_max=MISSED_MAX), 0, NOON)
    assert (len(found.publish), found.skipped, found.upto_ms) == (MISSED_MAX, True, NOON)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        (cron("0 3 * *"), "5 fields"),
        (cron("@daily"), "5 fields"),
        (cron("0 0 3 * * *"), "5 fields"),
        (cron("61 3 * * *"), "Bad minute"),
        (cron("0 0 30 2 *"), "Bad day-of-month"),
        (cron("* " * 200), "5 fields"),
        (cron("0 3 * * *", "Mars/Olympus"), "there is no time zone 'Mars/Olympus'"),
        (cron("0 3 * * *", "../etc/passwd"), "there is no time zone"),
        (every(999), "a second at least"),
        (Schedule("s", "t"), "an interval or a cron expression"),
        (Schedule("two words", "t", every_ms=5_000), "no blanks"),
        (Schedule("x" * 65, "t", every_ms=5_000), "1 to 64 characters"),
        (every(5_000, missed="never"), "missed must be one of once, skip, all"),
        (every(5_000, missed_max=0), "missed_max"),
    ],
)
def test_what_cannot_be_used_is_refused(schedule: Schedule, why: str) -> None:
    with pytest.raises(InvalidOptionError, match=why):
        check_schedule(schedule)


def test_zones_are_those_of_the_system() -> None:
    assert local_time(cron("0 3 * * *"), NOON).tzinfo == ZoneInfo(BERLIN)
