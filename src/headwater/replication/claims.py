"""Whose turn it is to push a replica: the server's side of the claims, pure.

Claims are politeness between clients that coordinate; what makes a push safe is that it is refused when its base is
not the newest version. A claim lives to its end. A holder that is connected keeps it a little longer, and as long as
its push runs, because it pushes at the very end of it. One that has gone has `RETURN_MS` to come back; then the claim
dies, however long it was to last. No write or push is stopped here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

from headwater.replication.spans import DAY_MS

GRACE_MS = 10_000  # how much longer a connected holder keeps its claim, so that its push can begin
RETURN_MS = 60_000  # for a holder whose connection is lost to come back
CLAIM_MS_MAX = 25 * DAY_MS
CLAIM_MS_MIN = 1


Who = Hashable
"""A client, over all its connections."""


class Answer(NamedTuple):
    """To a claim: yours for `remaining_ms`, or another's for about so long."""

    granted: bool
    remaining_ms: int


class ClaimDesk:
    """The claims of one replica. A client may be joined several times: a lost connection is often noticed late."""

    def __init__(self) -> None:
        self._joined: Counter[Who] = Counter()
        self._pushing: Counter[Who] = Counter()
        self._holder: Who | None = None
        self._ends_ms = 0
        self._gone_ms: int | None = None
        """Since when the holder has no connection."""

    def join(self, client: Who, now: int) -> int | None:
        """A connection of this client begins; what remains of another's live claim."""
        remaining_ms = self.remaining_ms(now) if self.holder(now) not in (None, client) else None
        self._joined[client] += 1
        if self._holder == client:
            self._gone_ms = None
        return remaining_ms

    def leave(self, client: Who, now: int) -> bool:
        """A connection of this client ended. Whether it has a claim, which dies if it does not come back."""
        self.holder(now)
        _one_less(self._joined, client)
        if self._holder != client or client in self._joined:
            return False
        self._gone_ms = now
        return True

    def claim(self, client: Who, span_ms: int, now: int) -> Answer:
        """The first wins; the holder may extend, never shorten: for that it releases."""
        holder = self.holder(now)
        if holder not in (None, client):
            return Answer(False, self.remaining_ms(now))
        ends_ms = now + min(max(span_ms, CLAIM_MS_MIN), CLAIM_MS_MAX)
        self._ends_ms = ends_ms if holder is None else max(ends_ms, self._ends_ms)
        self._holder, self._gone_ms = client, None
        return Answer(True, self._ends_ms - now)

    def release(self, client: Who, now: int) -> bool:
        """Whether this client held the claim, which is free now."""
        if self.holder(now) != client:
            return False
        self._holder = None
        return True

    def push_began(self, client: Who, now: int) -> None:
        self.holder(now)
        self._pushing[client] += 1

    def push_ended(self, client: Who, now: int) -> None:
        self.holder(now)
        _one_less(self._pushing, client)

    def holder(self, now: int) -> Who | None:
        """Who has a live claim. Asked before every change of who is there, so that what ended does not come back."""
        if self._holder is not None and now >= self._ends():
            late_by_ms = now - self._ends_ms
            connected = self._holder in self._joined
            if not (connected and (self._holder in self._pushing or late_by_ms < GRACE_MS)):
                self._holder = None
        return self._holder

    def remaining_ms(self, now: int) -> int:
        """How long the live claim goes on for sure, 0 when there is none; of one past its end, when to ask again."""
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


def _one_less(counts: Counter[Who], client: Who) -> None:
    counts[client] -= 1
    if counts[client] <= 0:
        del counts[client]
