"""Deliveries of an exclusive subscription in seq order: a window in memory, stored as one position with gaps.

Only retries, delayed messages and stragglers have rows. The window changes before the commit and undoes the change if
the commit fails. A copy of it that the commit installs would need no undo, but costs more than the transaction: with
10,000 deliveries in flight a copy takes 0.6 ms, and a whole ack 0.1 ms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from headwater.broker import deliveries
from headwater.broker.committer import TransactionHooks
from headwater.broker.deliveries import Claimed, ClaimResult, FetchPlan
from headwater.broker.in_flight import NEAR_SEQS, InFlight
from headwater.ports.records import DeliveryRow, SubscriptionRecord
from headwater.ports.store import Reader, Writer

NEAR_BYTES_MAX = 64 * 1024  # of a scan in the transaction that claims: others wait while it is read
SPANS_KEPT = 4  # how many times max_in_flight a window may stretch, from its first open delivery to its last


class Cursor(InFlight):
    _are_large = False  # the messages claimed last
    _full_claim = 0  # how many the last claim wanted and found close together: probably there is more behind

    def next_deadline_ms(self) -> int | None:
        return self._window.next_deadline_ms()

    # --- claiming -----------------------------------------------------------------------------------------------

    def may_claim_at_once(self, last_seq: int) -> bool:
        """Whether one step of the writer plans and claims, which takes half the time: near the end of the log, or where
        the last claim found all it wanted close together. Where there may be much to scan, the writer must not be kept
        waiting."""
        if self._filter_takes_time or self._are_large or len(self.claimed) >= self.spec.max_in_flight:
            return False
        return self._full_claim > 0 or self._is_near(last_seq)

    def plan_at_once(self, writer: Writer, limit: int, last_seq: int) -> FetchPlan | None:
        full_claim, self._full_claim = self._full_claim, 0
        if limit > full_claim and not self._is_near(last_seq):
            return None
        plan = self.plan(writer, limit, NEAR_BYTES_MAX)
        return plan if plan.fresh else None

    def may_claim_published(self, last_seq: int) -> bool:
        return self._is_near(last_seq) and self.may_claim_at_once(last_seq)

    def _scan_max(self, reader: Reader, room: int) -> int:
        return room

    def claim(
        self,
        writer: Writer,
        hooks: TransactionHooks,
        record: SubscriptionRecord,
        plan: FetchPlan,
        now_ms: int,
        bytes_max: int | None,
    ) -> ClaimResult:
        if not hooks:  # the first of its transaction, so everything before it is committed
            self._window.trim()
        stragglers = self._window.stragglers(SPANS_KEPT * self.spec.max_in_flight)
        if stragglers:
            self._move_to_rows(writer, hooks, stragglers)
        timed_out = dict.fromkeys(self._window.overdue(now_ms), now_ms)
        if timed_out:
            self._move_to_rows(writer, hooks, timed_out)
            self._remove(hooks, timed_out)
        result, room = ClaimResult(record, []), plan.room
        # Rows are not read unless the plan has seen one that is due: every statement releases the interpreter lock
        # and has to win it back.
        is_due = bool(timed_out) or (plan.next_due_ms is not None and plan.next_due_ms <= now_ms)
        if is_due and room > 0:
            suspects = self._suspect_until_ms(writer) is None
            result = deliveries.claim_due(writer, hooks, record, room, now_ms, suspects=suspects, bytes_max=bytes_max)
            room -= result.size
        was_outrun = self._scanned != plan.scanned_from  # another fetch of this consumer was quicker
        if not was_outrun:
            result = self._claim_fresh(writer, hooks, result, plan, room, now_ms)
        last = result.suspect or (result.claimed[-1] if result.claimed else None)
        if last is not None:
            self._are_large = last.message.size > NEAR_BYTES_MAX // 4
        has_new_room = bool(timed_out) and plan.room <= 0
        return result._replace(look_again=True) if was_outrun or has_new_room else result

    def _claim_fresh(
        self, writer: Writer, hooks: TransactionHooks, result: ClaimResult, plan: FetchPlan, room: int, now_ms: int
    ) -> ClaimResult:
        """Fill up with new messages."""
        fresh, scanned_to = plan.fresh[: max(0, room)], plan.scanned_to
        if len(fresh) < len(plan.fresh):
            scanned_to = fresh[-1].seq if fresh else plan.scanned_from
        seqs = [message.seq for message in fresh]
        delivered = self._window.delivered

        def take_back() -> None:
            self._window.undeliver(seqs, delivered)
            self._scanned = plan.scanned_from

        hooks.append(take_back)
        self._window.deliver(seqs, scanned_to, now_ms + self.spec.ack_wait_ms)
        self._scanned = scanned_to
        is_dense = scanned_to - plan.scanned_from <= NEAR_SEQS
        is_small = sum(message.size for message in fresh) <= NEAR_BYTES_MAX // 2
        self._full_claim = room if len(fresh) == room and is_dense and is_small else 0
        ready, delayed, expired = deliveries.sort_fresh(fresh, now_ms)
        record = result.record
        if len(ready) < len(seqs):  # the others have a row or are dead, so they are not open in the window
            self._window.settle([*(row.seq for row in delayed), *(message.seq for message in expired)])
            writer.put_deliveries(self.id, delayed)
            record = deliveries.dead_letter_expired(writer, hooks, record, expired, now_ms)
        claimed = [Claimed(message, 1, self.fence) for message in ready]
        return result._replace(record=record, claimed=result.claimed + claimed if result.claimed else claimed)

    def _move_to_rows(self, writer: Writer, hooks: TransactionHooks, due_ms: Mapping[int, int]) -> None:
        """Deliveries of the window become rows: stragglers, so that the window can drop the thousands that are settled
        behind them; and those whose ack wait is over, which are due as if their consumer had vanished."""
        self._close(hooks, due_ms)
        writer.put_deliveries(self.id, [DeliveryRow(seq, 1, at_ms, self.fence) for seq, at_ms in due_ms.items()])

    # --- settling -----------------------------------------------------------------------------------------------

    def save(self, writer: Writer, record: SubscriptionRecord, now_ms: int, **changes: Any) -> None:
        super().save(writer, record, now_ms, window=self._window.state(), **changes)

    def _remove(self, hooks: TransactionHooks, seqs: Collection[int]) -> None:
        if not hooks:
            self._window.trim()
        self._close(hooks, seqs)
        super()._remove(hooks, seqs)

    def _close(self, hooks: TransactionHooks, seqs: Iterable[int]) -> None:
        closed = self._window.settle(seqs)
        if closed:
            hooks.append(lambda: self._window.reopen(closed))
