"""Params and results of every `rpc.*` method as they travel. Durations are seconds, times are ISO 8601."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from headwater.message import EXTRA_FIELDS, HEADER_FIELDS, Time

NAMES_MAX = 1_000  # topics, subscriptions, or lines of an import, of one call
SEQS_MAX = 10_000  # as many as may be in flight
PUBLISHER_CHARS_MAX = 128

T = TypeVar("T")
Int64: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Names: TypeAlias = Annotated[list[T], msgspec.Meta(max_length=NAMES_MAX)]
Seqs: TypeAlias = Annotated[list[T], msgspec.Meta(max_length=SEQS_MAX)]
Patterns = str | Names[str] | None
TOPICS_MAX = 10_000  # in one answer
SUBSCRIPTIONS_MAX = 1_000  # in one answer


class Params(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """The params of a method. An unknown name is an error."""


# --- beginning ------------------------------------------------------------------------------------------------------


class Hello(Params):
    """`publisher` names a client that numbers its messages, so that it can safely send them again."""

    client: str = ""
    publisher: str | None = None


class Welcome(msgspec.Struct, omit_defaults=True):
    """`salt`: generated message ids derive from it. `rights`: those that the token grants, each with its patterns or
    names, and `admin` as true; `label`: that of the token. An unauthenticated client gets none of them, nor `log`."""

    server: str
    version: str
    log: str
    salt: int
    frame_bytes_max: int
    batch_calls_max: int
    authenticated: bool
    rights: dict[str, Any] = {}
    label: str = ""


class Authenticate(Params):
    token: str


# --- publishing -----------------------------------------------------------------------------------------------------


class _Publish(Params):
    """`number`: of the message in its publisher's own count (see Hello). Below `confirmed` all answers have arrived.
    The other fields are those of `message.Message`."""

    topic: str
    data: Raw
    id: str | None = None
    headers: dict[str, Any] | None = None
    published_at: str | float | None = None
    number: int | None = None
    confirmed: int = 0


if TYPE_CHECKING:
    Publish = _Publish
else:
    Publish = msgspec.defstruct(
        "Publish",
        [
            (field.option, str | float | None if field.kind == "time" else field.type, field.default)
            for field in EXTRA_FIELDS
            if field.kind != "json"
        ]
        + [(field.rule.span, float | None, None) for field in EXTRA_FIELDS if isinstance(field.rule, Time)],
        bases=(_Publish,),
        namespace={"__doc__": _Publish.__doc__},
        module=__name__,
        rename={field.option: field.name for field in HEADER_FIELDS if field.option != field.name},
    )


class PlainPublish(Params):
    """The usual publish; decoded in half the time."""

    topic: str
    data: Raw
    number: int | None = None
    confirmed: int = 0


class PlainMessage(Params):
    topic: str
    data: Raw


class PlainBatch(Params):
    """A batch of messages with topic and data only."""

    messages: list[PlainMessage]
    number: int | None = None
    confirmed: int = 0


class PublishBatch(Params):
    """All or none. `number` is that of the first message; the others follow it."""

    messages: list[Publish]
    number: int | None = None
    confirmed: int = 0


class Published(msgspec.Struct, gc=False):
    sequence_id: int
    duplicate: bool


class PublishedBatch(msgspec.Struct, gc=False):
    """`duplicates`: the positions of messages that were stored before."""

    sequence_ids: list[int]
    duplicates: list[int] = []


class SequenceId(msgspec.Struct, gc=False):
    """The result of methods that return a position in the log; `rpc.publish` has it too."""

    sequence_id: int


class Removed(msgspec.Struct, gc=False):
    removed: bool


# --- live -----------------------------------------------------------------------------------------------------------


class Topic(Params):
    topic: str


class Topics(Params):
    topics: Names[str]


# --- durable subscriptions ------------------------------------------------------------------------------------------


class ResumeFrom(Params):
    """`holder` is a name that the client chose for itself. After a broken connection it takes the subscription back at
    once, unless another client has held it since, and keeps the deliveries `held`: (seq, attempt) each."""

    holder: str
    held: Seqs[tuple[int, int]] = []


class Subscribe(Params, rename={"from_": "from"}):
    """`deliver`: "push" sends messages as notifications, as many as may be in flight; "fetch" waits for `rpc.fetch`."""

    subscription_id: str
    topic: str
    mode: str | UnsetType = UNSET
    start: str | int | UnsetType = UNSET
    wait: float | UnsetType = UNSET
    takeover: bool | UnsetType = UNSET
    dialect: str | UnsetType = UNSET
    from_: Patterns | UnsetType = UNSET
    to: Patterns | UnsetType = UNSET
    broadcast: bool | UnsetType = UNSET
    where: str | UnsetType | None = UNSET
    order: str | UnsetType = UNSET
    order_key: str | UnsetType | None = UNSET
    ack_wait: float | UnsetType = UNSET
    extension_max: float | UnsetType = UNSET
    lease: float | UnsetType = UNSET
    max_in_flight: int | UnsetType = UNSET
    max_attempts: int | UnsetType = UNSET
    backoff: float | UnsetType = UNSET
    backoff_factor: float | UnsetType = UNSET
    backoff_max: float | UnsetType = UNSET
    jitter: float | UnsetType = UNSET
    inactive_timeout: float | UnsetType | None = UNSET
    dead_letter_expired: bool | UnsetType = msgspec.field(default=UNSET, name="bury_expired")
    deliver: str = "push"
    resume: ResumeFrom | None = None


class Subscribed(msgspec.Struct, gc=False):
    """`resumed_from_*`: all messages up to this seq were settled before, 0 if new. `held` and `settled`: which of the
    deliveries that the client resumed with are still in flight for it, and which were settled."""

    subscription_id: str
    topic: str
    resumed_from_sequence: int
    resumed_from_seq: int
    undelivered_count: int
    held: list[int] = []
    settled: list[int] = []
    subscribed: bool = True


class SubscribeBatch(Params):
    subscriptions: Names[Subscribe]


class SubscriptionId(Params):
    subscription_id: str


class SubscriptionIds(Params):
    subscription_ids: Names[str]


class Unsubscribe(Params):
    """`seen`: deliveries that were processed and not settled, (seq, attempt) each. If it is given, all others in flight
    count as no attempt."""

    subscription_id: str
    seen: Seqs[tuple[int, int]] | None = None


class Release(Params):
    """For `rpc.release`: deliveries that were not processed go to other consumers and count as no attempt."""

    subscription_id: str
    sequence_ids: Seqs[int]


class Acknowledge(Params):
    """One seq or many. The others are acked even if some cannot be; the result names those. If none can be acked, the
    call is refused. An ack may be repeated. `lenient`: the call is never refused, and the result also names seqs that
    were acked before. `strict`: all or none, and none that was acked before."""

    subscription_id: str
    sequence_id: int | None = None
    sequence_ids: Seqs[int] | None = None
    lenient: bool = False
    strict: bool = False


class Acknowledged(msgspec.Struct, gc=False, omit_defaults=True):
    acknowledged: bool
    late: list[int] = []


class OneAcknowledgment(Params):
    subscription_id: str
    sequence_id: int


class AcknowledgeBatch(Params):
    acknowledgments: Seqs[OneAcknowledgment]


class Settle(Params):
    """For `rpc.nack`, `rpc.reject` and `rpc.extend`. `attempt`: which delivery of the message; the last by default.
    `lenient`: extend those still in flight and ignore the others. `failed`: the message is rejected because processing
    failed, not on request."""

    subscription_id: str
    sequence_id: int | None = None
    attempt: int | None = None
    sequence_ids: Seqs[int] | None = None
    delay: float | None = None
    by: float | None = None
    reason: str | None = None
    stack: str | None = None
    handler: str | None = None
    lenient: bool = False
    failed: bool = False


class Fetch(Params):
    subscription_id: str
    count: int = 100
    wait: float = 0.0


class Fetched(msgspec.Struct, Generic[T], gc=False, omit_defaults=True):
    """`messages` are arrays: [message, attempt, token], a message being an array of its fields in the order of
    `message/model.py`. Payloads at the positions `unreadable` are not JSON and travel as text."""

    messages: T
    unreadable: list[int] = []


class Credit(Params):
    """For `rpc.credit`: the server sends messages as `rpc.deliver` when they come, until it has sent `upto` of them
    since the subscribe. The number that has been received ends the credit. It is a total, so that the call may be
    repeated."""

    subscription_id: str
    upto: int


# --- operating a log ------------------------------------------------------------------------------------------------


class Seek(Params):
    """`dry_run`: nothing is moved; the result says what a seek would do."""

    subscription_id: str
    start: str | int
    dry_run: bool = False


class FindMessages(Params):
    """Which messages: by pattern, by seq in (`after`, `upto`], published from `since` on and before `until` (ISO 8601),
    by `where`. `order`: newest or oldest first."""

    topic: str = ">"
    where: str | None = None
    after: Int64 = 0
    upto: Int64 = 2**63 - 1
    since: str | None = None
    until: str | None = None
    order: str = "newest"
    limit: int = 50


class MessageSeq(Params):
    sequence_id: Int64


class Retain(Params):
    topic: str
    max_age: float | None = None
    max_count: int | None = None
    max_bytes: int | None = None
    keep_unacked: bool = False
    dialect: str = "nats"


class RemoveRetention(Params):
    topic: str
    dialect: str = "nats"


class DeclareSchedule(Params):
    """`schedule`: id, topic, every_ms or cron with tz, missed, missed_max. `publisher` names the client's process."""

    schedule: dict[str, Any]
    publisher: str


class TakeSchedule(Params):
    """`due_ms`: the occurrence that the client wants to publish, in milliseconds since 1970."""

    schedule: dict[str, Any]
    publisher: str
    due_ms: Int64


class PublishOccurrence(Params):
    """Without data, the occurrence is only noted as done. `ends`: the lease is released."""

    schedule: dict[str, Any]
    publisher: str
    fence: Int64
    at_ms: Int64
    data: Any = None
    ends: bool = True


class ScheduleId(Params):
    schedule_id: str


class DeadLetterFilter(Params):
    """Which dead letters; `after` and `limit` page through a list. `handler` and `error_kind` are those of a group, ""
    for none. `dry_run`: a redrive or a purge changes nothing and says what it would do."""

    after: Int64 = 0
    limit: int = 100
    ids: Seqs[Int64] | None = None
    subscription: str | None = None
    topic: str | None = None
    type: str | None = None
    reason: str | None = None
    error: str | None = None
    handler: str | None = None
    error_kind: str | None = None
    to_topic: str | None = None
    dry_run: bool = False


class DeadLetterId(Params):
    id: Int64


class ImportDeadLetters(Params):
    lines: Names[str]


class TopicPage(Params):
    """Up to `limit` topics after this one in name order; a page with fewer is the last."""

    after: str = ""
    limit: int = TOPICS_MAX


class SubscriptionPage(Params):
    """Up to `limit` subscriptions after this one by id; a page with fewer is the last."""

    after: str = ""
    limit: int = SUBSCRIPTIONS_MAX


class HistorySpan(Params):
    """`span`: hour, day or week."""

    span: str = "hour"


class Nothing(Params):
    pass


# --- notifications of the server ------------------------------------------------------------------------------------


class Notification(msgspec.Struct, gc=False):
    """`rpc.notification`: a message for one live subscription."""

    topic: str
    data: Raw
    pattern: str
    sequence_id: int
    timestamp: str
    id: str
    headers: dict[str, Any]


class Delivery(msgspec.Struct, gc=False):
    """`rpc.notification.persistent`."""

    subscription_id: str
    topic: str
    sequence_id: int
    timestamp: str
    data: Raw
    id: str
    headers: dict[str, Any]
    attempt: int


class Delivered(msgspec.Struct, Generic[T], gc=False, omit_defaults=True):
    """`rpc.deliver`: messages for which the client gave credit, in the form of `Fetched`."""

    subscription_id: str
    messages: T
    unreadable: list[int] = []


class GapNotice(msgspec.Struct, gc=False, rename={"from_": "from"}):
    """`rpc.gap`: retention deleted messages that were not acked."""

    subscription_id: str
    from_: int
    to: int
    count: int
    why: str
    timestamp: str = ""


class LostNotice(msgspec.Struct, gc=False, omit_defaults=True):
    """`rpc.lost`: the subscription was taken over or deleted and delivers no more. A live one has a topic and no id."""

    subscription_id: str
    why: str
    topic: str | None = None
