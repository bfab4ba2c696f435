"""The deliveries that an exclusive consumer has in flight, and what of them has to be stored.

The database keeps three things: `floor` (everything matching at or below it is settled), `delivered` (the highest seq
delivered) and the settled ranges between the two. While acks come in order that is one row with an empty range list,
whatever the number of messages. After a crash the next consumer reads the same three things and knows exactly what was
in flight: the matching messages in (floor, delivered] outside the ranges.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

import msgspec

Range = tuple[int, int]


class WindowState(msgspec.Struct, frozen=True):
    """The durable part. `settled` are inclusive seq ranges above the floor."""

    floor: int = 0
    delivered: int = 0
    settled: tuple[Range, ...] = ()

    def is_settled(self, seq: int) -> bool:
        return seq <= self.floor or any(low <= seq <= high for low, high in self.settled)


class Window:
    """In-flight deliveries of one consumer, in seq order. `deliver` and `settle` come before the commit; if it fails,
    `undeliver` and `reopen` undo them, so that memory and database agree."""

    def __init__(self, state: WindowState) -> None:
        self.delivered = state.delivered
        self._order: deque[int] = deque()
        self.open: dict[int, int] = {}  # seq -> deadline_ms
        self._first_deadline_ms = 0  # never later than the earliest deadline; spares a walk on every fetch

    def __len__(self) -> int:
        return len(self.open)

    def __contains__(self, seq: object) -> bool:
        return seq in self.open

    def deliver(self, seqs: Sequence[int], scanned_to: int, deadline_ms: int) -> None:
        """Add deliveries; the log has been read up to `scanned_to`, including messages that do not match."""
        if not self.open:
            self._first_deadline_ms = deadline_ms
        self._order.extend(seqs)
        self.open.update(dict.fromkeys(seqs, deadline_ms))
        self._first_deadline_ms = min(self._first_deadline_ms, deadline_ms)
        self.delivered = max(self.delivered, scanned_to)

    def undeliver(self, seqs: Iterable[int], scanned_before: int) -> None:
        """Undo the last `deliver`, because its transaction failed."""
        for seq in seqs:
            self.open.pop(seq, None)
        self.delivered = scanned_before
        while self._order and self._order[-1] > scanned_before:
            self._order.pop()

    def settle(self, seqs: Iterable[int]) -> dict[int, int]:
        """Close deliveries; returns what was open of them (with deadlines), to be handed to `reopen` on failure."""
        pop = self.open.pop
        return {seq: deadline for seq in seqs if (deadline := pop(seq, None)) is not None}

    def reopen(self, closed: dict[int, int]) -> None:
        self.open.update(closed)
        self._first_deadline_ms = 0

    def trim(self) -> None:
        """Forget the settled front; only when all that was settled is committed, for `reopen` needs it."""
        while self._order and self._order[0] not in self.open:
            self._order.popleft()

    def stragglers(self, most: int) -> dict[int, int]:
        """Open deliveries, with their deadlines, that keep the window longer than so many."""
        over = len(self._order) - most
        return {seq: self.open[seq] for seq in islice(self._order, over) if seq in self.open} if over > 0 else {}

    def state(self) -> WindowState:
        """What to store now."""
        order, still_open = self._order, self.open
        first = next((seq for seq in order if seq in still_open), None)
        if first is None:
            return WindowState(self.delivered, self.delivered)
        behind = (seq for seq in order if seq > first)
        in_order = len(still_open) == len(order) - order.index(first)
        ranges = () if in_order else tuple(_settled_ranges(behind, still_open))
        return WindowState(first - 1, self.delivered, ranges)

    def extend(self, seq: int, deadline_ms: int) -> bool:
        if seq not in self.open:
            return False
        self.open[seq] = deadline_ms
        self._first_deadline_ms = min(self._first_deadline_ms, deadline_ms)
        return True

    def overdue(self, now_ms: int) -> list[int]:
        """Deliveries whose ack wait is over, in seq order."""
        if not self.open or now_ms < self._first_deadline_ms:
            return []
        late = sorted(seq for seq, deadline_ms in self.open.items() if deadline_ms <= now_ms)
        self._first_deadline_ms = min(
            (deadline_ms for deadline_ms in self.open.values() if deadline_ms > now_ms), default=0
        )
        return late

    def next_deadline_ms(self) -> int | None:
        return min(self.open.values(), default=None)


def _settled_ranges(order: Iterable[int], still_open: dict[int, int]) -> Iterable[Range]:
    low = high = None
    for seq in order:
        if seq in still_open:
            if low is not None and high is not None:
                yield (low, high)
            low = high = None
        else:
            low = seq if low is None else low
            high = seq
    if low is not None and high is not None:
        yield (low, high)
