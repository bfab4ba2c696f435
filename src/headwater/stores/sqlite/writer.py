"""Changing a log inside one SQLite transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

import apsw
import msgspec

from headwater.delivery.lease import Lease
from headwater.delivery.publishing import DedupeWindow, Receipt
from headwater.delivery.retention import Kept, merged, runs_of
from headwater.errors import SqlError
from headwater.message import EXTRA_FIELDS, Draft, Extras, to_document
from headwater.ports.records import (
    Appended,
    DeadLetter,
    DeliveryRow,
    Gap,
    RetentionPolicy,
    Sample,
    SubscriptionRecord,
    Timing,
)
from headwater.stores.sql import OWN_TABLES, RUNS, UNORDERED_FACTS, assign_seqs, scoped_ids, unordered_by
from headwater.stores.sqlite.connection import SQL
from headwater.stores.sqlite.reader import SqliteReader
from headwater.topics import Dialect

# Rows per INSERT statement: one statement of many rows is far cheaper than many statements (bare: 700 k rows/s against
# 520 k/s one row at a time), and a few fixed sizes, round as batches are, keep the prepared ones in the cache.
_CHUNKS = (500, 100, 20, 4, 1)
_PLAIN_ROW = "(?, ?, ?, ?, 1)"
_FULL_ROW = "(?, ?, ?, ?, 2, ?" + ", ?" * len(EXTRA_FIELDS) + ")"
_INSERT_PLAIN = {size: f"{SQL['insert_plain']} {', '.join([_PLAIN_ROW] * size)}" for size in _CHUNKS}
_INSERT_FULL = {size: f"{SQL['insert_full']} {', '.join([_FULL_ROW] * size)}" for size in _CHUNKS}
_ADD_PRUNED = {size: f"{SQL['add_pruned']} {', '.join(['(?, ?)'] * size)}" for size in _CHUNKS}
_NO_EXTRAS = Extras()
_present = msgspec.json.Decoder(list[tuple[str, int, int]])
_topic, _data_json, _extras, _id = map(attrgetter, ("topic", "data_json", "extras", "id"))

_OWN_TABLES = OWN_TABLES | {"sqlite_sequence"}
_WRITES = {
    apsw.SQLITE_INSERT,
    apsw.SQLITE_UPDATE,
    apsw.SQLITE_DELETE,
    apsw.SQLITE_DROP_TABLE,
    apsw.SQLITE_ALTER_TABLE,
    apsw.SQLITE_CREATE_INDEX,
    apsw.SQLITE_DROP_INDEX,
    apsw.SQLITE_CREATE_TRIGGER,
    apsw.SQLITE_DROP_TRIGGER,
}
_CONTROLS = {
    apsw.SQLITE_TRANSACTION,
    apsw.SQLITE_SAVEPOINT,
    apsw.SQLITE_ATTACH,
    apsw.SQLITE_DETACH,
    apsw.SQLITE_PRAGMA,
}


class SqliteWriter(SqliteReader):
    """`ports.store.Writer` over a connection that is inside BEGIN IMMEDIATE."""

    _keeps_counts = False  # it may yet be rolled back

    def append(self, drafts: Sequence[Draft], now_ms: int, window: DedupeWindow) -> Appended:
        last = self.last_seq()
        plain = {*map(_extras, drafts), *map(_id, drafts)} == {None}
        if plain or not any(draft.id is not None for draft in drafts):
            seqs = list(range(last + 1, last + 1 + len(drafts)))
            self._insert(drafts, seqs, now_ms, plain)
            return Appended(seqs, frozenset())
        scoped = scoped_ids(drafts)
        assigned = assign_seqs(drafts, scoped, last, self._remembered(scoped, last, now_ms, window))
        self._insert(assigned.fresh, assigned.fresh_seqs, now_ms, plain=False)
        self._connection.execute(SQL["remember_ids"], (now_ms, _json(assigned.to_remember)))
        return Appended(assigned.seqs, assigned.duplicates)

    def _remembered(self, scoped: Sequence[str | None], last: int, now_ms: int, window: DedupeWindow) -> dict[str, int]:
        asked = _json([id for id in scoped if id is not None])
        return {
            id: seq
            for id, seq, published_ms in self._connection.execute(SQL["known_ids"], (asked,))
            if window.remembers(seq, published_ms, last, now_ms)
        }

    def _insert(self, drafts: Sequence[Draft], seqs: Sequence[int], now_ms: int, plain: bool) -> None:
        if not plain and any(draft.published_ms is not None for draft in drafts):
            self._note_unordered(drafts, seqs, now_ms)
        statements = _INSERT_PLAIN if plain else _INSERT_FULL
        values = _plain_values(drafts, seqs, now_ms) if plain else _full_values(drafts, seqs, now_ms)
        self._in_chunks(statements, values, len(drafts))

    def _note_unordered(self, drafts: Sequence[Draft], seqs: Sequence[int], now_ms: int) -> None:
        known = self.unordered()
        seq, published_ms = self._row("last_published") or (0, 0)
        found = unordered_by(drafts, seqs, now_ms, (seq, published_ms), known)
        if found is not None and found != known:
            for name, value in zip(UNORDERED_FACTS, found, strict=True):
                self._connection.execute(SQL["set_fact"], (name, value))

    def _in_chunks(self, statements: Mapping[int, str], values: Sequence[Any], rows: int) -> None:
        width, start = len(values) // max(1, rows), 0
        for size in _CHUNKS:
            while rows - start >= size:
                end = start + size
                self._connection.execute(statements[size], values[start * width : end * width])
                start = end

    def add_receipts(self, publisher: str, receipts: Sequence[Receipt], now_ms: int) -> None:
        rows = [(publisher, receipt.number, receipt.length, receipt.seq, now_ms) for receipt in receipts]
        self._connection.executemany(SQL["add_receipt"], rows)

    def forget_receipts(self, publisher: str, below: int) -> None:
        self._connection.execute(SQL["forget_receipts"], (publisher, below))

    def forget_old_receipts(self, before_ms: int, limit: int) -> int:
        self._connection.execute(SQL["forget_old_receipts"], (before_ms, limit))
        return self._connection.changes()

    def save_subscription(self, record: SubscriptionRecord) -> None:
        spec, window, lease = record.spec, record.window, record.lease
        self._connection.execute(
            SQL["save_subscription"],
            (
                record.id,
                spec.pattern,
                spec.mode,
                _json(spec),
                window.floor,
                window.delivered,
                _json(window.settled),
                lease.owner,
                lease.fence,
                lease.until_ms,
                record.created_ms,
                record.active_ms,
                record.acked,
                record.redelivered,
                record.dead_lettered,
            ),
        )

    def delete_subscription(self, id: str) -> None:
        for statement in ("delete_subscription", "clear_deliveries", "delete_gaps", "delete_timings"):
            self._connection.execute(SQL[statement], (id,))

    def put_deliveries(self, subscription: str, rows: Sequence[DeliveryRow]) -> None:
        alike: dict[tuple[Any, ...], list[int]] = {}
        for row in rows:  # a claimed batch differs in nothing but its seqs
            alike.setdefault(msgspec.structs.astuple(row)[1:], []).append(row.seq)
        for common, seqs in alike.items():
            self._connection.execute(SQL["put_deliveries"], (subscription, *common, _json(seqs)))

    def end_leases(self, subscription: str, now_ms: int) -> None:
        self._connection.execute(SQL["end_leases"], (now_ms, subscription, now_ms))

    def remove_deliveries(self, subscription: str, seqs: Sequence[int]) -> None:
        if seqs:
            self._connection.execute(SQL["remove_deliveries"], (subscription, _json(list(seqs))))

    def clear_deliveries(self, subscription: str) -> None:
        self._connection.execute(SQL["clear_deliveries"], (subscription,))

    def save_dead_letters(self, letters: Sequence[DeadLetter]) -> list[int]:
        ids: list[int] = []
        for letter in letters:
            self._connection.execute(SQL["save_dead_letter"], _letter_values(letter))
            ids.append(self._connection.last_insert_rowid())
        return ids

    def remove_dead_letters(self, ids: Sequence[int]) -> None:
        self._connection.execute(SQL["remove_dead_letters"], (_json(list(ids)),))

    def end_redrives(self, subscription: str, why: str) -> None:
        self._connection.execute(SQL["end_redrives"], (why, subscription))

    def add_gap(self, gap: Gap) -> None:
        self._connection.execute(
            SQL["add_gap"], (gap.subscription, gap.from_seq, gap.to_seq, gap.count, gap.why, gap.at_ms)
        )

    def mark_gaps_reported(self, subscription: str) -> None:
        self._connection.execute(SQL["mark_gaps_reported"], (subscription,))

    def set_retention(self, policy: RetentionPolicy) -> None:
        self._connection.execute(SQL["set_retention"], (policy.pattern, policy.dialect, _json(policy.limits)))

    def remove_retention(self, pattern: str, dialect: Dialect) -> bool:
        self._connection.execute(SQL["remove_retention"], (pattern, dialect))
        return self._connection.changes() > 0

    def delete_messages(self, gone: Sequence[Kept]) -> None:
        if not gone:
            return
        counted_to = int(self._value("fact", "counted_to"))
        seqs = sorted({kept.seq for kept in gone})
        highest = seqs[-1]
        if highest > counted_to:  # count them in first, or their topic's last seq would be forgotten
            self._fold(counted_to, highest)
        seqs_json = _json(seqs)
        by_topic = self._value("present", seqs_json)
        if sum(count for _, count, _ in _present.decode(by_topic)) < len(seqs):
            seqs = msgspec.json.decode(self._value("present_seqs", seqs_json))
        self._connection.execute(SQL["delete_messages"], (seqs_json,))
        self._connection.execute(SQL["uncount"], (by_topic,))
        self._note_pruned(seqs)

    def _note_pruned(self, seqs: Sequence[int]) -> None:
        """Only the runs right beside are looked at, so that it costs the same however many there are."""
        if not seqs:
            return
        runs = runs_of(seqs)
        nearest_end = self._value("last_pruned", seqs[-1] + 1)
        if nearest_end is not None and nearest_end >= seqs[0] - 1:  # else all that are stored lie below
            ends, starts = [first - 1 for first, _ in runs], [last + 1 for _, last in runs]
            beside = RUNS.decode(self._value("pruned_beside", _json(ends), _json(starts)))
            runs = merged([*runs, *beside])
            self._connection.execute(SQL["forget_pruned"], (_json([first for first, _ in beside]),))
        self._in_chunks(_ADD_PRUNED, list(chain.from_iterable(runs)), len(runs))

    def fold_topic_counts(self, limit: int) -> int:
        counted_to = int(self._value("fact", "counted_to"))
        upto = min(self.last_seq(), counted_to + limit)
        if upto > counted_to:
            self._fold(counted_to, upto)
        return upto - counted_to

    def _fold(self, counted_to: int, upto: int) -> None:
        self._connection.execute(SQL["fold_topic_counts"], (counted_to, upto))
        self._connection.execute(SQL["set_fact"], ("counted_to", upto))

    def forget_ids(self, window: DedupeWindow, now_ms: int, limit: int) -> int:
        oldest_seq, oldest_ms = window.oldest_seq(self.last_seq()), window.oldest_ms(now_ms)
        self._connection.execute(SQL["forget_ids"], (oldest_seq, oldest_ms, limit))
        return self._connection.changes()

    def save_sink_batch(self, sink: str, batch: int, now_ms: int) -> None:
        self._connection.execute(SQL["save_sink_batch"], (sink, batch, now_ms))

    def delete_sink(self, sink: str) -> None:
        self._connection.execute(SQL["delete_sink"], (sink,))

    def add_timings(self, timings: Sequence[Timing]) -> None:
        self._connection.execute(SQL["add_timings"], (_json(timings),))

    def forget_old_timings(self, before_ms: int, limit: int) -> int:
        self._connection.execute(SQL["forget_old_timings"], (before_ms, limit))
        return self._connection.changes()

    def save_sample(self, step_ms: int, slot: int, sample: Sample) -> None:
        self._connection.execute(SQL["save_sample"], (step_ms, slot, sample.at_ms, _json(sample)))

    def save_lease(self, resource: str, lease: Lease) -> None:
        self._connection.execute(SQL["save_lease"], (resource, lease.owner, lease.fence, lease.until_ms))

    def delete_lease(self, resource: str) -> None:
        self._connection.execute(SQL["delete_lease"], (resource,))

    def execute(self, sql: str, bindings: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        self._connection.authorizer = _only_the_users_own
        try:
            return self._connection.execute(sql, bindings, can_cache=False).fetchall()
        except apsw.AuthError as exc:
            raise SqlError(
                "this statement would touch the log's own tables or the transaction itself",
                where=sql[:80],
                next="Use the publish of the transaction, and leave BEGIN and COMMIT to it",
            ) from exc
        except (
            apsw.SQLError,
            apsw.ConstraintError,
            apsw.MismatchError,
            apsw.BindingsError,
            TypeError,
        ) as exc:
            raise SqlError(str(exc), where=sql[:80]) from exc
        finally:
            self._connection.authorizer = None


def _only_the_users_own(
    action: int, first: str | None, second: str | None, database: str | None, trigger: str | None
) -> int:
    if action == apsw.SQLITE_INSERT and first == "messages" and trigger is not None:
        return apsw.SQLITE_OK  # a trigger on the user's own table that publishes with plain SQL
    if action in _CONTROLS or (action in _WRITES and _OWN_TABLES & {first, second}):
        return apsw.SQLITE_DENY
    return apsw.SQLITE_OK


def _plain_values(drafts: Sequence[Draft], seqs: Sequence[int], now_ms: int) -> list[Any]:
    return list(chain.from_iterable(zip(seqs, map(_topic, drafts), map(_data_json, drafts), repeat(now_ms))))


def _full_values(drafts: Sequence[Draft], seqs: Sequence[int], now_ms: int) -> list[Any]:
    values: list[Any] = []
    for draft, seq in zip(drafts, seqs, strict=True):
        extras = draft.extras or _NO_EXTRAS
        published_ms = now_ms if draft.published_ms is None else draft.published_ms
        values += (seq, draft.topic, draft.data_json, published_ms, draft.id, *msgspec.structs.astuple(extras))
    return values


def _letter_values(letter: DeadLetter) -> tuple[Any, ...]:
    message = letter.message
    return (
        letter.id,
        letter.subscription,
        message.seq,
        message.topic,
        message.type,
        letter.reason,
        letter.attempts,
        letter.died_ms,
        letter.error,
        letter.stack,
        letter.handler,
        letter.redrives,
        int(letter.redriving),
        letter.redrive_error,
        _json(to_document(message)),
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
