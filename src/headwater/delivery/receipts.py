"""What a numbered publisher has stored already, so that what it sends again is not stored twice.

A publisher that may have to repeat itself, such as a client whose connection broke before the answer came, numbers its
messages 1, 2, 3, … In the transaction that stores them, the log notes which numbers became which seqs. That costs one
row for a whole frame of messages, where an id for each would cost a row and an index entry for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

RUN_MAX = 100_000  # how many messages one receipt may stand for


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """The messages `number`, `number + 1`, … (`length` of them) are in the log as `seq`, `seq + 1`, …"""

    number: int
    length: int
    seq: int


def stored_seqs(receipts: Iterable[Receipt], first: int, count: int) -> dict[int, int]:
    """Of the numbers `first` to `first + count - 1`, those that are stored, with their seqs."""
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
