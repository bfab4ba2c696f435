"""Which messages a handler has had already, so that one delivered twice is handled once.

An entry is `begun` before its message is handled and `done` after. A begun one is a claim that runs out, so that a
crash in between holds nothing up for ever: the next delivery handles the message again. All methods block, as those of
stores do, and may be called from several threads. `handler` is any text that names the handler; the limits
are for each handler, and at least `max_count` of its messages are remembered for `max_age`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from headwater.ports.clock import Clock

DEDUPE_COUNT = 10_000
DEDUPE_AGE_S = 3_600.0
DEDUPE_COUNT_MAX = 10_000_000
HANDLER_CHARS_MAX = 512
DEDUPE_ID_CHARS_MAX = 512

Begun = Literal["first", "busy", "done"]


class DedupeEntry(NamedTuple):
    """`until_ms` is when its claim runs out, None once it is done; `at_ms` when it was begun, or done."""

    id: str
    at_ms: int
    until_ms: int | None


class DedupeStats(NamedTuple):
    """What is remembered now, and what this object of the queue has answered since it was made."""

    handlers: int
    done: int
    begun: int
    oldest_ms: int | None
    max_count: int
    max_age_ms: int
    first: int
    duplicates: int
    busy: int


class DedupeQueue(Protocol):
    name: str
    """What logs and errors call it; without passwords."""
    clock: Clock

    def begin(self, handler: str, id: str, now_ms: int, claim_ms: int) -> Begun:
        """ "first": the caller is to handle it, and has until `now_ms + claim_ms` for that: it is new, or its
        claim ran out. "busy": another caller handles it. "done": it has been handled. Of simultaneous callers, one is
        first."""

    def extend(self, handler: str, id: str, now_ms: int, claim_ms: int) -> bool:
        """Extend the claim until `now_ms + claim_ms`, because handling takes longer. Returns False and changes nothing
        if the entry is done or another caller has claimed it."""

    def finish(self, handler: str, id: str) -> None:
        """Record it as handled, even if another caller has begun it. The oldest beyond the limits are forgotten."""

    def release(self, handler: str, id: str) -> None:
        """Give the claim up, because handling failed: the next delivery is first again. Does nothing if the entry is
        done or another caller has claimed it."""

    def contains(self, handler: str, id: str) -> bool:
        """Whether it is known to have been handled."""

    def add(self, handler: str, id: str) -> bool:
        """Begin and finish in one: True if the caller is the first."""

    def entries(self, handler: str) -> list[DedupeEntry]:
        """The oldest first."""

    def stats(self, handler: str | None = None) -> DedupeStats:
        """The statistics of one handler, or of all."""

    def clear(self, handler: str | None = None) -> int:
        """Forget all of a handler, or of all; returns how many entries."""

    def close(self) -> None:
        """May be called twice."""
