"""Changing a log inside one PostgreSQL transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import attrgetter
from typing import Any, ClassVar

import msgspec

from headwater.delivery.lease import Lease
from headwater.delivery.publishing import Receipt
from headwater.delivery.retention import Run
from headwater.errors import InvalidDataError, InvalidOptionError
from headwater.message import EXTRA_FIELDS, Draft, Extras
from headwater.ports.records import (
    DeadLetter,
    DeliveryRow,
    Due,
    Gap,
    Order,
    Scan,
    Selection,
    SubscriptionRecord,
    Timing,
)
from headwater.ports.store import SEQ_MAX
from headwater.stores.postgres.connection import SQL, array_of
from headwater.stores.postgres.external_tx import run_users_sql
from headwater.stores.postgres.known import Assumed, KnownSubscriptions, ReadAhead
from headwater.stores.postgres.pipelined import PipelinedConnection, Statement
from headwater.stores.postgres.reader import LOOK_AHEAD, PostgresReader
from headwater.stores.sql import SEQS, SqlWriter, TopicTail, declared_values, letter_values, moved_values, record_of

COPY_BYTES = 4 * 1024 * 1024
COPY_ROWS = 500  # how many rows are written down before they are sent: the server reads them while we write the next
ALIKE_MAX = 4  # into how many statements delivery rows are split at most, by what they have in common

_MOVING = frozenset(["move_subscription", "move_unchanged", "move_as_assumed"])
_NO_EXTRAS = Extras()
_topic, _data_json, _size = map(attrgetter, ("topic", "data_json", "size"))
_all_but_seq = attrgetter("attempts", "due_ms", "token", "priority", "key", "dead_letter")
_TEXTS = tuple(field.attribute for field in EXTRA_FIELDS if field.kind == "text")


class PostgresWriter(PostgresReader, SqlWriter):
    """`ports.store.Writer` over a connection that is inside a transaction. Unless it is `alone`, it locks the rows that
    it reads in order to change them."""

    _sql: ClassVar = {name: sql.replace("{locked}", "FOR UPDATE SKIP LOCKED") for name, sql in SQL.items()}

    def __init__(
        self,
        connection: PipelinedConnection,
        salt: int,
        alone: bool,
        topics: TopicTail,
        news: tuple[str, str],
        known: KnownSubscriptions,
    ) -> None:
        """`news`: the channel and the payload of a notification."""
        super().__init__(connection, salt, topics)
        self.alone = alone
        self._news = news
        self._known = known
        self._unchecked: dict[str, str] = {}  # subscriptions that are taken for unchanged, and their versions
        self._assumed: dict[str, Assumed] = {}  # and is not checked yet
        self._assumed_quiet: set[str] = set()
        self._current = ""  # the subscription that was asked for last
        self._looks: dict[str, Statement] = {}  # what is due next and whether there are gaps, asked ahead
        self._has_moved_deliveries = self._has_added_gaps = False  # since
        self._ahead: dict[str, ReadAhead] = {}  # taken from what is known, or read
        self._put_due_ms: dict[str, int] = {}  # the earliest of the delivery rows that were put
        self.rows_changed: dict[str, dict[int, DeliveryRow | None]] = {}  # those in flight; None: not any more
        self._last: int | None = None  # known while this transaction holds the publish lock
        self._locked: dict[str, SubscriptionRecord] = {}  # locked until the transaction ends
        self.saved: dict[str, SubscriptionRecord] = {}
        self.taken_for_known: list[str] = []
        self.has_published = False
        self.has_news = False
        """Whether something was done that others may be waiting for."""

    def _later(self, name: str, bindings: Sequence[Any]) -> Statement:
        """A statement whose outcome decides nothing here travels with the next one, or with the commit."""
        self.queue_checks()
        self._has_moved_deliveries |= name not in _MOVING
        self._has_added_gaps |= name == "add_gap"
        return self.connection.queue(SQL[name], bindings)

    def _execute(self, sql: str, bindings: Sequence[Any] = ()) -> Statement:
        self.queue_checks()
        return super()._execute(sql, bindings)

    @contextmanager
    def _savepoint(self) -> Iterator[None]:
        self.queue_checks()
        self.connection.send_queued()  # what was queued before may fail, and is none of the savepoint's business
        current, self._current = self._current, ""  # nothing that may fail is asked ahead
        try:
            with super()._savepoint():
                yield
        finally:
            self._current = current

    def queue_checks(self) -> None:
        """Queue the checks of what is assumed, before anything else is sent. One that fails divides by zero, which the
        store turns into a conflict. They lock the subscriptions that are taken for unchanged."""
        for id, version in self._unchecked.items():
            assumed = self._assumed.pop(id, None)
            if assumed is None:
                self.connection.queue(SQL["lock_unchanged"], (id, version))
            else:
                self.connection.queue(SQL["lock_as_assumed"], (id, version, *assumed.values(id)))
        self._unchecked.clear()
        for id, assumed in self._assumed.items():
            self.connection.queue(SQL["check_assumed"], assumed.values(id))
        self._assumed.clear()

    def _assume(self, id: str) -> Assumed:
        return self._assumed.setdefault(id, Assumed())

    def _change(self, name: str, bindings: Sequence[Any] = ()) -> Statement:
        """A statement that writes, and whose outcome is wanted."""
        self._has_moved_deliveries = True
        return self._execute(SQL[name], bindings)

    def _changed(self, name: str, *bindings: Any) -> int:
        return self._change(name, bindings).count

    def last_seq(self) -> int:
        return super().last_seq() if self._last is None else self._last

    def _last_to_publish_after(self) -> int:
        if self._last is None:
            self._last = int(self._change("lock_publishing").value())
        return self._last

    def _refuse_unstorable(self, drafts: Sequence[Draft]) -> None:
        for draft in drafts:
            if draft.id is not None and "\0" in draft.id:
                raise _nul("id", draft.topic)
            if draft.extras is not None:
                for name in _TEXTS:
                    value = getattr(draft.extras, name)
                    if value is not None and "\0" in value:
                        raise _nul(name, draft.topic)

    def _known_ids(self, scoped: list[str]) -> Iterable[tuple[Any, ...]]:
        return self._rows("known_ids", scoped)

    def _remember(self, new: dict[str, int], now_ms: int) -> None:
        self._later("remember_ids", (now_ms, array_of(new.values()), list(new)))

    def _store(self, drafts: Sequence[Draft], seqs: Sequence[int], now_ms: int, plain: bool) -> None:
        if not plain and any(draft.published_ms is not None for draft in drafts):
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

    def receipts(self, publisher: str, first: int, count: int) -> list[Receipt]:
        self._last_to_publish_after()  # two servers may be given the same messages at once; one of them is first
        return super().receipts(publisher, first, count)

    def add_receipts(self, publisher: str, receipts: Sequence[Receipt], now_ms: int) -> None:
        if receipts:
            last_word = {receipt.number: receipt for receipt in receipts}
            columns = zip(*map(msgspec.structs.astuple, last_word.values()), strict=True)
            self._later("add_receipts", (publisher, now_ms, *map(array_of, columns)))

    def subscription(self, id: str) -> SubscriptionRecord | None:
        self._current = id
        if id in self._locked:
            return self._locked[id]
        if self.alone:
            row = self._row("subscription", id)
        elif (known := self._known.get(id)) is not None:
            self._locked[id], self._unchecked[id] = known
            self.taken_for_known.append(id)
            return self._locked[id]
        else:
            row = self._row("subscription_to_change", id)
            if row is not None:
                *row, version = row
                self._known.seen(id, version)
        if row is None:
            return None
        self._locked[id] = record_of(tuple(row))
        return self._locked[id]

    def save_subscription(self, record: SubscriptionRecord) -> None:
        spec, known = record.spec, self._locked.get(record.id)
        if "\0" in record.id:
            raise _nul("the id of a subscription", record.id)
        moved = moved_values(record, _storable)
        if known is not None and known.spec == spec and known.created_ms == record.created_ms:
            version = self._unchecked.pop(record.id, None)
            assumed = None if version is None else self._assumed.pop(record.id, None)
            if version is None:
                self._later("move_subscription", (*moved, record.id))
            elif assumed is None:
                self._later("move_unchanged", (*moved, record.id, version))
            else:
                checked = (version, *assumed.values(record.id))
                self._later("move_as_assumed", (*moved, record.id, *checked))
        else:
            self._later("save_subscription", (*declared_values(record), *moved))
            self.has_news = known is not None or self.has_news  # it may be paused, or resumed
        self._locked[record.id] = self.saved[record.id] = record
        if spec.mode != "shared" and record.lease.until_ms == 0:
            self.has_news = True  # it is free to be taken

    def delete_subscription(self, id: str) -> None:
        self._locked.pop(id, None)
        self.saved.pop(id, None)
        self._known.forget([id])
        super().delete_subscription(id)
        self.has_news = True

    def scan(
        self, selection: Selection, after: int, limit: int, upto: int | None = None, bytes_max: int | None = None
    ) -> Scan:
        id = self._current
        ahead = self._ahead_of(id) if upto is None else None
        if ahead is not None and (found := ahead.next(selection, after, limit, bytes_max)):
            self._ahead[id] = ahead.rest_after(found[-1].seq)
            self._assume(id).messages.update(message.seq for message in found)
            return Scan(found, found[-1].seq)
        self._look_ahead(id)
        if upto is not None or id not in self._locked:
            return super().scan(selection, after, limit, upto, bytes_max)
        more = 0 if ahead is None else ahead.how_many_more(limit)
        found, scanned_to = super().scan(selection, after, limit + more, None, bytes_max)
        if found:
            mean_bytes = 1 + sum(message.size for message in found) // len(found)
            quiet_to_ms = ahead.quiet_to_ms if ahead is not None and id in self._assumed_quiet else -1
            read = ReadAhead(selection, after, found, mean_bytes, quiet_to_ms)
            self._ahead[id] = read.rest_after(found[:limit][-1].seq)
        return Scan(found[:limit], found[limit - 1].seq) if len(found) > limit else Scan(found, scanned_to)

    def _ahead_of(self, id: str) -> ReadAhead | None:
        if id in self._locked and id not in self._ahead and (known := self._known.take_ahead(id)) is not None:
            self._ahead[id] = known
        return self._ahead.get(id)

    def read_ahead(self) -> Iterator[tuple[str, ReadAhead]]:
        """What the next transactions may use."""
        for id, ahead in self._ahead.items():
            look = self._looks.get(id)
            if look is not None and look.sent_ns:
                due_ms, has_gaps = look.row()
                ahead = ahead._replace(quiet_to_ms=-1 if has_gaps else SEQ_MAX if due_ms is None else due_ms)
            yield id, ahead._replace(quiet_to_ms=min(ahead.quiet_to_ms, self._put_due_ms.get(id, SEQ_MAX)))

    def _assume_quiet(self, id: str, due_ms: int) -> bool:
        """Whether nothing is due up to then, and no gaps are to be reported, as far as this store knows."""
        ahead = self._ahead_of(id)
        if ahead is None or self._locked[id].spec.order_key is not None:
            return False
        if due_ms >= min(ahead.quiet_to_ms, self._put_due_ms.get(id, SEQ_MAX)):
            return False
        assumed = self._assume(id)
        assumed.due_ms = max(assumed.due_ms, due_ms)
        self._assumed_quiet.add(id)
        return True

    def _look_ahead(self, id: str) -> None:
        """A transaction that looks for something to deliver asks next what is due later and whether there are gaps:
        both travel with its first look."""
        if id in self._locked and id not in self._looks and id not in self._assumed_quiet:
            self.queue_checks()
            self._looks[id] = self.connection.queue(LOOK_AHEAD, (id, id))

    def next_due_ms(self, subscription: str, *, suspects: bool = True) -> int | None:
        if suspects and self._assume_quiet(subscription, SEQ_MAX - 1):
            return None
        self._look_ahead(subscription)
        asked = self._looks.get(subscription) if suspects else None
        if asked is None or self._has_moved_deliveries:
            return super().next_due_ms(subscription, suspects=suspects)
        if not asked.sent_ns:
            self.connection.send_queued()
        due_ms, _ = asked.row()
        return None if due_ms is None else int(due_ms)

    def gaps(self, subscription: str) -> list[Gap]:
        asked = self._looks.get(subscription)
        has_none = asked is not None and asked.sent_ns and not asked.row()[1]
        if (has_none or subscription in self._assumed_quiet) and not self._has_added_gaps:
            return []
        return super().gaps(subscription)

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
        if suspects is None and self._assume_quiet(subscription, now_ms):
            return []
        self._look_ahead(subscription)
        # A row that another transaction is just settling is skipped, not waited for. Also if we
        # are alone: such a transaction does not ask us. Written again after its commit, the row would be there anew.
        return super().due(subscription, now_ms, limit, order, suspects=suspects, bytes_max=bytes_max)

    def deliveries(self, subscription: str, seqs: Iterable[int]) -> dict[int, DeliveryRow]:
        wanted = list(seqs)
        rows = self._known_rows(subscription, wanted)
        if rows is None:
            return super().deliveries(subscription, wanted)
        self._assume(subscription).rows.update(wanted)
        return rows

    def _known_rows(self, id: str, seqs: Sequence[int]) -> dict[int, DeliveryRow] | None:
        if id not in self.taken_for_known:
            return None
        known, changed = self._known.rows(id), self.rows_changed.get(id, {})
        if not seqs or any(seq in changed or seq not in known for seq in seqs):
            return None
        return {seq: known[seq] for seq in seqs}

    def put_deliveries(self, subscription: str, rows: Sequence[DeliveryRow]) -> None:
        alike: dict[tuple[Any, ...], list[int]] = {}
        for rest, row in zip(map(_all_but_seq, rows), rows, strict=True):  # a claimed batch differs in nothing else
            alike.setdefault(rest, []).append(row.seq)
        if len(alike) <= ALIKE_MAX:
            for (attempts, due_ms, token, priority, key, letter), seqs in alike.items():
                common = (subscription, attempts, due_ms, token, priority, _storable(key), letter, array_of(seqs))
                self._later("put_deliveries", (*common, min(seqs), max(seqs)))
        else:
            columns = list(zip(*map(msgspec.structs.astuple, rows), strict=True))
            keys = [_storable(key) for key in columns.pop(5)]
            numbers = [array_of(column) for column in columns]
            self._later("put_mixed_deliveries", (subscription, *numbers[:5], keys, numbers[5]))
        if any(token == 0 for _, _, token, _, _, _ in alike):
            self.has_news = True  # given back
        if rows:
            due_ms = min(due_ms for _, due_ms, _, _, _, _ in alike)
            self._put_due_ms[subscription] = min(due_ms, self._put_due_ms.get(subscription, due_ms))
            changed = self.rows_changed.setdefault(subscription, {})
            changed.update((row.seq, row if row.token else None) for row in rows)

    def end_leases(self, subscription: str, now_ms: int) -> None:
        self._forget_rows(subscription)
        if self._changed("end_leases", now_ms, subscription, subscription, now_ms):
            self.has_news = True

    def remove_deliveries(self, subscription: str, seqs: Sequence[int]) -> None:
        if seqs:
            self._later("remove_deliveries", (subscription, array_of(seqs), *self._news))
            self.rows_changed.setdefault(subscription, {}).update(dict.fromkeys(seqs))

    def clear_deliveries(self, subscription: str) -> None:
        self._forget_rows(subscription)
        super().clear_deliveries(subscription)

    def _forget_rows(self, id: str) -> None:
        self._known.forget_rows(id)
        self.rows_changed.pop(id, None)

    def save_dead_letters(self, letters: Sequence[DeadLetter]) -> list[int]:
        if not letters:
            return []
        saved = [self._later("save_dead_letter", letter_values(letter, _storable)) for letter in letters]
        self.connection.send_queued()
        return [statement.value() for statement in saved]

    def add_gap(self, gap: Gap) -> None:
        super().add_gap(gap)
        self.has_news = True

    def _delete(self, seqs: list[int]) -> list[int]:
        return SEQS.decode(self._change("delete_messages", (array_of(seqs),)).text() or b"[]")

    def _add_pruned(self, runs: Sequence[Run]) -> None:
        firsts, lasts = zip(*runs, strict=True)
        self._later("add_pruned", (array_of(firsts), array_of(lasts)))

    def _counted_to(self) -> int:
        """Transactions that count or delete wait for each other."""
        return int(self._value("fact_to_change", "counted_to"))

    def add_timings(self, timings: Sequence[Timing]) -> None:
        if timings:
            ids, hours, stages, buckets, counts = zip(*map(msgspec.structs.astuple, timings), strict=True)
            columns = (list(ids), array_of(hours), list(stages), array_of(buckets), array_of(counts))
            self._later("add_timings", columns)

    def lease(self, resource: str) -> Lease:
        if self.alone:
            return super().lease(resource)
        row = self._row("lease_to_change", resource)
        if row is None:
            self._later("add_free_lease", (resource,))
            row = self._row("lease_to_change", resource)
        return Lease(*row)

    def execute(self, sql: str, bindings: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        self.queue_checks()
        self._known.forget_rows()
        self.rows_changed.clear()
        self._has_moved_deliveries = True
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


def _nul(what: str, where: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"{what} holds the character NUL, which PostgreSQL cannot keep",
        where=where.replace("\0", "\\0"),
        next="Leave it out",
    )


def _storable(text: str | None) -> Any:
    """A text from a payload or an error, as PostgreSQL can keep it."""
    if text is None or (text.isprintable() and text.isascii()):
        return text
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
