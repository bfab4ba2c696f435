"""Claims of clients that take turns in pushing a replica: the server's side. Pure.

Claims are advisory; the comparison of the base version ensures correctness. A connected holder keeps its claim a little
longer than it asked for, and as long as its push runs, because it pushes at the very end. A disconnected holder has
`RETURN_MS` to reconnect; then the claim ends, however long it was to last. No write or push is stopped here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

from headwater.replication.timers import DAY_MS

GRACE_MS = 10_000  # that a connected holder keeps its claim after its end, so that its push can begin
RETURN_MS = 60_000  # for a disconnected holder to reconnect
CLAIM_MS_MAX = 25 * DAY_MS
CLAIM_MS_MIN = 1


ClientIdentity = Hashable
"""Of a client, over all its connections."""


class ClaimAnswer(NamedTuple):
    """Granted for `remaining_ms`, or held by another client for about so long."""

    granted: bool
    remaining_ms: int


class ClaimRegistry:
    """The claims of one replica. A client may join several times: a lost connection is often noticed late."""

    def __init__(self) -> None:
        self._joined: Counter[ClientIdentity] = Counter()
        self._pushing: Counter[ClientIdentity] = Counter()
        self._holder: ClientIdentity | None = None
        self._ends_ms = 0
        self._gone_ms: int | None = None
        """When the holder disconnected."""

    def join(self, client: ClientIdentity, now: int) -> int | None:
        """A connection of this client begins; returns the rest of another client's claim."""
        remaining_ms = self.remaining_ms(now) if self.holder(now) not in (None, client) else None
        self._joined[client] += 1
        if self._holder == client:
            self._gone_ms = None
        return remaining_ms

    def leave(self, client: ClientIdentity, now: int) -> bool:
        """A connection of this client ended. Returns whether it holds a claim, which ends unless it reconnects."""
        self.holder(now)
        _one_less(self._joined, client)
        if self._holder != client or client in self._joined:
            return False
        self._gone_ms = now
        return True

    def claim(self, client: ClientIdentity, span_ms: int, now: int) -> ClaimAnswer:
        """Answer a claim: the first client wins; the holder may extend its claim, and shorten it only by a release."""
        holder = self.holder(now)
        if holder not in (None, client):
            return ClaimAnswer(False, self.remaining_ms(now))
        ends_ms = now + min(max(span_ms, CLAIM_MS_MIN), CLAIM_MS_MAX)
        self._ends_ms = ends_ms if holder is None else max(ends_ms, self._ends_ms)
        self._holder, self._gone_ms = client, None
        return ClaimAnswer(True, self._ends_ms - now)

    def release(self, client: ClientIdentity, now: int) -> bool:
        """Returns whether this client held the claim, which is free now."""
        if self.holder(now) != client:
            return False
        self._holder = None
        return True

    def push_began(self, client: ClientIdentity, now: int) -> None:
        self.holder(now)
        self._pushing[client] += 1

    def push_ended(self, client: ClientIdentity, now: int) -> None:
        self.holder(now)
        _one_less(self._pushing, client)

    def holder(self, now: int) -> ClientIdentity | None:
        """The client that holds the claim. Called before every change, so that an ended claim does not come back."""
        if self._holder is not None and now >= self._ends():
            late_by_ms = now - self._ends_ms
            connected = self._holder in self._joined
            if not (connected and (self._holder in self._pushing or late_by_ms < GRACE_MS)):
                self._holder = None
        return self._holder

    def remaining_ms(self, now: int) -> int:
        """How long the claim lasts at least, 0 without one; past its end, when to ask again."""
        if self.holder(now) is None:
            return 0
        if now < (ends_ms := self._ends()):
            return ends_ms - now
        in_grace_ms = self._ends_ms + GRACE_MS - now
        return in_grace_ms if in_grace_ms > 0 else GRACE_MS

    def _ends(self) -> int:
        if self._gone_ms is None or self._holder in self._pushing:
            return self._ends_ms
        return min(self._ends_ms, self._gone_ms + RETURN_MS)


def _one_less(counts: Counter[ClientIdentity], client: ClientIdentity) -> None:
    counts[client] -= 1
    if counts[client] <= 0:
        del counts[client]
