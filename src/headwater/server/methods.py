"""The server's own methods by name: what each takes, and what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import msgspec

from headwater.broker import dead_letters
from headwater.broker.core import Core
from headwater.broker.dead_letters import LetterFilter
from headwater.broker.flow import Flow, run_async
from headwater.errors import HeadwaterError, InvalidOption, TooLarge
from headwater.message import NAME_CHARS_MAX
from headwater.protocol import wire
from headwater.server import publishing
from headwater.server.registry import Method
from headwater.server.subscriptions import start_of
from headwater.topics import Dialect, Pattern, parse_pattern

if TYPE_CHECKING:
    from headwater.server.connection import Connection

LETTERS_MAX = 1_000  # dead letters in one answer
LETTER_IDS_MAX = 10_000
OK = {"ok": True}


# --- beginning ------------------------------------------------------------------------------------------------------


def hello(connection: Connection, params: wire.Hello) -> wire.Welcome:
    authenticated = connection.grant is not None or not connection.parts.needs_token
    if params.publisher is not None and authenticated:  # a stranger must not take the name of somebody who is known
        if not 1 <= len(params.publisher) <= publishing.PUBLISHER_CHARS_MAX:
            raise InvalidOption(f"a publisher's name has 1 to {publishing.PUBLISHER_CHARS_MAX} characters")
        connection.parts.take_publisher(params.publisher, connection)
    connection.takes_batches = connection.shapes.reads_batches
    limits = connection.parts.limits
    return wire.Welcome(
        server="headwater",
        version=connection.parts.version,
        log=connection.core.name.rsplit("/", 1)[-1],
        salt=connection.core.engine.store.salt,
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
    patterns = [parse_pattern(topic, "amqp" if "#" in topic else "nats") for topic in topics]
    for pattern in patterns:
        connection.require_subscribe(pattern)
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


def _require_stored(connection: Connection, id: str) -> Flow[None]:
    """A stored subscription may be looked at and moved by who may subscribe to its pattern."""
    pattern = yield from connection.core.subscription_pattern(id)
    if not connection.scopes.admin:
        connection.require_subscribe(pattern)


def subscription(connection: Connection, params: wire.SubscriptionId) -> Flow[Any]:
    yield from _require_stored(connection, params.subscription_id)
    info = yield from connection.core.subscription_info(params.subscription_id)
    return info


def remove_subscription(connection: Connection, params: wire.SubscriptionId) -> Flow[dict[str, bool]]:
    yield from _require_stored(connection, params.subscription_id)
    yield from connection.core.unsubscribe(params.subscription_id)
    return OK


def seek(connection: Connection, params: wire.Seek) -> Flow[dict[str, int]]:
    yield from _require_stored(connection, params.subscription_id)
    position = yield from connection.core.seek(params.subscription_id, start_of(params.start))
    return {"sequence_id": position}


def topic_max_seq(connection: Connection, params: wire.Topic) -> Flow[dict[str, int]]:
    if not connection.scopes.admin:
        connection.require_subscribe(parse_pattern(params.topic))
    last = yield from connection.core.topic_max_seq(params.topic)
    return {"sequence_id": last}


def last_seq(connection: Connection, params: wire.Nothing) -> Flow[dict[str, int]]:
    last = yield from connection.core.last_seq()
    return {"sequence_id": last}


# --- looking after the log: for admins --------------------------------------------------------------------------------

Run = Callable[["Connection", Any], Any]


def for_admins(run: Callable[[Core, Any], Any]) -> Run:
    def checked(connection: Connection, params: Any) -> Any:
        connection.require_admin()
        return run(connection.core, params)

    return checked


def retain(core: Core, params: wire.Retain) -> Flow[dict[str, bool]]:
    yield from core.retain(
        params.topic,
        max_age=params.max_age,
        max_count=params.max_count,
        max_bytes=params.max_bytes,
        keep_unacked=params.keep_unacked,
        dialect=_dialect(params.dialect),
    )
    return OK


def unretain(core: Core, params: wire.Unretain) -> Flow[dict[str, bool]]:
    removed = yield from core.unretain(params.topic, _dialect(params.dialect))
    return {"removed": removed}


def _dialect(given: str) -> Dialect:
    if given not in ("nats", "amqp"):
        raise InvalidOption(f"dialect must be nats or amqp, not {given!r}")
    return given  # type: ignore[return-value]


def letters(core: Core, params: wire.Letters) -> Flow[list[Any]]:
    """As many as an answer takes; the next page is after the last of them, and an empty one is the end."""
    _check_limit(params)
    found = yield from core.dead_letters.page(params.after, params.limit, **_filter(params))
    return [dead_letters.to_wire(letter) for letter in found.letters]


def _check_limit(params: wire.Letters) -> None:
    if not 1 <= params.limit <= LETTERS_MAX:
        raise TooLarge(f"limit lies between 1 and {LETTERS_MAX}, not {params.limit}", next="Page with after")


def letter(core: Core, params: wire.LetterId) -> Flow[Any]:
    found = yield from core.dead_letters.get(params.id)
    return dead_letters.to_wire(found)


def _filter(params: wire.Letters) -> LetterFilter:
    names = ("ids", "subscription", "topic", "type", "reason", "error")
    for name in names:
        value = getattr(params, name)
        if isinstance(value, str) and len(value) > NAME_CHARS_MAX:
            raise TooLarge(f"{name} has more than {NAME_CHARS_MAX} characters")
    if params.ids is not None and len(params.ids) > LETTER_IDS_MAX:
        raise TooLarge(f"{len(params.ids):,} ids are more than {LETTER_IDS_MAX:,}", next="Name them in several calls")
    return cast(LetterFilter, {name: value for name in names if (value := getattr(params, name)) is not None})


def export(core: Core, params: wire.Letters) -> Flow[dead_letters.Exported]:
    _check_limit(params)
    return core.dead_letters.export(params.after, params.limit, **_filter(params))


def _methods() -> dict[str, Method]:
    methods = {
        "rpc.hello": Method(wire.Hello, hello),
        "rpc.authenticate": Method(wire.Authenticate, authenticate),
        **publishing.METHODS,
        "rpc.subscribe": Method(wire.Topic, subscribe_live),
        "rpc.unsubscribe": Method(wire.Topic, unsubscribe_live),
        "rpc.subscribe.batch": Method(wire.Topics, subscribe_live_batch),
        "rpc.unsubscribe.batch": Method(wire.Topics, unsubscribe_live_batch),
        "rpc.subscribe.persistent": Method(wire.Subscribe, subscribe),
        "rpc.subscribe.persistent.batch": Method(wire.SubscribeBatch, subscribe_batch),
        "rpc.unsubscribe.persistent": Method(wire.Release, release),
        "rpc.unsubscribe.persistent.batch": Method(wire.SubscriptionIds, release_batch),
        "rpc.acknowledge.persistent": Method(wire.Acknowledge, acknowledge),
        "rpc.acknowledge.persistent.batch": Method(wire.AcknowledgeBatch, acknowledge_batch),
        "rpc.nack": Method(wire.Settle, nack),
        "rpc.reject": Method(wire.Settle, reject),
        "rpc.extend": Method(wire.Settle, extend),
        "rpc.fetch": Method(wire.Fetch, fetch),
        "rpc.fetch.end": Method(wire.SubscriptionId, end_fetches),
        "rpc.release": Method(wire.GiveBack, give_back),
        "rpc.subscription": Method(wire.SubscriptionId, subscription),
        "rpc.subscription.remove": Method(wire.SubscriptionId, remove_subscription),
        "rpc.seek": Method(wire.Seek, seek),
        "rpc.topic_max_seq": Method(wire.Topic, topic_max_seq),
        "rpc.last_seq": Method(wire.Nothing, last_seq),
    }
    admin: dict[str, tuple[type[Any], Callable[[Core, Any], Any]]] = {
        "rpc.topics": (wire.Nothing, lambda core, _: core.topics()),
        "rpc.subscriptions": (wire.Nothing, lambda core, _: core.subscription_infos()),
        "rpc.stats": (wire.Nothing, lambda core, _: core.statistics()),
        "rpc.health": (wire.Nothing, lambda core, _: core.health()),
        "rpc.retain": (wire.Retain, retain),
        "rpc.unretain": (wire.Unretain, unretain),
        "rpc.retention": (wire.Nothing, lambda core, _: core.retention()),
        "rpc.housekeep": (wire.Nothing, lambda core, _: core.housekeep()),
        "rpc.dead_letters": (wire.Letters, letters),
        "rpc.dead_letters.get": (wire.LetterId, letter),
        "rpc.dead_letters.stats": (wire.Letters, lambda core, p: core.dead_letters.statistics(**_filter(p))),
        "rpc.dead_letters.redrive": (wire.Letters, lambda core, p: core.dead_letters.redrive(p.to_topic, **_filter(p))),
        "rpc.dead_letters.purge": (wire.Letters, lambda core, p: core.dead_letters.purge(**_filter(p))),
        "rpc.dead_letters.export": (wire.Letters, export),
        "rpc.dead_letters.import": (wire.ImportLetters, lambda core, p: core.dead_letters.import_(p.lines)),
    }
    methods.update({name: Method(params, for_admins(run)) for name, (params, run) in admin.items()})
    methods.update(_other_spellings(methods))
    return methods


def _other_spellings(methods: dict[str, Method]) -> dict[str, Method]:
    """With underscores, as some clients write them; there a batch is a bare array."""
    verbs = {"subscribe": "subscribe", "acknowledge": "ack", "unsubscribe": "unsubscribe"}
    spelled: dict[str, Method] = {}
    for dotted, short in verbs.items():
        spelled[f"rpc.{short}_persistent"] = methods[f"rpc.{dotted}.persistent"]
        batch = methods[f"rpc.{dotted}.persistent.batch"]
        spelled[f"rpc.{short}_persistent_batch"] = Method(list[Any], _from_array(batch))
    return spelled


def _from_array(method: Method) -> Run:
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
