"""What one consumer of a durable subscription has in flight, and its right to act for the subscription.

All methods that take a Writer run inside a transaction of the committer; `plan` reads beside the writer. Changes in
memory come before the commit and are undone if it fails. There are two kinds: `Cursor` and `LeasedRows`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

from headwater.broker.committer import TransactionHooks
from headwater.broker.deliveries import (
    Claimed,
    ClaimResult,
    FetchPlan,
    load_held,
    not_in_flight,
    renewed,
    replace,
)
from headwater.broker.engine import Engine
from headwater.broker.wakeups import Waiter
from headwater.delivery.window import Window
from headwater.errors import LeaseLostError, NotDeliveredError
from headwater.ports.records import DeliveryRow, SubscriptionRecord, selection_of
from headwater.ports.store import Reader, Writer

NEAR_SEQS = 1_000  # a scan of so few costs the writer next to nothing
PUBLISHED_BYTES_MAX = 16 * 1024  # claimed by the transaction that publishes, before a server has reserved room for it

Rows = dict[int, DeliveryRow]


class InFlight(ABC):
    """Deliveries that were claimed here and are not settled. Those that are open in the window have no row."""

    def __init__(
        self, engine: Engine, record: SubscriptionRecord, waiter: Waiter, name: str, resumed: Iterable[Claimed]
    ) -> None:
        self.claimed = {claimed.message.seq: claimed for claimed in resumed}
        self.id, self.spec, self.fence = record.id, record.spec, record.lease.fence
        self.load: Callable[[Reader], SubscriptionRecord] = partial(
            load_held, id=record.id, owner=record.lease.owner, fence=self.fence, created_ms=record.created_ms
        )
        """The subscription as stored, if this consumer may still act for it."""
        self._name = name  # in the list of a shared subscription's consumers
        self._clock = engine.clock
        self._waiter = waiter
        self._selection = selection_of(record.spec)
        self._filter_takes_time = self._selection.takes_time
        self._window = Window(record.window)
        self._scanned = record.window.delivered
        self.suspect: int | None = None  # in flight, and its last consumer vanished

    @property
    def delivered_to(self) -> int:
        return self._window.delivered

    @abstractmethod
    def next_deadline_ms(self) -> int | None:
        """When the first of those times out that were claimed since the last plan."""

    # --- planning -----------------------------------------------------------------------------------------------

    def is_behind(self, last_seq: int) -> bool:
        return last_seq > self._scanned

    def _is_near(self, last_seq: int) -> bool:
        return 0 < last_seq - self._scanned <= NEAR_SEQS

    @abstractmethod
    def may_claim_at_once(self, last_seq: int) -> bool:
        """Whether a claim without a plan is cheap for the writer, and likely to find something."""

    @abstractmethod
    def plan_at_once(self, writer: Writer, limit: int, last_seq: int) -> FetchPlan | None:
        """A plan made inside the transaction that claims; None if there is nothing to claim, or much to search."""

    @abstractmethod
    def may_claim_published(self, last_seq: int) -> bool:
        """Whether the transaction that publishes may claim, too."""

    def plan_published(self, writer: Writer, limit: int) -> FetchPlan | None:
        """A plan of messages that are ready now, made inside the transaction that publishes them. Others, and what was
        due before, are found by the consumer's own look."""
        room, after = self._room(writer, limit), self._scanned
        if room <= 0:
            return None
        fresh, scanned_to = writer.scan(self._selection, after, room, None, PUBLISHED_BYTES_MAX)
        if not fresh or any(message.deliver_ms is not None or message.expires_ms is not None for message in fresh):
            return None
        return FetchPlan(room, fresh, after, scanned_to, self.delivered_to, True, None, has_gaps=False, is_current=True)

    def plan(self, reader: Reader, limit: int, bytes_max: int | None) -> FetchPlan:
        saved_to, room, after = self.delivered_to, self._room(reader, limit), self._scanned
        most = self._scan_max(reader, room) if room > 0 else 0
        fresh, scanned_to = reader.scan(self._selection, after, most, None, bytes_max) if most > 0 else ([], after)
        next_due_ms, has_gaps = self._next_due_ms(reader), bool(reader.gaps(self.id))
        at_end = room <= 0 or (not fresh and scanned_to >= reader.last_seq())
        return FetchPlan(room, fresh, after, scanned_to, saved_to, at_end, next_due_ms, has_gaps)

    @abstractmethod
    def _scan_max(self, reader: Reader, room: int) -> int:
        """How many new messages a plan looks for."""

    def skip(self, plan: FetchPlan) -> None:
        """Let the next plan begin behind this one, of which nothing can be claimed."""
        if self._scanned == plan.scanned_from:  # else another fetch moved it, or its claim was undone
            self._scanned = plan.scanned_to

    def _room(self, reader: Reader, limit: int) -> int:
        """How many more may be claimed. When there is no room, deliveries that have been passed on to other consumers
        because their time ran out here are dropped."""
        if len(self.claimed) >= self.spec.max_in_flight:
            seqs = list(self.claimed)
            leases = self._leases(reader, seqs)
            for seq in seqs:
                if seq not in leases and seq not in self._window:
                    self.claimed.pop(seq, None)
        return max(0, min(limit, self.spec.max_in_flight - len(self.claimed)))

    def _suspect_until_ms(self, reader: Reader) -> int | None:
        """When the suspect in flight here times out; None if there is none, and another may be claimed."""
        suspect = self.suspect
        return None if suspect is None or suspect not in self.claimed else self._leases(reader, [suspect]).get(suspect)

    def _next_due_ms(self, reader: Reader) -> int | None:
        """When the next row can be claimed."""
        until_ms = self._suspect_until_ms(reader)
        due_ms = reader.next_due_ms(self.id, suspects=until_ms is None)
        if due_ms is None or until_ms is None:
            return until_ms if due_ms is None else due_ms
        return min(due_ms, until_ms)

    def _leases(self, reader: Reader, seqs: Collection[int]) -> dict[int, int]:
        """When those time out that have a row which is still of their delivery here."""
        now_ms, rows = self._clock.now_ms(), reader.deliveries(self.id, seqs)
        held = ((row, self.claimed.get(seq)) for seq, row in rows.items() if row.due_ms > now_ms)
        return {row.seq: row.due_ms for row, claimed in held if claimed is not None and claimed.token == row.token}

    # --- claiming -----------------------------------------------------------------------------------------------

    @abstractmethod
    def claim(
        self,
        writer: Writer,
        hooks: TransactionHooks,
        record: SubscriptionRecord,
        plan: FetchPlan,
        now_ms: int,
        bytes_max: int | None,
    ) -> ClaimResult:
        """Claim what the plan found. The caller adds the result."""

    def add(self, hooks: TransactionHooks, claimed: Iterable[Claimed]) -> None:
        added = {each.message.seq: each for each in claimed}

        def take_back() -> None:
            for seq in added:
                self.claimed.pop(seq, None)

        hooks.append(take_back)
        self.claimed.update(added)

    # --- settling -----------------------------------------------------------------------------------------------

    def take_out(
        self, writer: Writer, hooks: TransactionHooks, claimed: Collection[Claimed], *, strict: bool
    ) -> tuple[Collection[Claimed], Rows]:
        """Take deliveries out of flight. Returns those that were in flight, and their rows, which the caller puts or
        removes. `strict`: an error if one is not in flight, before anything is changed."""
        held, rows = self._check(writer, claimed, strict=strict)
        self._remove(hooks, [each.message.seq for each in held])
        return held, rows

    def extend(self, writer: Writer, claimed: Collection[Claimed], deadline_ms: int, *, strict: bool) -> None:
        held, rows = self._check(writer, claimed, strict=strict)
        for each in held:
            if each.message.seq not in rows:
                self._window.extend(each.message.seq, deadline_ms)
        if rows:
            writer.put_deliveries(self.id, [replace(row, due_ms=deadline_ms) for row in rows.values()])

    def save(self, writer: Writer, record: SubscriptionRecord, now_ms: int, **changes: Any) -> None:
        writer.save_subscription(renewed(record, now_ms, **changes))

    def _remove(self, hooks: TransactionHooks, seqs: Collection[int]) -> None:
        if len(self.claimed) >= self.spec.max_in_flight or (self.suspect is not None and self.suspect in seqs):
            hooks.then.append(self._waiter.wake)  # a taker may wait for room, or for the suspect to be settled
        removed = {seq: self.claimed.pop(seq) for seq in seqs if seq in self.claimed}
        hooks.append(lambda: self.claimed.update(removed))

    def _check(self, reader: Reader, claimed: Collection[Claimed], *, strict: bool) -> tuple[Collection[Claimed], Rows]:
        """Those that are in flight here, and the rows of those that are not in the window. `strict`: an error if one of
        them is not in flight. An earlier delivery of a message is not, even if it has the same token and attempt: the
        message may have been dead-lettered and redriven since."""
        lost = [each for each in claimed if self.claimed.get(each.message.seq, each) is not each]
        window = self._window.open
        in_rows = (
            [each for each in claimed if each.attempt > 1 or each.message.seq not in window] if window else claimed
        )
        rows: Rows = {}
        if in_rows:
            rows = reader.deliveries(self.id, [each.message.seq for each in in_rows])
            lost += [each for each in in_rows if not _is_row_of(each, rows.get(each.message.seq))]
        if not lost:
            return claimed, rows
        if strict:
            raise self.why_not(lost[0].message.seq, reader)
        ids = set(map(id, lost))
        held = [each for each in claimed if id(each) not in ids]
        return held, {each.message.seq: rows[each.message.seq] for each in held if each.message.seq in rows}

    def why_not(self, seq: int, reader: Reader) -> NotDeliveredError | LeaseLostError:
        return not_in_flight(reader, self.load(reader), seq)


def _is_row_of(claimed: Claimed, row: DeliveryRow | None) -> bool:
    """Whether the row of its message is still of this delivery."""
    return row is not None and row.token == claimed.token and row.attempts == claimed.attempt
