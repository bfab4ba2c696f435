"""How far behind everybody is."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from headwater.errors import InvalidFilter
from headwater.message import Message
from headwater.ports.records import Selection, SubscriptionRecord, TopicCount, selection_of
from headwater.ports.store import Reader
from headwater.topics import check_topic, parse_pattern

WINDOW_LISTED_MAX = 20_000
LAG_LOOKED_AT_MAX = 1_000_000  # messages, matching or not; beyond it the exact number would cost more than it tells

_ALL = parse_pattern(">")


class SubscriptionInfo(msgspec.Struct, frozen=True):
    """`lag` is all that matches and is not settled: not yet delivered, in flight, or waiting for another attempt.
    `lag_is_least`: counting stopped at LAG_LOOKED_AT_MAX messages, so the lag may be greater."""

    id: str
    pattern: str
    mode: str
    position: int
    lag: int
    lag_is_least: bool
    in_flight: int
    waiting: int
    oldest_unacked_ms: int | None
    acked: int
    redelivered: int
    dead: int
    gaps: int
    holder: str | None
    created_ms: int
    active_ms: int
    problem: str | None = None


class LogStatistics(msgspec.Struct, frozen=True):
    last_seq: int
    messages: int
    bytes: int
    topics: list[TopicCount]
    subscriptions: list[SubscriptionInfo]


class Waiting(NamedTuple):
    messages: int
    is_least: bool


def count_waiting(reader: Reader, selection: Selection, after: int, most: int) -> Waiting:
    """How many messages above `after` match, among the first `most` messages of any topic."""
    upto, last = look_upto(reader, after, most), reader.last_seq()
    return Waiting(reader.count(selection, after, upto), upto < last)


def look_upto(reader: Reader, after: int, most: int) -> int:
    """The seq up to which there are at most `most` messages above `after`; deleted ones at the front do not count."""
    first = reader.oldest(_ALL, after, 1)
    return min(reader.last_seq(), first[0].seq - 1 + most) if first else reader.last_seq()


def _broken(reader: Reader, record: SubscriptionRecord, now_ms: int, why: str) -> SubscriptionInfo:
    """One whose filter cannot be used: nothing can be said of what it waits for, and it must spoil no one else's."""
    counts = reader.delivery_counts(record.id)
    return SubscriptionInfo(
        id=record.id,
        pattern=record.spec.pattern,
        mode=record.spec.mode,
        position=record.window.floor if counts.first_seq is None else min(record.window.floor, counts.first_seq - 1),
        lag=counts.in_flight + counts.waiting,
        lag_is_least=True,
        in_flight=counts.in_flight,
        waiting=counts.waiting,
        oldest_unacked_ms=None,
        acked=record.acked,
        redelivered=record.redelivered,
        dead=record.buried,
        gaps=reader.gap_total(record.id),
        holder=record.lease.owner if record.lease.live(now_ms) else None,
        created_ms=record.created_ms,
        active_ms=record.active_ms,
        problem=f"subscription '{record.id}' is broken: {why}",
    )


def describe(reader: Reader, record: SubscriptionRecord, now_ms: int) -> SubscriptionInfo:
    try:
        selection, window = selection_of(record.spec), record.window
    except InvalidFilter as exc:
        return _broken(reader, record, now_ms, str(exc))
    counts = reader.delivery_counts(record.id)
    undelivered = count_waiting(reader, selection, window.delivered, LAG_LOOKED_AT_MAX)
    bound = look_upto(reader, window.floor, LAG_LOOKED_AT_MAX)
    in_flight = counts.in_flight + _in_window(reader, record, min(window.delivered, bound))
    oldest = _oldest_unacked_ms(reader, record, counts.first_seq, bound)
    return SubscriptionInfo(
        id=record.id,
        pattern=record.spec.pattern,
        mode=record.spec.mode,
        position=window.floor if counts.first_seq is None else min(window.floor, counts.first_seq - 1),
        lag=undelivered.messages + in_flight + counts.waiting,
        lag_is_least=undelivered.is_least or window.floor < bound < window.delivered,
        in_flight=in_flight,
        waiting=counts.waiting,
        oldest_unacked_ms=None if oldest is None else max(0, now_ms - oldest),
        acked=record.acked,
        redelivered=record.redelivered,
        dead=record.buried,
        gaps=reader.gap_total(record.id),
        holder=record.lease.owner if record.lease.live(now_ms) else None,
        created_ms=record.created_ms,
        active_ms=record.active_ms,
    )


def _in_window(reader: Reader, record: SubscriptionRecord, upto: int) -> int:
    window = record.window
    if not window.settled and upto - window.floor > WINDOW_LISTED_MAX:  # a batch of a pipeline
        return reader.count(selection_of(record.spec), window.floor, upto)
    return sum(not window.is_settled(message.seq) for message in _between(reader, record, upto))


def _between(reader: Reader, record: SubscriptionRecord, upto: int) -> list[Message]:
    found: list[Message] = []
    after = record.window.floor
    while after < upto:
        messages, after = reader.scan(selection_of(record.spec), after, 1_000, upto)
        found += messages
    return found


def _oldest_unacked_ms(reader: Reader, record: SubscriptionRecord, first_row: int | None, upto: int) -> int | None:
    after = record.window.floor
    candidates = [] if first_row is None else list(reader.messages([first_row]).values())
    while after < upto:
        messages, after = reader.scan(selection_of(record.spec), after, 100, upto)
        open_ones = [message for message in messages if not record.window.is_settled(message.seq)]
        if open_ones:
            candidates.append(open_ones[0])
            break
    return min((message.published_ms for message in candidates), default=None)


def log_statistics(reader: Reader, now_ms: int) -> LogStatistics:
    topics = reader.topic_counts()
    return LogStatistics(
        last_seq=reader.last_seq(),
        messages=sum(topic.count for topic in topics),
        bytes=sum(topic.bytes for topic in topics),
        topics=topics,
        subscriptions=[describe(reader, record, now_ms) for record in reader.subscriptions()],
    )


def topic_max_seq(reader: Reader, topic: str) -> int:
    """The seq of the last message ever published to a topic, 0 if there was none."""
    wanted = check_topic(topic)
    return next((count.last_seq for count in reader.topic_counts() if count.topic == wanted), 0)
