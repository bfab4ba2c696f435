"""Changing a log inside one PostgreSQL transaction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import msgspec
import psycopg

from headwater.delivery.lease import Lease
from headwater.delivery.publishing import DedupeWindow, Receipt
from headwater.delivery.retention import Kept, merged, runs_of
from headwater.errors import InvalidDataError, InvalidOptionError
from headwater.message import EXTRA_FIELDS, Draft, Extras, to_document
from headwater.ports.records import (
    Appended,
    DeadLetter,
    DeliveryRow,
    Due,
    Gap,
    Order,
    RetentionPolicy,
    SubscriptionRecord,
    Timing,
)
from headwater.stores.postgres.connection import SQL, array_of, untyped
from headwater.stores.postgres.external_tx import run_users_sql
from headwater.stores.postgres.reader import RUNS, SEQS, PostgresReader
from headwater.stores.sql import UNORDERED_FACTS, TopicTail, assign_seqs, record_of, scoped_ids, unordered_by
from headwater.topics import Dialect

COPY_BYTES = 4 * 1024 * 1024
COPY_ROWS = 500  # how many rows are written down before they are sent: the server reads them while we write the next
ALIKE_MAX = 4  # into how many statements delivery rows are split at most, by what they have in common

_PASSING_BY = "FOR UPDATE SKIP LOCKED"
_NO_EXTRAS = Extras()
_topic, _data_json, _extras, _id, _size = map(attrgetter, ("topic", "data_json", "extras", "id", "size"))
_TEXTS = tuple(field.attribute for field in EXTRA_FIELDS if field.kind == "text")


class PostgresWriter(PostgresReader):
    """`ports.store.Writer` over a connection that is inside a transaction. Unless it is `alone`, it locks the rows that
    it reads in order to change them."""

    _keeps_counts = False  # it may yet be rolled back

    def __init__(self, connection: psycopg.Connection, salt: int, alone: bool, topics: TopicTail | None = None) -> None:
        super().__init__(connection, salt, topics)
        self._alone = alone
        self._last: int | None = None  # known while this transaction holds the publish lock
        self._locked: dict[str, SubscriptionRecord] = {}  # locked until the transaction ends
        self.has_published = False
        self.has_news = False
        """Whether something was done that others may be waiting for."""

    def last_seq(self) -> int:
        return super().last_seq() if self._last is None else self._last

    def _last_to_publish_after(self) -> int:
        if self._last is None:
            self._last = int(self._value("lock_publishing"))
        return self._last

    def append(self, drafts: Sequence[Draft], now_ms: int, window: DedupeWindow) -> Appended:
        if not drafts:
            return Appended([], frozenset())
        last = self._last_to_publish_after()
        plain = {*map(_extras, drafts), *map(_id, drafts)} == {None}
        if plain or not any(draft.id is not None for draft in drafts):
            seqs = list(range(last + 1, last + 1 + len(drafts)))
            self._copy(drafts, seqs, now_ms, plain)
            return Appended(seqs, frozenset())
        _refuse_nul(drafts)
        scoped = scoped_ids(drafts)
        assigned = assign_seqs(drafts, scoped, last, self._remembered(scoped, last, now_ms, window))
        self._copy(assigned.fresh, assigned.fresh_seqs, now_ms, plain=False)
        new = assigned.to_remember
        if new:
            self._execute(SQL["remember_ids"], (now_ms, array_of(new.values()), list(new)))
        return Appended(assigned.seqs, assigned.duplicates)

    def _remembered(self, scoped: Sequence[str | None], last: int, now_ms: int, window: DedupeWindow) -> dict[str, int]:
        asked = [id for id in scoped if id is not None]
        return {
            id: seq
            for id, seq, published_ms in self._execute(SQL["known_ids"], (asked,))
            if window.remembers(seq, published_ms, last, now_ms)
        }

    def _copy(self, drafts: Sequence[Draft], seqs: Sequence[int], now_ms: int, plain: bool) -> None:
        if not drafts:
            return
        if not plain:
            _refuse_nul(drafts)
            if any(draft.published_ms is not None for draft in drafts):
                self._note_unordered(drafts, seqs, now_ms)
        with self.connection.cursor().copy(SQL["copy_plain" if plain else "copy_full"].encode()) as copy:
            if plain:
                # Large messages go in smaller parts: each part is held three times over while it is written down.
                rows = max(1, min(COPY_ROWS, COPY_BYTES * len(drafts) // max(1, sum(map(_size, drafts)))))
                for start in range(0, len(drafts), rows):
                    end = start + rows
                    copy.write(_plain_rows(drafts[start:end], seqs[start:end], now_ms))
            else:
                for draft, seq in zip(drafts, seqs, strict=True):
                    extras = msgspec.structs.astuple(draft.extras or _NO_EXTRAS)
                    published_ms = now_ms if draft.published_ms is None else draft.published_ms
                    copy.write_row((seq, draft.topic, draft.data_json, published_ms, draft.size, 2, draft.id, *extras))
        self._last = seqs[-1]
        self.has_news = self.has_published = True

    def _note_unordered(self, drafts: Sequence[Draft], seqs: Sequence[int], now_ms: int) -> None:
        known = self.unordered()
        seq, published_ms = self._row("last_published") or (0, 0)
        found = unordered_by(drafts, seqs, now_ms, (seq, published_ms), known)
        if found is not None and found != known:
            for name, value in zip(UNORDERED_FACTS, found, strict=True):
                self._execute(SQL["set_fact"], (name, value))

    def receipts(self, publisher: str, first: int, count: int) -> list[Receipt]:
        self._last_to_publish_after()  # two servers may be given the same messages at once; one of them is first
        return super().receipts(publisher, first, count)

    def add_receipts(self, publisher: str, receipts: Sequence[Receipt], now_ms: int) -> None:
        if receipts:
            last_word = {receipt.number: receipt for receipt in receipts}
            columns = zip(*map(msgspec.structs.astuple, last_word.values()), strict=True)
            self._execute(SQL["add_receipts"], (publisher, now_ms, *map(array_of, columns)))

    def forget_receipts(self, publisher: str, below: int) -> None:
        self._execute(SQL["forget_receipts"], (publisher, below))

    def forget_old_receipts(self, before_ms: int, limit: int) -> int:
        return self._execute(SQL["forget_old_receipts"], (before_ms, limit)).rowcount

    def subscription(self, id: str) -> SubscriptionRecord | None:
        if id not in self._locked:
            row = self._row("subscription" if self._alone else "subscription_to_change", id)
            if row is None:
                return None
            self._locked[id] = record_of(row)
        return self._locked[id]

    def save_subscription(self, record: SubscriptionRecord) -> None:
        spec, window, lease = record.spec, record.window, record.lease
        if "\0" in record.id:
            raise _nul("the id of a subscription", record.id)
        self._locked[record.id] = record
        self._execute(
            SQL["save_subscription"],
            (
                record.id,
                spec.pattern,
                spec.mode,
                _json(spec),
                window.floor,
                window.delivered,
                _json(window.settled),
                _storable(lease.owner),
                lease.fence,
                lease.until_ms,
                record.created_ms,
                record.active_ms,
                record.acked,
                record.redelivered,
                record.dead_lettered,
            ),
        )
        if spec.mode != "shared" and lease.until_ms == 0:
            self.has_news = True  # it is free to be taken

    def delete_subscription(self, id: str) -> None:
        self._locked.pop(id, None)
        for statement in ("delete_subscription", "clear_deliveries", "delete_gaps", "delete_timings"):
            self._execute(SQL[statement], (id,))
        self.has_news = True

    def due(
        self,
        subscription: str,
        now_ms: int,
        limit: int,
        order: Order,
        *,
        suspects: bool | None = None,
        bytes_max: int | None = None,
    ) -> list[Due]:
        # A row that another transaction is just settling is skipped, not waited for. Also if we
        # are alone: such a transaction does not ask us. Written again after its commit, the row would be there anew.
        return self._due(subscription, now_ms, limit, order, suspects, bytes_max, locked=_PASSING_BY)

    def deliveries(self, subscription: str, seqs: Iterable[int]) -> dict[int, DeliveryRow]:
        return self._deliveries(subscription, seqs, locked=_PASSING_BY)

    def deliveries_by(self, subscription: str, token: int) -> list[DeliveryRow]:
        return self._deliveries_by(subscription, token, locked=_PASSING_BY)

    def put_deliveries(self, subscription: str, rows: Sequence[DeliveryRow]) -> None:
        alike: dict[tuple[Any, ...], list[int]] = {}
        for row in rows:  # a claimed batch differs in nothing but its seqs
            alike.setdefault(msgspec.structs.astuple(row)[1:], []).append(row.seq)
        if len(alike) <= ALIKE_MAX:
            for (attempts, due_ms, token, priority, key, letter), seqs in alike.items():
                common = (subscription, attempts, due_ms, token, priority, _storable(key), letter, array_of(seqs))
                bounds = (subscription, min(seqs), max(seqs))
                if not self._execute(SQL["add_deliveries"], (*common, *bounds)).rowcount:
                    self._execute(SQL["put_deliveries"], common)
        else:
            columns = list(zip(*map(msgspec.structs.astuple, rows), strict=True))
            keys = [_storable(key) for key in columns.pop(5)]
            numbers = [array_of(column) for column in columns]
            self._execute(SQL["put_mixed_deliveries"], (subscription, *numbers[:5], keys, numbers[5]))
        if any(row.token == 0 for row in rows):
            self.has_news = True  # given back

    def end_leases(self, subscription: str, now_ms: int) -> None:
        if self._execute(SQL["end_leases"], (now_ms, subscription, subscription, now_ms)).rowcount:
            self.has_news = True

    def remove_deliveries(self, subscription: str, seqs: Sequence[int]) -> None:
        if seqs and self._value("remove_deliveries", subscription, array_of(seqs)):
            self.has_news = True  # the next of their keys may come

    def clear_deliveries(self, subscription: str) -> None:
        self._execute(SQL["clear_deliveries"], (subscription,))

    def save_dead_letters(self, letters: Sequence[DeadLetter]) -> list[int]:
        if not letters:
            return []
        cursor = self.connection.cursor()
        cursor.executemany(SQL["save_dead_letter"].encode(), list(map(_letter_values, letters)), returning=True)
        ids: list[int] = []
        while True:
            ids += [id for (id,) in cursor]
            if not cursor.nextset():
                return ids

    def remove_dead_letters(self, ids: Sequence[int]) -> None:
        self._execute(SQL["remove_dead_letters"], (array_of(ids),))

    def end_redrives(self, subscription: str, why: str) -> None:
        self._execute(SQL["end_redrives"], (why, subscription))

    def add_gap(self, gap: Gap) -> None:
        self._execute(SQL["add_gap"], (gap.subscription, gap.from_seq, gap.to_seq, gap.count, gap.why, gap.at_ms))
        self.has_news = True

    def mark_gaps_reported(self, subscription: str) -> None:
        self._execute(SQL["mark_gaps_reported"], (subscription,))

    def set_retention(self, policy: RetentionPolicy) -> None:
        self._execute(SQL["set_retention"], (policy.pattern, policy.dialect, _json(policy.limits)))

    def remove_retention(self, pattern: str, dialect: Dialect) -> bool:
        return self._execute(SQL["remove_retention"], (pattern, dialect)).rowcount > 0

    def delete_messages(self, gone: Sequence[Kept]) -> None:
        if not gone:
            return
        counted_to = self._counted_to()
        seqs = sorted({kept.seq for kept in gone})
        if seqs[-1] > counted_to:  # count them in first, or their topic's last seq would be forgotten
            self._fold(counted_to, min(seqs[-1], self.last_seq()))
        self._note_pruned(SEQS.decode(self._value("delete_messages", array_of(seqs))))

    def _note_pruned(self, seqs: Sequence[int]) -> None:
        """Only the runs right beside are looked at, so that it costs the same however many there are."""
        if not seqs:
            return
        runs = runs_of(seqs)
        nearest_end = self._value("last_pruned", seqs[-1] + 1)
        if nearest_end is not None and nearest_end >= seqs[0] - 1:  # else all that are stored lie below
            ends, starts = [first - 1 for first, _ in runs], [last + 1 for _, last in runs]
            beside = RUNS.decode(self._value("pruned_beside", array_of(ends), array_of(starts)))
            runs = merged([*runs, *beside])
            self._execute(SQL["forget_pruned"], (array_of(first for first, _ in beside),))
        firsts, lasts = zip(*runs, strict=True)
        self._execute(SQL["add_pruned"], (array_of(firsts), array_of(lasts)))

    def fold_topic_counts(self, limit: int) -> int:
        counted_to = self._counted_to()
        upto = min(self.last_seq(), counted_to + limit)
        if upto > counted_to:
            self._fold(counted_to, upto)
        return max(0, upto - counted_to)

    def _counted_to(self) -> int:
        """Transactions that count or delete wait for each other."""
        return int(self._value("fact_to_change", "counted_to"))

    def _fold(self, counted_to: int, upto: int) -> None:
        self._execute(SQL["fold_topic_counts"], (counted_to, upto))
        self._execute(SQL["set_fact"], ("counted_to", upto))

    def forget_ids(self, window: DedupeWindow, now_ms: int, limit: int) -> int:
        oldest_seq, oldest_ms = window.oldest_seq(self.last_seq()), window.oldest_ms(now_ms)
        return self._execute(SQL["forget_ids"], (oldest_seq, oldest_ms, limit)).rowcount

    def save_sink_batch(self, sink: str, batch: int, now_ms: int) -> None:
        self._execute(SQL["save_sink_batch"], (sink, batch, now_ms))

    def delete_sink(self, sink: str) -> None:
        self._execute(SQL["delete_sink"], (sink,))

    def add_timings(self, timings: Sequence[Timing]) -> None:
        if timings:
            ids, hours, stages, buckets, counts = zip(*map(msgspec.structs.astuple, timings), strict=True)
            columns = (list(ids), array_of(hours), list(stages), array_of(buckets), array_of(counts))
            self._execute(SQL["add_timings"], columns)

    def forget_old_timings(self, before_ms: int, limit: int) -> int:
        return self._execute(SQL["forget_old_timings"], (before_ms, limit)).rowcount

    def lease(self, resource: str) -> Lease:
        if self._alone:
            return super().lease(resource)
        row = self._row("lease_to_change", resource)
        if row is None:
            self._execute(SQL["add_free_lease"], (resource,))
            row = self._row("lease_to_change", resource)
        return Lease(*row)

    def save_lease(self, resource: str, lease: Lease) -> None:
        self._execute(SQL["save_lease"], (resource, lease.owner, lease.fence, lease.until_ms))

    def delete_lease(self, resource: str) -> None:
        self._execute(SQL["delete_lease"], (resource,))

    def execute(self, sql: str, bindings: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        self._last = self._seen_last = None  # a trigger of the user's may publish
        return run_users_sql(self.connection, sql, bindings)


def _plain_rows(drafts: Sequence[Draft], seqs: Sequence[int], now_ms: int) -> str:
    """Rows for COPY: written with separators that stand in no topic and no JSON, so that what has to be escaped is
    escaped in one go for all of them."""
    columns = zip(seqs, map(_topic, drafts), map(_data_json, drafts), map(_size, drafts), repeat(now_ms))
    text = "".join([f"{seq}\0{topic}\0{data}\0{now}\0{size}\0001\1" for seq, topic, data, size, now in columns])
    if text.count("\0") != 5 * len(drafts) or text.count("\1") != len(drafts):
        raise InvalidDataError("a topic or data holds a control character", next="Escape it, as JSON asks for")
    for character, escaped in (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        text = text.replace(character, escaped)
    return text.replace("\0", "\t").replace("\1", "\n")


def _refuse_nul(drafts: Iterable[Draft]) -> None:
    for draft in drafts:
        if draft.id is not None and "\0" in draft.id:
            raise _nul("id", draft.topic)
        if draft.extras is not None:
            for name in _TEXTS:
                value = getattr(draft.extras, name)
                if value is not None and "\0" in value:
                    raise _nul(name, draft.topic)


def _nul(what: str, where: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"{what} holds the character NUL, which PostgreSQL cannot keep",
        where=where.replace("\0", "\\0"),
        next="Leave it out",
    )


def _storable(text: str | None) -> Any:
    """What came from a payload or an error as PostgreSQL can keep it."""
    if text is None or (text.isprintable() and text.isascii()):
        return text
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _letter_values(letter: DeadLetter) -> tuple[Any, ...]:
    message = letter.message
    return untyped(
        (
            letter.id,
            letter.subscription,
            message.seq,
            message.topic,
            message.type,
            letter.reason,
            letter.attempts,
            letter.died_ms,
            _storable(letter.error),
            _storable(letter.stack),
            _storable(letter.handler),
            letter.redrives,
            letter.redriving,
            _storable(letter.redrive_error),
            _json(to_document(message)),
        )
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
