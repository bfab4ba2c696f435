"""The shapes that travel: parameters and results of every `rpc.*` method. Times are seconds, moments ISO 8601."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

NAMES_MAX = 1_000  # topics, subscriptions, or lines of an import, of one call
SEQS_MAX = 10_000  # as many as may be in flight

T = TypeVar("T")
Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # as databases keep it
Names: TypeAlias = Annotated[list[T], msgspec.Meta(max_length=NAMES_MAX)]
Seqs: TypeAlias = Annotated[list[T], msgspec.Meta(max_length=SEQS_MAX)]
Patterns = str | Names[str] | None
TOPICS_MAX = 10_000  # in one answer


class Params(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """What a method takes. A misspelt name is an error, not silently nothing."""


# --- beginning ------------------------------------------------------------------------------------------------------


class Hello(Params):
    """`publisher` names a client that numbers its messages, so that it may safely send them again."""

    client: str = ""
    publisher: str | None = None


class Welcome(msgspec.Struct, omit_defaults=True):
    """`salt` is what the ids of messages that were given none follow from; a stranger learns neither it nor `log`."""

    server: str
    version: str
    log: str
    salt: int
    frame_bytes_max: int
    batch_calls_max: int
    authenticated: bool


class Authenticate(Params):
    token: str


# --- publishing -----------------------------------------------------------------------------------------------------


class Publish(Params, rename={"from_": "from"}):
    """`number` is the publisher's own count of its messages (see Hello); below `confirmed` it has heard of all."""

    topic: str
    data: Raw
    id: str | None = None
    headers: dict[str, Any] | None = None
    priority: int = 0
    deliver_at: str | float | None = None
    expires_at: str | float | None = None
    delay: float | None = None
    ttl: float | None = None
    from_: str | None = None
    to: str | None = None
    reply_to: str | None = None
    correlation_id: str | None = None
    type: str | None = None
    version: int | None = None
    content_type: str | None = None
    traceparent: str | None = None
    number: int | None = None
    confirmed: int = 0


class PlainPublish(Params):
    """What most publishes are; read in half the time."""

    topic: str
    data: Raw
    number: int | None = None
    confirmed: int = 0


class PlainMessage(Params):
    topic: str
    data: Raw


class PlainBatch(Params):
    """A batch of nothing but topics and data."""

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
    sequence_ids: list[int]
    duplicates: list[int] = []


# --- live -----------------------------------------------------------------------------------------------------------


class Topic(Params):
    topic: str


class Topics(Params):
    topics: Names[str]


# --- durable subscriptions ------------------------------------------------------------------------------------------


class ResumeFrom(Params):
    """`holder` is a name that the client chose for itself. After its connection broke it is let in at once, if nobody
    else has had the subscription since, and goes on with what it says it holds: (seq, attempt) each."""

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
    bury_expired: bool | UnsetType = UNSET
    deliver: str = "push"
    resume: ResumeFrom | None = None


class Subscribed(msgspec.Struct, gc=False):
    """`resumed_from_*`: the seq at and below which all was settled before, 0 if new. `held` and
    `settled` say what became of what the client resumed with."""

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


class Release(Params):
    """`seen`: what was looked at and not settled, (seq, attempt) each. If it is given, all else in flight counts as no
    attempt."""

    subscription_id: str
    seen: Seqs[tuple[int, int]] | None = None


class GiveBack(Params):
    """For `rpc.release`: what was delivered and not looked at goes to others, and counts as no attempt."""

    subscription_id: str
    sequence_ids: Seqs[int]


class Acknowledge(Params):
    """One seq or many. Those that cannot be acked do not keep the others from being acked; the result names them. If
    none can be, the call is refused. An ack may be repeated. `lenient`: the call is not refused, and the result names
    also what had been acked before. `strict`: all or none, and nothing that had been acked before."""

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
    """For `rpc.nack`, `rpc.reject` and `rpc.extend`. `attempt`: which delivery of the message is meant; without it, the
    last. `lenient`: extend what is still in flight, whatever became of the others. `failed`: it is rejected because it
    cannot be processed, not because somebody said so."""

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


class Fetched(msgspec.Struct, gc=False, omit_defaults=True):
    """`messages` are arrays: [message, attempt, token], a message being an array of its fields in the order of
    `message/model.py`. Payloads at the positions `unreadable` are not JSON and travel as text."""

    messages: Raw
    unreadable: list[int] = []


# --- looking after a log --------------------------------------------------------------------------------------------


class Seek(Params):
    subscription_id: str
    start: str | int


class Retain(Params):
    topic: str
    max_age: float | None = None
    max_count: int | None = None
    max_bytes: int | None = None
    keep_unacked: bool = False
    dialect: str = "nats"


class Unretain(Params):
    topic: str
    dialect: str = "nats"


class Letters(Params):
    """Which dead letters; `after` and `limit` page through a list."""

    after: Whole = 0
    limit: int = 100
    ids: Seqs[Whole] | None = None
    subscription: str | None = None
    topic: str | None = None
    type: str | None = None
    reason: str | None = None
    error: str | None = None
    to_topic: str | None = None


class LetterId(Params):
    id: Whole


class ImportLetters(Params):
    lines: Names[str]


class TopicPage(Params):
    """The topics that come after this one by name, as many as `limit`; a page with fewer is the last."""

    after: str = ""
    limit: int = TOPICS_MAX


class Nothing(Params):
    pass


# --- what the server sends by itself --------------------------------------------------------------------------------


class Notification(msgspec.Struct, gc=False):
    """`rpc.notification`: a message as it came, for one live pattern."""

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


class GapNotice(msgspec.Struct, gc=False, rename={"from_": "from"}):
    """`rpc.gap`: retention took what was not acked."""

    subscription_id: str
    from_: int
    to: int
    count: int
    why: str
    timestamp: str = ""


class LostNotice(msgspec.Struct, gc=False, omit_defaults=True):
    """`rpc.lost`: the subscription was taken over, or dropped; nothing more comes. A live one has a topic and no id."""

    subscription_id: str
    why: str
    topic: str | None = None
