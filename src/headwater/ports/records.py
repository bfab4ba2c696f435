"""What stores keep: subscriptions, deliveries, dead letters, gaps, retention policies, topic counts and figures."""

from __future__ import annotations

import functools
import re
from datetime import datetime
from typing import Any, Literal, NamedTuple

import msgspec

from headwater.delivery.filters import EntityFilter, FieldLookup, Regex, Where, parse_where
from headwater.delivery.lease import Lease
from headwater.delivery.retention import Limits
from headwater.delivery.retry import Reason, RetryPolicy
from headwater.delivery.window import WindowState
from headwater.errors import InvalidDataError
from headwater.formats import datetime_of
from headwater.message import Message
from headwater.topics import Dialect, Pattern, parse_pattern

Mode = Literal["exclusive", "shared", "ephemeral"]
Order = Literal["seq", "priority"]
Stage = Literal["deliver", "ack"]
LetterColumn = Literal["reason", "subscription", "topic", "type", "error", "redriving"]

ERROR_LINE_CHARS = 120  # of the first line of an error, by which dead letters are counted


class Selection(msgspec.Struct, frozen=True):
    """Which messages a reader wants: by topic, by sender and receiver, by content."""

    pattern: Pattern
    entities: EntityFilter = EntityFilter()
    where: Where | None = None

    @property
    def is_topics_only(self) -> bool:
        return self.where is None and self.entities.is_everything

    @property
    def takes_time(self) -> bool:
        """Whether what it asks of a message may take long, so that no writer may be kept waiting for it."""
        return self.where is not None or self.entities.has_regex

    def keeps(self, message: Message, field: FieldLookup | None = None) -> bool:
        """`field`: that of the message, if it remembers what it has decoded."""
        return (
            self.pattern.matches(message.topic)
            and (self.entities.is_everything or self.entities.keeps(message.from_, message.to))
            and (self.where is None or self._content_fits(self.where, field or message.field))
        )

    def _content_fits(self, where: Where, field: FieldLookup) -> bool:
        try:
            return where.holds(field)
        except InvalidDataError:
            return True  # unreadable: better delivered, failed and dead-lettered with a reason than silently left out


class SubscriptionSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a subscription was created with; stored as JSON."""

    pattern: str
    dialect: Dialect = "nats"
    entities: dict[str, Any] = {}
    where: str | None = None
    mode: Mode = "exclusive"
    order: Order = "seq"
    order_key: str | None = None
    ack_wait_ms: int = 30_000
    extension_ms_max: int = 3_600_000
    lease_ms: int = 15_000
    max_in_flight: int = 1_000
    inactive_ms: int | None = None
    dead_letter_expired: bool = msgspec.field(default=True, name="bury_expired")  # as stored
    retry: RetryPolicy = RetryPolicy()
    owner: str | None = None
    """Label or id of the owning token. Set at creation; a later subscribe does not change it."""
    paused_ms: int | None = None
    """Since when nothing is delivered. A later subscribe does not change it."""

    @property
    def keeps_rows(self) -> bool:
        """Whether every delivery in flight has a row of its own; otherwise the holder has them in its window."""
        return self.mode == "shared" or not self.is_in_seq_order

    @property
    def is_in_seq_order(self) -> bool:
        return self.order == "seq" and self.order_key is None


@functools.lru_cache(maxsize=4096)
def _selection_of(pattern: str, dialect: Dialect, entities_json: bytes, where: str | None) -> Selection:
    return Selection(
        parse_pattern(pattern, dialect),
        EntityFilter.from_json(msgspec.json.decode(entities_json)),
        None if where is None else parse_where(where),
    )


def pattern_of(spec: SubscriptionSpec) -> Pattern:
    """The pattern of a subscription, for callers that need the topics only: it can be read even if the filters
    cannot."""
    return parse_pattern(spec.pattern, spec.dialect)


def selection_of(spec: SubscriptionSpec) -> Selection:
    """Raises InvalidFilterError for a stored filter that cannot be used: a regex of an earlier version."""
    return _selection_of(spec.pattern, spec.dialect, msgspec.json.encode(spec.entities), spec.where)


class SubscriptionRecord(msgspec.Struct, frozen=True):
    """A durable subscription as stored. Change it with `msgspec.structs.replace` and save it back.

    `window` is the cursor: in row-keeping subscriptions its floor and delivered mark are equal, and a message at or
    below them without a delivery row is settled. `lease` is the exclusive holder's; shared subscriptions only use its
    fence, as the source of their claim tokens.
    """

    id: str
    spec: SubscriptionSpec
    created_ms: int
    active_ms: int
    window: WindowState = WindowState()
    lease: Lease = Lease()
    acked: int = 0
    redelivered: int = 0
    dead_lettered: int = 0


class DeliveryRow(msgspec.Struct, frozen=True, array_like=True):
    """A delivery that is in flight, waiting or failed. `token` 0 is waiting; `due_ms` is when it may be claimed:
    the end of its lease if it is in flight, else the end of its delay."""

    seq: int
    attempts: int
    due_ms: int
    token: int = 0
    priority: int = 0
    key: str | None = None
    dead_letter: int | None = None


class Due(NamedTuple):
    row: DeliveryRow
    message: Message | None  # None when the message is gone from the log


class Scan(NamedTuple):
    """`messages` is all that matches in (after, scanned_to]."""

    messages: list[Message]
    scanned_to: int


class Found(NamedTuple):
    """`seqs` is all that matches between where the search began and `looked_to`, which it includes only if the search
    runs upwards: in (after, looked_to], or newest first in (looked_to, upto]."""

    seqs: list[int]
    looked_to: int


class Times(NamedTuple):
    """`found` is the seq and the time of publishing of all that matches in (after, scanned_to]."""

    found: list[tuple[int, int]]
    scanned_to: int


class Appended(NamedTuple):
    seqs: list[int]
    duplicates: frozenset[int]  # positions whose id was known: their seq is the first one's


class DeadLetter(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """A message that will not be delivered to this subscription again unless it is redriven. `id` 0: not stored yet."""

    id: int
    """Its number in the log."""
    subscription: str
    """The id of the subscription that dead-lettered the message."""
    message: Message
    """The whole message. Retention does not delete it here."""
    reason: Reason
    """Why it was dead-lettered: `max_attempts`, `rejected`, `expired`, …"""
    attempts: int
    """How often it was delivered."""
    died_ms: int
    error: str | None = None
    """The last error of the handler, or the reason that `reject` named."""
    stack: str | None = None
    """The end of the handler's stack trace."""
    handler: str | None = None
    """The name of the handler."""
    redrives: int = 0
    """How often it was redriven."""
    redriving: bool = False
    """Whether it was redriven and is not settled yet."""
    redrive_error: str | None = None
    """Why the last redrive failed."""

    @property
    def died_at(self) -> datetime:
        """The time at which the message became a dead letter."""
        return datetime_of(self.died_ms)


def letter_value(letter: DeadLetter, column: LetterColumn) -> str:
    """What dead letters are counted by."""
    match column:
        case "topic":
            return letter.message.topic
        case "type":
            return letter.message.type or ""
        case "error":
            return (letter.error or "").split("\n", 1)[0][:ERROR_LINE_CHARS]
        case "redriving":
            return str(int(letter.redriving))
        case "reason" | "subscription":
            return str(getattr(letter, column))


class LetterGroup(msgspec.Struct, frozen=True, array_like=True):
    """Dead letters of one subscription that failed alike. `error` is the first line of their errors, "" if they have
    none; `last_id` is the newest letter."""

    subscription: str
    reason: str
    handler: str
    error: str
    count: int
    redriving: int
    first_ms: int
    last_ms: int
    last_id: int


_NUMBERS = re.compile(r"\b(?=[0-9a-fA-F-]*\d)[0-9a-fA-F-]{8,}\b|\d+")


def error_kind(error: str | None) -> str:
    """The first line of an error without the numbers in it, which differ from message to message."""
    return _NUMBERS.sub("#", (error or "").split("\n", 1)[0][:ERROR_LINE_CHARS])


class DeadLetterQuery(msgspec.Struct, frozen=True):
    """All given conditions hold together. `error` is searched in the error text and `error_kind` compared with it by
    the broker, because a search may take longer than a store may be kept waiting. A `handler` of "" is none."""

    ids: tuple[int, ...] | None = None
    subscription: str | None = None
    topic: Pattern | None = None
    type: str | None = None
    reason: str | None = None
    error: Regex | None = None
    seqs: tuple[int, ...] | None = None
    handler: str | None = None
    error_kind: str | None = None

    def fits(self, letter: DeadLetter) -> bool:
        """Whether a letter meets the conditions that stores leave to the broker."""
        return (self.error is None or (letter.error is not None and self.error.finds(letter.error))) and (
            self.error_kind is None or error_kind(letter.error) == self.error_kind
        )

    @property
    def is_left_to_broker(self) -> bool:
        return self.error is not None or self.error_kind is not None


class Gap(msgspec.Struct, frozen=True):
    """Messages a subscription can never get: deleted before it settled them."""

    subscription: str
    """The id of the subscription that misses them."""
    from_seq: int
    """The first seq of the range."""
    to_seq: int
    """The last seq of the range."""
    count: int
    """How many messages of the range matched the subscription."""
    why: str
    """What deleted them, such as a retention limit."""
    at_ms: int

    @property
    def at(self) -> datetime:
        """The time at which retention deleted the messages."""
        return datetime_of(self.at_ms)


class RetentionPolicy(msgspec.Struct, frozen=True):
    pattern: str
    limits: Limits
    dialect: Dialect = "nats"

    @property
    def max_age_s(self) -> float | None:
        return None if self.limits.max_age_ms is None else self.limits.max_age_ms / 1000


class TopicCount(msgspec.Struct, frozen=True, array_like=True):
    """`last_seq` stays when the messages are deleted."""

    topic: str
    count: int
    bytes: int
    last_seq: int
    last_published_ms: int

    @property
    def last_published_at(self) -> datetime:
        return datetime_of(self.last_published_ms)


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """How many messages got to this stage in this hour within a time of this bucket (`delivery.histogram`), counted
    from when they were published, or from when they were due if that was later. `hour_ms` is when the hour began."""

    subscription: str
    hour_ms: int
    stage: Stage
    bucket: int
    count: int


class SubscriptionSample(msgspec.Struct, frozen=True, array_like=True):
    lag: int
    acked: int


class Sample(msgspec.Struct, frozen=True):
    """Figures of a log at one time. `acked` and `last_seq` are totals, from which rates follow."""

    at_ms: int
    last_seq: int
    dead_letters: int
    file_bytes: int
    journal_bytes: int
    subscriptions: dict[str, SubscriptionSample] = {}


class DeliveryCounts(NamedTuple):
    in_flight: int
    waiting: int
    first_seq: int | None
