"""Whether a failed delivery is tried again, and when."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from headwater.errors import InvalidOptionError

Reason = Literal["processing_error", "timeout", "max_attempts", "expired", "rejected", "circuit_breaker"]

REASONS: tuple[Reason, ...] = get_args(Reason)
ATTEMPTS_MAX = 1_000
FACTOR_MAX = 100
BACKOFF_MS_MAX = 30 * 24 * 3600 * 1000


class RetryPolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    """Exponential backoff: `base_ms · factor^(attempt-1)`, at most `cap_ms`, plus up to `jitter` of itself."""

    max_attempts: int = 5
    base_ms: int = 1_000
    factor: float = 2.0
    cap_ms: int = 300_000
    jitter: float = 0.25

    def __post_init__(self) -> None:
        if not 1 <= self.max_attempts <= ATTEMPTS_MAX:
            raise InvalidOptionError(f"max_attempts must lie between 1 and {ATTEMPTS_MAX}, not {self.max_attempts}")
        if not 0 <= self.base_ms <= self.cap_ms <= BACKOFF_MS_MAX:
            raise InvalidOptionError("backoff must be at most backoff_max, and that at most 30 days")
        if not 1.0 <= self.factor <= FACTOR_MAX or not 0.0 <= self.jitter <= 1.0:
            raise InvalidOptionError("backoff_factor must be 1 to 100, and jitter 0 to 1")


class Retry(msgspec.Struct, frozen=True):
    at_ms: int


class GiveUp(msgspec.Struct, frozen=True):
    """Dead-letter it."""

    reason: Reason


def backoff_ms(policy: RetryPolicy, attempts: int, roll: float) -> int:
    """How long to wait after the given number of attempts; `roll` is a random number in [0, 1) for the jitter."""
    exponent = min(attempts - 1, 64)  # factor**64 is past any cap; a larger exponent would only overflow
    delay = min(policy.base_ms * policy.factor**exponent, policy.cap_ms)
    return round(delay * (1 + policy.jitter * roll))


def decide_retry(
    policy: RetryPolicy, attempts: int, now_ms: int, roll: float, *, delay_ms: int | None = None
) -> Retry | GiveUp:
    """Decide after a nack or an exception: again at some time, or never. An explicit delay replaces the backoff."""
    if attempts >= policy.max_attempts:
        return GiveUp("max_attempts")
    return Retry(now_ms + (backoff_ms(policy, attempts, roll) if delay_ms is None else delay_ms))


def decide_redelivery(policy: RetryPolicy, attempts: int, lost_its_holder: bool) -> GiveUp | None:
    """Whether a delivery that came back may be delivered once more. That counts deliveries that were released properly,
    too: a message that makes its consumer shut down must stop."""
    if attempts < policy.max_attempts:
        return None
    return GiveUp("timeout" if lost_its_holder else "max_attempts")
