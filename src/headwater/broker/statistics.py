"""How far behind everybody is."""

from __future__ import annotations

import msgspec

from headwater.message import Message
from headwater.ports.records import SubscriptionRecord, TopicCount, selection_of
from headwater.ports.store import Reader
from headwater.topics import check_topic

WINDOW_LISTED_MAX = 20_000
LAG_COUNTED_MAX = 1_000_000  # beyond it the exact number would cost more than it tells


class SubscriptionInfo(msgspec.Struct, frozen=True):
    """`lag` is all that matches and is not settled: not yet delivered, in flight, or waiting for another attempt.
    `lag_is_least` says that counting stopped at the limit."""

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


class LogStatistics(msgspec.Struct, frozen=True):
    last_seq: int
    messages: int
    bytes: int
    topics: list[TopicCount]
    subscriptions: list[SubscriptionInfo]


def describe(reader: Reader, record: SubscriptionRecord, now_ms: int) -> SubscriptionInfo:
    selection, window = selection_of(record.spec), record.window
    counts = reader.delivery_counts(record.id)
    undelivered = reader.count(selection, window.delivered, LAG_COUNTED_MAX)
    in_flight = counts.in_flight + _in_window(reader, record, undelivered)
    oldest = _oldest_unacked_ms(reader, record, counts.first_seq)
    return SubscriptionInfo(
        id=record.id,
        pattern=record.spec.pattern,
        mode=record.spec.mode,
        position=window.floor if counts.first_seq is None else min(window.floor, counts.first_seq - 1),
        lag=undelivered + in_flight + counts.waiting,
        lag_is_least=undelivered >= LAG_COUNTED_MAX,
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


def _in_window(reader: Reader, record: SubscriptionRecord, undelivered: int) -> int:
    window = record.window
    if not window.settled and window.delivered - window.floor > WINDOW_LISTED_MAX:  # a batch of a pipeline
        return max(0, reader.count(selection_of(record.spec), window.floor, LAG_COUNTED_MAX) - undelivered)
    return sum(not window.is_settled(message.seq) for message in _between(reader, record))


def _between(reader: Reader, record: SubscriptionRecord) -> list[Message]:
    window = record.window
    found: list[Message] = []
    after = window.floor
    while after < window.delivered:
        messages, after = reader.scan(selection_of(record.spec), after, 1_000, window.delivered)
        found += messages
    return found


def _oldest_unacked_ms(reader: Reader, record: SubscriptionRecord, first_row: int | None) -> int | None:
    after, last = record.window.floor, reader.last_seq()
    candidates = [] if first_row is None else list(reader.messages([first_row]).values())
    while after < last:
        messages, after = reader.scan(selection_of(record.spec), after, 100)
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
