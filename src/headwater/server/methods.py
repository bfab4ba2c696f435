"""The server's own methods by name: what each takes, and what it does."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import msgspec

from headwater.broker import claims, dead_letters
from headwater.broker.dead_letters import LetterFilter, LetterStatistics, Redriven
from headwater.broker.flow import Flow, run_async
from headwater.broker.statistics import LogStatistics, SubscriptionInfo, describe_all, log_statistics
from headwater.errors import HeadwaterError, InvalidOption, TooLarge, Unauthorized
from headwater.message import NAME_CHARS_MAX
from headwater.ports.records import RetentionPolicy
from headwater.ports.store import Reader
from headwater.protocol import wire
from headwater.server import publishing
from headwater.server.registry import Method, Needs
from headwater.server.scopes import Scopes, not_allowed, parse_any_spelling
from headwater.server.subscriptions import start_of
from headwater.topics import Dialect, Pattern, check_topic, parse_pattern

if TYPE_CHECKING:
    from headwater.server.connection import Connection

LETTERS_MAX = 1_000  # dead letters in one answer
OK = {"ok": True}


# --- beginning ------------------------------------------------------------------------------------------------------


def hello(connection: Connection, params: wire.Hello) -> wire.Welcome:
    authenticated = not connection.is_stranger
    if params.publisher is not None and authenticated:  # a stranger must not take the name of somebody who is known
        if not 1 <= len(params.publisher) <= publishing.PUBLISHER_CHARS_MAX:
            raise InvalidOption(f"a publisher's name has 1 to {publishing.PUBLISHER_CHARS_MAX} characters")
        connection.parts.take_publisher(params.publisher, connection)
    connection.takes_batches = connection.shapes.reads_batches
    limits = connection.parts.limits
    return wire.Welcome(
        server="headwater",
        version=connection.parts.version,
        log=connection.core.name.rsplit("/", 1)[-1] if authenticated else "",
        salt=connection.core.engine.store.salt if authenticated else 0,
        frame_bytes_max=limits.frame_bytes,
        batch_calls_max=limits.batch_calls,
        authenticated=authenticated,
    )


def authenticate(connection: Connection, params: wire.Authenticate) -> dict[str, bool]:
    connection.authenticate(connection.parts.authenticate(params.token))
    return {"authenticated": True}


# --- live -----------------------------------------------------------------------------------------------------------


def subscribe_live(connection: Connection, params: wire.Topic) -> Any:
    [pattern] = _listen(connection, [params.topic])
    return connection.shapes.subscribed_live(pattern)


def subscribe_live_batch(connection: Connection, params: wire.Topics) -> dict[str, Any]:
    _listen(connection, params.topics)
    return {"subscribed": params.topics}


def _listen(connection: Connection, topics: list[str]) -> list[Pattern]:
    patterns = [parse_any_spelling(topic) for topic in topics]
    for pattern in patterns:
        connection.require_read(pattern)
    connection.parts.live.add_all(connection, patterns)
    return patterns


def unsubscribe_live(connection: Connection, params: wire.Topic) -> Any:
    was_subscribed = connection.parts.live.remove(connection, params.topic)
    return connection.shapes.unsubscribed_live(params.topic, was_subscribed)


def unsubscribe_live_batch(connection: Connection, params: wire.Topics) -> dict[str, list[str]]:
    return {"unsubscribed": [topic for topic in params.topics if connection.parts.live.remove(connection, topic)]}


# --- durable subscriptions ------------------------------------------------------------------------------------------


async def subscribe(connection: Connection, params: wire.Subscribe) -> Any:
    return connection.shapes.subscribed(await connection.subscriptions.begin(params))


async def subscribe_batch(connection: Connection, params: wire.SubscribeBatch) -> Any:
    return connection.shapes.subscribed_all(await connection.subscriptions.begin_all(params))


async def release(connection: Connection, params: wire.Release) -> Any:
    await connection.subscriptions.release(params.subscription_id, params.seen)
    return connection.shapes.released(params.subscription_id)


async def release_batch(connection: Connection, params: wire.SubscriptionIds) -> Any:
    for id in params.subscription_ids:
        connection.subscriptions.find(id)
    for id in params.subscription_ids:
        await connection.subscriptions.release(id)
    return connection.shapes.released_all(params.subscription_ids)


def acknowledge(connection: Connection, params: wire.Acknowledge) -> Flow[Any]:
    """One seq that cannot be acked does not keep the others from being acked; the answer names it. If none can be, the
    call is refused."""
    seqs = _seqs(params)
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


def _seqs(params: wire.Acknowledge) -> list[int]:
    if (params.sequence_id is None) == (params.sequence_ids is None):
        raise InvalidOption("give either sequence_id or sequence_ids", where=params.subscription_id)
    return [params.sequence_id] if params.sequence_id is not None else params.sequence_ids or []


async def acknowledge_batch(connection: Connection, params: wire.AcknowledgeBatch) -> Any:
    """Each for itself: one that fails does not keep the others from being acked."""
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


def nack(connection: Connection, params: wire.Settle) -> Flow[dict[str, bool]]:
    yield from connection.subscriptions.nack(params)
    return OK


def reject(connection: Connection, params: wire.Settle) -> Flow[dict[str, bool]]:
    yield from connection.subscriptions.reject(params)
    return OK


def extend(connection: Connection, params: wire.Settle) -> Flow[dict[str, bool]]:
    yield from connection.subscriptions.extend(params)
    return OK


async def fetch(connection: Connection, params: wire.Fetch) -> Any:
    return await connection.subscriptions.fetch(params)


def end_fetches(connection: Connection, params: wire.SubscriptionId) -> dict[str, bool]:
    connection.subscriptions.end_fetches(params.subscription_id)
    return OK


def give_back(connection: Connection, params: wire.GiveBack) -> Flow[dict[str, bool]]:
    yield from connection.subscriptions.give_back(params.subscription_id, params.sequence_ids)
    return OK


# --- looking after subscriptions ------------------------------------------------------------------------------------


def subscription(connection: Connection, params: wire.SubscriptionId) -> Flow[Any]:
    with _hiding(connection, params.subscription_id, "rpc.subscription"):
        connection.require_use((yield from connection.core.subscription_record(params.subscription_id)))
    info = yield from connection.core.subscription_info(params.subscription_id)
    return info


def remove_subscription(connection: Connection, params: wire.SubscriptionId) -> Flow[dict[str, bool]]:
    with _hiding(connection, params.subscription_id, "rpc.subscription.remove"):
        yield from connection.core.unsubscribe(params.subscription_id, connection.require_use)
    return OK


def seek(connection: Connection, params: wire.Seek) -> Flow[dict[str, int]]:
    id, start = params.subscription_id, start_of(params.start)
    with _hiding(connection, id, "rpc.seek"):
        position = yield from connection.core.seek(id, start, connection.require_use)
    return {"sequence_id": position}


@contextmanager
def _hiding(connection: Connection, id: str, method: str) -> Iterator[None]:
    """What the token may not use is to it as if it were not there."""
    try:
        yield
    except Unauthorized as exc:
        connection.fault_for(exc, method)  # which records it
        raise claims.unknown(id) from exc


# --- looking: what the token may read or manage, and nothing of the rest ----------------------------------------------


def topic_max_seq(connection: Connection, params: wire.Topic) -> Flow[dict[str, int]]:
    if not connection.scopes.may_look_at(check_topic(params.topic)):
        raise not_allowed("read or manage", params.topic)
    last = yield from connection.core.topic_max_seq(params.topic)
    return {"sequence_id": last}


def last_seq(connection: Connection, params: wire.Nothing) -> Flow[dict[str, int]]:
    last = yield from connection.core.last_seq()
    return {"sequence_id": last}


def topics(connection: Connection, params: wire.TopicPage) -> Flow[msgspec.Raw]:
    if not 1 <= params.limit <= wire.TOPICS_MAX:
        raise TooLarge(f"limit lies between 1 and {wire.TOPICS_MAX:,}, not {params.limit}", next="Page with after")
    scopes, engine = connection.scopes, connection.core.engine

    def page(reader: Reader) -> msgspec.Raw:
        found = reader.topic_counts()
        first = bisect_right(found, params.after, key=lambda each: each.topic)
        visible = (each for each in islice(found, first, None) if scopes.may_look_at(each.topic))
        return _encoded(list(islice(visible, params.limit)))

    return engine.read(page, engine.statistics)


def _encoded(answer: Any) -> msgspec.Raw:
    """On the thread that reads: a large answer would keep the event loop, and with it all others, waiting."""
    return msgspec.Raw(msgspec.json.encode(answer))


def subscriptions(connection: Connection, params: wire.Nothing) -> Flow[msgspec.Raw]:
    core, scopes, owner = connection.core, connection.scopes, _owner(connection)

    def seen(reader: Reader) -> msgspec.Raw:
        return _encoded(_usable(scopes, owner, describe_all(reader, core.engine.clock.now_ms())))

    return core.shared_read(("rpc.subscriptions", scopes, owner), seen)


def _owner(connection: Connection) -> str | None:
    return None if connection.grant is None else connection.grant.owner


def _usable(scopes: Scopes, owner: str | None, found: list[SubscriptionInfo]) -> list[SubscriptionInfo]:
    return [
        each
        for each in found
        if scopes.may_use(each.id, parse_any_spelling(each.pattern), is_own=each.owner in (None, owner))
    ]


def statistics(connection: Connection, params: wire.Nothing) -> Flow[msgspec.Raw]:
    core, scopes, owner = connection.core, connection.scopes, _owner(connection)

    def seen(reader: Reader) -> msgspec.Raw:
        found = log_statistics(reader, core.engine.clock.now_ms())
        topics = [each for each in found.topics if scopes.may_look_at(each.topic)]
        return _encoded(
            LogStatistics(
                last_seq=found.last_seq,
                messages=sum(each.count for each in topics),
                bytes=sum(each.bytes for each in topics),
                topics=topics[: wire.TOPICS_MAX],
                subscriptions=_usable(scopes, owner, found.subscriptions),
                topics_left_out=max(0, len(topics) - wire.TOPICS_MAX),
            )
        )

    return core.shared_read(("rpc.stats", scopes, owner), seen)


def health(connection: Connection, params: wire.Nothing) -> Flow[Any]:
    return connection.core.health()


def housekeep(connection: Connection, params: wire.Nothing) -> Flow[Any]:
    return connection.core.housekeep()


# --- retention ------------------------------------------------------------------------------------------------------


def retain(connection: Connection, params: wire.Retain) -> Flow[dict[str, bool]]:
    dialect = _dialect(params.dialect)
    connection.require_manage(parse_pattern(params.topic, dialect))
    yield from connection.core.retain(
        params.topic,
        max_age=params.max_age,
        max_count=params.max_count,
        max_bytes=params.max_bytes,
        keep_unacked=params.keep_unacked,
        dialect=dialect,
    )
    return OK


def unretain(connection: Connection, params: wire.Unretain) -> Flow[dict[str, bool]]:
    dialect = _dialect(params.dialect)
    connection.require_manage(parse_pattern(params.topic, dialect))
    removed = yield from connection.core.unretain(params.topic, dialect)
    return {"removed": removed}


def retention(connection: Connection, params: wire.Nothing) -> Flow[list[RetentionPolicy]]:
    found = yield from connection.core.retention()
    return [each for each in found if connection.scopes.may_manage(parse_pattern(each.pattern, each.dialect))]


def _dialect(given: str) -> Dialect:
    if given not in ("nats", "amqp"):
        raise InvalidOption(f"dialect must be nats or amqp, not {given!r}")
    return given  # type: ignore[return-value]


# --- dead letters: those of the topics that the token may manage ------------------------------------------------------


def letters(connection: Connection, params: wire.Letters) -> Flow[list[Any]]:
    """As many as an answer takes; the next page is after the last of them, and an empty one is the end."""
    _check_limit(params)
    found = yield from connection.core.dead_letters.page(params.after, params.limit, **_filter(connection, params))
    return [dead_letters.to_wire(letter) for letter in found.letters]


def _check_limit(params: wire.Letters) -> None:
    if not 1 <= params.limit <= LETTERS_MAX:
        raise TooLarge(f"limit lies between 1 and {LETTERS_MAX}, not {params.limit}", next="Page with after")


def letter(connection: Connection, params: wire.LetterId) -> Flow[Any]:
    found = yield from connection.core.dead_letters.get(params.id)
    if not connection.scopes.manages(found.message.topic):
        raise dead_letters.unknown(params.id)  # as if it were not there
    return dead_letters.to_wire(found)


def _filter(connection: Connection, params: wire.Letters) -> LetterFilter:
    """Without a topic, it asks for those of every topic."""
    names = ("ids", "subscription", "topic", "type", "reason", "error")
    for name in names:
        value = getattr(params, name)
        if isinstance(value, str) and len(value) > NAME_CHARS_MAX:
            raise TooLarge(f"{name} has more than {NAME_CHARS_MAX} characters")
    connection.require_manage(parse_pattern(">" if params.topic is None else params.topic))
    return cast(LetterFilter, {name: value for name in names if (value := getattr(params, name)) is not None})


def letter_statistics(connection: Connection, params: wire.Letters) -> Flow[LetterStatistics]:
    return connection.core.dead_letters.statistics(**_filter(connection, params))


def redrive(connection: Connection, params: wire.Letters) -> Flow[Redriven]:
    """To their subscription again: the message was published before. To a topic: it is published anew."""
    chosen = _filter(connection, params)
    if params.to_topic is not None:
        connection.require_publish(params.to_topic)
    return connection.core.dead_letters.redrive(params.to_topic, **chosen)


def purge(connection: Connection, params: wire.Letters) -> Flow[int]:
    return connection.core.dead_letters.purge(**_filter(connection, params))


def export(connection: Connection, params: wire.Letters) -> Flow[dead_letters.Exported]:
    _check_limit(params)
    return connection.core.dead_letters.export(params.after, params.limit, **_filter(connection, params))


def import_(connection: Connection, params: wire.ImportLetters) -> Flow[int]:
    """A letter whose message is not in the log is redriven with what was imported: so it is published by its import."""

    def allow(topic: str) -> None:
        connection.require_publish(topic)
        connection.require_manage(parse_pattern(topic))

    return connection.core.dead_letters.import_(params.lines, allow)


OPEN = Needs((), "")
LISTEN = Needs(("read",), "each pattern")
HELD = Needs(("read",), "what the connection holds")
DURABLE = Needs(("read",), "the pattern; and `consume` of the name, unless the mode is ephemeral")
OWN = Needs(("consume", "manage"), "`consume` of the name of its own subscription, else `manage` of its pattern")
LOOK = Needs(("read", "manage"), "what is shown: nothing else is")
LIST_OWN = Needs(("consume", "manage"), "what is shown: nothing else is")
MANAGE = Needs(("manage",), "the pattern")
DEAD = Needs(("manage",), "the topic filter, or every topic without one")
ADMIN = Needs(("admin",), "the server")


def _methods() -> dict[str, Method]:
    methods = {
        "rpc.hello": Method(wire.Hello, hello, OPEN),
        "rpc.authenticate": Method(wire.Authenticate, authenticate, OPEN),
        **publishing.METHODS,
        "rpc.subscribe": Method(wire.Topic, subscribe_live, LISTEN),
        "rpc.unsubscribe": Method(wire.Topic, unsubscribe_live, HELD),
        "rpc.subscribe.batch": Method(wire.Topics, subscribe_live_batch, LISTEN),
        "rpc.unsubscribe.batch": Method(wire.Topics, unsubscribe_live_batch, HELD),
        "rpc.subscribe.persistent": Method(wire.Subscribe, subscribe, DURABLE),
        "rpc.subscribe.persistent.batch": Method(wire.SubscribeBatch, subscribe_batch, DURABLE),
        "rpc.unsubscribe.persistent": Method(wire.Release, release, HELD),
        "rpc.unsubscribe.persistent.batch": Method(wire.SubscriptionIds, release_batch, HELD),
        "rpc.acknowledge.persistent": Method(wire.Acknowledge, acknowledge, HELD),
        "rpc.acknowledge.persistent.batch": Method(wire.AcknowledgeBatch, acknowledge_batch, HELD),
        "rpc.nack": Method(wire.Settle, nack, HELD),
        "rpc.reject": Method(wire.Settle, reject, HELD),
        "rpc.extend": Method(wire.Settle, extend, HELD),
        "rpc.fetch": Method(wire.Fetch, fetch, HELD),
        "rpc.fetch.end": Method(wire.SubscriptionId, end_fetches, HELD),
        "rpc.release": Method(wire.GiveBack, give_back, HELD),
        "rpc.subscription": Method(wire.SubscriptionId, subscription, OWN),
        "rpc.subscription.remove": Method(wire.SubscriptionId, remove_subscription, OWN, audited=True),
        "rpc.seek": Method(wire.Seek, seek, OWN, audited=True),
        "rpc.topic_max_seq": Method(wire.Topic, topic_max_seq, Needs(("read", "manage"), "the topic")),
        "rpc.last_seq": Method(wire.Nothing, last_seq, Needs(("read", "manage"), "anything")),
        "rpc.topics": Method(wire.TopicPage, topics, LOOK),
        "rpc.subscriptions": Method(wire.Nothing, subscriptions, LIST_OWN),
        "rpc.stats": Method(wire.Nothing, statistics, LOOK),
        "rpc.health": Method(wire.Nothing, health, ADMIN),
        "rpc.housekeep": Method(wire.Nothing, housekeep, ADMIN),
        "rpc.retain": Method(wire.Retain, retain, MANAGE, audited=True),
        "rpc.unretain": Method(wire.Unretain, unretain, MANAGE, audited=True),
        "rpc.retention": Method(wire.Nothing, retention, Needs(("manage",), "what is shown: nothing else is")),
        "rpc.dead_letters": Method(wire.Letters, letters, DEAD),
        "rpc.dead_letters.get": Method(wire.LetterId, letter, Needs(("manage",), "its topic")),
        "rpc.dead_letters.stats": Method(wire.Letters, letter_statistics, DEAD),
        "rpc.dead_letters.redrive": Method(
            wire.Letters, redrive, Needs(("manage",), f"{DEAD.of}; and `publish` of `to_topic`"), audited=True
        ),
        "rpc.dead_letters.purge": Method(wire.Letters, purge, DEAD, audited=True),
        "rpc.dead_letters.export": Method(wire.Letters, export, DEAD),
        "rpc.dead_letters.import": Method(
            wire.ImportLetters, import_, Needs(("manage",), "each topic; and `publish` of it"), audited=True
        ),
    }
    methods.update(_other_spellings(methods))
    return methods


def _other_spellings(methods: dict[str, Method]) -> dict[str, Method]:
    """With underscores, as some clients write them; there a batch is a bare array."""
    verbs = {"subscribe": "subscribe", "acknowledge": "ack", "unsubscribe": "unsubscribe"}
    spelled: dict[str, Method] = {}
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

    def run(connection: Connection, given: list[Any]) -> Any:
        # An array of one array is the array by position.
        items = given[0] if len(given) == 1 and isinstance(given[0], list) else given
        if name == "subscription_ids":
            items = [each.get("subscription_id") if isinstance(each, dict) else each for each in items]
        try:
            converted = msgspec.convert({name: items}, params)
        except msgspec.ValidationError as exc:
            raise InvalidOption(str(exc), where="params") from exc
        return method.run(connection, converted)

    return run


METHODS = _methods()
