"""Changing the tables. Every change is noted in the undo log, so that a transaction can be taken back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from headwater.delivery.dedupe import DedupeWindow
from headwater.delivery.lease import Lease
from headwater.delivery.receipts import Receipt
from headwater.delivery.retention import Kept
from headwater.errors import InvalidOption
from headwater.message import NO_HEADERS, Draft, Extras, Message, scoped_id
from headwater.ports.records import (
    Appended,
    DeadLetter,
    DeliveryRow,
    Gap,
    RetentionPolicy,
    SubscriptionRecord,
    Timing,
    TopicCount,
)
from headwater.stores.memory.reader import MemoryReader
from headwater.stores.memory.tables import RememberedId, Tables
from headwater.stores.memory.undo import UndoLog
from headwater.topics import Dialect


class MemoryWriter(MemoryReader):
    def __init__(self, tables: Tables, undo: UndoLog) -> None:
        super().__init__(tables)
        self._undo = undo

    # --- messages -------------------------------------------------------------------------------------------

    def append(self, drafts: Sequence[Draft], now_ms: int, window: DedupeWindow) -> Appended:
        last_before = self.last_seq()
        seqs: list[int] = []
        repeats: set[int] = set()
        new: list[Message] = []
        for position, draft in enumerate(drafts):
            scoped = None if draft.id is None else scoped_id(draft.topic, draft.id)
            known_seq = self._known_seq(scoped, last_before, now_ms, window)
            if known_seq is not None:
                repeats.add(position)
                seqs.append(known_seq)
                continue
            seq = last_before + len(new) + 1
            seqs.append(seq)
            new.append(_message_of(draft, seq, now_ms, self._tables.salt))
            if scoped is not None:
                self._undo.put(self._tables.ids, scoped, RememberedId(seq, now_ms))
        self._tables.messages.extend(new, self._undo)
        self._count(new, +1)
        return Appended(seqs, frozenset(repeats))

    def delete_messages(self, gone: Sequence[Kept]) -> None:
        deleted = self._tables.messages.delete([kept.seq for kept in gone], self._undo)
        self._count(deleted, -1)

    def fold_topic_counts(self, limit: int) -> int:
        """Counting is free here and done at once, so there is never a tail to take in."""
        return 0

    def forget_ids(self, window: DedupeWindow, now_ms: int, limit: int) -> int:
        oldest_seq, oldest_ms = window.oldest_seq(self.last_seq()), window.oldest_ms(now_ms)
        outside = (
            id for id, (seq, published_ms) in self._tables.ids.items() if seq <= oldest_seq or published_ms < oldest_ms
        )
        forgotten = list(islice(outside, limit))
        for id in forgotten:
            self._undo.drop(self._tables.ids, id)
        return len(forgotten)

    def _known_seq(self, scoped: str | None, last_before: int, now_ms: int, window: DedupeWindow) -> int | None:
        remembered = None if scoped is None else self._tables.ids.get(scoped)
        if remembered is None:
            return None
        stands_in_same_call = remembered.seq > last_before
        if stands_in_same_call or window.remembers(*remembered, last_before, now_ms):
            return remembered.seq
        return None

    def _count(self, messages: Iterable[Message], sign: int) -> None:
        changed: dict[str, TopicCount] = {}
        for message in messages:
            topic = message.topic
            before = changed.get(topic) or self._tables.topic_counts.get(topic) or TopicCount(topic, 0, 0, 0, 0)
            last_seq, last_published_ms = before.last_seq, before.last_published_ms
            if message.seq > last_seq:
                last_seq, last_published_ms = message.seq, message.published_ms
            changed[topic] = TopicCount(
                topic, before.count + sign, before.bytes + sign * message.size, last_seq, last_published_ms
            )
        for topic, counted in changed.items():
            self._undo.put(self._tables.topic_counts, topic, counted)

    # --- subscriptions and their deliveries -----------------------------------------------------------------

    def save_subscription(self, record: SubscriptionRecord) -> None:
        self._undo.put(self._tables.subscriptions, record.id, record)

    def delete_subscription(self, id: str) -> None:
        self._undo.drop(self._tables.subscriptions, id)
        self._undo.drop(self._tables.deliveries, id)
        self._undo.drop(self._tables.untold_gaps, id)
        self._undo.drop(self._tables.gap_totals, id)
        for key in [key for key in self._tables.timings if key[0] == id]:
            self._undo.drop(self._tables.timings, key)

    def put_deliveries(self, subscription: str, rows: Sequence[DeliveryRow]) -> None:
        stored = self._tables.deliveries.setdefault(subscription, {})
        for row in rows:
            self._undo.put(stored, row.seq, row)

    def end_leases(self, subscription: str, now_ms: int) -> None:
        leased = [row for row in self._rows(subscription) if row.token and row.due_ms > now_ms]
        self.put_deliveries(subscription, [msgspec.structs.replace(row, due_ms=now_ms) for row in leased])

    def remove_deliveries(self, subscription: str, seqs: Sequence[int]) -> None:
        stored = self._tables.deliveries.get(subscription, {})
        for seq in seqs:
            self._undo.drop(stored, seq)

    def clear_deliveries(self, subscription: str) -> None:
        self._undo.drop(self._tables.deliveries, subscription)

    # --- what went wrong ------------------------------------------------------------------------------------

    def bury(self, letters: Sequence[DeadLetter]) -> list[int]:
        ids = [letter.id or self._next_dead_letter_id() for letter in letters]
        for id, letter in zip(ids, letters, strict=True):
            self._undo.put(self._tables.dead_letters, id, msgspec.structs.replace(letter, id=id))
        return ids

    def remove_dead_letters(self, ids: Sequence[int]) -> None:
        for id in ids:
            self._undo.drop(self._tables.dead_letters, id)

    def end_redrives(self, subscription: str, why: str) -> None:
        for letter in list(self._tables.dead_letters.values()):
            if letter.subscription == subscription and letter.redriving:
                self.bury([msgspec.structs.replace(letter, redriving=False, redrive_error=why)])

    def add_gap(self, gap: Gap) -> None:
        subscription = gap.subscription
        self._undo.put(self._tables.untold_gaps, subscription, (*self.gaps(subscription), gap))
        self._undo.put(self._tables.gap_totals, subscription, self.gap_total(subscription) + gap.count)

    def mark_gaps_told(self, subscription: str) -> None:
        self._undo.drop(self._tables.untold_gaps, subscription)

    def _next_dead_letter_id(self) -> int:
        self._undo.add(partial(setattr, self._tables, "last_dead_letter", self._tables.last_dead_letter))
        self._tables.last_dead_letter += 1
        return self._tables.last_dead_letter

    # --- settings, leases, SQL ------------------------------------------------------------------------------

    def set_retention(self, policy: RetentionPolicy) -> None:
        self._undo.put(self._tables.retention, (policy.pattern, policy.dialect), policy)

    def remove_retention(self, pattern: str, dialect: Dialect) -> bool:
        return self._undo.drop(self._tables.retention, (pattern, dialect))

    def add_receipts(self, publisher: str, receipts: Sequence[Receipt], now_ms: int) -> None:
        for receipt in receipts:
            self._undo.put(self._tables.receipts, (publisher, receipt.number), (receipt, now_ms))

    def forget_receipts(self, publisher: str, below: int) -> None:
        heard = [
            (whose, number)
            for (whose, number), (receipt, _) in self._tables.receipts.items()
            if whose == publisher and number + receipt.length <= below
        ]
        for key in heard:
            self._undo.drop(self._tables.receipts, key)

    def forget_old_receipts(self, before_ms: int, limit: int) -> int:
        old = list(islice((key for key, (_, at_ms) in self._tables.receipts.items() if at_ms < before_ms), limit))
        for key in old:
            self._undo.drop(self._tables.receipts, key)
        return len(old)

    def save_sink_batch(self, sink: str, batch: int, now_ms: int) -> None:
        self._undo.put(self._tables.sinks, sink, batch)

    def add_timings(self, timings: Sequence[Timing]) -> None:
        stored = self._tables.timings
        for timing in timings:
            if timing.subscription not in self._tables.subscriptions:
                continue
            key = (timing.subscription, timing.hour_ms, timing.stage, timing.bucket)
            self._undo.put(stored, key, stored.get(key, 0) + timing.count)

    def forget_old_timings(self, before_ms: int, limit: int) -> int:
        old = list(islice((key for key in self._tables.timings if key[1] < before_ms), limit))
        for key in old:
            self._undo.drop(self._tables.timings, key)
        return len(old)

    def save_lease(self, resource: str, lease: Lease) -> None:
        self._undo.put(self._tables.leases, resource, lease)

    def execute(self, sql: str, bindings: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        raise InvalidOption(
            "a log in memory has no SQL",
            where="execute",
            next="Open a file or a PostgreSQL log to write your own rows with a message",
        )


_NO_EXTRAS = Extras()


def _message_of(draft: Draft, seq: int, now_ms: int, salt: int) -> Message:
    extras = draft.extras or _NO_EXTRAS
    return Message(
        seq=seq,
        topic=draft.topic,
        raw=msgspec.Raw(draft.data_json.encode()),
        published_ms=now_ms,
        size=draft.size,
        identity=salt if draft.id is None else draft.id,
        priority=extras.priority,
        deliver_ms=extras.deliver_ms,
        expires_ms=extras.expires_ms,
        from_=extras.from_,
        to=extras.to,
        reply_to=extras.reply_to,
        correlation_id=extras.correlation_id,
        type=extras.type,
        version=extras.version,
        content_type=extras.content_type,
        traceparent=extras.traceparent,
        raw_headers=NO_HEADERS if extras.headers_json is None else msgspec.Raw(extras.headers_json.encode()),
    )
