"""Decides for a push subscription what to send to the server, and when to push. Pure.

Report events, then call `step`, do what it returns, and call it again at `wake_ms` or after the next event. Every
`Push` has to be followed by `push_ended`, also if it could not begin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from headwater.delivery.retry import RetryPolicy, backoff_ms
from headwater.replication.claims import CLAIM_MS_MAX, GRACE_MS
from headwater.replication.timers import Debounce, Timers

LEAD_MS_MAX = 10_000  # before the end of a claim it is extended
CLAIM_MS_LEAST = 1_000  # of a claim for a push that is due
ANSWER_MS_MAX = 10_000  # an unanswered claim delays a push no longer
FIRST_CONNECTION_MS_MAX = 5_000  # that the push at the start waits for a connection
LATE_MS_MAX = GRACE_MS // 2  # past the end of a claim a client still relies on it; the server allows more

# Of all retries of a subscription. The jitter spreads clients that were cut off together.
BACKOFF = RetryPolicy(base_ms=1_000, factor=2.0, cap_ms=300_000, jitter=0.25)


class Claim(NamedTuple):
    """Claim the next push, within this span; also extends a claim."""

    span_ms: int


class Changed(NamedTuple):
    """Announce changes without a claim; they will be pushed after this span."""

    span_ms: int


class Push(NamedTuple):
    """Begin a push, with a snapshot taken from now on."""


class Release(NamedTuple):
    """Release the claim."""


Action = Claim | Changed | Push | Release


Turn = Literal["free", "asked", "mine", "theirs"]
"""Whose turn to push it is: no claim is known, the answer to one is awaited, or this or another client holds one."""


class PushSchedule:
    """`jitter` returns a random number in [0, 1). Times come from one monotonic clock."""

    def __init__(self, timers: Timers, coordinate: bool, now: int, jitter: Callable[[], float]) -> None:
        self._coordinate = coordinate
        self._jitter = jitter
        self._debounce = Debounce(timers, now)
        self._lead_ms = min(LEAD_MS_MAX, timers.wait_idle_ms // 2)
        # A push that is due even without changes, like that at the start; None once it began.
        self._wanted_ms: int | None = now + (FIRST_CONNECTION_MS_MAX if coordinate else 0)
        self._retry_ms: int | None = None
        self._failures = 0
        self._pushing = False
        self._connected = False
        self._turn: Turn = "free"
        self._turn_ends_ms = now  # of the claim; while an answer is awaited, for how long
        self._claim_ends_ms = now
        self._next_claim_ms = now
        self._held = False  # the server may regard this client as the holder
        self._give_back = False
        self._announced_changes = False
        self._wake_ms: int | None = now

    # --- events -----------------------------------------------------------------------------------------------------

    def wrote(self, now: int) -> None:
        self._debounce.wrote(now)

    def push_ended(self, now: int, ok: bool) -> None:
        if not self._pushing:
            return
        self._pushing = False
        if ok:
            self._failures, self._retry_ms = 0, None
            self._announced_changes = False
        else:
            self._failures += 1
            self._retry_ms = now + backoff_ms(BACKOFF, self._failures, self._jitter())
        self._give_back = self._held
        if self._turn in ("asked", "mine"):
            self._turn = "free"

    def want_push(self, now: int) -> None:
        """Push without waiting for the timers."""
        self._wanted_ms, self._retry_ms = now, None

    def connected(self, now: int) -> None:
        """A requested push waited for this."""
        self._connected = True
        self._turn = "free"
        if self._wanted_ms is not None:
            self._wanted_ms = min(self._wanted_ms, now)

    def disconnected(self, now: int) -> None:
        """Claims of other clients are unknown now, so they delay nothing."""
        self._connected = False
        self._turn = "free"

    def granted(self, now: int) -> None:
        if self._connected and self._held:  # not for a claim that was released before its answer came
            self._turn, self._turn_ends_ms = "mine", self._claim_ends_ms

    def claimed_by_other(self, now: int, span_ms: int) -> None:
        if self._connected:
            self._turn, self._turn_ends_ms = "theirs", now + max(0, min(span_ms, CLAIM_MS_MAX))
            self._held = self._give_back = False

    def released_by_other(self, now: int) -> None:
        if self._turn == "theirs":
            self._turn = "free"

    # --- decisions --------------------------------------------------------------------------------------------------

    @property
    def has_changes(self) -> bool:
        """Unpushed ones."""
        return self._debounce.dirty or self._pushing or self._retry_ms is not None

    @property
    def owes_push(self) -> bool:
        """A requested push has not succeeded yet."""
        return self._wanted_ms is not None or self._pushing or self._retry_ms is not None

    @property
    def retry_ms(self) -> int | None:
        """When a failed push is tried again."""
        return self._retry_ms

    def wake_ms(self) -> int | None:
        """When to call `step` again without an event; always later than the last step."""
        return self._wake_ms

    def step(self, now: int) -> list[Action]:
        actions: list[Action] = []
        wake_ms = self._decide(now, actions)
        self._wake_ms = None if wake_ms is None else max(wake_ms, now + 1)
        return actions

    def _decide(self, now: int, actions: list[Action]) -> int | None:
        ready_ms = self._ready_ms()
        if self._give_back and self._connected:
            actions.append(Release())
            self._held = self._give_back = False
        if self._pushing or ready_ms is None:
            return None
        if not self._coordinate:
            self._announce(now, ready_ms, actions)
        elif self._connected:
            return self._take_turn(now, ready_ms, actions)
        return self._push_when_ready(now, ready_ms, actions)

    def _ready_ms(self) -> int | None:
        """When to push, without regard to other clients."""
        if self._retry_ms is not None:
            return self._retry_ms
        return self._debounce.due_ms() if self._wanted_ms is None else self._wanted_ms

    def _announce(self, now: int, ready_ms: int, actions: list[Action]) -> None:
        if self._debounce.dirty and self._wanted_ms is None and not self._announced_changes:
            actions.append(Changed(max(0, ready_ms - now)))
            self._announced_changes = True

    def _take_turn(self, now: int, ready_ms: int, actions: list[Action]) -> int | None:
        self._end_turn(now)
        if self._turn in ("asked", "theirs"):
            return self._turn_ends_ms
        if self._turn == "mine":
            if now >= ready_ms or ready_ms <= self._turn_ends_ms:
                return self._push_when_ready(now, ready_ms, actions)
            extend_ms = max(self._turn_ends_ms - self._lead_ms, self._next_claim_ms)
            if now < extend_ms:
                return min(extend_ms, ready_ms)
            self._claim(now, ready_ms, actions)
            self._turn_ends_ms = self._claim_ends_ms
            return ready_ms
        # A claim is not held during a backoff: another client may succeed.
        claim_ms = max(self._next_claim_ms, self._retry_ms or 0)
        if now < claim_ms:
            return claim_ms
        self._claim(now, ready_ms, actions)
        self._turn, self._turn_ends_ms = "asked", now + ANSWER_MS_MAX
        return self._turn_ends_ms

    def _end_turn(self, now: int) -> None:
        """End the turn when its time is over. A claim without an answer counts as granted; one of this client is
        relied on a little longer."""
        if now < self._turn_ends_ms + (LATE_MS_MAX if self._turn == "mine" else 0):
            return
        if self._turn == "asked":
            self._turn, self._turn_ends_ms = "mine", max(self._claim_ends_ms, now)
        else:
            self._turn = "free"

    def _claim(self, now: int, ready_ms: int, actions: list[Action]) -> None:
        """Claim the time until the push."""
        span_ms = max(ready_ms - now, CLAIM_MS_LEAST)
        actions.append(Claim(span_ms))
        self._claim_ends_ms = now + span_ms
        self._next_claim_ms = now + self._lead_ms
        self._held, self._give_back = True, False

    def _push_when_ready(self, now: int, ready_ms: int, actions: list[Action]) -> int | None:
        if now < ready_ms:
            return ready_ms
        self._pushing = True
        self._wanted_ms = None
        self._debounce.pushed(now)
        actions.append(Push())
        return None
