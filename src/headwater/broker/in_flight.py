"""What one consumer of a durable subscription has in flight, in memory, and its right to act for the subscription."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable
from functools import partial

from headwater.broker.committer import TransactionHooks
from headwater.broker.deliveries import (
    Claimed,
    is_row_of,
    load_held,
    not_in_flight,
)
from headwater.broker.engine import Engine
from headwater.broker.wakeups import Waiter
from headwater.errors import LeaseLostError, NotDeliveredError
from headwater.ports.records import DeliveryRow, SubscriptionRecord
from headwater.ports.store import Reader

Rows = dict[int, DeliveryRow]


class InFlight(dict[int, Claimed]):
    """Deliveries that were claimed here and are not settled, by seq. A transaction that fails undoes its changes."""

    def __init__(
        self, engine: Engine, record: SubscriptionRecord, waiter: Waiter, resumed: Iterable[Claimed] = ()
    ) -> None:
        super().__init__((claimed.message.seq, claimed) for claimed in resumed)
        self.id, self.spec, self.fence = record.id, record.spec, record.lease.fence
        self.load: Callable[[Reader], SubscriptionRecord] = partial(
            load_held, id=record.id, owner=record.lease.owner, fence=self.fence, created_ms=record.created_ms
        )
        """The subscription as stored, if this consumer may still act for it."""
        self._clock = engine.clock
        self._waiter = waiter
        self.suspect: int | None = None  # in flight, and its last consumer vanished

    def room(self, reader: Reader, limit: int, window: Container[int] = ()) -> int:
        """How many more may be claimed. When there is no room, deliveries that have been passed on to other consumers
        because their time ran out here are dropped."""
        if len(self) >= self.spec.max_in_flight:
            now_ms = self._clock.now_ms()
            rows = reader.deliveries(self.id, list(self))
            for seq, claimed in list(self.items()):
                row = rows.get(seq)
                held = row is not None and row.token == claimed.token and row.due_ms > now_ms
                if not held and seq not in window:
                    self.pop(seq, None)
        return max(0, min(limit, self.spec.max_in_flight - len(self)))

    def suspect_until_ms(self, reader: Reader) -> int | None:
        """When the suspect in flight here times out; None if there is none, and another may be claimed."""
        claimed = None if self.suspect is None else self.get(self.suspect)
        if claimed is None:
            return None
        row = reader.deliveries(self.id, [claimed.message.seq]).get(claimed.message.seq)
        is_held = row is not None and row.token == claimed.token and row.due_ms > self._clock.now_ms()
        return row.due_ms if row is not None and is_held else None

    def next_due_ms(self, reader: Reader) -> int | None:
        """When the next row can be claimed."""
        if self.suspect is None or (until_ms := self.suspect_until_ms(reader)) is None:
            return reader.next_due_ms(self.id, suspects=True)
        due_ms = reader.next_due_ms(self.id, suspects=False)
        return until_ms if due_ms is None else min(due_ms, until_ms)

    def add(self, hooks: TransactionHooks, claimed: Iterable[Claimed]) -> None:
        added = {each.message.seq: each for each in claimed}

        def take_back() -> None:
            for seq in added:
                self.pop(seq, None)

        hooks.append(take_back)
        self.update(added)

    def remove(self, hooks: TransactionHooks, seqs: Collection[int]) -> None:
        if len(self) >= self.spec.max_in_flight or (self.suspect is not None and self.suspect in seqs):
            hooks.then.append(self._waiter.wake)  # a taker may wait for room, or for the suspect to be settled
        removed = {seq: self.pop(seq) for seq in seqs if seq in self}
        hooks.append(lambda: self.update(removed))

    def check(
        self, reader: Reader, claimed: Collection[Claimed], *, strict: bool, window: Container[int] | None = None
    ) -> tuple[Collection[Claimed], Rows]:
        """Those that are in flight here, and the rows of those that are not in the window. `strict`: an error if one of
        them is not in flight. An earlier delivery of a message is not, even if it has the same token and attempt: the
        message may have been dead-lettered and redriven since."""
        lost = [each for each in claimed if self.get(each.message.seq, each) is not each]
        in_rows = claimed
        if window is not None:
            in_rows = [each for each in claimed if each.attempt > 1 or each.message.seq not in window]
        rows: Rows = {}
        if in_rows:
            rows = reader.deliveries(self.id, [each.message.seq for each in in_rows])
            lost += [each for each in in_rows if not is_row_of(each, rows)]
        if not lost:
            return claimed, rows
        if strict:
            raise self.why_not(lost[0].message.seq, reader)
        ids = set(map(id, lost))
        held = [each for each in claimed if id(each) not in ids]
        return held, {each.message.seq: rows[each.message.seq] for each in held if each.message.seq in rows}

    def why_not(self, seq: int, reader: Reader) -> NotDeliveredError | LeaseLostError:
        return not_in_flight(reader, self.load(reader), seq)
