"""`rpc.publish` and `rpc.publish.batch`: what a frame publishes goes into one transaction."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from headwater.broker.flow import Flow, Ticket, finish
from headwater.broker.publish import Numbered, submit_drafts
from headwater.errors import HeadwaterError, InvalidOption, TooLarge
from headwater.message import (
    BATCH_MESSAGES_MAX,
    DATA_BYTES_MAX,
    NAMED_HEADERS,
    Draft,
    PublishOptions,
    check_whole,
    make_draft,
    ms_of_iso,
)
from headwater.ports.records import Appended
from headwater.protocol.jsonrpc import Call, Fault, params_of
from headwater.protocol.session import Exchange
from headwater.protocol.wire import (
    PlainBatch,
    PlainMessage,
    PlainPublish,
    Publish,
    PublishBatch,
    Published,
    PublishedBatch,
)
from headwater.server.registry import Method, Needs

if TYPE_CHECKING:
    from headwater.server.connection import Connection

_PLAIN = Publish("", msgspec.Raw(b"null"))
_EXTRAS = tuple(name for name in Publish.__struct_fields__ if name not in ("topic", "data", "number", "confirmed"))
PUBLISHER_CHARS_MAX = 128
NUMBER_MAX = 2**53  # up to here every JSON parser reads whole numbers


def publish_calls(connection: Connection, exchange: Exchange, calls: Sequence[Call]) -> None:
    """The hot path: all publishes of a frame, without a task for each. Runs of consecutive numbers are one append."""
    run: list[tuple[Call, PlainPublish | Publish, Draft]] = []
    refused = 0
    for call in calls:
        try:
            params = _params(call)
            draft = draft_of(connection, params)
        except (Fault, HeadwaterError) as exc:
            exchange.refuse(call, connection.fault_for(exc, call.method))
            refused += 1
            continue
        if run and not _follows(run[-1][1], params):
            _store(connection, exchange, run)
            run = []
        run.append((call, params, draft))
    if run:
        _store(connection, exchange, run)
    if refused:
        connection.finished(refused, exchange)
        connection.parts.metrics.count_calls("rpc.publish", "refused", refused)


def _params(call: Call) -> PlainPublish | Publish:
    if call.params is not UNSET:
        try:
            return _plain.decode(call.params)
        except msgspec.ValidationError:
            pass  # something more, or something wrong
    return params_of(call, Publish)


_plain = msgspec.json.Decoder(PlainPublish)


def _follows(last: PlainPublish | Publish, next: PlainPublish | Publish) -> bool:
    if last.number is None or next.number is None:
        return last.number is next.number
    return next.number == last.number + 1


def _store(connection: Connection, exchange: Exchange, run: list[tuple[Call, PlainPublish | Publish, Draft]]) -> None:
    began = time.perf_counter()
    calls, params, drafts = zip(*run, strict=True)
    metrics = connection.parts.metrics

    def done(ticket: Ticket[Appended]) -> None:
        connection.finished(len(calls), exchange)
        if ticket.error is not None:
            fault = connection.fault_for(ticket.error, "rpc.publish")
            for call in calls:
                exchange.refuse(call, fault)
            metrics.count_calls("rpc.publish", "refused", len(calls))
            return
        seqs, repeats = ticket.result()
        flags = [at in repeats for at in range(len(seqs))] if repeats else [False] * len(seqs)
        exchange.answer_all(calls, list(map(Published, seqs, flags)))
        metrics.count_calls("rpc.publish", "done", len(calls))
        metrics.observe_publish(len(calls), len(repeats), time.perf_counter() - began)

    try:
        numbered = numbering(connection, params[0].number, max(each.confirmed for each in params))
        ticket = submit_drafts(connection.core.engine, list(drafts), numbered, connection)
    except HeadwaterError as exc:
        ticket = Ticket()
        finish([(ticket, None, exc)])
    ticket.then(connection.loop, done)


def numbering(connection: Connection, number: int | None, confirmed: int) -> Numbered | None:
    if number is None:
        return None
    if connection.publisher is None:
        raise InvalidOption(
            "numbered messages need a publisher", where="rpc.publish", next='Call rpc.hello with {"publisher": …} first'
        )
    check_whole("number", number, 1, NUMBER_MAX)
    check_whole("confirmed", confirmed, 0, NUMBER_MAX)
    return Numbered(connection.publisher, number, confirmed)


def draft_of(connection: Connection, params: PlainMessage | PlainPublish | Publish) -> Draft:
    topic = connection.require_publish(params.topic)
    raw = memoryview(params.data)
    if len(raw) > DATA_BYTES_MAX:
        raise TooLarge(
            f"{len(raw)} bytes of JSON, the limit is {DATA_BYTES_MAX}",
            where=topic,
            next="Store it elsewhere and publish a reference",
        )
    text = str(raw, "utf-8")
    if isinstance(params, Publish):
        given = {name: value for name in _EXTRAS if (value := getattr(params, name)) != getattr(_PLAIN, name)}
        draft = make_draft(topic, None, _options(given), connection.core.engine.clock.now_ms())
        return replace(draft, data_json=text, size=len(raw))
    return Draft(topic, text, len(raw))


def _options(given: dict[str, Any]) -> PublishOptions:
    """The named headers may stand in `headers` too, as deliveries show them."""
    headers = given.get("headers")
    if headers:
        free = {name: value for name, value in headers.items() if name not in NAMED_HEADERS}
        named = {("from_" if name == "from" else name): headers[name] for name in NAMED_HEADERS if name in headers}
        given = {**named, **given, "headers": free}
    for name in ("deliver_at", "expires_at"):
        if isinstance(given.get(name), str):
            try:
                given[name] = ms_of_iso(given[name]) / 1000
            except ValueError as exc:
                raise InvalidOption(
                    f"{given[name]!r} is no moment",
                    where=name,
                    next="Write 2030-01-31T12:00:00Z, or the seconds since 1970",
                ) from exc
    return cast(PublishOptions, given)


def publish_one(connection: Connection, params: Publish) -> Flow[Published]:
    """The same for one, for servers whose middleware wants to see every call."""
    draft = draft_of(connection, params)
    numbered = numbering(connection, params.number, params.confirmed)
    appended: Appended = yield submit_drafts(connection.core.engine, [draft], numbered, connection)
    connection.parts.metrics.count_published(1, len(appended.repeats))
    return Published(appended.seqs[0], bool(appended.repeats))


def publish_batch(connection: Connection, params: PublishBatch) -> Flow[PublishedBatch]:
    """The same for a batch."""
    drafts = _drafts(connection, params)
    if not drafts:
        return PublishedBatch([])
    numbered = numbering(connection, params.number, params.confirmed)
    appended: Appended = yield submit_drafts(connection.core.engine, drafts, numbered, connection)
    connection.parts.metrics.count_published(len(drafts), len(appended.repeats))
    return PublishedBatch(appended.seqs, sorted(appended.repeats))


def publish_batch_call(connection: Connection, exchange: Exchange, call: Call) -> None:
    """`rpc.publish.batch` without a task; all or none."""
    began = time.perf_counter()
    metrics = connection.parts.metrics

    def done(ticket: Ticket[Appended]) -> None:
        connection.finished(1, exchange)
        if ticket.error is not None:
            exchange.refuse(call, connection.fault_for(ticket.error, call.method))
            metrics.count_calls("rpc.publish.batch", "refused", 1)
            return
        seqs, repeats = ticket.result()
        exchange.answer(call, PublishedBatch(seqs, sorted(repeats)))
        metrics.count_calls("rpc.publish.batch", "done", 1)
        metrics.observe_publish(len(seqs), len(repeats), time.perf_counter() - began)

    try:
        connection.require_method(call.method)  # not even nothing may be published without the right
        params = _batch_params(call)
        drafts = _drafts(connection, params)
        numbered = numbering(connection, params.number, params.confirmed)
        ticket = submit_drafts(connection.core.engine, drafts, numbered, connection)
    except (Fault, HeadwaterError) as exc:
        ticket = Ticket()
        finish([(ticket, None, exc)])
    ticket.then(connection.loop, done)


def _batch_params(call: Call) -> PlainBatch | PublishBatch:
    if call.params is not UNSET:
        try:
            return _plain_batch.decode(call.params)
        except msgspec.ValidationError:
            pass
    return params_of(call, PublishBatch)


_plain_batch = msgspec.json.Decoder(PlainBatch)


def _drafts(connection: Connection, params: PlainBatch | PublishBatch) -> list[Draft]:
    messages = params.messages
    if len(messages) > BATCH_MESSAGES_MAX:
        raise TooLarge(f"more than {BATCH_MESSAGES_MAX} messages in one batch", next="Publish it in parts")
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
                raise InvalidOption("the number of a batch stands beside its messages, not in them")
            drafts.append(draft_of(connection, message))
        except HeadwaterError as exc:
            where = f"message {len(drafts)} of the batch" + (f" ({exc.where})" if exc.where else "")
            raise type(exc)(exc.why, where=where, next=exc.next or "Nothing of the batch was published") from exc
    return drafts


METHODS = {
    "rpc.publish": Method(Publish, publish_one, Needs(("publish",), "the topic")),
    "rpc.publish.batch": Method(PublishBatch, publish_batch, Needs(("publish",), "each topic")),
}
