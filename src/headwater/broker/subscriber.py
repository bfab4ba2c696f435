"""One holder of one subscription: fetches, settles, keeps its lease. Verbs are flows; see `flow`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from headwater.broker import claims
from headwater.broker.claims import Claimed, replace
from headwater.broker.committer import Undo
from headwater.broker.engine import Engine, refuse_in_transaction
from headwater.broker.flow import Flow, Within
from headwater.broker.holding import Holding
from headwater.broker.logger import logger
from headwater.broker.resuming import NOTHING_RESUMED, Resumed
from headwater.delivery.lease import release
from headwater.errors import LeaseLost
from headwater.message import Message
from headwater.ports.records import DeliveryRow, Gap, SubscriptionRecord
from headwater.ports.store import Reader, Writer

NEAR_SEQS = 1_000  # so far behind, a look costs the writer next to nothing
PASSED_BY_MS = 200  # when to look again at a delivery that is due and cannot be had
SCANNED_UNSAVED_MAX = 10_000  # how far a reader may look past messages of others before it notes its place


class Outlook(NamedTuple):
    """What a look at the log promises, taken without disturbing the writer."""

    room: int
    fresh: list[Message]
    scanned_from: int
    scanned_to: int
    saved_to: int
    last_seq: int
    next_due_ms: int | None
    has_gaps: bool

    @property
    def at_end(self) -> bool:
        return self.scanned_to >= self.last_seq or self.room <= 0


class Claim(NamedTuple):
    found: list[Claimed]
    gaps: list[Gap]
    look_again: bool = False  # there may be more, though nothing was found this time


class Subscriber(Holding):
    def __init__(
        self, engine: Engine, record: SubscriptionRecord, resumed_from: int, resumed: Resumed = NOTHING_RESUMED
    ) -> None:
        super().__init__(engine, record)
        self.resumed = resumed
        self._in_flight.update((claimed.message.seq, claimed) for claimed in resumed.held)
        self.resumed_from = resumed_from
        self._scanned = self._saved_to = record.window.delivered
        self._expects_more = False
        self._running: dict[int, int] = {}  # seq -> when its handler began; extended while it runs

    # --- fetching -----------------------------------------------------------------------------------------------

    def _try_fetch(self, limit: int) -> Flow[tuple[list[Claimed], int | None]]:
        """One pass over what is there; the second value is when to look again at the latest."""
        if self._is_near() or self._expects_more:
            look = self._look_near if self._is_near() else self._unlooked
            claim = yield from self._claim_or_give_back(lambda writer: look(writer, limit))
            self._tell(claim.gaps)
            if claim.found:
                return claim.found, None
        last_place = None
        while True:
            outlook = yield from self.engine.read(lambda reader: self._look(reader, limit))
            now_ms = self.engine.clock.now_ms()
            overdue_ms = self._window.next_deadline_ms()
            due_ms = min((ms for ms in (outlook.next_due_ms, overdue_ms) if ms is not None), default=None)
            is_due = (overdue_ms is not None and overdue_ms <= now_ms) or (
                outlook.room > 0 and outlook.next_due_ms is not None and outlook.next_due_ms <= now_ms
            )
            if outlook.room <= 0:
                due_ms = overdue_ms  # without room only a delivery that is given up can change anything
            claim = Claim([], [])
            far = outlook.scanned_to - outlook.saved_to > SCANNED_UNSAVED_MAX
            if outlook.fresh or is_due or far or outlook.has_gaps:
                claim = yield from self._claim_or_give_back(lambda _, seen=outlook: seen)  # type: ignore[misc]
                self._tell(claim.gaps)
            elif self._scanned == outlook.scanned_from:  # else another fetch moved it, or its claim was taken back
                self._scanned = outlook.scanned_to
            place = (outlook.scanned_from, outlook.saved_to)
            stuck = place == last_place and not claim.look_again  # all that is left waits behind others of its key
            last_place = place
            if claim.found or stuck or (outlook.at_end and not claim.look_again):
                if is_due and not claim.found and due_ms is not None:  # somebody is settling it in its own transaction
                    due_ms = max(due_ms, now_ms + PASSED_BY_MS)
                return claim.found, due_ms

    def _is_near(self) -> bool:
        """Whether news has come and the end of the log is close. Then looking and claiming is one step of the writer,
        which takes half the time; where there may be much to look through, the writer must not be kept waiting."""
        behind = self.engine.wakeups.announced - self._scanned
        return 0 < behind <= NEAR_SEQS and not self.spec.keeps_rows and len(self._in_flight) < self.spec.max_in_flight

    def _look_near(self, writer: Writer, limit: int) -> Outlook | None:
        self._held(writer)
        outlook = self._look(writer, limit)
        return outlook if outlook.fresh else None

    def _unlooked(self, writer: Writer, limit: int) -> Outlook | None:
        """After a claim that was full there is probably more right behind it: that is found out by claiming."""
        self._expects_more = False
        room = self._room(writer, limit)
        return Outlook(room, [], 0, 0, self._saved_to, 0, None, has_gaps=True) if room > 0 else None

    def _claim_or_give_back(self, look: Callable[[Writer], Outlook | None]) -> Flow[Claim]:
        """A cancelled fetch may have claimed already, and nobody would ever see what: it is given back untouched."""
        refuse_in_transaction(self.engine)
        self.engine.refuse_closed()
        made: list[Claim] = []

        def work(writer: Writer, undo: Undo) -> Claim:
            outlook = look(writer)
            if outlook is None:
                return Claim([], [])
            made[:] = [self._claim(writer, undo, outlook=outlook)]
            undo.append(made.clear)
            return made[0]

        def give_back(writer: Writer, undo: Undo) -> None:
            for claim in made:
                self._give_back(writer, undo, claim.found)

        ticket = self.engine.committer.submit(work, touching=self.id)
        try:
            claim: Claim = yield ticket
            return claim
        except BaseException:
            if ticket.error is None:
                # It comes after the claim, for there is one queue.
                self.engine.committer.submit(give_back, touching=self.id)
            raise

    def cleared(self) -> Flow[None]:
        """Wait while a message is in flight whose last holder vanished, perhaps because of it: what is handed out
        meanwhile could vanish with it. For those who fetch before they have settled; no longer than the ack wait."""
        until = time.monotonic() + self.spec.ack_wait_ms / 1000
        while True:
            ticket = self._waiter.arm()
            left_s = until - time.monotonic()
            if self._suspect not in self._in_flight or self._closed or left_s <= 0:
                return
            yield Within(ticket, left_s)

    def unfetch(self, found: list[Claimed]) -> Flow[None]:
        """Give back what was fetched and not looked at: it counts as no attempt and comes with the next fetch."""
        return self.engine.write(lambda writer, undo: self._give_back(writer, undo, found), touching=self.id)

    def _look(self, reader: Reader, limit: int) -> Outlook:
        saved_to = self._window.delivered
        if self.spec.keeps_rows:
            saved_to = self._held(reader).window.delivered
            # Further than we looked: another consumer was there. Back from where it was: somebody moved it.
            self._scanned = saved_to if saved_to < self._saved_to else max(self._scanned, saved_to)
            self._saved_to = saved_to
        room = self._room(reader, limit)
        after = self._scanned
        # A window's messages are handed out as read here; a row-keeping claim reads again under the write lock.
        most = 1 if self.spec.keeps_rows else room
        fresh, scanned_to = reader.scan(self._selection, after, most) if room > 0 else ([], after)
        next_due_ms = reader.next_due_ms(self.id)
        has_gaps = bool(reader.gaps(self.id))
        return Outlook(room, fresh, after, scanned_to, saved_to, reader.last_seq(), next_due_ms, has_gaps)

    def _room(self, reader: Reader, limit: int) -> int:
        if len(self._in_flight) >= self.spec.max_in_flight:
            # Perhaps some have been passed on to others, because their time ran out here.
            now_ms = self.engine.clock.now_ms()
            rows = reader.deliveries(self.id, list(self._in_flight))
            for seq, claimed in list(self._in_flight.items()):
                row = rows.get(seq)
                held = row is not None and row.token == claimed.token and row.due_ms > now_ms
                if not held and seq not in self._window:
                    self._in_flight.pop(seq, None)
        return max(0, min(limit, self.spec.max_in_flight - len(self._in_flight)))

    def _tell(self, gaps: list[Gap]) -> None:
        for gap in gaps:
            logger.warning("subscription %s lost %d messages (%s)", self.id, gap.count, gap.why)
            if self.on_gap is not None:
                try:
                    self.on_gap(gap)
                except Exception:  # the claim is committed: what it found must reach its consumer
                    logger.exception("the on_gap callback of subscription %s failed", self.id)

    def _claim(self, writer: Writer, undo: Undo, *, outlook: Outlook) -> Claim:
        if self._closed:  # since it looked; what it claimed now, nobody would give back
            return Claim([], [])
        now_ms = self.engine.clock.now_ms()
        record = self._held(writer)
        self._trim(undo)
        self._shorten_window(writer, undo)
        if self.spec.keeps_rows:
            delivered = record.window.delivered
            record, found, look_again, suspect, redriven = self._claim_rows(writer, record, outlook, now_ms)
            is_dense = record.window.delivered - delivered <= NEAR_SEQS  # the writer looks through little
            self._expects_more = is_dense and len(found) == outlook.room and self.spec.is_in_seq_order
        else:
            late = self._give_up_overdue(writer, undo, now_ms)
            room_made = late and outlook.room <= 0
            found, look_again, suspect, redriven = [], False, False, frozenset()
            # Not asked again unless the look has seen a row that is due: a statement costs more than it seems, for
            # every one gives up the interpreter and has to win it back.
            if late or (outlook.next_due_ms is not None and outlook.next_due_ms <= now_ms):
                record, found, look_again, suspect, redriven = claims.claim_due(writer, record, outlook.room, now_ms)
            outrun = self._scanned != outlook.scanned_from  # another fetch of this holder was quicker
            if not found and not outrun:
                record, found = self._claim_window(writer, undo, record, outlook, now_ms)
            look_again = look_again or outrun or room_made
            record = replace(record, window=self._window.state())
        self._suspect = found[-1].message.seq if suspect else None
        gaps = writer.gaps(self.id) if outlook.has_gaps else []
        if gaps:
            writer.mark_gaps_told(self.id)
        writer.save_subscription(claims.renewed(record, now_ms))
        self._hand_out(undo, found)
        self._time(undo, "deliver", found, redriven)
        return Claim(found, gaps, look_again)

    def _hand_out(self, undo: Undo, found: list[Claimed]) -> None:
        def take_back() -> None:
            for claimed in found:
                self._in_flight.pop(claimed.message.seq, None)

        undo.append(take_back)
        self._in_flight.update({claimed.message.seq: claimed for claimed in found})

    def _claim_rows(self, writer: Writer, record: SubscriptionRecord, outlook: Outlook, now_ms: int) -> claims.Handed:
        if record.spec.mode == "shared":  # every claim has a token of its own, so that an old one is told apart
            record = replace(record, lease=replace(record.lease, fence=record.lease.fence + 1))
        skip_to = outlook.fresh[0].seq - 1 if outlook.fresh else outlook.scanned_to
        if record.window.delivered < outlook.saved_to:  # moved back since we looked
            skip_to = 0
        if record.spec.order == "priority" or record.spec.order_key is not None:
            return claims.park_and_claim(writer, record, outlook.room, skip_to, now_ms)
        record, found, dropped, suspect, redriven = claims.claim_due(writer, record, outlook.room, now_ms)
        tried_before = any(claimed.attempt > 1 for claimed in found)
        if len(found) < outlook.room and not tried_before:
            record, fresh = claims.claim_fresh(writer, record, outlook.room - len(found), skip_to, now_ms)
            found += fresh
        return claims.Handed(record, found, dropped, suspect, redriven)

    def _claim_window(
        self, writer: Writer, undo: Undo, record: SubscriptionRecord, outlook: Outlook, now_ms: int
    ) -> tuple[SubscriptionRecord, list[Claimed]]:
        ready, delayed, expired = claims.sort_fresh(outlook.fresh, now_ms)
        seqs = [message.seq for message in outlook.fresh]
        delivered = self._window.delivered

        def take_back() -> None:
            self._window.undeliver(seqs, delivered)
            self._scanned = outlook.scanned_from

        undo.append(take_back)
        self._window.deliver(seqs, outlook.scanned_to, now_ms + self.spec.ack_wait_ms)
        if len(ready) < len(seqs):  # the others have a row or are dead: not in flight, whoever reads the window
            self._window.settle([*(row.seq for row in delayed), *(message.seq for message in expired)])
        self._scanned = outlook.scanned_to
        writer.put_deliveries(self.id, delayed)
        record = claims.bury_expired(writer, record, expired, now_ms)
        fence = self.fence
        return record, [Claimed(message, 1, fence) for message in ready]

    def _give_up_overdue(self, writer: Writer, undo: Undo, now_ms: int) -> bool:
        """Deliveries of the window whose ack wait is over become rows that are due, like those of a vanished holder."""
        late = self._window.overdue(now_ms)
        if late:
            self._close_in_window(undo, late)
            self._forget(undo, late)
            writer.put_deliveries(self.id, [DeliveryRow(seq, 1, now_ms, self.fence) for seq in late])
        return bool(late)

    # --- living and ending --------------------------------------------------------------------------------------

    def heartbeat(self) -> Flow[None]:
        """Keep the lease, and the deliveries whose handlers still run, unless they have run for too long."""

        def work(writer: Writer, undo: Undo) -> None:
            now_ms = self.engine.clock.now_ms()
            record = self._held(writer)
            writer.save_subscription(claims.renewed(record, now_ms))

        try:
            yield from self.engine.write(work, touching=self.id)
        except LeaseLost:
            self.lose()
            raise
        now_ms = self.engine.clock.now_ms()
        running = [
            claimed
            for seq, began_ms in list(self._running.items())
            if now_ms - began_ms < self.spec.extension_ms_max and (claimed := self._in_flight.get(seq)) is not None
        ]
        if running:
            yield from self.engine.write(partial(self._extend_held, extended=running), touching=self.id)

    def began(self, claimed: Claimed) -> None:
        self._running[claimed.message.seq] = self.engine.clock.now_ms()

    def ended(self, claimed: Claimed) -> None:
        self._running.pop(claimed.message.seq, None)

    def close(self, unseen: Iterable[int] = (), *, vanished: bool = False) -> Flow[None]:
        """Give everything back: what is in flight is deliverable at once, and what nobody saw counts as no attempt.
        What a consumer had that `vanished` comes back one at a time, for one of them may have killed it."""
        if self._closed:
            return
        self._closed = True
        never_seen = set(unseen)

        def work(writer: Writer, undo: Undo) -> None:
            now_ms = self.engine.clock.now_ms()
            record = writer.subscription(self.id)
            if record is None:
                return
            if record.spec.mode == "exclusive":
                if not record.lease.held_by(self.owner, self.fence):
                    return
                record = replace(record, lease=release(record.lease))
            rows = writer.deliveries(self.id, list(self._in_flight))
            given_back = []
            for seq, claimed in self._in_flight.items():
                attempts = claimed.attempt - (seq in never_seen)
                row = rows.get(seq)
                if row is None and seq in self._window:
                    row = DeliveryRow(seq, claimed.attempt, 0, claimed.token)
                if row is not None and row.token == claimed.token:  # else it was passed on
                    token = claimed.token if vanished and seq not in never_seen else 0
                    given_back.append(replace(row, attempts=attempts, due_ms=now_ms, token=token))
            self._close_in_window(undo, list(self._in_flight))
            writer.put_deliveries(self.id, given_back)
            if not self.spec.keeps_rows:
                record = replace(record, window=self._window.state())
            writer.save_subscription(replace(record, active_ms=now_ms))

        try:
            yield from self.engine.write(work, touching=self.id)
        finally:
            self._leave()
            self.engine.wakeups.settled()
