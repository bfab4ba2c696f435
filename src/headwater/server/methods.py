"""The `rpc.*` methods of the server: for each its params, its implementation and the right that it needs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import msgspec

from headwater.broker import browse, dead_letters, deliveries
from headwater.broker.browse import FoundMessages, SeekPreview
from headwater.broker.dead_letters import GroupFilter, LetterStatistics, RedriveResult
from headwater.broker.flow import Blocking, Flow, run_async
from headwater.broker.history import history as log_history
from headwater.broker.schedules import ScheduleRecord, ScheduleTurn
from headwater.broker.statistics import LogStatistics, SubscriptionInfo, describe_all, log_statistics
from headwater.delivery.filters import parse_where
from headwater.delivery.retention import make_limits
from headwater.delivery.schedule import Schedule, check_schedule
from headwater.errors import HeadwaterError, InvalidOptionError, TooLargeError, UnauthorizedError
from headwater.formats import TIME_MS_MAX, time_ms
from headwater.message import NAME_CHARS_MAX
from headwater.ports.records import RetentionPolicy, Selection, SubscriptionRecord, SubscriptionSpec, pattern_of
from headwater.ports.store import Reader
from headwater.protocol import methods as rpc
from headwater.server.auth import Scopes, not_allowed, parse_any_spelling
from headwater.server.lake import is_bucket, of_buckets, read_lake
from headwater.server.publish import publish, publish_batch
from headwater.server.registry import Method, Needs
from headwater.server.subscriptions import OK, Subscriptions, seqs_of, start_of
from headwater.topics import Dialect, Pattern, check_topic, parse_pattern

if TYPE_CHECKING:
    from headwater.server.connection import Connection

DEAD_LETTERS_MAX = 1_000  # dead letters in one answer
MESSAGES_MAX = 500  # messages in one answer of a search


# --- beginning ------------------------------------------------------------------------------------------------------


def hello(connection: Connection, params: rpc.Hello) -> rpc.Welcome:
    """Introduce the client. From then on one frame may carry several notifications."""
    authenticated = not connection.is_unauthenticated
    if params.publisher is not None and authenticated:  # an unauthenticated client must not take the name of another
        _check_publisher(params.publisher)
        connection.context.register_publisher(params.publisher, connection)
    connection.takes_batches = connection.shapes.reads_batches
    limits = connection.context.limits
    return rpc.Welcome(
        server="headwater",
        version=connection.context.version,
        log=connection.core.name.rsplit("/", 1)[-1] if authenticated else "",
        salt=connection.core.engine.store.salt if authenticated else 0,
        frame_bytes_max=limits.frame_bytes,
        batch_calls_max=limits.batch_calls,
        authenticated=authenticated,
        rights=connection.scopes.granted if authenticated else {},
        label=connection.label,
    )


def authenticate(connection: Connection, params: rpc.Authenticate) -> dict[str, bool]:
    """Show a token; the connection gets its rights."""
    connection.authenticate(connection.context.authenticate(params.token))
    return {"authenticated": True}


# --- live -----------------------------------------------------------------------------------------------------------


def subscribe_live(connection: Connection, params: rpc.Topic) -> Any:
    """Get `rpc.notification` with each new message that matches, once for each pattern. No position is stored."""
    [pattern] = _subscribe_live(connection, [params.topic])
    return connection.shapes.subscribed_live(pattern)


def subscribe_live_batch(connection: Connection, params: rpc.Topics) -> dict[str, Any]:
    """The same for several patterns."""
    _subscribe_live(connection, params.topics)
    return {"subscribed": params.topics}


def _subscribe_live(connection: Connection, topics: list[str]) -> list[Pattern]:
    patterns = [parse_any_spelling(topic) for topic in topics]
    for pattern in patterns:
        connection.require_read(pattern)
    connection.context.live.add_all(connection, patterns)
    return patterns


def unsubscribe_live(connection: Connection, params: rpc.Topic) -> Any:
    """End a live subscription."""
    was_subscribed = connection.context.live.remove(connection, params.topic)
    return connection.shapes.unsubscribed_live(params.topic, was_subscribed)


def unsubscribe_live_batch(connection: Connection, params: rpc.Topics) -> dict[str, list[str]]:
    """End several live subscriptions."""
    return {"unsubscribed": [topic for topic in params.topics if connection.context.live.remove(connection, topic)]}


# --- durable subscriptions ------------------------------------------------------------------------------------------


async def subscribe(connection: Connection, params: rpc.Subscribe) -> Any:
    """Begin or resume a durable subscription, with the options of `log.subscribe`."""
    return connection.shapes.subscribed(await connection.subscriptions.begin(params))


async def subscribe_batch(connection: Connection, params: rpc.SubscribeBatch) -> Any:
    """Begin or resume several subscriptions: all or none."""
    return connection.shapes.subscribed_all(await connection.subscriptions.begin_all(params))


async def unsubscribe(connection: Connection, params: rpc.Unsubscribe) -> Any:
    """Release a subscription. The log keeps its position."""
    await connection.subscriptions.release(params.subscription_id, params.seen)
    return connection.shapes.released(params.subscription_id)


async def unsubscribe_batch(connection: Connection, params: rpc.SubscriptionIds) -> Any:
    """Release several subscriptions."""
    for id in params.subscription_ids:
        connection.subscriptions.find(id)
    for id in params.subscription_ids:
        await connection.subscriptions.release(id)
    return connection.shapes.released_all(params.subscription_ids)


def acknowledge(connection: Connection, params: rpc.Acknowledge) -> Flow[Any]:
    """Acks each seq that can be acked; the answer names the others. If none can be acked, the call is refused."""
    seqs = seqs_of(params)
    late: list[int] = []
    if params.strict:
        yield from connection.subscriptions.acknowledge_strictly(params.subscription_id, seqs)
    elif params.lenient:
        late = yield from connection.subscriptions.acknowledge_leniently(params.subscription_id, seqs)
    else:
        refused = yield from connection.subscriptions.acknowledge(params.subscription_id, seqs)
        if refused and len(refused) == len({*seqs}):
            raise next(iter(refused.values()))
        late = [*refused]
    return connection.shapes.acknowledged(params, late)


async def acknowledge_batch(connection: Connection, params: rpc.AcknowledgeBatch) -> Any:
    """Each one separately: one that fails does not affect the others."""
    by_subscription: dict[str, list[int]] = {}
    for each in params.acknowledgments:
        by_subscription.setdefault(each.subscription_id, []).append(each.sequence_id)
    refused: dict[tuple[str, int], HeadwaterError] = {}
    for id, seqs in by_subscription.items():
        try:
            errors = await run_async(connection.subscriptions.acknowledge(id, seqs))
        except HeadwaterError as exc:
            errors = dict.fromkeys(seqs, exc)
        refused.update({(id, seq): error for seq, error in errors.items()})
    return connection.shapes.acknowledged_all(params.acknowledgments, refused)


# --- operating subscriptions ----------------------------------------------------------------------------------------


def subscription(connection: Connection, params: rpc.SubscriptionId) -> Flow[Any]:
    """Describe a durable subscription."""
    with _hiding(connection, params.subscription_id, "rpc.subscription"):
        connection.require_use((yield from connection.core.subscription_record(params.subscription_id)))
    info = yield from connection.core.subscription_info(params.subscription_id)
    return info


def remove_subscription(connection: Connection, params: rpc.SubscriptionId) -> Flow[dict[str, bool]]:
    """Delete a subscription with its position."""
    with _hiding(connection, params.subscription_id, "rpc.subscription.remove"):
        yield from connection.core.delete_subscription(params.subscription_id, connection.require_use)
    return OK


def seek(connection: Connection, params: rpc.Seek) -> Flow[dict[str, int] | SeekPreview]:
    """Move the position of a subscription; or tell what that would do."""
    id, start = params.subscription_id, start_of(params.start)
    with _hiding(connection, id, "rpc.seek"):
        if params.dry_run:
            engine, reads = connection.core.engine, connection.scopes.reads
            return (yield from browse.preview_seek(engine, id, start, connection.require_use, reads))
        position = yield from connection.core.seek(id, start, connection.require_use)
    return {"sequence_id": position}


def pause(connection: Connection, params: rpc.SubscriptionId) -> Flow[SubscriptionInfo]:
    """Deliver nothing until it is resumed; the position is kept."""
    with _hiding(connection, params.subscription_id, "rpc.subscription.pause"):
        yield from connection.core.pause(params.subscription_id, connection.require_use)
    return (yield from connection.core.subscription_info(params.subscription_id))


def resume(connection: Connection, params: rpc.SubscriptionId) -> Flow[SubscriptionInfo]:
    """Deliver again after a pause."""
    with _hiding(connection, params.subscription_id, "rpc.subscription.resume"):
        yield from connection.core.resume(params.subscription_id, connection.require_use)
    return (yield from connection.core.subscription_info(params.subscription_id))


@contextmanager
def _hiding(connection: Connection, id: str, method: str) -> Iterator[None]:
    """A subscription that the token may not use is reported as unknown."""
    try:
        yield
    except UnauthorizedError as exc:
        connection.fault_for(exc, method)  # which records it
        raise deliveries.unknown(id) from exc


# --- inspecting: only what the token may read or manage ---------------------------------------------------------------


def topic_max_seq(connection: Connection, params: rpc.Topic) -> Flow[dict[str, int]]:
    """The seq of the last message on the topic; 0 if there is none."""
    if not connection.scopes.may_look_at(check_topic(params.topic)):
        raise not_allowed("read or manage", params.topic)
    last = yield from connection.core.topic_max_seq(params.topic)
    return {"sequence_id": last}


def last_seq(connection: Connection, params: rpc.Nothing) -> Flow[dict[str, int]]:
    """The seq of the last message in the log."""
    last = yield from connection.core.last_seq()
    return {"sequence_id": last}


def find_messages(connection: Connection, params: rpc.FindMessages) -> Flow[FoundMessages]:
    """Search messages. A search ends after two seconds, and says how far it looked."""
    if not 1 <= params.limit <= MESSAGES_MAX:
        raise TooLargeError(f"limit must be 1 to {MESSAGES_MAX}, not {params.limit}", next="Continue from looked_to")
    if params.order not in ("newest", "oldest"):
        raise InvalidOptionError(f"order is newest or oldest, not {params.order!r}")
    pattern = parse_any_spelling(params.topic)
    connection.require_read(pattern)
    return browse.search(
        connection.core.engine,
        Selection(pattern, where=None if params.where is None else parse_where(params.where)),
        after=max(0, params.after),
        upto=params.upto,
        since_ms=_time_of(params.since, "since"),
        until_ms=_time_of(params.until, "until"),
        limit=params.limit,
        newest_first=params.order == "newest",
    )


def _time_of(given: str | None, name: str) -> int | None:
    try:
        return None if given is None else time_ms(datetime.fromisoformat(given), name)
    except ValueError as exc:
        raise InvalidOptionError(
            f"{name} is a time in ISO 8601, not {given!r}", next="Write a time like 2030-01-31T12:00:00Z"
        ) from exc


def message(connection: Connection, params: rpc.MessageSeq) -> Flow[Any]:
    """One message whole, its deliveries to the subscriptions that the token may use, and its dead letters if the token
    may manage its topic."""
    scopes = connection.scopes

    def may_use(record: SubscriptionRecord) -> bool:
        return connection.may_use(record.id, pattern_of(record.spec), record.spec.owner)

    found = yield from browse.inspect(connection.core.engine, params.sequence_id, scopes.reads, may_use, scopes.manages)
    letters = [dead_letters.to_wire(letter) for letter in found.dead_letters]
    return {**msgspec.structs.asdict(found), "dead_letters": letters}


def topics(connection: Connection, params: rpc.TopicPage) -> Flow[msgspec.Raw]:
    """A page of topics in name order, with their counts. A page with fewer than `limit` is the last."""
    if not 1 <= params.limit <= rpc.TOPICS_MAX:
        raise TooLargeError(f"limit must be 1 to {rpc.TOPICS_MAX:,}, not {params.limit}", next="Continue with after")
    scopes, engine = connection.scopes, connection.core.engine

    def page(reader: Reader) -> msgspec.Raw:
        found = reader.topic_counts()
        first = bisect_right(found, params.after, key=lambda each: each.topic)
        visible = (each for each in islice(found, first, None) if scopes.may_look_at(each.topic))
        return _encoded(list(islice(visible, params.limit)))

    return engine.read(page, engine.statistics)


def _encoded(answer: Any) -> msgspec.Raw:
    """Encode on the thread of the reader: encoding a large answer on the event loop would delay all clients."""
    return msgspec.Raw(msgspec.json.encode(answer))


def subscriptions(connection: Connection, params: rpc.SubscriptionPage) -> Flow[msgspec.Raw]:
    """A page of the durable subscriptions that the token may use, by id. A page with fewer than `limit` is the last."""
    if not 1 <= params.limit <= rpc.SUBSCRIPTIONS_MAX:
        why = f"limit must be 1 to {rpc.SUBSCRIPTIONS_MAX:,}, not {params.limit}"
        raise TooLargeError(why, next="Continue with after")
    core, scopes, owner = connection.core, connection.scopes, _owner(connection)

    def page(reader: Reader) -> msgspec.Raw:
        def wanted(record: SubscriptionRecord) -> bool:
            return record.id > params.after and _may_use(scopes, owner, record.id, record.spec)

        return _encoded(describe_all(reader, core.engine.clock.now_ms(), params.limit, wanted))

    if params == rpc.SubscriptionPage():  # what is polled
        return core.shared_read(("rpc.subscriptions", scopes, owner), page)
    return core.engine.read(page, core.engine.statistics)


def _owner(connection: Connection) -> str | None:
    return None if connection.grant is None else connection.grant.owner


def _may_use(scopes: Scopes, owner: str | None, id: str, of: SubscriptionInfo | SubscriptionSpec) -> bool:
    return scopes.may_use(id, parse_any_spelling(of.pattern), is_own=of.owner in (None, owner))


def statistics(connection: Connection, params: rpc.Nothing) -> Flow[msgspec.Raw]:
    """Sum up the log, with the first 10,000 topics by name; `topics_left_out` counts the others."""
    core, scopes, owner = connection.core, connection.scopes, _owner(connection)

    def seen(reader: Reader) -> msgspec.Raw:
        found = log_statistics(reader, core.engine.clock.now_ms())
        topics = [each for each in found.topics if scopes.may_look_at(each.topic)]
        return _encoded(
            LogStatistics(
                last_seq=found.last_seq,
                messages=sum(each.count for each in topics),
                bytes=sum(each.bytes for each in topics),
                topics=topics[: rpc.TOPICS_MAX],
                subscriptions=[each for each in found.subscriptions if _may_use(scopes, owner, each.id, each)],
                topics_left_out=max(0, len(topics) - rpc.TOPICS_MAX),
            )
        )

    return core.shared_read(("rpc.stats", scopes, owner), seen)


def history(connection: Connection, params: rpc.HistorySpan) -> Flow[msgspec.Raw]:
    """The figures of the whole log over time."""
    if not connection.scopes.may_watch:
        raise not_allowed("admin, or manage", ">")
    clock = connection.core.engine.clock
    return connection.core.shared_read(
        ("rpc.stats.history", params.span),
        lambda reader: _encoded(log_history(reader, params.span, clock.now_ms())),
    )


def lake(connection: Connection, params: rpc.Nothing) -> Flow[msgspec.Raw]:
    """What the last run and the last audit of the pipeline found; null if the server is given no lake."""
    if not connection.scopes.may_watch:
        raise not_allowed("admin, or manage", ">")
    lake, engine = connection.context.lake, connection.core.engine
    if lake is None:
        return _encoded(None)
    pool = of_buckets if is_bucket(lake) else engine.statistics
    return cast(msgspec.Raw, (yield Blocking(lambda: _encoded(read_lake(lake, engine.store.salt)), pool)))


def health(connection: Connection, params: rpc.Nothing) -> Flow[Any]:
    """The state of the store."""
    return connection.core.health()


def run_maintenance(connection: Connection, params: rpc.Nothing) -> Flow[Any]:
    """Run maintenance now."""
    return connection.core.run_maintenance()


# --- retention ------------------------------------------------------------------------------------------------------


def retain(connection: Connection, params: rpc.Retain) -> Flow[dict[str, bool]]:
    """Set the retention of a topic pattern."""
    pattern = _manageable(connection, params)
    limits = make_limits(
        max_age=params.max_age,
        max_count=params.max_count,
        max_bytes=params.max_bytes,
        keep_unacked=params.keep_unacked,
    )
    yield from connection.core.retain(params.topic, limits, pattern.dialect)
    return OK


def remove_retention(connection: Connection, params: rpc.RemoveRetention) -> Flow[dict[str, bool]]:
    """Delete the retention of a topic pattern."""
    pattern = _manageable(connection, params)
    removed = yield from connection.core.delete_retention(params.topic, pattern.dialect)
    return {"removed": removed}


def retention(connection: Connection, params: rpc.Nothing) -> Flow[list[RetentionPolicy]]:
    """The retention policies."""
    found = yield from connection.core.retention()
    return [each for each in found if connection.scopes.may_manage(parse_pattern(each.pattern, each.dialect))]


def _manageable(connection: Connection, params: rpc.Retain | rpc.RemoveRetention) -> Pattern:
    pattern = parse_pattern(params.topic, cast(Dialect, params.dialect))  # which refuses other dialects
    connection.require_manage(pattern)
    return pattern


# --- schedules --------------------------------------------------------------------------------------------------------


def schedules(connection: Connection, params: rpc.Nothing) -> Flow[list[ScheduleRecord]]:
    """The stored schedules with `last_ms`, the last occurrence that is done."""
    found = yield from connection.core.schedules()
    return [each for each in found if _may_see(connection, each.schedule.topic)]


def _may_see(connection: Connection, topic: str) -> bool:
    return connection.scopes.may_look_at(topic) or connection.may_publish(topic)


def declare_schedule(connection: Connection, params: rpc.DeclareSchedule) -> Flow[ScheduleTurn]:
    """A schedule of a topic that the token may not publish to is not replaced by another of its id."""
    schedule, publisher = _schedule_of(connection, params)

    def allow(stored: Schedule) -> None:
        if not connection.may_publish(stored.topic):
            raise not_allowed("publish", schedule.id)  # without the topic, which the token may not know

    return connection.core.declare_schedule(schedule, publisher, allow)


def take_schedule(connection: Connection, params: rpc.TakeSchedule) -> Flow[ScheduleTurn]:
    """Ask for the turn to publish an occurrence. `fence`: the client may publish it; `busy`: another client publishes
    it; neither: it is done."""
    schedule, publisher = _schedule_of(connection, params)
    return connection.core.take_schedule(schedule, params.due_ms, publisher)


def publish_occurrence(connection: Connection, params: rpc.PublishOccurrence) -> Flow[bool]:
    """Publish an occurrence under the fence of the turn; the result says whether it was stored."""
    schedule, publisher = _schedule_of(connection, params)
    if not 0 <= params.at_ms <= TIME_MS_MAX:
        raise InvalidOptionError("at_ms lies outside the years 1970 to 9999", where=schedule.id)
    done = yield from connection.core.publish_occurrence(
        schedule, params.fence, params.at_ms, params.data, params.ends, publisher
    )
    if done and params.data is not None:
        connection.context.metrics.count_published(1, 0)
    return done


def remove_schedule(connection: Connection, params: rpc.ScheduleId) -> Flow[dict[str, bool]]:
    """Delete a schedule."""

    def allow(stored: Schedule) -> None:
        if not connection.scopes.manages(stored.topic):
            raise not_allowed("manage", params.schedule_id)  # without the topic, which the token may not know

    removed = yield from connection.core.delete_schedule(params.schedule_id, allow)
    return {"removed": removed}


def _check_publisher(name: str) -> None:
    if not 1 <= len(name) <= rpc.PUBLISHER_CHARS_MAX:
        raise InvalidOptionError(f"a publisher's name has 1 to {rpc.PUBLISHER_CHARS_MAX} characters")


def _schedule_of(
    connection: Connection, params: rpc.DeclareSchedule | rpc.TakeSchedule | rpc.PublishOccurrence
) -> tuple[Schedule, str]:
    try:
        schedule = msgspec.convert(params.schedule, Schedule)
    except msgspec.ValidationError as exc:
        raise InvalidOptionError(f"not a schedule: {exc}") from None
    _check_publisher(params.publisher)
    connection.require_publish(schedule.topic)
    return check_schedule(schedule), params.publisher


# --- dead letters of topics that the token may manage -----------------------------------------------------------------


def list_dead_letters(connection: Connection, params: rpc.DeadLetterFilter) -> Flow[list[Any]]:
    """A page of dead letters that fits into an answer. The next page starts after its last; an empty one is the end."""
    _check_limit(params)
    found = yield from connection.core.dead_letters.page(params.after, params.limit, **_filter(connection, params))
    return [dead_letters.to_wire(letter) for letter in found.letters]


def _check_limit(params: rpc.DeadLetterFilter) -> None:
    if not 1 <= params.limit <= DEAD_LETTERS_MAX:
        raise TooLargeError(f"limit must be 1 to {DEAD_LETTERS_MAX}, not {params.limit}", next="Continue with after")


def get_dead_letter(connection: Connection, params: rpc.DeadLetterId) -> Flow[Any]:
    """One dead letter."""
    found = yield from connection.core.dead_letters.get(params.id)
    if not connection.scopes.manages(found.message.topic):
        raise dead_letters.unknown(params.id)  # as if it were not there
    return dead_letters.to_wire(found)


def _filter(connection: Connection, params: rpc.DeadLetterFilter) -> GroupFilter:
    """The filter of the params; without a topic, it is for every topic."""
    names = ("ids", "subscription", "topic", "type", "reason", "error", "handler", "error_kind")
    for name in names:
        value = getattr(params, name)
        if isinstance(value, str) and len(value) > NAME_CHARS_MAX:
            raise TooLargeError(f"{name} has more than {NAME_CHARS_MAX} characters")
    pattern = parse_any_spelling(">" if params.topic is None else params.topic)
    connection.require_manage(pattern)
    given = {name: value for name in names if (value := getattr(params, name)) is not None}
    return cast(GroupFilter, given if params.topic is None else {**given, "topic": pattern})


def dead_letter_statistics(connection: Connection, params: rpc.DeadLetterFilter) -> Flow[LetterStatistics]:
    """Count dead letters by subscription, topic, type, reason and error."""
    return connection.core.dead_letters.statistics(**_filter(connection, params))


def dead_letter_groups(connection: Connection, params: rpc.DeadLetterFilter) -> Flow[list[dict[str, Any]]]:
    """The largest groups of dead letters that failed alike: by subscription, reason, handler and kind of error."""
    found = yield from connection.core.dead_letters.groups(**_filter(connection, params))
    return [msgspec.structs.asdict(group) for group in found]


def redrive(connection: Connection, params: rpc.DeadLetterFilter) -> Flow[RedriveResult]:
    """Redrive to their subscription without publishing again, or publish them to a topic. `dry_run` only counts."""
    chosen = _filter(connection, params)
    if params.to_topic is not None:
        connection.require_publish(params.to_topic)
    return connection.core.dead_letters.redrive(params.to_topic, params.dry_run, **chosen)


def purge(connection: Connection, params: rpc.DeadLetterFilter) -> Flow[int]:
    """Delete the dead letters that match, or count them."""
    return connection.core.dead_letters.purge(params.dry_run, **_filter(connection, params))


def export(connection: Connection, params: rpc.DeadLetterFilter) -> Flow[dead_letters.Exported]:
    """A page of dead letters as JSON `lines`. Pass `next` as `after`, until it is null."""
    _check_limit(params)
    return connection.core.dead_letters.export(params.after, params.limit, **_filter(connection, params))


def import_(connection: Connection, params: rpc.ImportDeadLetters) -> Flow[int]:
    """A redrive publishes an imported dead letter whose message is not in the log, so an import needs that right."""

    def allow(topic: str) -> None:
        connection.require_publish(topic)
        connection.require_manage(parse_pattern(topic))

    return connection.core.dead_letters.import_(params.lines, allow)


OPEN = Needs((), "")
LISTEN = Needs(("read",), "each pattern")
HELD = Needs(("read",), "what the connection holds")
DURABLE = Needs(("read",), "the pattern; and `consume` of the name, unless the mode is ephemeral")
OWN = Needs(("consume", "manage"), "`consume` of the name of its own subscription, else `manage` of its pattern")
LOOK = Needs(("read", "manage"), "each item; others are left out")
LIST_OWN = Needs(("consume", "manage"), "each item; others are left out")
MANAGE = Needs(("manage",), "the pattern")
DEAD = Needs(("manage",), "the topic filter, or every topic without one")
SCHEDULE = Needs(("publish",), "the topic")
WATCH = Needs(("manage", "admin"), "`manage` of `>`, or `admin`")
ADMIN = Needs(("admin",), "the server")


def _methods() -> dict[str, Method]:
    methods = {
        "rpc.hello": Method(rpc.Hello, hello, OPEN),
        "rpc.authenticate": Method(rpc.Authenticate, authenticate, OPEN),
        "rpc.publish": Method(rpc.Publish, publish, Needs(("publish",), "the topic")),
        "rpc.publish.batch": Method(rpc.PublishBatch, publish_batch, Needs(("publish",), "each topic")),
        "rpc.subscribe": Method(rpc.Topic, subscribe_live, LISTEN),
        "rpc.unsubscribe": Method(rpc.Topic, unsubscribe_live, HELD),
        "rpc.subscribe.batch": Method(rpc.Topics, subscribe_live_batch, LISTEN),
        "rpc.unsubscribe.batch": Method(rpc.Topics, unsubscribe_live_batch, HELD),
        "rpc.subscribe.persistent": Method(rpc.Subscribe, subscribe, DURABLE),
        "rpc.subscribe.persistent.batch": Method(rpc.SubscribeBatch, subscribe_batch, DURABLE),
        "rpc.unsubscribe.persistent": Method(rpc.Unsubscribe, unsubscribe, HELD),
        "rpc.unsubscribe.persistent.batch": Method(rpc.SubscriptionIds, unsubscribe_batch, HELD),
        "rpc.acknowledge.persistent": Method(rpc.Acknowledge, acknowledge, HELD),
        "rpc.acknowledge.persistent.batch": Method(rpc.AcknowledgeBatch, acknowledge_batch, HELD),
        "rpc.nack": Method(rpc.Settle, _of_connection(Subscriptions.nack), HELD),
        "rpc.reject": Method(rpc.Settle, _of_connection(Subscriptions.reject), HELD),
        "rpc.extend": Method(rpc.Settle, _of_connection(Subscriptions.extend), HELD),
        "rpc.fetch": Method(rpc.Fetch, _of_connection(Subscriptions.fetch), HELD),
        "rpc.credit": Method(rpc.Credit, _of_connection(Subscriptions.give_credit), HELD),
        "rpc.fetch.end": Method(rpc.SubscriptionId, _of_connection(Subscriptions.end_fetches), HELD),
        "rpc.release": Method(rpc.Release, _of_connection(Subscriptions.release_messages), HELD),
        "rpc.subscription": Method(rpc.SubscriptionId, subscription, OWN),
        "rpc.subscription.remove": Method(rpc.SubscriptionId, remove_subscription, OWN, audited=True),
        "rpc.subscription.pause": Method(rpc.SubscriptionId, pause, OWN, audited=True),
        "rpc.subscription.resume": Method(rpc.SubscriptionId, resume, OWN, audited=True),
        "rpc.seek": Method(rpc.Seek, seek, OWN, audited=True),
        "rpc.topic_max_seq": Method(rpc.Topic, topic_max_seq, Needs(("read", "manage"), "the topic")),
        "rpc.last_seq": Method(rpc.Nothing, last_seq, Needs(("read", "manage"), "anything")),
        "rpc.messages": Method(rpc.FindMessages, find_messages, Needs(("read",), "the pattern")),
        "rpc.message": Method(
            rpc.MessageSeq,
            message,
            Needs(("read",), "its topic; of deliveries and dead letters what the token may use and manage"),
        ),
        "rpc.topics": Method(rpc.TopicPage, topics, LOOK),
        "rpc.subscriptions": Method(rpc.SubscriptionPage, subscriptions, LIST_OWN),
        "rpc.stats": Method(rpc.Nothing, statistics, LOOK),
        "rpc.stats.history": Method(rpc.HistorySpan, history, WATCH),
        "rpc.lake": Method(rpc.Nothing, lake, WATCH),
        "rpc.health": Method(rpc.Nothing, health, ADMIN),
        "rpc.maintenance.run": Method(rpc.Nothing, run_maintenance, ADMIN),
        "rpc.retain": Method(rpc.Retain, retain, MANAGE, audited=True),
        "rpc.retention.remove": Method(rpc.RemoveRetention, remove_retention, MANAGE, audited=True),
        "rpc.retention": Method(rpc.Nothing, retention, Needs(("manage",), "each item; others are left out")),
        "rpc.schedules": Method(
            rpc.Nothing, schedules, Needs(("publish", "read", "manage"), "each item; others are left out")
        ),
        "rpc.schedule.declare": Method(rpc.DeclareSchedule, declare_schedule, SCHEDULE, audited=True),
        "rpc.schedule.take": Method(rpc.TakeSchedule, take_schedule, SCHEDULE),
        "rpc.schedule.publish": Method(rpc.PublishOccurrence, publish_occurrence, SCHEDULE),
        "rpc.schedule.remove": Method(rpc.ScheduleId, remove_schedule, Needs(("manage",), "its topic"), audited=True),
        "rpc.dead_letters": Method(rpc.DeadLetterFilter, list_dead_letters, DEAD),
        "rpc.dead_letters.get": Method(rpc.DeadLetterId, get_dead_letter, Needs(("manage",), "its topic")),
        "rpc.dead_letters.stats": Method(rpc.DeadLetterFilter, dead_letter_statistics, DEAD),
        "rpc.dead_letters.groups": Method(rpc.DeadLetterFilter, dead_letter_groups, DEAD),
        "rpc.dead_letters.redrive": Method(
            rpc.DeadLetterFilter, redrive, Needs(("manage",), f"{DEAD.of}; and `publish` of `to_topic`"), audited=True
        ),
        "rpc.dead_letters.purge": Method(rpc.DeadLetterFilter, purge, DEAD, audited=True),
        "rpc.dead_letters.export": Method(rpc.DeadLetterFilter, export, DEAD),
        "rpc.dead_letters.import": Method(
            rpc.ImportDeadLetters, import_, Needs(("manage",), "each topic; and `publish` of it"), audited=True
        ),
    }
    methods.update(_other_spellings(methods))
    return methods


def _of_connection(run: Callable[[Subscriptions, Any], Any]) -> Callable[[Connection, Any], Any]:
    """A method that the subscriptions of the connection carry out, with their docstring."""
    return wraps(run)(lambda connection, params: run(connection.subscriptions, params))


# Former names, which clients of earlier versions send.
RENAMED = {"rpc.housekeep": "rpc.maintenance.run", "rpc.unretain": "rpc.retention.remove"}


def _other_spellings(methods: dict[str, Method]) -> dict[str, Method]:
    """Former names, and the names with underscores, as some clients write them; there the params of a batch are a bare
    array."""
    verbs = {"subscribe": "subscribe", "acknowledge": "ack", "unsubscribe": "unsubscribe"}
    spelled = {old: methods[new] for old, new in RENAMED.items()}
    for dotted, short in verbs.items():
        spelled[f"rpc.{short}_persistent"] = methods[f"rpc.{dotted}.persistent"]
        batch = methods[f"rpc.{dotted}.persistent.batch"]
        spelled[f"rpc.{short}_persistent_batch"] = Method(list[Any], _from_array(batch), batch.needs)
    return spelled


def _from_array(method: Method) -> Callable[[Connection, Any], Any]:
    """Read a bare array as the one member of the dotted spelling's params."""
    params = method.params
    assert params is not None
    [name] = params.__struct_fields__

    @wraps(method.run)
    def run(connection: Connection, given: list[Any]) -> Any:
        # An array of one array is the array by position.
        items = given[0] if len(given) == 1 and isinstance(given[0], list) else given
        if name == "subscription_ids":
            items = [each.get("subscription_id") if isinstance(each, dict) else each for each in items]
        try:
            converted = msgspec.convert({name: items}, params)
        except msgspec.ValidationError as exc:
            raise InvalidOptionError(str(exc), where="params") from exc
        return method.run(connection, converted)

    return run


METHODS = _methods()
