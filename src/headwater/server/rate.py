"""How fast one connection may call: a bucket that fills with time."""

from __future__ import annotations

import time
from collections.abc import Callable


class Bucket:
    """`per_second` calls in the long run, `burst` at once; 0 a second is no limit."""

    def __init__(self, per_second: float, burst: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = max(burst, 1)
        self._now_s = now_s
        self._left = float(self._burst)
        self._at_s = now_s() if per_second else 0.0

    def take(self, count: int) -> float:
        """0.0 if so many calls may be made now, else in how many seconds. A batch larger than the bucket may pass when
        the bucket is full, and is paid for afterwards."""
        if not self._per_second:
            return 0.0
        now_s = self._now_s()
        self._left = min(float(self._burst), self._left + (now_s - self._at_s) * self._per_second)
        self._at_s = now_s
        needed = min(count, self._burst)
        if self._left < needed:
            return (needed - self._left) / self._per_second
        self._left -= count
        return 0.0
