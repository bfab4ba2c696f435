"""Reading from the tables; whoever holds a reader holds the store's lock, so that it sees one moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice

from headwater.delivery.lease import Lease
from headwater.delivery.receipts import Receipt
from headwater.delivery.retention import Kept
from headwater.delivery.runs import Run
from headwater.message import Message
from headwater.ports.records import (
    DeadLetter,
    DeadLetterQuery,
    DeliveryCounts,
    DeliveryRow,
    Due,
    Gap,
    LetterColumn,
    Order,
    RetentionPolicy,
    Scan,
    Selection,
    SubscriptionRecord,
    Times,
    Timing,
    TopicCount,
    letter_value,
)
from headwater.ports.store import SEQ_MAX
from headwater.stores.database import letters_page
from headwater.stores.memory.tables import Tables
from headwater.stores.sifting import Candidate, sift
from headwater.topics import Pattern


class MemoryReader:
    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    # --- messages -------------------------------------------------------------------------------------------

    def last_seq(self) -> int:
        return self._tables.messages.last_seq

    def scan(
        self, selection: Selection, after: int, limit: int, upto: int | None = None, bytes_max: int | None = None
    ) -> Scan:
        end = self.last_seq() if upto is None else min(upto, self.last_seq())
        if selection.takes_time:
            candidates = (_candidate(message) for message in self._tables.messages.between(after, end))
            seqs, stopped_at = sift(selection, candidates, limit, self._tables.salt, self._tables.messages.by_seq.get)
            return Scan([*self.messages(seqs).values()], max(after, end) if stopped_at is None else stopped_at)
        found = list(islice(self._matching(selection, after, end), limit))
        if len(found) < limit:
            return Scan(found, max(after, end))
        return Scan(found, found[-1].seq if found else after)

    def scan_times(self, selection: Selection, after: int, limit: int, upto: int) -> Times:
        messages, scanned_to = self.scan(selection, after, limit, upto)
        return Times([(message.seq, message.published_ms) for message in messages], scanned_to)

    def messages(self, seqs: Iterable[int]) -> dict[int, Message]:
        by_seq = self._tables.messages.by_seq
        return {seq: by_seq[seq] for seq in seqs if seq in by_seq}

    heads = messages  # they are there anyway

    def oldest(self, pattern: Pattern, after: int, limit: int, upto: int = SEQ_MAX) -> list[Kept]:
        matching = self._matching(Selection(pattern), after, upto)
        return [
            Kept(message.seq, message.topic, message.size, message.published_ms) for message in islice(matching, limit)
        ]

    def pruned(self, low: int, high: int) -> list[Run]:
        return self._tables.messages.holes(low, high)

    def seq_before(self, at_ms: int) -> int:
        return self._tables.messages.seq_before(at_ms)

    def count(self, selection: Selection, after: int, upto: int) -> int:
        return sum(1 for _ in self._matching(selection, after, upto))

    def topics_between(self, after: int, upto: int) -> list[str]:
        return sorted({message.topic for message in self._tables.messages.between(after, upto)})

    def topic_counts(self) -> list[TopicCount]:
        return sorted(self._tables.topic_counts.values(), key=lambda counted: counted.topic)

    def topic_max_seq(self, topic: str) -> int:
        counted = self._tables.topic_counts.get(topic)
        return 0 if counted is None else counted.last_seq

    def _matching(self, selection: Selection, after: int, upto: int) -> Iterator[Message]:
        return filter(selection.keeps, self._tables.messages.between(after, upto))

    # --- subscriptions and their deliveries -----------------------------------------------------------------

    def subscription(self, id: str) -> SubscriptionRecord | None:
        return self._tables.subscriptions.get(id)

    def subscriptions(self) -> list[SubscriptionRecord]:
        return sorted(self._tables.subscriptions.values(), key=lambda record: record.id)

    def owned_subscriptions(self, owner: str) -> int:
        return sum(record.spec.owner == owner for record in self._tables.subscriptions.values())

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
        rows = [
            row
            for row in _not_behind_their_key(self._rows(subscription))
            if row.due_ms <= now_ms and suspects in (None, row.token > 0)
        ]
        rows.sort(key=(lambda row: (row.due_ms, row.seq)) if suspects else _ORDERS[order])
        by_seq = self._tables.messages.by_seq
        return [Due(row, by_seq.get(row.seq)) for row in rows[:limit]]

    def next_due_ms(self, subscription: str, *, suspects: bool = True) -> int | None:
        rows = _not_behind_their_key(self._rows(subscription))
        return min((row.due_ms for row in rows if suspects or not row.token), default=None)

    def deliveries(self, subscription: str, seqs: Iterable[int]) -> dict[int, DeliveryRow]:
        rows = self._tables.deliveries.get(subscription, {})
        return {seq: rows[seq] for seq in seqs if seq in rows}

    def deliveries_by(self, subscription: str, token: int) -> list[DeliveryRow]:
        return [row for row in self._rows(subscription) if row.token == token]

    def delivery_counts(self, subscription: str) -> DeliveryCounts:
        rows = self._rows(subscription)
        in_flight = sum(1 for row in rows if row.token)
        first_seq = min((row.seq for row in rows), default=None)
        return DeliveryCounts(in_flight, len(rows) - in_flight, first_seq)

    def leased_seqs(self, low: int, high: int, now_ms: int) -> set[int]:
        return {
            row.seq
            for rows in self._tables.deliveries.values()
            for row in rows.values()
            if low <= row.seq <= high and row.token and now_ms < row.due_ms
        }

    def _rows(self, subscription: str) -> Collection[DeliveryRow]:
        return self._tables.deliveries.get(subscription, {}).values()

    # --- what went wrong ------------------------------------------------------------------------------------

    def dead_letters(self, query: DeadLetterQuery, after: int, limit: int) -> list[DeadLetter]:
        matches = _dead_letter_test(query)
        letters = (self._tables.dead_letters[id] for id in sorted(self._tables.dead_letters) if id > after)
        return letters_page(filter(matches, letters), query, limit)

    def count_dead_letters(self, query: DeadLetterQuery, by: LetterColumn, limit: int) -> dict[str, int]:
        letters = filter(_dead_letter_test(query), self._tables.dead_letters.values())
        counts = Counter(letter_value(letter, by) for letter in letters)
        return dict(sorted(counts.items(), key=lambda counted: (-counted[1], counted[0]))[:limit])

    def gaps(self, subscription: str) -> list[Gap]:
        return list(self._tables.untold_gaps.get(subscription, ()))

    def gap_total(self, subscription: str) -> int:
        return self._tables.gap_totals.get(subscription, 0)

    # --- statistics, settings and leases --------------------------------------------------------------------

    def receipts(self, publisher: str, first: int, count: int) -> list[Receipt]:
        return [
            receipt
            for (whose, number), (receipt, _) in sorted(self._tables.receipts.items())
            if whose == publisher and number < first + count and number + receipt.length > first
        ]

    def sink_batch(self, sink: str) -> int | None:
        return self._tables.sinks.get(sink)

    def timings(self) -> list[Timing]:
        return [Timing(*key, count) for key, count in sorted(self._tables.timings.items())]

    def retention(self) -> list[RetentionPolicy]:
        return [self._tables.retention[key] for key in sorted(self._tables.retention)]

    def lease(self, resource: str) -> Lease:
        return self._tables.leases.get(resource, Lease())


def _candidate(message: Message) -> Candidate:
    return Candidate(
        message.seq, message.topic, message.from_, message.to, message.size, message.published_ms, is_judged=False
    )


_ORDERS: dict[Order, Callable[[DeliveryRow], tuple[int, ...]]] = {
    "seq": lambda row: (row.seq,),
    "priority": lambda row: (-row.priority, row.seq),
}


def _not_behind_their_key(rows: Collection[DeliveryRow]) -> Iterator[DeliveryRow]:
    """The rows that no lower seq of the same key holds back."""
    first_of_key: dict[str, int] = {}
    for row in rows:
        if row.key is not None:
            first_of_key[row.key] = min(row.seq, first_of_key.get(row.key, row.seq))
    return (row for row in rows if row.key is None or first_of_key[row.key] == row.seq)


def _dead_letter_test(query: DeadLetterQuery) -> Callable[[DeadLetter], bool]:
    ids = None if query.ids is None else set(query.ids)
    seqs = None if query.seqs is None else set(query.seqs)

    def matches(letter: DeadLetter) -> bool:
        return (
            (ids is None or letter.id in ids)
            and (seqs is None or letter.message.seq in seqs)
            and (query.subscription is None or letter.subscription == query.subscription)
            and (query.type is None or letter.message.type == query.type)
            and (query.reason is None or letter.reason == query.reason)
        )

    return matches
