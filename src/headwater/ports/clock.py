"""Time, passed in."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol


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
    """A clock for tests: stands still until `advance`."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._callbacks: list[Callable[[], None]] = []

    def now_ms(self) -> int:
        """The time in milliseconds since 1970."""
        return self._now_ms

    def on_advance(self, callback: Callable[[], None]) -> None:
        """Call this after each move of the clock."""
        self._callbacks.append(callback)

    def advance(self, seconds: float | timedelta) -> None:
        """Seconds may be a fraction: the clock counts milliseconds."""
        if isinstance(seconds, timedelta):
            seconds = seconds.total_seconds()
        self._now_ms += round(seconds * 1000)
        for callback in self._callbacks:
            callback()
