"""When the next push is due, from the writes seen and the last push.

While something is unpushed it is due at
`min(max(last_write + wait_idle, last_push + min_interval), last_push + max_interval)`.
"""

from __future__ import annotations

from headwater.replication.spans import Timers


class Debounce:
    """Times come from one clock that does not go backwards. A write counts for the first push that begins after the
    call of `wrote`, so what is written while a push runs is left for the next one."""

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
        """A push began. One that fails is tried again whatever is due, so it need not be told here."""
        self._last_push_ms, self._last_write_ms = at, None

    def due_ms(self) -> int | None:
        """None while all is pushed. A time that has passed already means: now."""
        if self._last_write_ms is None:
            return None
        timers = self._timers
        quiet_ms = max(self._last_write_ms + timers.wait_idle_ms, self._last_push_ms + timers.min_interval_ms)
        return min(quiet_ms, self._last_push_ms + timers.max_interval_ms)
