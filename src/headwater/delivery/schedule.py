"""When a schedule is due: timetables, and what becomes of occurrences that were missed. Pure: times are passed in.

An occurrence is a moment of a timetable. Every process computes the same ones, so they have the same message ids
everywhere. `every` means the multiples of an interval since 1970 UTC. `cron` follows the clocks of a time zone: an
expression with a fixed hour runs once on the days on which clocks change (a time that is skipped runs when the clocks
have moved, one that comes twice runs the first time); one whose minute or hour begins with `*` runs by elapsed time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec

from headwater.arguments import check_choice, check_text, check_whole
from headwater.errors import InvalidOptionError
from headwater.formats import TIME_MS_MAX, datetime_of, format_duration, iso, time_ms

Missed = Literal["once", "skip", "all"]
MISSED: tuple[Missed, ...] = ("once", "skip", "all")

SCHEDULE_ID_CHARS_MAX = 64  # with a time behind it, it is the id of a message
CRON_CHARS_MAX = 200
CRON_FIELDS = 5
ZONE_CHARS_MAX = 64
EVERY_MS_MIN = 1_000
MISSED_MAX = 1_000  # occurrences that are made up for at a time
LATE_MS = 60_000  # an occurrence is missed if nothing published it within this time
_WINDOW_MS = 60_000  # in which the newest occurrences are looked for; doubled until there are enough


class Schedule(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What is published when. `every_ms` or `cron` is set. `missed_max` limits `missed="all"`."""

    id: str
    topic: str
    every_ms: int | None = None
    cron: str | None = None
    tz: str = "UTC"
    missed: Missed = "once"
    missed_max: int = 100

    @property
    def text(self) -> str:
        """The timetable for people: `every 5m`, `0 3 * * * Europe/Berlin`."""
        return f"every {format_duration(self.every_ms)}" if self.every_ms is not None else f"{self.cron} {self.tz}"

    def is_same_timetable(self, other: Schedule) -> bool:
        return (self.topic, self.every_ms, self.cron, self.tz) == (other.topic, other.every_ms, other.cron, other.tz)

    def message_id(self, at_ms: int) -> str:
        """The same in every process, so that an occurrence is stored once."""
        return f"{self.id}@{iso(at_ms)}"


class Plan(NamedTuple):
    """`publish`: occurrences, oldest first. `skipped`: whether the policy drops others. `upto_ms`: the newest that is
    due, None if none is. `next_ms`: the next one after now, None if there is none."""

    publish: list[int]
    skipped: bool
    upto_ms: int | None
    next_ms: int | None


def check_schedule(schedule: Schedule) -> Schedule:
    """Refuse what cannot be used, before it is stored or waited for."""
    id = check_text("the id of a schedule", schedule.id)
    if not 1 <= len(id) <= SCHEDULE_ID_CHARS_MAX or not id.isprintable() or not id.isascii() or " " in id:
        raise InvalidOptionError(
            f"the id of a schedule has 1 to {SCHEDULE_ID_CHARS_MAX} characters of ASCII, no blanks, not {id[:80]!r}",
            next='Name it like "nightly-report"',
        )
    check_choice("missed", schedule.missed, MISSED, where=id)
    check_whole("missed_max", schedule.missed_max, 1, MISSED_MAX)
    if (schedule.every_ms is None) == (schedule.cron is None):
        raise InvalidOptionError("a schedule has an interval or a cron expression", where=id)
    if schedule.every_ms is not None:
        if schedule.every_ms < EVERY_MS_MIN:
            raise InvalidOptionError(
                f"the interval of a schedule is a second at least, not {schedule.every_ms} ms",
                where=id,
                next='Write it like "10s" or "5m"',
            )
        return schedule
    assert schedule.cron is not None
    check_text("a cron expression", schedule.cron)
    zone(check_text("tz", schedule.tz))
    if why := _problem(schedule.cron):
        raise InvalidOptionError(
            f"not a cron expression: {schedule.cron[:80]!r} ({why})",
            where=id,
            next='Write minute, hour, day, month and weekday, like "0 3 * * 1-5"',
        )
    return schedule


def _problem(expression: str) -> str | None:
    from cronsim import CronSimError

    if len(expression) > CRON_CHARS_MAX or len(expression.split()) != CRON_FIELDS:
        return f"it needs {CRON_FIELDS} fields"
    try:
        first = next(_crons(expression, datetime(2024, 1, 1, tzinfo=UTC)), None)
    except CronSimError as exc:
        return str(exc)
    return "no day matches it" if first is None else None


@lru_cache(maxsize=128)
def zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC
    from zoneinfo import ZoneInfo

    try:
        if len(name) > ZONE_CHARS_MAX:
            raise ValueError
        return ZoneInfo(name)
    except (ValueError, OSError, LookupError):  # LookupError: there is no such zone
        raise InvalidOptionError(
            f"there is no time zone {str(name)[:80]!r}",
            next="Name it like Europe/Berlin; a machine without time zones needs the package tzdata",
        ) from None


def occurrences(schedule: Schedule, after_ms: int) -> Iterator[int]:
    """All occurrences later than this, ascending."""
    if schedule.every_ms is not None:
        at_ms = (after_ms // schedule.every_ms + 1) * schedule.every_ms
        while at_ms <= TIME_MS_MAX:
            yield at_ms
            at_ms += schedule.every_ms
        return
    assert schedule.cron is not None
    # An hour that comes twice has one name: from inside it, the calendar may name times that are over.
    last_ms = after_ms
    for at in _crons(schedule.cron, datetime_of(after_ms).astimezone(zone(schedule.tz))):
        at_ms = time_ms(at)
        if at_ms > last_ms:
            last_ms = at_ms
            yield at_ms


def _crons(expression: str, after: datetime) -> Iterator[datetime]:
    from cronsim import CronSim  # not before a calendar is wanted

    try:
        yield from CronSim(expression, after)
    except OverflowError:  # the calendar ends with the year 9999
        return


def next_after(schedule: Schedule, after_ms: int) -> int | None:
    return next(occurrences(schedule, after_ms), None)


def newest(schedule: Schedule, after_ms: int, upto_ms: int, count: int) -> tuple[list[int], bool]:
    """The last `count` occurrences in (after, upto], ascending, and whether there are more. However long ago `after`
    is, not many more than these are computed: the look goes back from the end, twice as far each time."""
    window_ms = _WINDOW_MS
    while True:
        from_ms = max(after_ms, upto_ms - window_ms)
        found: deque[int] = deque(maxlen=count + 1)
        for at_ms in occurrences(schedule, from_ms):
            if at_ms > upto_ms:
                break
            found.append(at_ms)
        if len(found) > count or from_ms <= after_ms:
            return list(found)[-count:], len(found) > count
        window_ms *= 2


def plan(schedule: Schedule, last_ms: int, now_ms: int) -> Plan:
    """What to do at this moment, if the schedule is done up to `last_ms`."""
    count = schedule.missed_max if schedule.missed == "all" else 1
    due, has_more = newest(schedule, last_ms, now_ms, count) if now_ms > last_ms else ([], False)
    next_ms = next_after(schedule, max(now_ms, last_ms))
    if not due:
        return Plan([], False, None, next_ms)
    upto_ms = due[-1]
    if schedule.missed == "skip" and now_ms - upto_ms > LATE_MS:
        return Plan([], True, upto_ms, next_ms)
    return Plan(due, has_more, upto_ms, next_ms)


def local_time(schedule: Schedule, at_ms: int) -> datetime:
    """An occurrence in the time zone of its schedule."""
    return datetime_of(at_ms).astimezone(zone(schedule.tz))
