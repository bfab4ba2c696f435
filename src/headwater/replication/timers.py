"""When the next push of a subscription is due: spans of time, the three timers made of them, and the debounce. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from headwater.errors import InvalidOptionError
from headwater.formats import Span, format_duration, span_ms

SECOND_MS = 1_000
DAY_MS = 24 * 3600 * SECOND_MS

WAIT_IDLE_MS_MIN = SECOND_MS
WAIT_IDLE_MS_MAX = 24 * DAY_MS
MIN_INTERVAL_MS_MAX = 24 * DAY_MS  # with it, a claim until the push is due stays within the longest span of a claim
MAX_INTERVAL_MS_MAX = 366 * DAY_MS
WAIT_IDLE_MS_DEFAULT = 10 * 60 * SECOND_MS
MAX_INTERVAL_MS_DEFAULT = DAY_MS


def seconds_text(span_ms: int) -> str:
    """The span as on the wire: seconds, with at most three decimals."""
    return f"{span_ms / 1000:.3f}".rstrip("0").rstrip(".")


@dataclass(frozen=True, init=False)
class Timers:
    """When a push is due: after `wait_idle` without a write, never sooner than `min_interval` after the last push,
    never later than `max_interval` after it."""

    wait_idle_ms: int
    min_interval_ms: int
    max_interval_ms: int
    given: dict[str, float] = field(compare=False)
    """Those that the user has set, in seconds: the server warns if the key allows only pulls."""

    def __init__(
        self, wait_idle_ms: int | None = None, min_interval_ms: int | None = None, max_interval_ms: int | None = None
    ) -> None:
        """`wait_idle` defaults to ten minutes, `min_interval` to `wait_idle`; `max_interval` to a day, or to the longer
        of the two others."""
        set_ms = {"waitIdle": wait_idle_ms, "minInterval": min_interval_ms, "maxInterval": max_interval_ms}
        object.__setattr__(self, "given", {name: ms / 1000 for name, ms in set_ms.items() if ms is not None})
        wait_idle_ms = WAIT_IDLE_MS_DEFAULT if wait_idle_ms is None else wait_idle_ms
        shortest = wait_idle_ms if min_interval_ms is None else min_interval_ms
        longest = max(MAX_INTERVAL_MS_DEFAULT, wait_idle_ms, shortest) if max_interval_ms is None else max_interval_ms
        _check_range("waitIdle", wait_idle_ms, WAIT_IDLE_MS_MIN, WAIT_IDLE_MS_MAX)
        _check_range("minInterval", shortest, 0, MIN_INTERVAL_MS_MAX)
        _check_range("maxInterval", longest, WAIT_IDLE_MS_MIN, MAX_INTERVAL_MS_MAX)
        for name, least_ms in (("waitIdle", wait_idle_ms), ("minInterval", shortest)):
            if least_ms > longest:
                raise InvalidOptionError(
                    f"maxInterval {format_duration(longest)} is shorter than {name} {format_duration(least_ms)}",
                    next=f"Make maxInterval at least as long as {name}",
                )
        object.__setattr__(self, "wait_idle_ms", wait_idle_ms)
        object.__setattr__(self, "min_interval_ms", shortest)
        object.__setattr__(self, "max_interval_ms", longest)

    @classmethod
    def of(cls, wait_idle: Span | None, min_interval: Span | None = None, max_interval: Span | None = None) -> Timers:
        """Timers from spans as users give them."""
        spans = {"waitIdle": wait_idle, "minInterval": min_interval, "maxInterval": max_interval}
        return cls(*(None if span is None else span_ms(span, name) for name, span in spans.items()))


def _check_range(name: str, span_ms: int, least_ms: int, most_ms: int) -> None:
    if not least_ms <= span_ms <= most_ms:
        limits = f"{format_duration(least_ms)} and {format_duration(most_ms)}"
        why = f"{name} lies between {limits}, not {format_duration(max(span_ms, 0))}"
        raise InvalidOptionError(why, next=f"Choose another {name}")


class Debounce:
    """While something is unpushed, a push is due at
    `min(max(last_write + wait_idle, last_push + min_interval), last_push + max_interval)`.

    Times come from one monotonic clock. A write counts for the first push that begins after the call of `wrote`: a
    write during a push is left for the next one."""

    def __init__(self, timers: Timers, last_push_ms: int) -> None:
        self._timers = timers
        self._last_push_ms = last_push_ms
        self._last_write_ms: int | None = None

    @property
    def dirty(self) -> bool:
        return self._last_write_ms is not None

    def wrote(self, now: int) -> None:
        self._last_write_ms = now

    def pushed(self, at: int) -> None:
        """A push began at this time. The retry of a failed push does not depend on this class."""
        self._last_push_ms, self._last_write_ms = at, None

    def due_ms(self) -> int | None:
        """None while everything is pushed. A time in the past means: now."""
        if self._last_write_ms is None:
            return None
        timers = self._timers
        quiet_ms = max(self._last_write_ms + timers.wait_idle_ms, self._last_push_ms + timers.min_interval_ms)
        return min(quiet_ms, self._last_push_ms + timers.max_interval_ms)
