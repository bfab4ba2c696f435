"""What one holder of a subscription has in flight, and how it is settled. Verbs are flows; see `flow`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from headwater.broker import claims
from headwater.broker.claims import Claimed, Failure, replace
from headwater.broker.committer import Undo
from headwater.broker.engine import Engine
from headwater.broker.flow import Flow, Ticket
from headwater.broker.reading import LogReader
from headwater.delivery.retry import Retry, decide_retry
from headwater.delivery.window import Window
from headwater.errors import LeaseLost, NotDelivered, OutcomeUnknown, StoreError
from headwater.message import NO_HEADERS
from headwater.ports.records import DeliveryRow, Due, Stage, SubscriptionRecord
from headwater.ports.store import Reader, Writer

SET_ASIDE = msgspec.Raw(b"null")
GONE = "retention deleted the message while it was in flight, so its data is not here"
SPANS_KEPT = 4  # how many times its size a window may stretch, from its first open delivery to its last


class Holding(LogReader):
    """In flight are the deliveries of the window, and those with a row: retries, and all where rows are kept."""

    def __init__(self, engine: Engine, record: SubscriptionRecord) -> None:
        spec = record.spec
        super().__init__(engine, record.id, spec, minds_settling=spec.keeps_rows or spec.mode == "exclusive")
        self.owner = record.lease.owner
        self.fence = record.lease.fence
        self._created_ms = record.created_ms
        self._window = Window(record.window)
        self._suspect: int | None = None  # in flight, and its last holder vanished
        self._in_flight: dict[int, Claimed] = {}  # what this holder has been handed and not settled

    def set_payloads_aside(self, sent: Iterable[Claimed]) -> None:
        """For a server: what was sent to a client is in flight without its payload, which the log has too. Else the
        client says how much memory is taken, by not settling."""
        if self.engine.store.shares_messages:
            return
        for claimed in sent:
            claimed.message.raw, claimed.message.raw_headers = SET_ASIDE, NO_HEADERS

    def _held(self, reader: Reader) -> SubscriptionRecord:
        """The subscription as stored, if this holder may still act for it."""
        record = claims.load_held(reader, self.id, self.owner, self.fence)
        if record.created_ms != self._created_ms:
            raise LeaseLost("the subscription was removed and made anew", where=self.id, next="Subscribe again")
        return record

    @property
    def delivered_to(self) -> int:
        """How far the log has been handed out here."""
        return self._window.delivered

    def handed_out(self, seqs: Sequence[int], attempt: int | None = None) -> Flow[list[Claimed]]:
        """What this holder was given under these seqs, for those who settle by seq; an error if one was not, or with
        another attempt."""
        held = [(seq, self._in_flight.get(seq)) for seq in seqs]
        stranger = next((seq for seq, each in held if each is None or attempt not in (None, each.attempt)), None)
        if stranger is not None:
            raise (yield from self.engine.read(lambda reader: self._why_not(reader, stranger)))
        return [self._in_flight[seq] for seq in seqs]

    def still_in_flight(self, seqs: Sequence[int]) -> list[Claimed]:
        return [self._in_flight[seq] for seq in seqs if seq in self._in_flight]

    def why_not_acked(self, seqs: Sequence[int]) -> Flow[dict[int, NotDelivered | LeaseLost]]:
        """Of seqs that are not in flight here: why each was not acked, but for those that were acked before."""

        def look(reader: Reader) -> dict[int, NotDelivered | LeaseLost]:
            record = self._held(reader)
            acked = claims.acked_before(reader, record, seqs)
            return {seq: claims.not_in_flight(reader, record, seq) for seq in seqs if seq not in acked}

        return self.engine.read(look, self._lane)

    def _why_not(self, reader: Reader, seq: int) -> NotDelivered | LeaseLost:
        return claims.not_in_flight(reader, self._held(reader), seq)

    def ack(self, settled: Sequence[Claimed]) -> Ticket[None]:
        return self.engine.submit(lambda writer, undo: self.ack_in(writer, undo, settled), touching=self.id)

    def submit_ack(self, settled: Sequence[Claimed]) -> Ticket[list[int]]:
        def work(writer: Writer, undo: Undo) -> list[int]:
            record = self._held(writer)
            seqs = [claimed.message.seq for claimed in settled]
            rows = writer.deliveries(self.id, [seq for seq in seqs if seq not in self._window])
            held = [claimed for claimed in settled if self._still_held(claimed, rows.get(claimed.message.seq))]
            self._ack_held(writer, undo, record, held)
            return sorted(set(seqs) - {claimed.message.seq for claimed in held})

        return self.engine.committer.submit(work, touching=self.id)

    def _still_held(self, claimed: Claimed, row: DeliveryRow | None) -> bool:
        if self._in_flight.get(claimed.message.seq, claimed) is not claimed:
            return False
        if claimed.attempt == 1 and claimed.message.seq in self._window:
            return True
        return row is not None and row.token == claimed.token and row.attempts == claimed.attempt

    def ack_in(self, writer: Writer, undo: Undo, settled: Sequence[Claimed]) -> None:
        """Ack inside a transaction: also the user's own."""
        record = self._held(writer)
        self._ack_held(writer, undo, record, settled)

    def _ack_held(self, writer: Writer, undo: Undo, record: SubscriptionRecord, settled: Sequence[Claimed]) -> None:
        self._trim(undo)
        rows = self._settle(writer, undo, record, settled)
        redriven = {row.seq: row.dead_letter for row in rows if row.dead_letter is not None}
        if redriven:
            writer.remove_dead_letters(list(redriven.values()))
        self._time(undo, "ack", settled, redriven)
        acked = len({claimed.message.seq for claimed in settled})
        self._save(writer, replace(record, acked=record.acked + acked))

    def lay_down(self, claimed: Claimed) -> Flow[None]:
        """Give a delivery in hand a row, if it has none, and let go of it: whoever removes the row has settled it."""

        def work(writer: Writer, undo: Undo) -> None:
            record = self._held(writer)
            self._trim(undo)
            row = self._settled_row(writer, undo, record, claimed)
            due_ms = self.engine.clock.now_ms() + self.spec.ack_wait_ms
            writer.put_deliveries(self.id, [replace(row, due_ms=due_ms, token=claimed.token)])
            self._save(writer, record)

        return self.engine.write(work, touching=self.id)

    def nack(self, claimed: Claimed, delay_ms: int | None, failure: Failure) -> Flow[None]:
        def work(writer: Writer, undo: Undo) -> None:
            now_ms = self.engine.clock.now_ms()
            record = self._held(writer)
            decision = decide_retry(self.spec.retry, claimed.attempt, now_ms, self.engine.roll(), delay_ms=delay_ms)
            row = self._settled_row(writer, undo, record, claimed)
            if isinstance(decision, Retry):
                undo.then.append(self._wake_all_of_it)
                writer.put_deliveries(self.id, [replace(row, due_ms=decision.at_ms, token=0)])
            else:
                record = self._bury(writer, record, claimed, row, failure._replace(reason=decision.reason), now_ms)
            self._save(writer, record)

        return self.engine.write(work, touching=self.id)

    def reject(self, claimed: Claimed, failure: Failure) -> Flow[None]:
        def work(writer: Writer, undo: Undo) -> None:
            record = self._held(writer)
            row = self._settled_row(writer, undo, record, claimed)
            self._save(writer, self._bury(writer, record, claimed, row, failure, self.engine.clock.now_ms()))

        return self.engine.write(work, touching=self.id)

    def extend(self, extended: Sequence[Claimed], by_ms: int | None) -> Flow[None]:
        def work(writer: Writer, undo: Undo) -> None:
            now_ms = self.engine.clock.now_ms()
            record = self._held(writer)
            self._refuse_strangers(writer, record, extended)
            deadline_ms = now_ms + (self.spec.ack_wait_ms if by_ms is None else by_ms)
            in_rows = [claimed for claimed in extended if not self._extend_in_window(claimed, deadline_ms)]
            rows = claims.rows_in_flight(writer, record, _keys(in_rows))
            writer.put_deliveries(self.id, [replace(row, due_ms=deadline_ms) for row in rows])
            writer.save_subscription(claims.renewed(record, now_ms))

        return self.engine.write(work, touching=self.id)

    def extend_held(self, seqs: Sequence[int]) -> Flow[None]:
        """More time for what is still in flight of these."""
        held = self.still_in_flight(seqs)
        return self.engine.write(lambda writer, undo: self._extend_held(writer, undo, extended=held), touching=self.id)

    def _extend_held(self, writer: Writer, undo: Undo, *, extended: Sequence[Claimed]) -> None:
        """More time for those still held; one that was lost does not cost the others theirs."""
        now_ms = self.engine.clock.now_ms()
        record = self._held(writer)
        deadline_ms = now_ms + self.spec.ack_wait_ms
        in_rows = [claimed for claimed in extended if not self._extend_in_window(claimed, deadline_ms)]
        rows = writer.deliveries(self.id, [claimed.message.seq for claimed in in_rows])
        held = [rows[each.message.seq] for each in in_rows if self._still_held(each, rows.get(each.message.seq))]
        writer.put_deliveries(self.id, [replace(row, due_ms=deadline_ms) for row in held])
        writer.save_subscription(claims.renewed(record, now_ms))

    def release(self, untouched: Sequence[Claimed]) -> Ticket[None]:
        def work(writer: Writer, undo: Undo) -> None:
            record = self._held(writer)
            self._trim(undo)
            rows = writer.deliveries(self.id, [claimed.message.seq for claimed in untouched])
            held = [claimed for claimed in untouched if self._still_held(claimed, rows.get(claimed.message.seq))]
            now_ms = self.engine.clock.now_ms()
            released = [self._released(claimed, rows.get(claimed.message.seq), now_ms, seen=False) for claimed in held]
            self._close_in_window(undo, [row.seq for row in released])
            self._forget(undo, [row.seq for row in released])
            writer.put_deliveries(self.id, released)
            undo.then.append(self._wake_all_of_it)
            self._save(writer, record)

        def keep(done: Ticket[None]) -> None:
            if isinstance(done.error, StoreError) and not isinstance(done.error, OutcomeUnknown):
                self._buffer.extendleft(reversed(untouched))  # still nobody else's, and not looked at
                self._wake()

        ticket: Ticket[None] = self.engine.committer.submit(work, touching=self.id)
        ticket.watch(keep)
        return ticket

    def _released(
        self, claimed: Claimed, row: DeliveryRow | None, now_ms: int, *, seen: bool, vanished: bool = False
    ) -> DeliveryRow:
        """The row of a delivery that is given back: due now, and no attempt if no code has seen it. A token marks what
        is suspected of having killed its consumer; what was not looked at stays as suspect as it was, but not of this
        one: a resume takes all that has the token of this holder for an attempt that it has to take back."""
        seq = claimed.message.seq
        row = row or DeliveryRow(seq, claimed.attempt, 0)
        if seen:
            return replace(row, attempts=claimed.attempt, due_ms=now_ms, token=claimed.token if vanished else 0)
        token = max(1, claimed.token - 1) if seq == self._suspect else 0
        return replace(row, attempts=claimed.attempt - 1, due_ms=now_ms, token=token)

    def _extend_in_window(self, claimed: Claimed, deadline_ms: int) -> bool:
        return claimed.attempt == 1 and self._window.extend(claimed.message.seq, deadline_ms)

    def _settle(
        self, writer: Writer, undo: Undo, record: SubscriptionRecord, settled: Sequence[Claimed]
    ) -> list[DeliveryRow]:
        """Take claims out of the window or off the rows; returns the rows. Refuses before it changes anything."""
        seqs = [claimed.message.seq for claimed in settled]
        self._refuse_strangers(writer, record, settled)
        in_rows = [claimed for claimed in settled if claimed.attempt > 1 or claimed.message.seq not in self._window]
        rows = claims.rows_in_flight(writer, record, _keys(in_rows)) if in_rows else []
        self._close_in_window(undo, seqs)
        writer.remove_deliveries(self.id, [row.seq for row in rows])
        self._forget(undo, seqs)
        if self.spec.order_key is not None:
            undo.then.append(self._wake_all_of_it)  # the next of its key may be delivered now
        return rows

    def _refuse_strangers(self, reader: Reader, record: SubscriptionRecord, claimed: Sequence[Claimed]) -> None:
        """What was handed out last is what may be settled: not an earlier handing out of the same message, even if it
        has the same token and attempt, as one that died and was redriven can."""
        for each in claimed:
            if self._in_flight.get(each.message.seq, each) is not each:
                raise claims.not_in_flight(reader, record, each.message.seq)

    def _time(self, undo: Undo, stage: Stage, claimed: Sequence[Claimed], redriven: Collection[int]) -> None:
        """Count how long they took. How long the redriven were dead is no measure of anything."""
        if redriven:
            claimed = [each for each in claimed if each.message.seq not in redriven]
        if claimed:
            self.engine.timings.note(undo, stage, self.id, claimed)

    def _wake_all_of_it(self) -> None:
        self.engine.wakeups.settled(self.id)

    def _settled_row(self, writer: Writer, undo: Undo, record: SubscriptionRecord, claimed: Claimed) -> DeliveryRow:
        rows = self._settle(writer, undo, record, [claimed])
        return rows[0] if rows else DeliveryRow(claimed.message.seq, claimed.attempt, 0)

    def _close_in_window(self, undo: Undo, seqs: Iterable[int]) -> None:
        closed = self._window.settle(seqs)
        if closed:
            undo.append(lambda: self._window.reopen(closed))

    def _bury(
        self,
        writer: Writer,
        record: SubscriptionRecord,
        claimed: Claimed,
        row: DeliveryRow,
        failure: Failure,
        now_ms: int,
    ) -> SubscriptionRecord:
        message = claimed.message
        if message.raw is SET_ASIDE:
            [(_, stored)] = claims.with_buried_copies(writer, [Due(row, writer.messages([row.seq]).get(row.seq))])
            if stored is None:  # retention took it meanwhile
                failure = failure._replace(error=f"{GONE}; {failure.error}" if failure.error else GONE)
            message = stored or message
        letter = claims.dead_letter(self.id, message, row, failure, now_ms)
        return claims.bury(writer, record, [letter])

    def _save(self, writer: Writer, record: SubscriptionRecord) -> None:
        if not self.spec.keeps_rows:
            record = replace(record, window=self._window.state())
        writer.save_subscription(claims.renewed(record, self.engine.clock.now_ms()))

    def _trim(self, undo: Undo) -> None:
        if not undo:  # the first of its transaction, so all that was done before is committed
            self._window.trim()

    def _shorten_window(self, writer: Writer, undo: Undo) -> None:
        """A delivery that stays open for long, while thousands behind it are settled, gets a row, so that the window
        can forget those."""
        stragglers = self._window.stragglers(SPANS_KEPT * self.spec.max_in_flight)
        if stragglers:
            self._close_in_window(undo, stragglers)
            rows = [DeliveryRow(seq, 1, deadline_ms, self.fence) for seq, deadline_ms in stragglers.items()]
            writer.put_deliveries(self.id, rows)

    def _forget(self, undo: Undo, seqs: Iterable[int]) -> None:
        seqs = list(seqs)
        if len(self._in_flight) >= self.spec.max_in_flight or self._suspect in seqs:
            undo.then.append(self._waiter.wake)  # somebody may be waiting for room, or for this very one
        handed = {seq: self._in_flight.pop(seq) for seq in seqs if seq in self._in_flight}
        undo.append(lambda: self._in_flight.update(handed))


def _keys(claimed: Iterable[Claimed]) -> list[tuple[int, int, int]]:
    return [(each.message.seq, each.attempt, each.token) for each in claimed]
