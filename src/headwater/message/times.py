"""Times: whole milliseconds since 1970 UTC inside, aware datetimes or seconds at the surface."""

from __future__ import annotations

import functools
import math
from datetime import UTC, datetime, timedelta

from headwater.errors import InvalidOption

TIME_MS_MAX = 253_402_300_799_999  # the last millisecond of year 9999, the most a datetime can say

Moment = datetime | int | float
Span = timedelta | int | float


def time_ms(at: Moment, name: str = "time") -> int:
    """Milliseconds of an aware datetime, or of seconds since 1970."""
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise InvalidOption(f"{name} has no time zone", next="Give it one, such as UTC: 2030-01-31T12:00:00Z")
        ms = round((at - _EPOCH) / timedelta(milliseconds=1))
    elif isinstance(at, (int, float)) and not isinstance(at, bool) and math.isfinite(at):
        ms = round(at * 1000)
    else:
        raise InvalidOption(f"{name} must be a datetime or seconds since 1970, not {at!r}")
    if not 0 <= ms <= TIME_MS_MAX:
        raise InvalidOption(f"{name} lies outside the years 1970 to 9999: {at!r}")
    return ms


def span_ms(span: Span, name: str) -> int:
    """Milliseconds of a timedelta, or of seconds; never negative."""
    if isinstance(span, timedelta):
        seconds = span.total_seconds()
    elif isinstance(span, (int, float)) and not isinstance(span, bool) and math.isfinite(span):
        seconds = float(span)
    else:
        raise InvalidOption(f"{name} must be seconds or a timedelta, not {span!r}")
    if not 0 <= seconds <= 3_155_760_000:  # a century; beyond it arithmetic on times would overflow
        raise InvalidOption(f"{name} must lie between 0 and a hundred years, not {span!r}")
    return round(seconds * 1000)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def datetime_of(ms: int) -> datetime:
    # Not through a float, which is off by one in the far future; and whatever a row inserted by hand says, no error.
    return _EPOCH + timedelta(milliseconds=min(max(ms, 0), TIME_MS_MAX))


def iso(ms: int) -> str:
    return datetime_of(ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@functools.lru_cache(maxsize=1024)
def ms_of_iso(text: str) -> int:
    return time_ms(datetime.fromisoformat(text))
