"""Whether a target that failed too often is asked again: a circuit breaker, as a value and what becomes of it.

closed, and asked, until `failures` of them fall within `within_ms`; then open, and not asked, for `open_ms`; then
half open: one try goes through, and its outcome closes or opens the circuit.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headwater.errors import InvalidOption
from headwater.message import check_whole

FAILURES_MAX = 1_000
SPAN_MS_MAX = 30 * 24 * 3600 * 1000

BreakerState = Literal["closed", "open", "half-open"]


class BreakerPolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    failures: int = 5
    within_ms: int = 120_000
    open_ms: int = 30_000

    def __post_init__(self) -> None:
        check_whole("failures", self.failures, 1, FAILURES_MAX)
        for name, span in (("within", self.within_ms), ("open", self.open_ms)):
            if type(span) is not int or not 1 <= span <= SPAN_MS_MAX:
                raise InvalidOption(f"{name} lies between a millisecond and 30 days, not {span!r} ms")


class Breaker(msgspec.Struct, frozen=True):
    """`turn` grows with every change of state: what was begun in an earlier turn says nothing about this one."""

    state: BreakerState = "closed"
    turn: int = 0
    since_ms: int = 0
    failed_at_ms: tuple[int, ...] = ()


def until_ms(policy: BreakerPolicy, breaker: Breaker) -> int | None:
    """When an open circuit lets the next try through; None if it is not open."""
    return breaker.since_ms + policy.open_ms if breaker.state == "open" else None


def ask(policy: BreakerPolicy, breaker: Breaker, now_ms: int) -> tuple[Breaker, int | None]:
    """May the target be tried now? The turn to report the outcome with, or None: not now."""
    if breaker.state == "closed":
        return breaker, breaker.turn
    # A clock that was set back must not keep the circuit open for longer than it was meant to be.
    if breaker.state == "open" and not 0 <= now_ms - breaker.since_ms < policy.open_ms:
        trying = Breaker("half-open", breaker.turn + 1, now_ms)
        return trying, trying.turn
    return breaker, None


def succeeded(breaker: Breaker, turn: int, now_ms: int) -> Breaker:
    """A success closes a half-open circuit. Between failures it changes nothing: they count by their time alone."""
    if breaker.state == "half-open" and turn == breaker.turn:
        return Breaker("closed", breaker.turn + 1, now_ms)
    return breaker


def failed(policy: BreakerPolicy, breaker: Breaker, turn: int, now_ms: int) -> Breaker:
    if turn != breaker.turn:
        return breaker
    recent = (*(at for at in breaker.failed_at_ms if 0 <= now_ms - at < policy.within_ms), now_ms)
    if breaker.state == "half-open" or len(recent) >= policy.failures:
        return Breaker("open", breaker.turn + 1, now_ms)
    return msgspec.structs.replace(breaker, failed_at_ms=recent)


def not_tried(policy: BreakerPolicy, breaker: Breaker, turn: int) -> Breaker:
    """The one try of a half-open circuit ended without a word from the target: the next who asks may try."""
    if breaker.state == "half-open" and turn == breaker.turn:
        return Breaker("open", breaker.turn + 1, breaker.since_ms - policy.open_ms)
    return breaker
