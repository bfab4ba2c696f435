"""Publishes and the acks of handlers: the messages of a frame go into one transaction, without a task for each call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from headwater.arguments import check_whole
from headwater.broker.flow import Completion, Flow
from headwater.broker.publish import PublisherBatch, submit_drafts
from headwater.errors import HeadwaterError, InvalidOptionError, TooLargeError
from headwater.formats import ms_of_iso
from headwater.message import (
    BATCH_MESSAGES_MAX,
    DATA_BYTES_MAX,
    HEADER_FIELDS,
    NAMED_HEADERS,
    Draft,
    PublishOptions,
    make_draft,
)
from headwater.ports.records import Appended
from headwater.protocol.jsonrpc import Call, Fault, params_of
from headwater.protocol.methods import (
    Acknowledge,
    PlainBatch,
    PlainMessage,
    PlainPublish,
    Publish,
    PublishBatch,
    Published,
    PublishedBatch,
)
from headwater.protocol.session import Exchange
from headwater.topics import parse_pattern

if TYPE_CHECKING:
    from headwater.server.connection import Connection

NUMBER_MAX = 2**53  # up to here every JSON parser reads whole numbers
_DEFAULTS = Publish("", msgspec.Raw(b"null"))
_OPTIONS = tuple(name for name in Publish.__struct_fields__ if name not in ("topic", "data", "number", "confirmed"))
T = TypeVar("T")
U = TypeVar("U")


# --- the methods ----------------------------------------------------------------------------------------------------


def publish(connection: Connection, params: PlainPublish | Publish) -> Flow[Published]:
    """Store one message; the answer comes when it is on disk."""
    [published] = yield from _publish_all(connection, [params], [draft_of(connection, params)])
    return published


def publish_batch(connection: Connection, params: PlainBatch | PublishBatch) -> Flow[PublishedBatch]:
    """All or none."""
    seqs, duplicates = yield from _store(connection, _drafts(connection, params), params.number, params.confirmed)
    return PublishedBatch(seqs, sorted(duplicates))


def _publish_all(
    connection: Connection, params: Sequence[PlainPublish | Publish], drafts: list[Draft]
) -> Flow[list[Published]]:
    """Messages with consecutive numbers, or without any."""
    confirmed = max(each.confirmed for each in params)
    seqs, duplicates = yield from _store(connection, drafts, params[0].number, confirmed)
    if not duplicates:
        return list(map(Published, seqs, repeat(False)))
    return [Published(seq, at in duplicates) for at, seq in enumerate(seqs)]


def _store(connection: Connection, drafts: list[Draft], number: int | None, confirmed: int) -> Flow[Appended]:
    numbered = _numbered(connection, number, confirmed)
    if not drafts:
        return Appended([], frozenset())
    stored: Appended = yield submit_drafts(connection.core.engine, drafts, numbered, connection)
    connection.context.metrics.count_published(len(drafts), len(stored.duplicates))
    return stored


# --- the same without a task for each call, where no middleware wants to see it ---------------------------------------


def start_publishes(connection: Connection, exchange: Exchange, calls: Sequence[Call]) -> None:
    """The `rpc.publish` calls of a frame. Messages with consecutive numbers are one append."""
    runs: list[list[tuple[Call, PlainPublish | Publish, Draft]]] = []
    refused = 0
    for call in calls:
        try:
            params = _params(call, _plain, Publish)
            draft = draft_of(connection, params)
        except (Fault, HeadwaterError) as exc:
            exchange.refuse(call, connection.fault_for(exc, call.method))
            refused += 1
            continue
        if not runs or not _follows(runs[-1][-1][1], params):
            runs.append([])
        runs[-1].append((call, params, draft))
    for run in runs:
        started, numbered, drafts = zip(*run, strict=True)
        _start(connection, exchange, started, _publish_all(connection, numbered, list(drafts)))
    if refused:
        connection.finished(refused, exchange)
        connection.context.metrics.count_calls("rpc.publish", "refused", refused)


def _follows(last: PlainPublish | Publish, next: PlainPublish | Publish) -> bool:
    if last.number is None or next.number is None:
        return last.number is next.number
    return next.number == last.number + 1


def start_batch(connection: Connection, exchange: Exchange, call: Call) -> None:
    def publish_one_batch() -> Flow[Sequence[PublishedBatch]]:
        connection.require_method(call.method)  # also an empty batch needs the right
        return [(yield from publish_batch(connection, _params(call, _plain_batch, PublishBatch)))]

    _start(connection, exchange, [call], publish_one_batch())


def start_ack(connection: Connection, exchange: Exchange, call: Call) -> bool:
    """An ack that its client does not wait for; False if it is another one."""
    try:
        params = _ack.decode(call.params) if call.params is not UNSET else None
    except msgspec.DecodeError:
        return False
    if params is None or not params.lenient or params.sequence_ids is None or params.sequence_id is not None:
        return False
    subscriptions, id, seqs = connection.subscriptions, params.subscription_id, params.sequence_ids

    def ack() -> Flow[Sequence[Any]]:
        connection.require_method(call.method)
        late = yield from subscriptions.acknowledge_leniently(id, seqs)
        return [connection.shapes.acknowledged(params, late)]

    _start(connection, exchange, [call], ack())
    return True


def _start(connection: Connection, exchange: Exchange, calls: Sequence[Call], flow: Flow[Sequence[Any]]) -> None:
    """Answers the calls, which are of one method, with the results of the flow, which waits once at most."""
    began_s, metrics, method = time.perf_counter(), connection.context.metrics, calls[0].method

    def resume(stored: Completion[Any] | None) -> None:
        try:
            if stored is None:
                next(flow).then(connection.loop, resume)  # type: ignore[union-attr]
            elif stored.error is not None:
                flow.throw(stored.error)
            else:
                flow.send(stored.result())
        except StopIteration as stop:
            connection.is_answering = True
            if len(calls) == 1:
                exchange.answer(calls[0], stop.value[0])
            else:
                exchange.answer_all(calls, stop.value)
            connection.finished(len(calls), exchange)
            metrics.observe_in_place(method, len(calls), time.perf_counter() - began_s)
        except Exception as exc:
            fault = connection.fault_for(exc, method)
            connection.is_answering = True
            for call in calls:
                exchange.refuse(call, fault)
            connection.finished(len(calls), exchange)
            metrics.count_calls(method, "refused", len(calls))

    resume(None)


# --- params ---------------------------------------------------------------------------------------------------------


def _params(call: Call, plain: msgspec.json.Decoder[T], full: type[U]) -> T | U:
    if call.params is not UNSET:
        try:
            return plain.decode(call.params)
        except msgspec.ValidationError:
            pass  # more options, or invalid
    return params_of(call, full)


_ack = msgspec.json.Decoder(Acknowledge)
_plain = msgspec.json.Decoder(PlainPublish)
_plain_batch = msgspec.json.Decoder(PlainBatch)


def _numbered(connection: Connection, number: int | None, confirmed: int) -> PublisherBatch | None:
    if number is None:
        return None
    if connection.publisher is None:
        raise InvalidOptionError(
            "numbered messages need a publisher", where="rpc.publish", next='Call rpc.hello with {"publisher": …} first'
        )
    if not (1 <= number <= NUMBER_MAX and 0 <= confirmed <= NUMBER_MAX):
        check_whole("number", number, 1, NUMBER_MAX)
        check_whole("confirmed", confirmed, 0, NUMBER_MAX)
    return PublisherBatch(connection.publisher, number, confirmed)


def draft_of(connection: Connection, params: PlainMessage | PlainPublish | Publish) -> Draft:
    topic = connection.require_publish(params.topic)
    raw = memoryview(params.data)
    if len(raw) > DATA_BYTES_MAX:
        raise TooLargeError(
            f"{len(raw)} bytes of JSON, the limit is {DATA_BYTES_MAX}",
            where=topic,
            next="Store it elsewhere and publish a reference",
        )
    text = str(raw, "utf-8")
    if isinstance(params, Publish):
        if params.published_at is not None:  # it decides when retention deletes the message, and where seeks find it
            connection.require_manage(parse_pattern(topic))
        given = {name: value for name in _OPTIONS if (value := getattr(params, name)) != getattr(_DEFAULTS, name)}
        draft = make_draft(topic, None, _options(given), connection.core.engine.clock.now_ms())
        return replace(draft, data_json=text, size=len(raw))
    return Draft(topic, text, len(raw))


def _options(given: dict[str, Any]) -> PublishOptions:
    """Named headers may also be in `headers`, as deliveries have them."""
    headers = given.get("headers")
    if headers:
        free = {name: value for name, value in headers.items() if name not in NAMED_HEADERS}
        named = {field.option: headers[field.name] for field in HEADER_FIELDS if field.name in headers}
        given = {**named, **given, "headers": free}
    for name in ("deliver_at", "expires_at", "published_at"):
        if isinstance(given.get(name), str):
            try:
                given[name] = ms_of_iso(given[name]) / 1000
            except ValueError as exc:
                raise InvalidOptionError(
                    f"{given[name]!r} is no moment",
                    where=name,
                    next="Write 2030-01-31T12:00:00Z, or the seconds since 1970",
                ) from exc
    return cast(PublishOptions, given)


def _drafts(connection: Connection, params: PlainBatch | PublishBatch) -> list[Draft]:
    messages = params.messages
    if len(messages) > BATCH_MESSAGES_MAX:
        raise TooLargeError(f"more than {BATCH_MESSAGES_MAX} messages in one batch", next="Publish it in parts")
    if isinstance(params, PlainBatch) and messages:
        raws = [memoryview(message.data) for message in messages]
        sizes = list(map(len, raws))
        topics = [message.topic for message in messages]
        if max(sizes) <= DATA_BYTES_MAX and all(map(connection.may_publish, set(topics))):
            return list(map(Draft, topics, [str(raw, "utf-8") for raw in raws], sizes))
    drafts: list[Draft] = []
    for message in messages:
        try:
            if isinstance(message, Publish) and (message.number is not None or message.confirmed):
                raise InvalidOptionError("the number of a batch stands beside its messages, not in them")
            drafts.append(draft_of(connection, message))
        except HeadwaterError as exc:
            where = f"message {len(drafts)} of the batch" + (f" ({exc.where})" if exc.where else "")
            raise type(exc)(exc.why, where=where, next=exc.next or "Nothing of the batch was published") from exc
    return drafts
