"""Time, passed in."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Protocol

from headwater.errors import InvalidOptionError
from headwater.formats import Span, span_ms, time_ms


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since 1970 UTC. May jump; nothing may be lost when it does."""

    def on_advance(self, callback: Callable[[], None]) -> None:
        """Called after the time moved other than by passing, so that sleepers look again."""


class SystemClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def on_advance(self, callback: Callable[[], None]) -> None:
        """Real time passes by itself; sleepers have a timeout."""


class ManualClock:
    """A clock for tests: stands still until `advance`. It begins at an aware datetime, or at milliseconds since 1970
    UTC."""

    def __init__(self, now_ms: int | datetime = 1_700_000_000_000) -> None:
        if isinstance(now_ms, datetime):
            now_ms = time_ms(now_ms, "the time of a ManualClock")
        elif not isinstance(now_ms, int):
            raise InvalidOptionError(
                f"a ManualClock begins at an aware datetime or at milliseconds since 1970 UTC, not {now_ms!r}",
                next="Give it a time with a time zone",
            )
        self._now_ms = now_ms
        self._callbacks: list[Callable[[], None]] = []

    def now_ms(self) -> int:
        """The time in milliseconds since 1970."""
        return self._now_ms

    def on_advance(self, callback: Callable[[], None]) -> None:
        """Call this after each move of the clock."""
        self._callbacks.append(callback)

    def advance(self, seconds: Span) -> None:
        """Move the clock by seconds, a timedelta or a text like `5m`. Seconds may be a fraction: the clock counts
        milliseconds."""
        if isinstance(seconds, timedelta):
            seconds = seconds.total_seconds()
        elif not isinstance(seconds, (int, float)):
            seconds = span_ms(seconds, "seconds") / 1000
        self._now_ms += round(seconds * 1000)
        for callback in self._callbacks:
            callback()
