"""When to try again: pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from headwater.errors import InvalidOption

Strategy = Literal["exponential", "fixed", "none"]
STRATEGIES = ("exponential", "fixed", "none")
JITTER = 0.25


class Backoff(msgspec.Struct, frozen=True):
    """`exponential` doubles from `first_s` up to `most_s`, `fixed` stays at `first_s`; both with up to a quarter more
    by chance, so that a thousand clients do not come back at the same moment. `none` does not try again."""

    strategy: Strategy = "exponential"
    first_s: float = 0.1
    most_s: float = 30.0
    attempts: int | None = None

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise InvalidOption(f"reconnect is one of {', '.join(STRATEGIES)}, not {self.strategy!r}")
        if not 0 < self.first_s <= self.most_s:
            raise InvalidOption("reconnect_min must be more than 0 and at most reconnect_max")
        if self.attempts is not None and self.attempts < 0:
            raise InvalidOption(f"reconnect_attempts is None or at least 0, not {self.attempts}")

    def delay_s(self, attempt: int, roll: float) -> float | None:
        """How long to wait before attempt 1, 2, …; None to give up. `roll` is chance, from 0 to 1."""
        if self.strategy == "none" or (self.attempts is not None and attempt > self.attempts):
            return None
        doubled = self.first_s * 2 ** min(attempt - 1, 62) if self.strategy == "exponential" else self.first_s
        return min(self.most_s, min(self.most_s, doubled) * (1 + JITTER * roll))
