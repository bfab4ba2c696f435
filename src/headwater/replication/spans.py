"""Spans of time as the flags of a push spell them, and the three timers made of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headwater.errors import InvalidOption

SECOND_MS = 1_000
DAY_MS = 24 * 3600 * SECOND_MS

WAIT_IDLE_MS_MIN = SECOND_MS
WAIT_IDLE_MS_MAX = 24 * DAY_MS
MIN_INTERVAL_MS_MAX = 24 * DAY_MS  # with it, a claim until the push is due stays within the longest span of a claim
MAX_INTERVAL_MS_MAX = 366 * DAY_MS
WAIT_IDLE_MS_DEFAULT = 10 * 60 * SECOND_MS
MAX_INTERVAL_MS_DEFAULT = DAY_MS

_UNITS_MS = {"w": 7 * DAY_MS, "d": DAY_MS, "h": 3600 * SECOND_MS, "m": 60 * SECOND_MS, "s": SECOND_MS}
_SPAN = re.compile("".join(rf"(?:([0-9]{{1,9}}){unit})?" for unit in _UNITS_MS))
_HOW = "Write it as 3s, 10m, 1h30m, 3d or 1w: weeks, days, hours, minutes and seconds, in this order"


def span_ms_of(text: str) -> int:
    """Whole milliseconds of `1h30m` and its like. No months, bare numbers, fractions, signs or blanks."""
    found = _SPAN.fullmatch(text)
    if not text or found is None:
        raise InvalidOption(f"{text[:40]!r} is no span of time", next=_HOW)
    return sum(int(count or 0) * unit_ms for count, unit_ms in zip(found.groups(), _UNITS_MS.values(), strict=True))


def span_text(span_ms: int) -> str:
    """The span as `span_ms_of` reads it, rounded down to whole seconds."""
    parts = []
    for unit, unit_ms in _UNITS_MS.items():
        count, span_ms = divmod(span_ms, unit_ms)
        parts.append(f"{count}{unit}" if count else "")
    return "".join(parts) or "0s"


def seconds_text(span_ms: int) -> str:
    """As spans stand on the wire: seconds, with what is left of them behind a point."""
    return f"{span_ms / 1000:.3f}".rstrip("0").rstrip(".")


@dataclass(frozen=True, init=False)
class Timers:
    """When a push is due: after `wait_idle` without a write, never sooner than `min_interval` after the last push,
    never later than `max_interval` after it."""

    wait_idle_ms: int
    min_interval_ms: int
    max_interval_ms: int

    def __init__(
        self, wait_idle_ms: int, min_interval_ms: int | None = None, max_interval_ms: int | None = None
    ) -> None:
        """`min_interval` is `wait_idle` if not said; `max_interval` a day, or the longer of the two others."""
        shortest = wait_idle_ms if min_interval_ms is None else min_interval_ms
        longest = max(MAX_INTERVAL_MS_DEFAULT, wait_idle_ms, shortest) if max_interval_ms is None else max_interval_ms
        _check_range("waitIdle", wait_idle_ms, WAIT_IDLE_MS_MIN, WAIT_IDLE_MS_MAX)
        _check_range("minInterval", shortest, 0, MIN_INTERVAL_MS_MAX)
        _check_range("maxInterval", longest, WAIT_IDLE_MS_MIN, MAX_INTERVAL_MS_MAX)
        for name, span_ms in (("waitIdle", wait_idle_ms), ("minInterval", shortest)):
            if span_ms > longest:
                raise InvalidOption(
                    f"maxInterval {span_text(longest)} is shorter than {name} {span_text(span_ms)}",
                    next=f"Make maxInterval at least as long as {name}",
                )
        object.__setattr__(self, "wait_idle_ms", wait_idle_ms)
        object.__setattr__(self, "min_interval_ms", shortest)
        object.__setattr__(self, "max_interval_ms", longest)

    @classmethod
    def of(cls, wait_idle: str, min_interval: str | None = None, max_interval: str | None = None) -> Timers:
        """From the texts of the flags; an error names the flag."""
        return cls(
            _flag_ms("waitIdle", wait_idle),
            None if min_interval is None else _flag_ms("minInterval", min_interval),
            None if max_interval is None else _flag_ms("maxInterval", max_interval),
        )


def _flag_ms(name: str, text: str) -> int:
    try:
        return span_ms_of(text)
    except InvalidOption as exc:
        raise InvalidOption(exc.why, where=f"--{name}", next=exc.next) from None


def _check_range(name: str, span_ms: int, least_ms: int, most_ms: int) -> None:
    if not least_ms <= span_ms <= most_ms:
        raise InvalidOption(
            f"{name} lies between {span_text(least_ms)} and {span_text(most_ms)}, not {span_text(max(span_ms, 0))}",
            next=f"Choose another {name}",
        )
