"""Deliveries as rows in the database: of a shared subscription, or in order of priority or key.

The rows are the state, and other processes may change them. A delivery may be settled by the consumer whose token its
row has; each claim of a shared subscription has a token of its own. The stored window is only a position: messages up
to it that have no row are settled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headwater.broker import deliveries
from headwater.broker.committer import TransactionHooks
from headwater.broker.deliveries import ClaimResult, FetchPlan, replace
from headwater.broker.in_flight import NEAR_SEQS, InFlight
from headwater.broker.shared_consumers import next_token
from headwater.ports.records import Scan, SubscriptionRecord
from headwater.ports.store import Reader, Writer


class LeasedRows(InFlight):
    _expects_more = False  # the last claim was full, so there is probably more right behind it
    _deadline_ms: int | None = None

    def next_deadline_ms(self) -> int | None:
        return self._deadline_ms

    # --- claiming -----------------------------------------------------------------------------------------------

    def may_claim_at_once(self, last_seq: int) -> bool:
        return self._expects_more

    def plan_at_once(self, writer: Writer, limit: int, last_seq: int) -> FetchPlan | None:
        self._expects_more = False
        room = self._room(writer, limit)
        return FetchPlan(room, [], 0, 0, self.delivered_to, True, None, has_gaps=True) if room > 0 else None

    def may_claim_published(self, last_seq: int) -> bool:
        # Other consumers may have claimed further since, never less: the claim leaves out what is theirs.
        return self.spec.is_in_seq_order and not self._filter_takes_time and self._is_near(last_seq)

    def plan(self, reader: Reader, limit: int, bytes_max: int | None) -> FetchPlan:
        self._deadline_ms = None
        delivered = self.load(reader).window.delivered
        # Ahead of our scan: another consumer was there. Behind where it was: the subscription was moved.
        self._scanned = delivered if delivered < self._window.delivered else max(self._scanned, delivered)
        self._window.delivered = delivered
        return super().plan(reader, limit, bytes_max)

    def _scan_max(self, reader: Reader, room: int) -> int:
        if not self._filter_takes_time:
            return 1  # the claim scans again under the write lock, so it is enough to know that there is one
        return room if self.spec.is_in_seq_order else deliveries.parking_room(reader, self.id, self.spec)

    def claim(
        self,
        writer: Writer,
        hooks: TransactionHooks,
        record: SubscriptionRecord,
        plan: FetchPlan,
        now_ms: int,
        bytes_max: int | None,
    ) -> ClaimResult:
        delivered = record.window.delivered
        result = self._claim_rows(writer, hooks, record, plan, now_ms, bytes_max)
        # Others were quicker, or the subscription was moved: the messages of the plan are not what there is.
        was_outrun = self._filter_takes_time and delivered != plan.saved_to
        is_dense = result.record.window.delivered - delivered <= NEAR_SEQS
        is_full = is_dense and result.size == plan.room
        self._expects_more = is_full and self.spec.is_in_seq_order and not self._filter_takes_time
        hooks.then.append(partial(self._advance, result.record.window.delivered, now_ms + self.spec.ack_wait_ms))
        return result._replace(look_again=True) if was_outrun else result

    def _advance(self, delivered: int, deadline_ms: int) -> None:
        self._deadline_ms = deadline_ms if self._deadline_ms is None else min(deadline_ms, self._deadline_ms)
        self._scanned = max(self._scanned, delivered)
        self._window.delivered = max(self._window.delivered, delivered)

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
        suspects = self._suspect_until_ms(writer) is None
        if not self.spec.is_in_seq_order:
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
            most_bytes = bytes_max if self.spec.is_in_seq_order else None
            return lambda most: writer.scan(self._selection, after, most, None, most_bytes)
        seen = [] if moved_back else [message for message in plan.fresh if message.seq > delivered]

        def take(most: int) -> Scan:
            taken = seen[:most]
            if len(taken) < len(seen) or moved_back:
                return Scan(taken, taken[-1].seq if taken else delivered)
            return Scan(taken, max(delivered, plan.scanned_to))

        return take
