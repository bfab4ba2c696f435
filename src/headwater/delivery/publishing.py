"""What keeps a publish that is repeated from being stored twice: ids, and the numbers of a numbered publisher.

A client whose connection broke before the answer came has to repeat itself, so it numbers its messages 1, 2, 3, … In
the transaction that stores them, the log records which numbers became which seqs. That costs one row for a whole
frame of messages, where an id for each would cost a row and an index entry for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from headwater.errors import InvalidOptionError

RUN_MAX = 100_000  # how many messages one receipt may stand for


class DedupeWindow(msgspec.Struct, frozen=True):
    """An id counts as a repeat while both hold: not older than `span_ms`, and among the last `count` messages."""

    span_ms: int = 24 * 3600 * 1000
    count: int = 1_000_000

    def __post_init__(self) -> None:
        if self.span_ms < 0 or self.count < 0:
            raise InvalidOptionError("a dedupe window cannot be negative")

    def remembers(self, seq: int, published_ms: int, last_seq: int, now_ms: int) -> bool:
        return seq > self.oldest_seq(last_seq) and published_ms >= self.oldest_ms(now_ms)

    def oldest_seq(self, last_seq: int) -> int:
        return last_seq - self.count

    def oldest_ms(self, now_ms: int) -> int:
        return now_ms - self.span_ms


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """The messages `number`, `number + 1`, … (`length` of them) are in the log as `seq`, `seq + 1`, …"""

    number: int
    length: int
    seq: int


def stored_seqs(receipts: Iterable[Receipt], first: int, count: int) -> dict[int, int]:
    """The seqs of those numbers from `first` to `first + count - 1` that are stored."""
    known: dict[int, int] = {}
    for receipt in receipts:
        low, high = max(first, receipt.number), min(first + count, receipt.number + receipt.length)
        known.update((number, receipt.seq + number - receipt.number) for number in range(low, high))
    return known


def receipts_for(numbers: Sequence[int], seqs: Sequence[int]) -> list[Receipt]:
    """Receipts for messages of these numbers that got these seqs: one for each run of neighbours."""
    receipts: list[Receipt] = []
    start = 0
    for at in range(1, len(seqs) + 1):
        is_end = at == len(seqs) or at - start == RUN_MAX
        if is_end or numbers[at] != numbers[at - 1] + 1 or seqs[at] != seqs[at - 1] + 1:
            receipts.append(Receipt(numbers[start], at - start, seqs[start]))
            start = at
    return receipts
