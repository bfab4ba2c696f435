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
from headwater.broker.deliveries import Claimed, ClaimResult, FetchPlan, replace
from headwater.broker.in_flight import InFlight, Rows
from headwater.delivery.window import Window
from headwater.ports.records import DeliveryRow, SubscriptionRecord, selection_of
from headwater.ports.store import Reader, Writer

NEAR_SEQS = 1_000  # so far behind the end of the log, a scan costs the writer next to nothing
NEAR_BYTES_MAX = 64 * 1024  # unless messages are large: then others would wait while they are read
SPANS_KEPT = 4  # how many times max_in_flight a window may stretch, from its first open delivery to its last


class Cursor:
    def __init__(self, in_flight: InFlight, record: SubscriptionRecord) -> None:
        self.id, self.spec = record.id, record.spec
        self._in_flight = in_flight
        self._selection = selection_of(record.spec)
        self._filter_takes_time = self._selection.takes_time
        self._window = Window(record.window)
        self._scanned = record.window.delivered
        self._are_large = False  # the messages claimed last
        self._full_claim = 0  # how many the last claim wanted and found close together: probably there is more behind

    @property
    def delivered_to(self) -> int:
        return self._window.delivered

    def next_deadline_ms(self) -> int | None:
        return self._window.next_deadline_ms()

    # --- claiming -----------------------------------------------------------------------------------------------

    def is_behind(self, last_seq: int) -> bool:
        return last_seq > self._scanned

    def may_claim_at_once(self, last_seq: int) -> bool:
        """Near the end of the log, or where the last claim found all it wanted close together, planning and claiming is
        one step of the writer, which takes half the time. Where there may be much to scan, the writer must not be kept
        waiting."""
        if self._filter_takes_time or self._are_large or len(self._in_flight) >= self.spec.max_in_flight:
            return False
        return self._full_claim > 0 or self._is_near(last_seq)

    def _is_near(self, last_seq: int) -> bool:
        return 0 < last_seq - self._scanned <= NEAR_SEQS

    def may_claim_published(self, last_seq: int) -> bool:
        """The same inside the transaction that publishes, where only what it published is looked for."""
        return self._is_near(last_seq) and self.may_claim_at_once(last_seq)

    def plan_published(self, writer: Writer, limit: int) -> FetchPlan | None:
        room = self._in_flight.room(writer, limit, self._window.open)
        delivered = self._window.delivered
        return deliveries.plan_published(writer, self._selection, room, self._scanned, delivered)

    def plan_at_once(self, writer: Writer, limit: int, last_seq: int) -> FetchPlan | None:
        full_claim, self._full_claim = self._full_claim, 0
        if limit > full_claim and not self._is_near(last_seq):
            return None
        plan = self.plan(writer, limit, NEAR_BYTES_MAX)
        return plan if plan.fresh else None

    def plan(self, reader: Reader, limit: int, bytes_max: int | None) -> FetchPlan:
        room, after = self._in_flight.room(reader, limit, self._window.open), self._scanned
        fresh, scanned_to = reader.scan(self._selection, after, room, None, bytes_max) if room > 0 else ([], after)
        saved_to, next_due_ms = self._window.delivered, self._in_flight.next_due_ms(reader)
        has_gaps = bool(reader.gaps(self.id))
        at_end = room <= 0 or (not fresh and scanned_to >= reader.last_seq())
        return FetchPlan(room, fresh, after, scanned_to, saved_to, at_end, next_due_ms, has_gaps)

    def skip(self, plan: FetchPlan) -> None:
        """Nothing of the plan can be claimed: the next one begins behind it."""
        if self._scanned == plan.scanned_from:  # else another fetch moved it, or its claim was undone
            self._scanned = plan.scanned_to

    def claim(
        self,
        writer: Writer,
        hooks: TransactionHooks,
        record: SubscriptionRecord,
        plan: FetchPlan,
        now_ms: int,
        bytes_max: int | None,
    ) -> tuple[ClaimResult, bool]:
        """Also whether there may be more, though nothing was found."""
        if not hooks:  # the first of its transaction, so everything before it is committed
            self._window.trim()
        stragglers = self._window.stragglers(SPANS_KEPT * self.spec.max_in_flight)
        if stragglers:
            self._move_to_rows(writer, hooks, stragglers)
        timed_out = dict.fromkeys(self._window.overdue(now_ms), now_ms)
        if timed_out:
            self._move_to_rows(writer, hooks, timed_out)
            self._in_flight.remove(hooks, timed_out)
        result, room = ClaimResult(record, []), plan.room
        # Rows are not read unless the plan has seen one that is due: every statement releases the interpreter lock
        # and has to win it back.
        is_due = bool(timed_out) or (plan.next_due_ms is not None and plan.next_due_ms <= now_ms)
        if is_due and room > 0:
            suspects = self._in_flight.suspect_until_ms(writer) is None
            result = deliveries.claim_due(writer, hooks, record, room, now_ms, suspects=suspects, bytes_max=bytes_max)
            room -= result.size
        was_outrun = self._scanned != plan.scanned_from  # another fetch of this consumer was quicker
        if not was_outrun:
            result = self._claim_fresh(writer, hooks, result, plan, room, now_ms)
        last = result.suspect or (result.claimed[-1] if result.claimed else None)
        if last is not None:
            self._are_large = last.message.size > NEAR_BYTES_MAX // 4
        return result, result.dropped or was_outrun or (bool(timed_out) and plan.room <= 0)

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
        claimed = [Claimed(message, 1, self._in_flight.fence) for message in ready]
        return result._replace(record=record, claimed=result.claimed + claimed if result.claimed else claimed)

    def _move_to_rows(self, writer: Writer, hooks: TransactionHooks, due_ms: Mapping[int, int]) -> None:
        """Deliveries of the window become rows: stragglers, so that the window can drop the thousands that are settled
        behind them; and those whose ack wait is over, which are due as if their consumer had vanished."""
        self._close(hooks, due_ms)
        fence = self._in_flight.fence
        writer.put_deliveries(self.id, [DeliveryRow(seq, 1, at_ms, fence) for seq, at_ms in due_ms.items()])

    # --- settling -----------------------------------------------------------------------------------------------

    def take_out(
        self, writer: Writer, hooks: TransactionHooks, claimed: Collection[Claimed], *, strict: bool
    ) -> tuple[Collection[Claimed], Rows]:
        """Take deliveries out of flight. Returns those that were in flight, and their rows, which the caller puts or
        removes. `strict`: an error if one is not in flight, before anything is changed."""
        if not hooks:
            self._window.trim()
        held, rows = self._in_flight.check(writer, claimed, strict=strict, window=self._window.open)
        seqs = [each.message.seq for each in held]
        self._close(hooks, seqs)
        self._in_flight.remove(hooks, seqs)
        return held, rows

    def extend(self, writer: Writer, claimed: Collection[Claimed], deadline_ms: int, *, strict: bool) -> None:
        held, rows = self._in_flight.check(writer, claimed, strict=strict, window=self._window.open)
        for each in held:
            if each.attempt == 1:
                self._window.extend(each.message.seq, deadline_ms)
        if rows:
            writer.put_deliveries(self.id, [replace(row, due_ms=deadline_ms) for row in rows.values()])

    def save(self, writer: Writer, record: SubscriptionRecord, now_ms: int, **changes: Any) -> None:
        writer.save_subscription(deliveries.renewed(record, now_ms, window=self._window.state(), **changes))

    def _close(self, hooks: TransactionHooks, seqs: Iterable[int]) -> None:
        closed = self._window.settle(seqs)
        if closed:
            hooks.append(lambda: self._window.reopen(closed))
