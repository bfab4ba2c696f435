"""The brain of a push subscription: what to say to the server, and when to push. Pure.

Tell it what happened, then call `step`; do what it returns, and come back at `wake_ms` or when something happens. A
push that was asked for has to be ended with `push_ended`, also when it could not even begin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headwater.delivery.retry import RetryPolicy, backoff_ms
from headwater.replication.claims import CLAIM_MS_MAX, GRACE_MS
from headwater.replication.debounce import Debounce
from headwater.replication.spans import Timers

LEAD_MS_MAX = 10_000  # how long before the end of a claim it is extended
CLAIM_MS_LEAST = 1_000  # asked for when the push is due already
ANSWER_MS_MAX = 10_000  # a claim that is not answered does not hold up a push for longer
FIRST_CONNECTION_MS_MAX = 5_000  # how long the push at the start waits for a connection to claim through
LATE_MS_MAX = GRACE_MS // 2  # past the end of a claim, a client that was held up still counts on it; the server on more

# Of all that a subscription tries again. Jitter on top, so that clients cut off together do not come back together.
BACKOFF = RetryPolicy(base_ms=1_000, factor=2.0, cap_ms=300_000, jitter=0.25)


class Claim(NamedTuple):
    """Say to the server: I shall push within this span. Also extends a claim."""

    span_ms: int


class Changed(NamedTuple):
    """Say to the server, without a claim: there are changes, to be pushed after this span."""

    span_ms: int


class Push(NamedTuple):
    """Begin a push, with a snapshot that is taken from now on."""


class Release(NamedTuple):
    """Say to the server: others may."""


Action = Claim | Changed | Push | Release


class _Free(NamedTuple):
    """As far as we know, nobody's turn."""


class _Asked(NamedTuple):
    at_ms: int
    ends_ms: int


class _Mine(NamedTuple):
    ends_ms: int


class _Theirs(NamedTuple):
    until_ms: int


_FREE = _Free()


class PushSchedule:
    """`jitter` rolls a number in [0, 1). Times come from one clock that does not go backwards."""

    def __init__(self, timers: Timers, coordinate: bool, now: int, jitter: Callable[[], float]) -> None:
        self._coordinate = coordinate
        self._jitter = jitter
        self._debounce = Debounce(timers, now)
        self._lead_ms = min(LEAD_MS_MAX, timers.wait_idle_ms // 2)
        # One that is wanted whether there are changes or not; None once it began. The first is that of the start.
        self._wanted_ms: int | None = now + (FIRST_CONNECTION_MS_MAX if coordinate else 0)
        self._retry_ms: int | None = None
        self._failures = 0
        self._pushing = False
        self._connected = False
        self._turn: _Free | _Asked | _Mine | _Theirs = _FREE
        self._claim_ends_ms = now
        self._next_claim_ms = now
        self._held = False  # the server may count us as the holder
        self._give_back = False
        self._told_changed = False
        self._wake_ms: int | None = now

    # --- what happened ----------------------------------------------------------------------------------------------

    def wrote(self, now: int) -> None:
        self._debounce.wrote(now)

    def push_ended(self, now: int, ok: bool) -> None:
        if not self._pushing:
            return
        self._pushing = False
        if ok:
            self._failures, self._retry_ms = 0, None
            self._told_changed = False
        else:
            self._failures += 1
            self._retry_ms = now + backoff_ms(BACKOFF, self._failures, self._jitter())
        self._give_back = self._held
        if isinstance(self._turn, _Asked | _Mine):
            self._turn = _FREE

    def want_push(self, now: int) -> None:
        """One that begins from now on, whatever the timers say."""
        self._wanted_ms, self._retry_ms = now, None

    def connected(self, now: int) -> None:
        """There is a connection to claim through. A push that is wanted has no more to wait for."""
        self._connected = True
        self._turn = _FREE
        if self._wanted_ms is not None:
            self._wanted_ms = min(self._wanted_ms, now)

    def disconnected(self, now: int) -> None:
        """What others claim is not heard any more, so it does not hold us up either."""
        self._connected = False
        self._turn = _FREE

    def granted(self, now: int) -> None:
        if self._connected and self._held:  # not one that was given back before its answer came
            self._turn = _Mine(self._claim_ends_ms)

    def claimed_by_other(self, now: int, span_ms: int) -> None:
        if self._connected:
            self._turn = _Theirs(now + max(0, min(span_ms, CLAIM_MS_MAX)))
            self._held = self._give_back = False

    def released_by_other(self, now: int) -> None:
        if isinstance(self._turn, _Theirs):
            self._turn = _FREE

    # --- what to do -------------------------------------------------------------------------------------------------

    @property
    def has_changes(self) -> bool:
        """That no push has taken along."""
        return self._debounce.dirty or self._pushing or self._retry_ms is not None

    @property
    def owes_push(self) -> bool:
        """One that was wanted has not come through."""
        return self._wanted_ms is not None or self._pushing or self._retry_ms is not None

    @property
    def retry_ms(self) -> int | None:
        """When a push that failed is tried again."""
        return self._retry_ms

    @property
    def failures(self) -> int:
        """Pushes that failed in a row."""
        return self._failures

    def wake_ms(self) -> int | None:
        """When to call `step` again if nothing happens; after a step always later than it."""
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
            self._say_changed(now, ready_ms, actions)
        elif self._connected:
            return self._take_turn(now, ready_ms, actions)
        return self._push_when_ready(now, ready_ms, actions)

    def _ready_ms(self) -> int | None:
        """When to push, if nobody else is about to."""
        if self._retry_ms is not None:
            return self._retry_ms
        return self._debounce.due_ms() if self._wanted_ms is None else self._wanted_ms

    def _say_changed(self, now: int, ready_ms: int, actions: list[Action]) -> None:
        if self._debounce.dirty and self._wanted_ms is None and not self._told_changed:
            actions.append(Changed(max(0, ready_ms - now)))
            self._told_changed = True

    def _take_turn(self, now: int, ready_ms: int, actions: list[Action]) -> int | None:
        turn = self._turn = self._turn_at(now)
        if isinstance(turn, _Theirs):
            return turn.until_ms
        if isinstance(turn, _Asked):
            return turn.at_ms + ANSWER_MS_MAX
        if isinstance(turn, _Mine):
            if now >= ready_ms or ready_ms <= turn.ends_ms:
                return self._push_when_ready(now, ready_ms, actions)
            extend_ms = max(turn.ends_ms - self._lead_ms, self._next_claim_ms)
            if now < extend_ms:
                return min(extend_ms, ready_ms)
            self._turn = _Mine(self._claim(now, ready_ms, actions))
            return ready_ms
        # A turn is not kept through a backoff: others may have more luck.
        claim_ms = max(self._next_claim_ms, self._retry_ms or 0)
        if now < claim_ms:
            return claim_ms
        self._turn = _Asked(now, self._claim(now, ready_ms, actions))
        return now + ANSWER_MS_MAX

    def _turn_at(self, now: int) -> _Free | _Asked | _Mine | _Theirs:
        turn = self._turn
        if isinstance(turn, _Theirs) and now >= turn.until_ms:
            return _FREE
        if isinstance(turn, _Asked) and now >= turn.at_ms + ANSWER_MS_MAX:
            return _Mine(max(turn.ends_ms, now))
        if isinstance(turn, _Mine) and now >= turn.ends_ms + LATE_MS_MAX:
            return _FREE
        return turn

    def _claim(self, now: int, ready_ms: int, actions: list[Action]) -> int:
        """Ask for the time until the push; returns its end."""
        span_ms = max(ready_ms - now, CLAIM_MS_LEAST)
        actions.append(Claim(span_ms))
        self._claim_ends_ms = now + span_ms
        self._next_claim_ms = now + self._lead_ms
        self._held, self._give_back = True, False
        return self._claim_ends_ms

    def _push_when_ready(self, now: int, ready_ms: int, actions: list[Action]) -> int | None:
        if now < ready_ms:
            return ready_ms
        self._pushing = True
        self._wanted_ms = None
        self._debounce.pushed(now)
        actions.append(Push())
        return None
