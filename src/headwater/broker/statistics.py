"""Figures about a log: how far behind its subscriptions are, and how long deliveries and acks take."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import chain
from typing import NamedTuple

import msgspec

from headwater.broker.committer import TransactionHooks
from headwater.broker.deliveries import Claimed
from headwater.broker.shared_consumers import live_consumers
from headwater.delivery.histogram import bucket_of, sample
from headwater.errors import InvalidFilterError
from headwater.formats import datetime_of
from headwater.ports.clock import Clock
from headwater.ports.records import Selection, Stage, SubscriptionRecord, Timing, TopicCount, selection_of
from headwater.ports.store import Reader, Writer
from headwater.topics import parse_pattern

WINDOW_LISTED_MAX = 20_000
LAG_LOOKED_AT_MAX = 1_000_000  # messages, matching or not; beyond it the exact number would cost more than it tells
ALL_LOOKED_AT_MAX = 1_000_000  # the same for all subscriptions together, where all are described
TIMES_PAGE = 1_000
HOUR_MS = 3_600_000
SAVE_EVERY_MS = 10_000
UNSAVED_MAX = 50_000  # buckets; what would need more, while nothing can be saved, is not counted

_ALL = parse_pattern(">")
_ANYTHING = Selection(_ALL)


class SubscriptionInfo(msgspec.Struct, frozen=True):
    """A durable subscription and its figures."""

    id: str
    """Its name."""
    pattern: str
    """The topics that it gets."""
    mode: str
    """`exclusive` or `shared`."""
    position: int
    """Everything up to this seq is settled."""
    lag: int
    """Messages that match and are not settled: not yet delivered, in flight, or waiting for another attempt."""
    lag_is_least: bool
    """The lag may be greater: counting stopped at LAG_LOOKED_AT_MAX messages, or at this subscription's share of
    ALL_LOOKED_AT_MAX where all are described."""
    in_flight: int
    """Messages that are delivered and not settled."""
    waiting: int
    """Messages that wait for another attempt."""
    oldest_unacked_ms: int | None
    acked: int
    """Messages acked since the subscription was created; without those of `ack(tx=…)` in a transaction of your own."""
    redelivered: int
    """Deliveries that were not the first of their message."""
    dead: int
    """How often a message became a dead letter since the subscription was created. Redriving does not lower it."""
    gaps: int
    """Messages that were deleted before the subscription settled them."""
    holder: str | None
    """The process that holds it; None without a holder, and for a shared subscription."""
    created_ms: int
    active_ms: int
    owner: str | None = None
    """The label, or else the id, of the token that created it through a server."""
    problem: str | None = None
    """Why it cannot deliver, such as a regex that is no longer supported."""
    consumers: list[str] = []
    """The processes that share it, if it is a shared one."""
    paused_ms: int | None = None

    @property
    def created_at(self) -> datetime:
        """When it was created."""
        return datetime_of(self.created_ms)

    @property
    def active_at(self) -> datetime:
        """When it was last used."""
        return datetime_of(self.active_ms)

    @property
    def paused_at(self) -> datetime | None:
        """When it was paused; None if it delivers."""
        return None if self.paused_ms is None else datetime_of(self.paused_ms)

    @property
    def oldest_unacked_s(self) -> float | None:
        """The age of the oldest message that is not settled."""
        return None if self.oldest_unacked_ms is None else self.oldest_unacked_ms / 1000


class LogStatistics(msgspec.Struct, frozen=True):
    """The figures of a log."""

    last_seq: int
    """The seq of the last message, also if it was deleted."""
    messages: int
    """Messages in the log."""
    bytes: int
    """Bytes of their data."""
    topics: list[TopicCount]
    """Each topic with its `count`, `bytes` and `last_seq`."""
    subscriptions: list[SubscriptionInfo]
    """Each subscription with its figures."""
    topics_left_out: int = 0
    """How many topics a server did not list: it lists the first ones by name."""


class Waiting(NamedTuple):
    messages: int
    is_least: bool


_UNKNOWN = Waiting(0, is_least=True)


def count_waiting(reader: Reader, selection: Selection, after: int, most: int) -> Waiting:
    """How many messages above `after` match, among the first `most` messages of any topic."""
    upto, last = look_upto(reader, after, most), reader.last_seq()
    return Waiting(reader.count(selection, after, upto) if after < upto else 0, upto < last)


def look_upto(reader: Reader, after: int, most: int) -> int:
    """The seq up to which there are at most `most` messages above `after`; deleted ones at the front do not count."""
    last = reader.last_seq()
    if last - after <= most:
        return last
    first = reader.oldest(_ALL, after, 1)
    return min(last, first[0].seq - 1 + most) if first else last


Count = Callable[[Selection, int, int], Waiting]  # a selection, after which seq, and at how many messages it may look


def describe(
    reader: Reader,
    record: SubscriptionRecord,
    now_ms: int,
    *,
    looked_at_max: int | None = None,
    count: Count | None = None,
) -> SubscriptionInfo:
    most = LAG_LOOKED_AT_MAX if looked_at_max is None else looked_at_max
    try:
        selection, window = selection_of(record.spec), record.window
    except InvalidFilterError as exc:  # its lag cannot be computed, and the figures of the others must not fail
        return _info(reader, record, now_ms, problem=f"subscription '{record.id}' is broken: {exc}")
    undelivered = (count or partial(count_waiting, reader))(selection, window.delivered, most)
    bound = look_upto(reader, window.floor, most)
    in_window, oldest_ms = _in_window(reader, record, min(window.delivered, bound))
    is_least = undelivered.is_least or window.floor < bound < window.delivered
    if oldest_ms is None and undelivered.messages:
        oldest_ms = min(_first_ms(reader, selection, window.delivered), default=None)
    return _info(reader, record, now_ms, Waiting(undelivered.messages, is_least), in_window, oldest_ms)


def _info(
    reader: Reader,
    record: SubscriptionRecord,
    now_ms: int,
    undelivered: Waiting = _UNKNOWN,
    in_window: int = 0,
    oldest_ms: int | None = None,
    problem: str | None = None,
) -> SubscriptionInfo:
    window, counts = record.window, reader.delivery_counts(record.id)
    in_flight = counts.in_flight + in_window
    oldest = [] if oldest_ms is None else [oldest_ms]
    if counts.first_seq is not None:
        oldest += [at_ms for _, at_ms in reader.scan_times(_ANYTHING, counts.first_seq - 1, 1, counts.first_seq).found]
    return SubscriptionInfo(
        id=record.id,
        pattern=record.spec.pattern,
        mode=record.spec.mode,
        position=window.floor if counts.first_seq is None else min(window.floor, counts.first_seq - 1),
        lag=undelivered.messages + in_flight + counts.waiting,
        lag_is_least=undelivered.is_least,
        in_flight=in_flight,
        waiting=counts.waiting,
        oldest_unacked_ms=max(0, now_ms - min(oldest)) if oldest else None,
        acked=record.acked,
        redelivered=record.redelivered,
        dead=record.dead_lettered,
        gaps=reader.gap_total(record.id),
        holder=record.lease.owner if record.lease.live(now_ms) else None,
        created_ms=record.created_ms,
        active_ms=record.active_ms,
        owner=record.spec.owner,
        problem=problem,
        consumers=live_consumers(reader, record.id, now_ms) if record.spec.mode == "shared" else [],
        paused_ms=record.spec.paused_ms,
    )


def _in_window(reader: Reader, record: SubscriptionRecord, upto: int) -> tuple[int, int | None]:
    """How many messages of an exclusive consumer's window are in flight, and when the first of them was published."""
    selection, window, after = selection_of(record.spec), record.window, record.window.floor
    if not window.settled and upto - after > WINDOW_LISTED_MAX:  # a batch of a pipeline
        total = reader.count(selection, after, upto)
        return total, min(_first_ms(reader, selection, after), default=None) if total else None
    lows = [low for low, _ in window.settled]
    in_flight, oldest_ms = 0, None
    while after < upto:
        found, after = reader.scan_times(selection, after, TIMES_PAGE, upto)
        for seq, published_ms in found:
            at = bisect_right(lows, seq) - 1
            if at < 0 or window.settled[at][1] < seq:
                in_flight += 1
                oldest_ms = published_ms if oldest_ms is None else oldest_ms
    return in_flight, oldest_ms


def _first_ms(reader: Reader, selection: Selection, after: int) -> list[int]:
    """When the first matching message above a seq was published, which is known to exist."""
    last = reader.last_seq()
    while after < last:
        found, after = reader.scan_times(selection, after, 1, last)
        if found:
            return [found[0][1]]
    return []


def describe_all(
    reader: Reader,
    now_ms: int,
    limit: int | None = None,
    wanted: Callable[[SubscriptionRecord], bool] = lambda record: True,
) -> list[SubscriptionInfo]:
    """All subscriptions that are wanted, or the first ones by id. They share ALL_LOOKED_AT_MAX: the smallest lags are
    counted first, and leave the rest to the larger ones. Those with equal selection and position are counted once."""
    records = sorted(filter(wanted, reader.subscriptions()), key=lambda record: record.id)[:limit]
    left, last = ALL_LOOKED_AT_MAX, reader.last_seq()
    known: dict[tuple[Selection, int], Waiting] = {}

    def count(selection: Selection, after: int, most: int) -> Waiting:
        nonlocal left
        found = known.get((selection, after))
        if found is None:
            found = known[selection, after] = count_waiting(reader, selection, after, most)
            left -= min(most, last - after)
        return found

    infos = []
    for done, record in enumerate(sorted(records, key=lambda record: -record.window.floor)):
        most = min(LAG_LOOKED_AT_MAX, max(1, left // (len(records) - done)))
        infos.append(describe(reader, record, now_ms, looked_at_max=most, count=count))
    return sorted(infos, key=lambda info: info.id)


def log_statistics(reader: Reader, now_ms: int, subscriptions_max: int | None = None) -> LogStatistics:
    topics = reader.topic_counts()
    return LogStatistics(
        last_seq=reader.last_seq(),
        messages=sum(topic.count for topic in topics),
        bytes=sum(topic.bytes for topic in topics),
        topics=topics,
        subscriptions=describe_all(reader, now_ms, subscriptions_max),
    )


_Key = tuple[str, int, Stage, int]


class Timings:
    """How long it took from publish to delivery, and to the ack, counted as it happens.

    These are statistics, not promises. Of a batch some messages stand for all. Counts gather in memory and are saved
    with the heartbeats, in a commit that is made anyway, and when the log is closed; a process that is killed loses
    those of its last seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # the writer thread counts, and so do own transactions
        self._counts: dict[_Key, int] = {}
        self._saved_ms = clock.now_ms()

    def note(
        self,
        hooks: TransactionHooks,
        stage: Stage,
        subscription: str,
        claimed: Collection[Claimed],
        redriven: Collection[int] = (),
    ) -> None:
        """Record that this transaction brings deliveries to this stage. They are counted once it is committed, all that
        it brings there as one batch, so that next to nothing is paid for each. Redriven messages are left out: how long
        they were dead is no measure of anything."""
        if redriven:
            claimed = [each for each in claimed if each.message.seq not in redriven]
        if not claimed:
            return
        batches = hooks.timed.get((stage, subscription))
        if batches is None:
            batches = hooks.timed[stage, subscription] = []
            hooks.then.append(partial(self._count_all, stage, subscription, batches))
        batches.append(claimed)

    def _count_all(self, stage: Stage, subscription: str, batches: Sequence[Sequence[Claimed]]) -> None:
        self.count(stage, subscription, batches[0] if len(batches) == 1 else [*chain.from_iterable(batches)])

    def count(self, stage: Stage, subscription: str, claimed: Sequence[Claimed]) -> None:
        """A batch got to this stage now. Of deliveries only the first of a message counts; an ack counts whatever
        attempt it took."""
        now_ms = self._clock.now_ms()
        hour_ms = now_ms - now_ms % HOUR_MS
        took_ms = bucket = 0
        buckets: dict[int, int] = {}
        for index, weight in sample(len(claimed)):
            each = claimed[index]
            if each.attempt > 1 and stage == "deliver":
                continue
            since_ms = each.message.published_ms
            due_ms = each.message.deliver_ms
            if due_ms is not None and due_ms > since_ms:
                since_ms = due_ms
            if now_ms - since_ms != took_ms:  # neighbours were mostly published together
                took_ms = now_ms - since_ms
                bucket = bucket_of(took_ms)
            buckets[bucket] = buckets.get(bucket, 0) + weight
        self._add({(subscription, hour_ms, stage, bucket): count for bucket, count in buckets.items()})

    def is_due(self) -> bool:
        """Whether there is something to save, and the last time is long ago."""
        return bool(self._counts) and abs(self._clock.now_ms() - self._saved_ms) >= SAVE_EVERY_MS

    def __bool__(self) -> bool:
        return bool(self._counts)

    def save(self, writer: Writer, hooks: TransactionHooks) -> None:
        """Work for the committer."""
        with self._lock:
            taken, self._counts = self._counts, {}
            self._saved_ms = self._clock.now_ms()
        hooks.append(partial(self._add, taken))
        writer.add_timings([Timing(*key, count) for key, count in taken.items()])

    def _add(self, counts: Mapping[_Key, int]) -> None:
        with self._lock:
            unsaved = self._counts
            for key, count in counts.items():
                if key in unsaved:
                    unsaved[key] += count
                elif len(unsaved) < UNSAVED_MAX:
                    unsaved[key] = count
