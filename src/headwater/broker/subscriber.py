"""One holder of one subscription: fetches, settles, keeps its lease. Verbs are flows; see `flow`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from headwater.broker import claims
from headwater.broker.claims import Claimed, replace
from headwater.broker.committer import Undo
from headwater.broker.engine import Engine, refuse_in_transaction
from headwater.broker.flow import Flow
from headwater.broker.holding import Holding
from headwater.broker.resuming import NOTHING_RESUMED, Resumed
from headwater.delivery.lease import release
from headwater.errors import LeaseLost
from headwater.message import Message
from headwater.ports.records import DeliveryRow, Scan, SubscriptionRecord
from headwater.ports.store import Reader, Writer

NEAR_SEQS = 1_000  # so far behind, a look costs the writer next to nothing
NEAR_BYTES_MAX = 64 * 1024  # unless messages are large: then others would wait while they are read
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
        self._are_large = False  # those found last

    # --- claiming -----------------------------------------------------------------------------------------------

    def _claim_all(self, limit: int) -> Flow[int | None]:
        """One pass over what is there; the outcome is when to look again at the latest."""
        if self._is_near() or self._expects_more:
            look = self._look_near if self._is_near() else self._unlooked
            claim = yield from self._claim_after(lambda writer: look(writer, limit))
            if claim.found:
                return None
        last_place = None
        while True:
            outlook = yield from self.engine.read(lambda reader: self._look_ahead(reader, limit), self._lane)
            now_ms = self.engine.clock.now_ms()
            overdue_ms = self._window.next_deadline_ms()
            due_ms = min((ms for ms in (outlook.next_due_ms, overdue_ms) if ms is not None), default=None)
            is_due = (overdue_ms is not None and overdue_ms <= now_ms) or (
                outlook.room > 0 and outlook.next_due_ms is not None and outlook.next_due_ms <= now_ms
            )
            if outlook.room <= 0:
                due_ms = overdue_ms  # without room only a delivery that is given up can change anything
            claim = Claim([])
            far = outlook.scanned_to - outlook.saved_to > SCANNED_UNSAVED_MAX
            if outlook.fresh or is_due or far or outlook.has_gaps:
                claim = yield from self._claim_after(lambda _, seen=outlook: seen)  # type: ignore[misc]
            elif self._scanned == outlook.scanned_from:  # else another fetch moved it, or its claim was taken back
                self._scanned = outlook.scanned_to
            place = (outlook.scanned_from, outlook.saved_to)
            stuck = place == last_place and not claim.look_again  # all that is left waits behind others of its key
            last_place = place
            if claim.found or stuck or (outlook.at_end and not claim.look_again):
                if is_due and not claim.found and due_ms is not None:  # somebody is settling it in its own transaction
                    due_ms = max(due_ms, now_ms + PASSED_BY_MS)
                return due_ms

    def _is_near(self) -> bool:
        """Whether news has come and the end of the log is close. Then looking and claiming is one step of the writer,
        which takes half the time; where there may be much to look through, the writer must not be kept waiting."""
        if self._selection.takes_time:
            return False
        behind = self.engine.wakeups.announced - self._scanned
        if self._are_large:
            return False
        return 0 < behind <= NEAR_SEQS and not self.spec.keeps_rows and len(self._in_flight) < self.spec.max_in_flight

    def _look_near(self, writer: Writer, limit: int) -> Outlook | None:
        self._held(writer)
        outlook = self._look_ahead(writer, limit, NEAR_BYTES_MAX)
        return outlook if outlook.fresh else None

    def _unlooked(self, writer: Writer, limit: int) -> Outlook | None:
        """After a claim that was full there is probably more right behind it: that is found out by claiming."""
        self._expects_more = False
        room = self._room(writer, limit)
        return Outlook(room, [], 0, 0, self._saved_to, 0, None, has_gaps=True) if room > 0 else None

    def _claim_after(self, look: Callable[[Writer], Outlook | None]) -> Flow[Claim]:
        def work(writer: Writer, undo: Undo) -> Claim:
            outlook = look(writer)
            # Closed since it was asked for: closing has given back all that there was.
            if outlook is None or self._closing:
                return Claim([])
            return self._claim(writer, undo, outlook)

        claim: Claim = yield self.engine.committer.submit(work, touching=self.id)
        return claim

    def _look_ahead(self, reader: Reader, limit: int, bytes_max: int | None = None) -> Outlook:
        saved_to = self._window.delivered
        if self.spec.keeps_rows:
            saved_to = self._held(reader).window.delivered
            # Further than we looked: another consumer was there. Back from where it was: somebody moved it.
            self._scanned = saved_to if saved_to < self._saved_to else max(self._scanned, saved_to)
            self._saved_to = saved_to
        room = self._room(reader, limit)
        after = self._scanned
        most, bytes_max = self._most(reader, room), bytes_max or self.claim_bytes_max
        fresh, scanned_to = (
            reader.scan(self._selection, after, most, None, bytes_max) if room > 0 and most > 0 else ([], after)
        )
        suspect_until_ms = self._suspect_until_ms(reader)
        next_due_ms = reader.next_due_ms(self.id, suspects=suspect_until_ms is None)
        if suspect_until_ms is not None:
            next_due_ms = suspect_until_ms if next_due_ms is None else min(next_due_ms, suspect_until_ms)
        has_gaps = bool(reader.gaps(self.id))
        return Outlook(room, fresh, after, scanned_to, saved_to, reader.last_seq(), next_due_ms, has_gaps)

    def _most(self, reader: Reader, room: int) -> int:
        """How many messages to look for. They are handed out as read here, unless a claim that keeps rows can read them
        again under the write lock: then it is enough to know that there is one."""
        if not self.spec.keeps_rows:
            return room
        if not self._selection.takes_time:
            return 1
        return room if self.spec.is_in_seq_order else claims.parking_room(reader, self.id, self.spec)

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

    def _suspect_until_ms(self, reader: Reader) -> int | None:
        """When the suspect in flight here is given up; None if there is none, and another may come."""
        claimed = None if self._suspect is None else self._in_flight.get(self._suspect)
        if claimed is None:
            return None
        row = reader.deliveries(self.id, [claimed.message.seq]).get(claimed.message.seq)
        is_held = row is not None and row.token == claimed.token and row.due_ms > self.engine.clock.now_ms()
        return row.due_ms if row is not None and is_held else None

    def _claim(self, writer: Writer, undo: Undo, outlook: Outlook) -> Claim:
        now_ms = self.engine.clock.now_ms()
        record = self._held(writer)
        self._trim(undo)
        self._shorten_window(writer, undo)
        if self.spec.keeps_rows:
            delivered = record.window.delivered
            handed = self._claim_rows(writer, record, outlook, now_ms)
            record = handed.record
            # Others were quicker, or it was moved: what the look has found is not what there is.
            outrun = self._selection.takes_time and delivered != outlook.saved_to
            look_again = handed.dropped or outrun
            is_dense = record.window.delivered - delivered <= NEAR_SEQS  # the writer looks through little
            self._expects_more = (
                is_dense
                and handed.size == outlook.room
                and self.spec.is_in_seq_order
                and not self._selection.takes_time
            )
        else:
            handed = claims.Handed(record, [])
            late = self._give_up_overdue(writer, undo, now_ms)
            # Not asked again unless the look has seen a row that is due: a statement costs more than it seems, for
            # every one gives up the interpreter and has to win it back.
            if outlook.room > 0 and (late or (outlook.next_due_ms is not None and outlook.next_due_ms <= now_ms)):
                may_suspect = self._suspect_until_ms(writer) is None
                handed = claims.claim_due(
                    writer, record, outlook.room, now_ms, suspects=may_suspect, bytes_max=self.claim_bytes_max
                )
            outrun = self._scanned != outlook.scanned_from  # another fetch of this holder was quicker
            if not outrun:
                handed = self._claim_window(writer, undo, handed, outlook, now_ms)
            look_again = handed.dropped or outrun or (late and outlook.room <= 0)
            record = replace(handed.record, window=self._window.state())
        found = handed.claimed if handed.suspect is None else [*handed.claimed, handed.suspect]
        if found:
            self._are_large = found[-1].message.size > NEAR_BYTES_MAX // 4
        if handed.suspect is not None:
            self._suspect = handed.suspect.message.seq
        gaps = writer.gaps(self.id) if outlook.has_gaps else []
        if gaps:
            writer.mark_gaps_told(self.id)
        writer.save_subscription(claims.renewed(record, now_ms))
        self._hand_out(undo, found)
        self._time(undo, "deliver", found, handed.redriven)
        undo.then.append(partial(self.deliver, found, gaps))
        return Claim(found, look_again)

    def _hand_out(self, undo: Undo, found: list[Claimed]) -> None:
        def take_back() -> None:
            for claimed in found:
                self._in_flight.pop(claimed.message.seq, None)

        undo.append(take_back)
        self._in_flight.update({claimed.message.seq: claimed for claimed in found})

    def _claim_rows(self, writer: Writer, record: SubscriptionRecord, outlook: Outlook, now_ms: int) -> claims.Handed:
        if record.spec.mode == "shared":  # every claim has a token of its own, so that an old one is told apart
            record = replace(record, lease=replace(record.lease, fence=record.lease.fence + 1))
        may_suspect = self._suspect_until_ms(writer) is None
        fresh = self._fresh(writer, record, outlook)
        if record.spec.order == "priority" or record.spec.order_key is not None:
            return claims.park_and_claim(
                writer, record, outlook.room, fresh, now_ms, suspects=may_suspect, bytes_max=self.claim_bytes_max
            )
        handed = claims.claim_due(
            writer, record, outlook.room, now_ms, suspects=may_suspect, bytes_max=self.claim_bytes_max
        )
        room = outlook.room - handed.size
        if room <= 0:
            return handed
        record, claimed = claims.claim_fresh(writer, handed.record, fresh(room), now_ms)
        return handed._replace(record=record, claimed=handed.claimed + claimed)

    def _fresh(self, writer: Writer, record: SubscriptionRecord, outlook: Outlook) -> Callable[[int], Scan]:
        """New messages, up to so many: looked for now, from where the look found the first on; or those that the look
        found, if looking takes time. What others have taken meanwhile is not among them."""
        delivered, moved_back = record.window.delivered, record.window.delivered < outlook.saved_to
        if not self._selection.takes_time:
            skip_to = outlook.fresh[0].seq - 1 if outlook.fresh else outlook.scanned_to
            after = delivered if moved_back else max(delivered, skip_to)
            # What is parked is not handed out yet: the order is right only if all that there is room for is seen.
            bytes_max = self.claim_bytes_max if self.spec.is_in_seq_order else None
            return lambda most: writer.scan(self._selection, after, most, None, bytes_max)
        seen = [] if moved_back else [message for message in outlook.fresh if message.seq > delivered]

        def take(most: int) -> Scan:
            taken = seen[:most]
            if len(taken) < len(seen) or moved_back:
                return Scan(taken, taken[-1].seq if taken else delivered)
            return Scan(taken, max(delivered, outlook.scanned_to))

        return take

    def _claim_window(
        self, writer: Writer, undo: Undo, handed: claims.Handed, outlook: Outlook, now_ms: int
    ) -> claims.Handed:
        """Fill up with new messages."""
        fresh, scanned_to = outlook.fresh[: max(0, outlook.room - handed.size)], outlook.scanned_to
        if len(fresh) < len(outlook.fresh):
            scanned_to = fresh[-1].seq if fresh else outlook.scanned_from
        ready, delayed, expired = claims.sort_fresh(fresh, now_ms)
        seqs = [message.seq for message in fresh]
        delivered = self._window.delivered

        def take_back() -> None:
            self._window.undeliver(seqs, delivered)
            self._scanned = outlook.scanned_from

        undo.append(take_back)
        self._window.deliver(seqs, scanned_to, now_ms + self.spec.ack_wait_ms)
        if len(ready) < len(seqs):  # the others have a row or are dead: not in flight, whoever reads the window
            self._window.settle([*(row.seq for row in delayed), *(message.seq for message in expired)])
        self._scanned = scanned_to
        writer.put_deliveries(self.id, delayed)
        record = claims.bury_expired(writer, handed.record, expired, now_ms)
        claimed = [Claimed(message, 1, self.fence) for message in ready]
        return handed._replace(record=record, claimed=handed.claimed + claimed if handed.claimed else claimed)

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
        """Keep the lease, the deliveries whose handlers run, and those that wait in the buffer."""
        try:
            yield from self.engine.write(partial(self._extend_held, extended=self._to_extend()), touching=self.id)
        except LeaseLost as exc:
            self.lose(exc)
            raise

    def close(self, seen: Collection[tuple[int, int]] | None = None, *, vanished: bool = False) -> Flow[None]:
        refuse_in_transaction(self.engine)  # it would wait for itself
        return super().close(seen, vanished=vanished)

    def _submit_close(self, seen: Collection[tuple[int, int]] | None, vanished: bool) -> None:
        def work(writer: Writer, undo: Undo) -> None:
            now_ms = self.engine.clock.now_ms()
            record = writer.subscription(self.id)
            if record is None:
                return
            if record.spec.mode == "exclusive":
                if not record.lease.held_by(self.owner, self.fence):
                    return
                record = replace(record, lease=release(record.lease))
            # Looked at here, for an earlier claim may have been committed since it was asked for.
            in_flight, unseen = self._in_flight.copy(), set(self._unseen())
            if seen is not None:
                looked_at = set(seen)
                unseen = {seq for seq, claimed in in_flight.items() if (seq, claimed.attempt) not in looked_at}
            rows = writer.deliveries(self.id, list(in_flight))
            released = []
            for seq, claimed in in_flight.items():
                row = rows.get(seq)
                if seq in self._window or (row is not None and row.token == claimed.token):  # else it was passed on
                    released.append(self._released(claimed, row, now_ms, seen=seq not in unseen, vanished=vanished))
            self._close_in_window(undo, list(in_flight))
            writer.put_deliveries(self.id, released)
            if not self.spec.keeps_rows:
                record = replace(record, window=self._window.state())
            writer.save_subscription(replace(record, active_ms=now_ms))

        self.engine.committer.submit(work, touching=self.id).watch(lambda done: self._leave(done.error))
