"""Deliveries as rows in the database: of a shared subscription, or in order of priority or key.

The rows are the state, and other processes may change them. A delivery may be settled by the consumer whose token its
row has; each claim of a shared subscription has a token of its own. The stored window is only a position: messages up
to it that have no row are settled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from headwater.broker import deliveries
from headwater.broker.committer import TransactionHooks
from headwater.broker.deliveries import Claimed, ClaimResult, FetchPlan, replace
from headwater.broker.in_flight import InFlight, Rows
from headwater.broker.shared_consumers import next_token
from headwater.ports.records import Scan, SubscriptionRecord, selection_of
from headwater.ports.store import Reader, Writer

DENSE_SEQS = 1_000  # a claim that advanced no further cost the writer next to nothing


class LeasedRows:
    def __init__(self, in_flight: InFlight, record: SubscriptionRecord, name: str) -> None:
        self.id, self.spec, self._name = record.id, record.spec, name
        self._in_flight = in_flight
        self._selection = selection_of(record.spec)
        self._filter_takes_time = self._selection.takes_time
        self._in_seq_order = record.spec.is_in_seq_order
        self._scanned = self._saved_to = record.window.delivered
        self._expects_more = False  # the last claim was full, so there is probably more right behind it
        self._deadline_ms: int | None = None

    @property
    def delivered_to(self) -> int:
        return self._saved_to

    def next_deadline_ms(self) -> int | None:
        """Of the rows claimed since the last plan, which has seen all others."""
        return self._deadline_ms

    # --- claiming -----------------------------------------------------------------------------------------------

    def is_behind(self, last_seq: int) -> bool:
        return last_seq > self._scanned

    def may_claim_at_once(self, last_seq: int) -> bool:
        """Whether a claim without a plan is cheap for the writer, and likely to find something."""
        return self._expects_more

    def may_claim_published(self, last_seq: int) -> bool:
        """The same inside the transaction that publishes."""
        return self._in_seq_order and not self._filter_takes_time and 0 < last_seq - self._scanned <= DENSE_SEQS

    def plan_published(self, writer: Writer, limit: int) -> FetchPlan | None:
        room = self._in_flight.room(writer, limit)
        # Other consumers may have claimed further since, never less: the claim leaves out what is theirs.
        return deliveries.plan_published(writer, self._selection, room, self._scanned, self._saved_to)

    def plan_at_once(self, writer: Writer, limit: int, last_seq: int) -> FetchPlan | None:
        self._expects_more = False
        room = self._in_flight.room(writer, limit)
        return FetchPlan(room, [], 0, 0, self._saved_to, 0, None, has_gaps=True) if room > 0 else None

    def plan(self, reader: Reader, limit: int, bytes_max: int | None) -> FetchPlan:
        self._deadline_ms = None
        saved_to = self._in_flight.load(reader).window.delivered
        # Ahead of our scan: another consumer was there. Behind where it was: the subscription was moved.
        self._scanned = saved_to if saved_to < self._saved_to else max(self._scanned, saved_to)
        self._saved_to = saved_to
        room, after = self._in_flight.room(reader, limit), self._scanned
        if not self._filter_takes_time:
            most = 1  # the claim scans again under the write lock, so it is enough to know that there is one
        else:
            most = room if self._in_seq_order else deliveries.parking_room(reader, self.id, self.spec)
        fresh, scanned_to = (
            reader.scan(self._selection, after, most, None, bytes_max) if room > 0 and most > 0 else ([], after)
        )
        next_due_ms, has_gaps = self._in_flight.next_due_ms(reader), bool(reader.gaps(self.id))
        return FetchPlan(room, fresh, after, scanned_to, saved_to, reader.last_seq(), next_due_ms, has_gaps)

    def skip(self, plan: FetchPlan) -> None:
        """Nothing of the plan can be claimed: the next one begins behind it."""
        if self._scanned == plan.scanned_from:  # else another fetch moved it
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
        delivered = record.window.delivered
        result = self._claim_rows(writer, hooks, record, plan, now_ms, bytes_max)
        # Others were quicker, or the subscription was moved: the messages of the plan are not what there is.
        was_outrun = self._filter_takes_time and delivered != plan.saved_to
        is_dense = result.record.window.delivered - delivered <= DENSE_SEQS
        is_full = is_dense and result.size == plan.room
        self._expects_more = is_full and self._in_seq_order and not self._filter_takes_time
        hooks.then.append(partial(self._advance, result.record.window.delivered, now_ms + self.spec.ack_wait_ms))
        return result, result.dropped or was_outrun

    def _advance(self, delivered: int, deadline_ms: int) -> None:
        self._deadline_ms = deadline_ms if self._deadline_ms is None else min(deadline_ms, self._deadline_ms)
        self._scanned = max(self._scanned, delivered)
        self._saved_to = max(self._saved_to, delivered)

    def _claim_rows(
        self,
        writer: Writer,
        hooks: TransactionHooks,
        record: SubscriptionRecord,
        plan: FetchPlan,
        now_ms: int,
        bytes_max: int | None,
    ) -> ClaimResult:
        if record.spec.mode == "shared":  # every claim has a token of its own, so an old one is recognised
            token = next_token(record.lease.fence, self._name)
            record = replace(record, lease=replace(record.lease, fence=token))
        fresh = self._fresh(writer, record, plan, bytes_max)
        if plan.is_current:
            record, claimed = deliveries.claim_fresh(writer, hooks, record, fresh(plan.room), now_ms)
            return ClaimResult(record, claimed)
        suspects = self._in_flight.suspect_until_ms(writer) is None
        if not self._in_seq_order:
            return deliveries.park_and_claim(
                writer, hooks, record, plan.room, fresh, now_ms, suspects=suspects, bytes_max=bytes_max
            )
        result = deliveries.claim_due(writer, hooks, record, plan.room, now_ms, suspects=suspects, bytes_max=bytes_max)
        room = plan.room - result.size
        if room <= 0:
            return result
        record, claimed = deliveries.claim_fresh(writer, hooks, result.record, fresh(room), now_ms)
        return result._replace(record=record, claimed=result.claimed + claimed)

    def _fresh(
        self, writer: Writer, record: SubscriptionRecord, plan: FetchPlan, bytes_max: int | None
    ) -> Callable[[int], Scan]:
        """New messages, up to so many: scanned now, from the first that the plan found on; or those of the plan, if the
        filter takes time. Messages that others have claimed meanwhile are not among them."""
        delivered, moved_back = record.window.delivered, record.window.delivered < plan.saved_to
        if not (self._filter_takes_time or plan.is_current):
            skip_to = plan.fresh[0].seq - 1 if plan.fresh else plan.scanned_to
            after = delivered if moved_back else max(delivered, skip_to)
            # What is parked is not delivered yet: the order is right only if all that there is room for is seen.
            most_bytes = bytes_max if self._in_seq_order else None
            return lambda most: writer.scan(self._selection, after, most, None, most_bytes)
        seen = [] if moved_back else [message for message in plan.fresh if message.seq > delivered]

        def take(most: int) -> Scan:
            taken = seen[:most]
            if len(taken) < len(seen) or moved_back:
                return Scan(taken, taken[-1].seq if taken else delivered)
            return Scan(taken, max(delivered, plan.scanned_to))

        return take

    # --- settling -----------------------------------------------------------------------------------------------

    def take_out(
        self, writer: Writer, hooks: TransactionHooks, claimed: Collection[Claimed], *, strict: bool
    ) -> tuple[Collection[Claimed], Rows]:
        """Take deliveries out of flight. Returns those that were in flight, and their rows, which the caller puts or
        removes. `strict`: an error if one is not in flight, before anything is changed."""
        held, rows = self._in_flight.check(writer, claimed, strict=strict)
        self._in_flight.remove(hooks, list(rows))
        return held, rows

    def extend(self, writer: Writer, claimed: Collection[Claimed], deadline_ms: int, *, strict: bool) -> None:
        _, rows = self._in_flight.check(writer, claimed, strict=strict)
        writer.put_deliveries(self.id, [replace(row, due_ms=deadline_ms) for row in rows.values()])

    def save(self, writer: Writer, record: SubscriptionRecord, now_ms: int, **changes: Any) -> None:
        writer.save_subscription(deliveries.renewed(record, now_ms, **changes))
