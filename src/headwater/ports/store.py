"""A store keeps one log: messages, subscriptions, deliveries, dead letters. All of them share one contract suite.

A store decides nothing about delivery; it keeps what the broker decided. All its methods block, so the broker calls
them on threads of its own, never on an event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

from headwater.delivery.lease import Lease
from headwater.delivery.publishing import DedupeWindow, Receipt
from headwater.delivery.retention import Kept, Run
from headwater.errors import HeadwaterError
from headwater.message import Draft, Message
from headwater.ports.records import (
    Appended,
    DeadLetter,
    DeadLetterQuery,
    DeliveryCounts,
    DeliveryRow,
    Due,
    Found,
    Gap,
    LetterColumn,
    LetterGroup,
    Order,
    RetentionPolicy,
    Sample,
    Scan,
    Selection,
    SubscriptionRecord,
    Times,
    Timing,
    TopicCount,
)
from headwater.topics import Dialect, Pattern

SEQ_MAX = 2**63 - 1
PUBLISHING = ""  # what a work touches that only publishes
COUNTERS = "\0"  # what a work touches that only counts; no subscription has such an id
LETTERS_BYTES_MAX = 1024 * 1024  # of dead letters that are read at a time


class Interruption:
    """Ends one read from another thread: its time is over, its caller has left, or the log closes. The read then raises
    the error that is given as the reason. An interruption that comes late does nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None
        self.reason: HeadwaterError | None = None

    def interrupt(self, reason: HeadwaterError) -> None:
        """Does not block."""
        with self._lock:
            if self.reason is None:
                self.reason = reason
                if self._stop is not None:
                    self._stop()

    def check(self) -> None:
        if self.reason is not None:
            raise self.reason

    @contextmanager
    def stops(self, stop: Callable[[], None]) -> Iterator[None]:
        """Used by a store: inside the block, `stop` is called to end the running statement; afterwards never."""
        with self._lock:
            self.check()
            self._stop = stop
        try:
            yield
        finally:
            with self._lock:
                self._stop = None


class Reader(Protocol):
    """A view of one moment: everything read through it was true at the same time."""

    def last_seq(self) -> int:
        """The highest seq ever given out, 0 in a log that never had a message."""

    def scan(
        self, selection: Selection, after: int, limit: int, upto: int | None = None, bytes_max: int | None = None
    ) -> Scan:
        """The first `limit` matching messages in (after, upto], in seq order. Looks at a bounded number of rows: if
        `scanned_to` is below the end and below the limit's worth of messages, call again from there. `bytes_max`: about
        so much may be read into memory, but one message at least; a store that can say so stops there."""

    def scan_times(self, selection: Selection, after: int, limit: int, upto: int) -> Times:
        """Like `scan`, but returns only the times of publishing, and loads no payload."""

    def find(self, selection: Selection, after: int, upto: int, limit: int, *, newest_first: bool = False) -> Found:
        """The seqs of the first `limit` matching messages in (after, upto], or of the last ones, newest first. Looks at
        a bounded number of rows, for a bounded time: if fewer are found, and `looked_to` is not the end, call again
        from there. Large payloads that do not match are not all loaded by one call."""

    def messages(self, seqs: Iterable[int]) -> dict[int, Message]:
        """The messages of these seqs, as far as they exist."""

    def heads(self, seqs: Iterable[int]) -> dict[int, Message]:
        """The same without data and free headers, which are not read."""

    def oldest(self, pattern: Pattern, after: int, limit: int, upto: int = SEQ_MAX) -> list[Kept]:
        """What retention looks at: the first matching messages in (after, upto], without their payload."""

    def seq_before(self, at_ms: int) -> int:
        """The last position at and below which all messages were published before a time; the next one was not. Assumes
        a clock that runs forward. Messages that were published with times of their own may be older behind it."""

    def count(self, selection: Selection, after: int, upto: int) -> int:
        """How many messages in (after, upto] match. Looks at all of them and at no others: the caller bounds it. No
        payload is loaded unless `where` asks for it."""

    def topics_between(self, after: int, upto: int) -> list[str]:
        """The distinct topics of the messages in (after, upto]."""

    def topic_counts(self) -> list[TopicCount]:
        """Every topic ever published to, by name."""

    def topic_max_seq(self, topic: str) -> int:
        """The seq of the last message ever published to a topic, 0 if there was none. Looks at no other topic's."""

    def subscription(self, id: str) -> SubscriptionRecord | None: ...

    def subscriptions(self) -> list[SubscriptionRecord]:
        """All durable subscriptions, by id."""

    def owned_subscriptions(self, owner: str) -> int:
        """How many durable subscriptions have this owner."""

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
        """Delivery rows that may be claimed now (waiting ones whose delay is over, leased ones whose lease ran out),
        by seq or by priority (high first) then seq. Of rows with the same key only one can be due: one that was leased,
        else the lowest seq. `suspects`: only those whose lease ran out, the one that is due the longest first; or none
        of them. `bytes_max`: as for `scan`."""

    def next_due_ms(self, subscription: str, *, suspects: bool = True) -> int | None:
        """When the earliest delivery row becomes due, if there is one. Rows behind another of the same key do not
        count, nor leased ones without `suspects`."""

    def deliveries(self, subscription: str, seqs: Iterable[int]) -> dict[int, DeliveryRow]: ...

    def deliveries_by(self, subscription: str, token: int) -> list[DeliveryRow]:
        """The deliveries that were claimed under this token."""

    def delivery_counts(self, subscription: str, upto: int = SEQ_MAX) -> DeliveryCounts:
        """The counts of the delivery rows up to a seq."""

    def leased_seqs(self, low: int, high: int, now_ms: int) -> set[int]:
        """Seqs in [low, high] that some subscription holds under a live lease."""

    def dead_letters(self, query: DeadLetterQuery, after: int, limit: int) -> list[DeadLetter]:
        """Dead letters with an id above `after`, by id: so many that they take LETTERS_BYTES_MAX, and one at least. A
        page that is shorter than `limit` need not be the last one; an empty one is. What the query says of errors is
        left to the caller."""

    def count_dead_letters(self, query: DeadLetterQuery, by: LetterColumn, limit: int) -> dict[str, int]:
        """How many dead letters match, for the most frequent `limit` values of a column, the most frequent first. A
        missing value counts as "", of errors the first ERROR_LINE_CHARS characters of the first line count. No letter
        is loaded; the query has no `error` and no topic with wildcards."""

    def group_dead_letters(self, query: DeadLetterQuery, limit: int) -> list[LetterGroup]:
        """The largest `limit` groups of dead letters by subscription, reason, handler and the first ERROR_LINE_CHARS
        characters of the error's first line, the largest first. No letter is loaded; the query is as above."""

    def gaps(self, subscription: str) -> list[Gap]:
        """Gaps not yet reported to the subscription, oldest first."""

    def gap_total(self, subscription: str) -> int:
        """How many messages the subscription has lost to gaps in all."""

    def receipts(self, publisher: str, first: int, count: int) -> list[Receipt]:
        """The receipts of a numbered publisher that cover any of these numbers. Receipts of one publisher do not
        overlap."""

    def pruned(self, low: int, high: int) -> list[Run]:
        """Which seqs of [low, high] were deleted, as ascending runs that neither overlap nor touch. Together with those
        stored they are all that were ever given out; any other missing seq was lost."""

    def sink_batch(self, sink: str) -> int | None:
        """The last batch that this sink published, if it ever did."""

    def timings(self, since_ms: int = 0) -> list[Timing]:
        """How long deliveries took in the hours from this one on, by subscription, hour, stage and bucket."""

    def file_bytes(self) -> int:
        """How much space the log takes, without the journal."""

    def samples(self, step_ms: int, since_ms: int = 0) -> list[Sample]:
        """The figures over time that were saved with this step and taken at this time or later, the oldest first."""

    def retention(self) -> list[RetentionPolicy]: ...

    def lease(self, resource: str) -> Lease: ...

    def leases(self, prefix: str) -> dict[str, Lease]:
        """Those whose resource begins with this, by resource."""


class Writer(Reader, Protocol):
    """A transaction: all of it becomes durable together when its context ends, or none of it."""

    def append(self, drafts: Sequence[Draft], now_ms: int, window: DedupeWindow) -> Appended:
        """Give each draft the next seq and store it. A draft whose id the window remembers on its topic, or that
        stands there earlier in the same call, is not stored again: it gets the first one's seq. The window counts from
        the last seq before the call."""

    def add_receipts(self, publisher: str, receipts: Sequence[Receipt], now_ms: int) -> None: ...

    def forget_receipts(self, publisher: str, below: int) -> None:
        """The publisher has the answers for all its messages with a number below this."""

    def forget_old_receipts(self, before_ms: int, limit: int) -> int:
        """Drop receipts older than this; returns how many."""

    def save_subscription(self, record: SubscriptionRecord) -> None: ...

    def delete_subscription(self, id: str) -> None:
        """Delete it with its delivery rows, gaps and timings. Its dead letters stay."""

    def put_deliveries(self, subscription: str, rows: Sequence[DeliveryRow]) -> None:
        """Insert, or replace those of the same seq."""

    def end_leases(self, subscription: str, now_ms: int) -> None:
        """Make every delivery in flight due now, keeping its token: its holder is gone."""

    def remove_deliveries(self, subscription: str, seqs: Sequence[int]) -> None: ...

    def clear_deliveries(self, subscription: str) -> None: ...

    def save_dead_letters(self, letters: Sequence[DeadLetter]) -> list[int]:
        """Store dead letters and return their ids, which are never used twice. A letter with an id replaces the stored
        one."""

    def remove_dead_letters(self, ids: Sequence[int]) -> None: ...

    def end_redrives(self, subscription: str, why: str) -> None:
        """End the redrives under way of the subscription's dead letters; `why` becomes their `redrive_error`."""

    def add_gap(self, gap: Gap) -> None: ...

    def mark_gaps_reported(self, subscription: str) -> None: ...

    def set_retention(self, policy: RetentionPolicy) -> None: ...

    def remove_retention(self, pattern: str, dialect: Dialect) -> bool: ...

    def delete_messages(self, gone: Sequence[Kept]) -> None:
        """Remove messages, note them as pruned, and take them off the topic counts. Delivery rows are the caller's
        business."""

    def fold_topic_counts(self, limit: int) -> int:
        """Bring the stored topic counts up to date by at most `limit` messages; returns how many were taken in.
        Publishing does not pay for counting: readers add the uncounted tail, this keeps the tail short."""

    def forget_ids(self, window: DedupeWindow, now_ms: int, limit: int) -> int:
        """Drop remembered ids that lie outside the window; returns how many."""

    def save_sink_batch(self, sink: str, batch: int, now_ms: int) -> None:
        """Record a batch in the transaction that publishes it, so that a repeat is known by its number."""

    def delete_sink(self, sink: str) -> None: ...

    def add_timings(self, timings: Sequence[Timing]) -> None:
        """Add their counts to those stored. Of a subscription that has been deleted nothing is kept."""

    def forget_old_timings(self, before_ms: int, limit: int) -> int:
        """Drop timings of hours that began before this; returns how many."""

    def save_sample(self, step_ms: int, slot: int, sample: Sample) -> None:
        """Keep it in place of the one that is in this slot of this step."""

    def save_lease(self, resource: str, lease: Lease) -> None: ...

    def delete_lease(self, resource: str) -> None: ...

    def execute(self, sql: str, bindings: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """The user's own SQL inside this transaction. It may not touch the log's tables nor
        end the transaction."""


class ExternalTx(Protocol):
    """Verbs inside a transaction that the user runs on a connection of its own to the log's database. Where that is an
    asynchronous one, the outcomes are awaitable."""

    def publish(self, tx: Any, draft: Draft, now_ms: int, window: DedupeWindow) -> int | Awaitable[int]:
        """The seq that it will have when the transaction commits."""

    def may_ack(self, tx: Any) -> bool | Awaitable[bool]:
        """Whether the transaction has published nothing yet."""

    def ack(self, tx: Any, subscription: str, seq: int, attempt: int, token: int) -> bool | Awaitable[bool]:
        """Remove the row of a delivery; False if it is not, or no longer, in flight."""


class GroupedWork(Protocol):
    """A work of a group commit. `touching` is the one existing subscription that it reads and changes, PUBLISHING or
    COUNTERS; None if it may touch anything."""

    @property
    def touching(self) -> str | None: ...


GroupedWorkT = TypeVar("GroupedWorkT", bound=GroupedWork)


class Store(Protocol):
    name: str
    salt: int
    """What the ids of messages that were given none follow from."""
    claims_with_publish: bool
    """Whether a transaction that has published may go on to claim, for any subscription."""
    commits_in_place: bool
    """Whether a small transaction takes no longer than its sync to disk, so that an event loop may wait for it."""

    def write(
        self,
        on_rollback: Callable[[], None] | None = None,
        *,
        alone: bool = True,
        synced: bool = True,
        wait: bool = True,
    ) -> AbstractContextManager[Writer]:
        """Begin a transaction; commit durably at the end of the block, roll back if it or the commit raises. One at a
        time per store object: further callers wait, also for `on_rollback`, which is called if it was rolled back.

        `wait`: for other writers; else LockedError. Only where the store `commits_in_place`.

        `synced`: the commit is on disk when the block ends. Else it survives the end of this process, and a power cut
        loses it or keeps it whole; a later commit that is synced makes it durable too.

        `alone`: no other transaction writes meanwhile, anywhere. One that is not alone may publish, and may touch
        existing subscriptions, in the order of their ids, before it publishes. Conflict means that nothing of the
        transaction stays and that it may be run again."""

    def publish_at_once(self, drafts: Sequence[Draft]) -> range | None:
        """Store messages that have nothing but topic and data, durably and by the system's clock, and return their
        seqs. An exception that comes from outside, such as that of a signal handler, finds all of it done or nothing.
        None where that cannot be, or where it would wait for another transaction."""

    def order(self, group: list[GroupedWorkT]) -> bool:
        """Sort the works of one transaction into the order in which the store takes locks, so that no two processes
        wait for each other; returns whether the transaction has to be `alone`."""

    def split_locked(self, group: list[GroupedWorkT]) -> tuple[list[GroupedWorkT], list[GroupedWorkT]]:
        """Divide a group after LockedError: the works that wait for the lock, and those that can be committed without
        them."""

    def read(self, interruption: Interruption | None = None) -> AbstractContextManager[Reader]:
        """Open a reader: any number at a time, from any thread, and without blocking writers, except in memory."""

    @property
    def external_tx(self) -> ExternalTx | None:
        """None where the user has no connections of its own."""

    def announce(self) -> str | None:
        """Give a server's process a name, by which a server that opens the log later can tell that it is gone.
        None where that cannot be known, or where another server has announced itself and lives."""

    def is_gone(self, name: str) -> bool:
        """Whether the process that was announced under this name has ended for certain."""

    def reclaim_space(self, pages: int) -> bool:
        """Give back some free disk space without holding writers up for long; True while there is more to give."""

    def journal_bytes(self) -> int:
        """How much of what was written waits to be moved to its place; cheap enough to ask every second."""

    def health(self, interruption: Interruption | None = None) -> dict[str, Any]:
        """What `doctor` shows: versions, sizes, settings, integrity."""

    def close(self) -> None: ...


class Notifier(Protocol):
    """Reports that another process may have changed the log. A hint: it may come late, twice, or for nothing."""

    def start(self) -> None:
        """Begin to call back. Calls come from a thread of the notifier's own."""

    def stop(self) -> None: ...
