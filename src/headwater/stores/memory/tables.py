"""What a memory store holds. Nothing here depends on the order of a dict: rolling back may change it."""

from __future__ import annotations

import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from headwater.delivery.lease import Lease
from headwater.delivery.receipts import Receipt
from headwater.delivery.runs import Run, holes
from headwater.message import SALT_BITS, Message
from headwater.ports.records import (
    DeadLetter,
    DeliveryRow,
    Gap,
    RetentionPolicy,
    Stage,
    SubscriptionRecord,
    TopicCount,
)
from headwater.stores.memory.undo import UndoLog
from headwater.topics import Dialect


class RememberedId(NamedTuple):
    seq: int
    published_ms: int


class MessageTable:
    """Messages by seq, and beside them the existing seqs in order, so that ranges are found by bisection."""

    def __init__(self) -> None:
        self.last_seq = 0
        self.by_seq: dict[int, Message] = {}
        self._seqs: list[int] = []

    def between(self, after: int, upto: int) -> Iterator[Message]:
        """The messages in (after, upto]; costs nothing for those outside."""
        low = bisect_right(self._seqs, after)
        high = bisect_right(self._seqs, upto, lo=low)
        return (self.by_seq[self._seqs[index]] for index in range(low, high))

    def holes(self, low: int, high: int) -> list[Run]:
        """Nothing but deleting makes them: seqs are given out one after the other."""
        low, high = max(low, 1), min(high, self.last_seq)
        return holes(self._seqs[bisect_left(self._seqs, low) : bisect_right(self._seqs, high)], low, high)

    def seq_before(self, at_ms: int) -> int:
        index = bisect_left(self._seqs, at_ms, key=lambda seq: self.by_seq[seq].published_ms)
        return self._seqs[index - 1] if index else 0

    def extend(self, messages: Sequence[Message], undo: UndoLog) -> None:
        """Append messages whose seqs follow `last_seq`."""
        if not messages:
            return
        undo.add(partial(self._truncate, self.last_seq))
        self._seqs.extend(message.seq for message in messages)
        self.by_seq.update((message.seq, message) for message in messages)
        self.last_seq = messages[-1].seq

    def delete(self, seqs: Sequence[int], undo: UndoLog) -> list[Message]:
        """Remove those that exist, and return them."""
        gone = [self.by_seq[seq] for seq in sorted(set(seqs)) if seq in self.by_seq]
        if not gone:
            return []
        low = bisect_left(self._seqs, gone[0].seq)
        high = bisect_right(self._seqs, gone[-1].seq)
        touched = self._seqs[low:high]
        gone_seqs = {message.seq for message in gone}
        kept = [seq for seq in touched if seq not in gone_seqs]
        undo.add(partial(self._seqs.__setitem__, slice(low, low + len(kept)), touched))
        self._seqs[low:high] = kept
        for seq in gone_seqs:
            undo.drop(self.by_seq, seq)
        return gone

    def _truncate(self, last_seq: int) -> None:
        start = bisect_right(self._seqs, last_seq)
        for seq in self._seqs[start:]:
            self.by_seq.pop(seq, None)
        del self._seqs[start:]
        self.last_seq = last_seq


class Tables:
    def __init__(self) -> None:
        self.salt = secrets.randbits(SALT_BITS)
        self.messages = MessageTable()
        self.ids: dict[str, RememberedId] = {}  # by scoped id
        self.topic_counts: dict[str, TopicCount] = {}
        self.subscriptions: dict[str, SubscriptionRecord] = {}
        self.deliveries: dict[str, dict[int, DeliveryRow]] = {}
        self.dead_letters: dict[int, DeadLetter] = {}
        self.last_dead_letter = 0
        self.untold_gaps: dict[str, tuple[Gap, ...]] = {}
        self.gap_totals: dict[str, int] = {}
        self.retention: dict[tuple[str, Dialect], RetentionPolicy] = {}
        self.leases: dict[str, Lease] = {}
        self.receipts: dict[tuple[str, int], tuple[Receipt, int]] = {}  # by publisher and number, with their time
        self.sinks: dict[str, int] = {}
        self.timings: dict[tuple[str, int, Stage, int], int] = {}
