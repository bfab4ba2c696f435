"""The consumer of a durable subscription in a log of this process: claims, settles, keeps its lease.

What it has in flight is a `Cursor`, for an exclusive subscription in seq order, or `LeasedRows`, for all others. Every
verb is one transaction of the committer: it loads the subscription, which refuses a consumer that has lost its lease,
changes deliveries, and saves the subscription with a renewed lease.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from headwater.broker import deliveries
from headwater.broker.committer import TransactionHooks
from headwater.broker.consumer import FALLBACK_POLL_S, Consumer
from headwater.broker.cursor import Cursor
from headwater.broker.deliveries import NOTHING, Claim, Claimed, Failure, FetchPlan, Resumed, replace
from headwater.broker.engine import Engine, refuse_in_transaction
from headwater.broker.flow import Completion, Flow, complete
from headwater.broker.in_flight import InFlight
from headwater.broker.leased_rows import LeasedRows
from headwater.broker.shared_consumers import renew_consumer
from headwater.delivery.lease import release
from headwater.delivery.retry import decide_retry
from headwater.errors import ClosedError, LeaseLostError, NotDeliveredError, OutcomeUnknownError, StoreError
from headwater.ports.records import DeliveryRow, SubscriptionRecord, selection_of
from headwater.ports.store import Writer

LOCKED_RETRY_MS = 200  # when to look again at a row that is due and locked by another transaction
SCANNED_UNSAVED_MAX = 10_000  # how far a scan may pass messages that do not match before its position is saved


class DurableConsumer(Consumer):
    def __init__(
        self, engine: Engine, record: SubscriptionRecord, resumed_from: int, resumed: Resumed, name: str
    ) -> None:
        selection = selection_of(record.spec)
        waiter = engine.wakeups.add(selection.pattern, record.id, wake_on_settle=True)
        super().__init__(record.id, record.spec, waiter, engine.clock.now_ms)
        self.engine = engine
        self._owner = record.lease.owner
        self._name = name  # in the list of a shared subscription's consumers
        self.resumed = resumed
        self.resumed_from = resumed_from
        kind = LeasedRows if record.spec.keeps_rows else Cursor
        self._state: InFlight = kind(engine, record, waiter, name, resumed.held)
        self._in_flight = self._state.claimed
        self._lane = engine.filters if selection.takes_time else engine.readers
        self._is_paused = record.spec.paused_ms is not None  # as far as this process knows
        self.on_paused: Callable[[], None] | None = None  # on whichever thread learns of a pause
        self._looked_s = 0.0  # at the log, not only at what this process published
        engine.ensure_watching()

    @property
    def fence(self) -> int:
        return self._state.fence

    @property
    def delivered_to(self) -> int:
        return self._state.delivered_to

    # --- claiming -----------------------------------------------------------------------------------------------

    def claim(self, limit: int) -> Flow[int | None]:
        refuse_in_transaction(self.engine)
        self.engine.refuse_closed()
        if self._is_paused and (yield from self._is_still_paused()):
            return None
        submit, state = self.engine.committer.submit, self._state
        claim: Claim
        if state.may_claim_at_once(self.engine.wakeups.announced):
            claim = yield submit(partial(self._claim_at_once, limit), limit, touching=self.id, synced=False)
            self._waiter.is_stale = True  # it may have left rows that are due
            if claim.found:
                return self._look_again_ms
        try:
            return (yield from self._look_and_claim(limit))
        except BaseException:
            self._waiter.is_stale = True
            raise

    def _look_and_claim(self, limit: int) -> Flow[int | None]:
        submit, state = self.engine.committer.submit, self._state
        self._waiter.is_stale, self._looked_s = False, time.monotonic()
        last_place = None
        while True:
            plan = yield from self.engine.read(
                lambda reader: state.plan(reader, limit, self.claim_bytes_max), self._lane
            )
            now_ms = self._now_ms()
            times_out_ms = state.next_deadline_ms()
            # Without room, only a delivery that times out can change anything.
            row_due_ms = plan.next_due_ms if plan.room > 0 else None
            due_ms = min((ms for ms in (row_due_ms, times_out_ms) if ms is not None), default=None)
            is_due = due_ms is not None and due_ms <= now_ms
            is_far = plan.scanned_to - plan.saved_to > SCANNED_UNSAVED_MAX
            claim = NOTHING
            if plan.fresh or is_due or is_far or plan.has_gaps:
                claim = yield submit(partial(self._claim_planned, plan), plan.room, touching=self.id, synced=False)
                self._waiter.is_stale = True  # it may have left rows that are due, such as delayed ones
            else:
                state.skip(plan)
            if self._is_paused:
                return None
            place = (plan.scanned_from, plan.saved_to)
            is_stuck = place == last_place and not claim.look_again  # all that is left waits behind others of its key
            last_place = place
            is_parked = bool(plan.fresh) and not claim.found  # the next plan knows when the first of them is due
            if claim.found or is_stuck or (plan.at_end and not claim.look_again and not is_parked):
                if is_due and not claim.found and due_ms is not None:  # an external transaction is settling it
                    due_ms = max(due_ms, now_ms + LOCKED_RETRY_MS)
                return due_ms

    def _claim_at_once(self, limit: int, writer: Writer, hooks: TransactionHooks) -> Claim:
        if self._closing:  # the close has released everything, and the lease
            return NOTHING
        record = self._load(writer, hooks)
        plan = self._state.plan_at_once(writer, limit, self.engine.wakeups.announced)
        return NOTHING if plan is None else self._claim(writer, hooks, record, plan)

    def is_up_to_date(self) -> bool:
        if self._waiter.is_stale or time.monotonic() - self._looked_s >= FALLBACK_POLL_S:
            return False
        if self._state.is_behind(self.engine.wakeups.last_known):
            return self._is_paused
        if self._is_paused:
            return True
        now_ms = self._now_ms()
        return all(ms is None or ms > now_ms for ms in (self._look_again_ms, self._next_deadline_ms()))

    def _next_deadline_ms(self) -> int | None:
        return None if self._is_paused else self._state.next_deadline_ms()

    @contextlib.contextmanager
    def _standing_by(self, limit: int) -> Iterator[None]:
        if self.engine.store.claims_with_publish:
            self.engine.wakeups.stand_by(self._waiter, partial(self._claim_published, limit))
        try:
            yield
        finally:
            self.engine.wakeups.stand_down(self._waiter)

    def _claim_published(self, limit: int, last_seq: int, writer: Writer, hooks: TransactionHooks) -> bool:
        if self._has_ended or self._is_paused or not self._state.may_claim_published(last_seq):
            return False
        record = self._load(writer, hooks)
        plan = self._state.plan_published(writer, limit)
        return plan is not None and bool(self._claim(writer, hooks, record, plan).found)

    def _claim_planned(self, plan: FetchPlan, writer: Writer, hooks: TransactionHooks) -> Claim:
        return NOTHING if self._closing else self._claim(writer, hooks, self._load(writer, hooks), plan)

    def _claim(self, writer: Writer, hooks: TransactionHooks, record: SubscriptionRecord, plan: FetchPlan) -> Claim:
        if record.spec.paused_ms is not None:
            return NOTHING
        now_ms = self._now_ms()
        result = self._state.claim(writer, hooks, record, plan, now_ms, self.claim_bytes_max)
        found = result.claimed
        if result.suspect is not None:
            self._state.suspect = result.suspect.message.seq
            found = [*found, result.suspect]
        gaps = writer.gaps(self.id) if plan.has_gaps else []
        if gaps:
            writer.mark_gaps_reported(self.id)
        self._state.save(writer, result.record, now_ms)
        self._state.add(hooks, found)
        self.engine.timings.note(hooks, "deliver", self.id, found, result.redriven)
        hooks.then.append(partial(self.deliver, found, gaps))
        return Claim(found, result.look_again)

    # --- pausing ------------------------------------------------------------------------------------------------

    def _load(self, writer: Writer, hooks: TransactionHooks) -> SubscriptionRecord:
        """The subscription as stored. A pause or resume by another process is noticed here."""
        record = self._state.load(writer)
        is_paused = record.spec.paused_ms is not None
        if is_paused is not self._is_paused:
            hooks.then.append(partial(self.note_paused, is_paused))
        return record

    def note_paused(self, is_paused: bool) -> None:
        """Release the buffer when the subscription is paused: no code gets its messages, also none that was claimed
        ahead."""
        self._is_paused = is_paused
        if is_paused and not self._closing:
            with self._lock:
                untouched = self._pop(len(self._buffer))
            if untouched:
                with contextlib.suppress(ClosedError):  # then closing gives them back
                    self._releasing = self.release(untouched)
            if self.on_paused is not None:
                self.on_paused()

    def _is_still_paused(self) -> Flow[bool]:
        self._waiter.is_stale, self._looked_s = False, time.monotonic()
        record = yield from self.engine.read(self._state.load)
        self._is_paused = record.spec.paused_ms is not None
        return self._is_paused

    # --- settling -----------------------------------------------------------------------------------------------

    def ack(self, settled: Sequence[Claimed]) -> Completion[list[int]]:
        return self.engine.submit(partial(self.ack_in, settled), len(settled), touching=self.id)

    def submit_ack(self, settled: Sequence[Claimed], *, lazy: bool = False) -> Completion[list[int]]:
        # Not where deliveries wait for it: others of its key, a taker without room.
        lazy = lazy and self.spec.order_key is None and 2 * len(self._in_flight) < self.spec.max_in_flight
        ack = partial(self.ack_in, settled, strict=False)
        return self.engine.committer.submit(ack, len(settled), touching=self.id, lazy=lazy)

    def ack_in(
        self, settled: Sequence[Claimed], writer: Writer, hooks: TransactionHooks, *, strict: bool = True
    ) -> list[int]:
        """Ack inside a transaction, which may be the user's own. Returns the seqs that are not in flight any more; if
        `strict`, one such is an error."""
        record = self._load(writer, hooks)
        held, rows = self._state.take_out(writer, hooks, settled, strict=strict)
        redriven = {}
        if rows:
            writer.remove_deliveries(self.id, list(rows))
            redriven = {row.seq: row.dead_letter for row in rows.values() if row.dead_letter is not None}
            if redriven:
                writer.remove_dead_letters(list(redriven.values()))
        if self.spec.order_key is not None:
            hooks.then.append(self._wake_subscription)  # the next of its key may be delivered now
        self.engine.timings.note(hooks, "ack", self.id, held, redriven)
        acked = {claimed.message.seq for claimed in held}
        self._state.save(writer, record, self._now_ms(), acked=record.acked + len(acked))
        return [] if held is settled else sorted({claimed.message.seq for claimed in settled} - acked)

    def nack(self, claimed: Claimed, delay_ms: int | None, failure: Failure) -> Flow[None]:
        def work(writer: Writer, hooks: TransactionHooks) -> None:
            now_ms = self._now_ms()
            decision = decide_retry(self.spec.retry, claimed.attempt, now_ms, self.engine.roll(), delay_ms=delay_ms)
            record, row = self._take_out(writer, hooks, claimed)
            record = deliveries.nack_row(writer, hooks, record, claimed, row, failure, now_ms, decision)
            self._state.save(writer, record, now_ms)

        return self.engine.write(work, touching=self.id)

    def reject(self, claimed: Claimed, failure: Failure) -> Flow[None]:
        def work(writer: Writer, hooks: TransactionHooks) -> None:
            now_ms = self._now_ms()
            record, row = self._take_out(writer, hooks, claimed)
            record = deliveries.reject_row(writer, hooks, record, claimed, row, failure, now_ms)
            self._state.save(writer, record, now_ms)

        return self.engine.write(work, touching=self.id)

    def persist_delivery(self, claimed: Claimed) -> Flow[None]:
        """Give the delivery a row, if it has none, and forget it here, before an ack in an external transaction, which
        settles it by removing the row."""

        def work(writer: Writer, hooks: TransactionHooks) -> None:
            now_ms = self._now_ms()
            record, row = self._take_out(writer, hooks, claimed)
            due_ms = now_ms + self.spec.ack_wait_ms
            writer.put_deliveries(self.id, [replace(row, due_ms=due_ms, token=claimed.token)])
            self._state.save(writer, record, now_ms)

        return self.engine.write(work, touching=self.id)

    def _take_out(
        self, writer: Writer, hooks: TransactionHooks, claimed: Claimed
    ) -> tuple[SubscriptionRecord, DeliveryRow]:
        record, seq = self._load(writer, hooks), claimed.message.seq
        _, rows = self._state.take_out(writer, hooks, [claimed], strict=True)
        hooks.then.append(self._wake_subscription)
        return record, rows[seq] if rows else DeliveryRow(seq, claimed.attempt, 0)

    def extend(self, extended: Sequence[Claimed], by_ms: int | None) -> Flow[None]:
        return self._extend(extended, self.spec.ack_wait_ms if by_ms is None else by_ms, strict=True)

    def _extend(self, extended: Sequence[Claimed], by_ms: int, *, strict: bool) -> Flow[None]:
        """Extend deliveries. Unless `strict`, one that is not in flight any more does not cost the others their
        time."""

        def work(writer: Writer, hooks: TransactionHooks) -> None:
            now_ms = self._now_ms()
            record = self._load(writer, hooks)
            self._state.extend(writer, extended, now_ms + by_ms, strict=strict)
            writer.save_subscription(deliveries.renewed(record, now_ms))
            if record.spec.mode == "shared":
                renew_consumer(writer, self.id, self._name, now_ms, now_ms + record.spec.lease_ms)

        return self.engine.write(work, touching=self.id, synced=False)

    def release(self, untouched: Sequence[Claimed]) -> Completion[None]:
        def work(writer: Writer, hooks: TransactionHooks) -> None:
            now_ms = self._now_ms()
            record = self._state.load(writer)
            held, rows = self._state.take_out(writer, hooks, untouched, strict=False)
            writer.put_deliveries(self.id, [self._unseen_row(each, rows, now_ms) for each in held])
            hooks.then.append(self._wake_subscription)
            self._state.save(writer, record, now_ms)

        def keep(done: Completion[None]) -> None:
            if isinstance(done.error, StoreError) and not isinstance(done.error, OutcomeUnknownError):
                self._buffer.extendleft(reversed(untouched))  # they are still in flight here, and unseen
                self._wake()

        completion: Completion[None] = self.engine.committer.submit(work, touching=self.id)
        completion.watch(keep)
        return completion

    def _unseen_row(self, claimed: Claimed, rows: dict[int, DeliveryRow], now_ms: int) -> DeliveryRow:
        seq = claimed.message.seq
        return deliveries.released_row(claimed, rows.get(seq), now_ms, is_suspect=seq == self._state.suspect)

    def _wake_subscription(self) -> None:
        """Wake all consumers of it in this process: something may be deliverable now."""
        self.engine.wakeups.settled(self.id)

    # --- for a server, which knows deliveries by their seqs -----------------------------------------------------

    def find_in_flight(self, seqs: Sequence[int], attempt: int | None = None) -> Flow[list[Claimed]]:
        """The deliveries of these seqs; an error if one is not in flight here, or is another attempt."""
        found = [self._in_flight.get(seq) for seq in seqs]
        for seq, claimed in zip(seqs, found, strict=True):
            if claimed is None or attempt not in (None, claimed.attempt):
                raise (yield from self.engine.read(partial(self._state.why_not, seq)))
        return [claimed for claimed in found if claimed is not None]

    def why_not_acked(self, seqs: Sequence[int]) -> Flow[dict[int, NotDeliveredError | LeaseLostError]]:
        """Why each of these seqs, which are not in flight here, was not acked; without those that were acked before."""
        return self.engine.read(
            lambda reader: deliveries.why_not_acked(reader, self._state.load(reader), seqs), self._lane
        )

    def extend_in_flight(self, seqs: Sequence[int]) -> Flow[None]:
        """More time for those that are still in flight."""
        return self._extend(self.still_in_flight(seqs), self.spec.ack_wait_ms, strict=False)

    # --- living and ending --------------------------------------------------------------------------------------

    def heartbeat(self) -> Flow[None]:
        """Keep the lease, the deliveries whose handlers run, and those in the buffer."""
        try:
            yield from self._extend(self._to_extend(), self.spec.ack_wait_ms, strict=False)
        except LeaseLostError as exc:
            self.lose(exc)
            raise

    def close(self, seen: Collection[tuple[int, int]] | None = None, *, vanished: bool = False) -> Flow[None]:
        refuse_in_transaction(self.engine)  # it would wait for itself
        return super().close(seen, vanished=vanished)

    def _submit_close(self, seen: Collection[tuple[int, int]] | None, vanished: bool) -> None:
        def work(writer: Writer, hooks: TransactionHooks) -> None:
            now_ms = self._now_ms()
            record = writer.subscription(self.id)
            if record is None:
                return
            if record.spec.mode == "exclusive" and not record.lease.held_by(self._owner, self.fence):
                return
            # Looked at here, for an earlier claim may have been committed since the close was asked for.
            buffered, looked_at = set(self._unseen()), None if seen is None else set(seen)
            held, rows = self._state.take_out(writer, hooks, [*self._in_flight.values()], strict=False)
            released = []
            for claimed in held:
                seq = claimed.message.seq
                if seq in buffered if looked_at is None else (seq, claimed.attempt) not in looked_at:
                    released.append(self._unseen_row(claimed, rows, now_ms))
                else:
                    released.append(deliveries.unsettled_row(claimed, rows.get(seq), now_ms, vanished=vanished))
            writer.put_deliveries(self.id, released)
            self._state.save(writer, record, now_ms, lease=release(record.lease))
            if record.spec.mode == "shared":
                renew_consumer(writer, self.id, self._name, now_ms, now_ms)

        self.engine.committer.submit(work, touching=self.id).watch(lambda done: self._leave(done.error))

    def _leave(self, error: BaseException | None) -> None:
        self._buffer.clear()
        self.engine.wakeups.leave(self._waiter)
        complete([(self.gone, None, error)])
