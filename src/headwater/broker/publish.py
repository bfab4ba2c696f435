"""Publishing: checked and encoded in the caller's thread, stored by the committer."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple, cast

from headwater.broker.committer import NO_SUBSCRIPTION, Undo, bytes_of
from headwater.broker.engine import Engine, refuse_in_transaction
from headwater.broker.flow import Flow, Ticket
from headwater.delivery.receipts import receipts_for, stored_seqs
from headwater.errors import InvalidInput, InvalidOption, TooLarge
from headwater.message import BATCH_MESSAGES_MAX, Draft, Extras, Message, PublishOptions, encode_all, make_draft
from headwater.ports.records import Appended
from headwater.ports.store import Writer
from headwater.topics import check_topic

Outgoing = tuple[str, Any] | tuple[str, Any, Mapping[str, Any]] | Mapping[str, Any]
"""One of several: (topic, data), (topic, data, options), or a mapping with topic, data and options."""


def publish(engine: Engine, topic: str, data: Any, options: PublishOptions) -> Flow[int]:
    refuse_in_transaction(engine)
    engine.refuse_closed()
    draft = make_draft(check_topic(topic), data, options, engine.clock.now_ms())
    seq: int = yield engine.committer.publish(draft)
    return seq


def publish_many(engine: Engine, messages: Iterable[Outgoing]) -> Flow[list[int]]:
    """All or none, in one transaction."""
    refuse_in_transaction(engine)
    engine.refuse_closed()
    drafts = make_drafts(messages, engine.clock.now_ms())
    if not drafts:
        return []
    seqs: list[int] = yield engine.committer.publish_many(drafts)
    return seqs


class Numbered(NamedTuple):
    """Who numbers its messages, the number of the first of them, and below which it has heard of all."""

    publisher: str
    first: int
    confirmed: int = 0


def submit_drafts(
    engine: Engine, drafts: list[Draft], numbered: Numbered | None, source: Hashable = None
) -> Ticket[Appended]:
    """Store messages, all or none; what a numbered publisher sends again is recognised and gets its first seq. Sources
    take turns: see `committer`."""

    def work(writer: Writer, undo: Undo) -> Appended:
        now_ms = engine.clock.now_ms()
        if numbered is None:
            return _append(engine, writer, undo, drafts, now_ms)
        publisher, first, confirmed = numbered
        known = stored_seqs(writer.receipts(publisher, first, len(drafts)), first, len(drafts))
        missing = [at for at in range(len(drafts)) if first + at not in known]
        stored = _append(engine, writer, undo, [drafts[at] for at in missing], now_ms)
        seq_at = dict(zip(missing, stored.seqs, strict=True))
        seqs = [seq_at[at] if at in seq_at else known[first + at] for at in range(len(drafts))]
        repeats = {at for at in range(len(drafts)) if at not in seq_at} | {missing[index] for index in stored.repeats}
        # For the new ones alone: the receipt of a known one may reach further than this time's frame.
        writer.add_receipts(publisher, receipts_for([first + at for at in missing], stored.seqs), now_ms)
        if confirmed:
            writer.forget_receipts(publisher, confirmed)
        return Appended(seqs, frozenset(repeats))

    refuse_in_transaction(engine)
    engine.refuse_closed()
    return engine.committer.submit(work, len(drafts), bytes=bytes_of(drafts), touching=NO_SUBSCRIPTION, source=source)


def _append(engine: Engine, writer: Writer, undo: Undo, drafts: list[Draft], now_ms: int) -> Appended:
    appended = writer.append(drafts, now_ms, engine.dedupe)
    repeats = appended.repeats
    new = appended.seqs if not repeats else [seq for at, seq in enumerate(appended.seqs) if at not in repeats]
    undo.note_published(drafts, new)
    return appended


def make_drafts(messages: Iterable[Outgoing], now_ms: int) -> list[Draft]:
    batch = list(messages)
    if len(batch) > BATCH_MESSAGES_MAX:
        raise TooLarge(f"more than {BATCH_MESSAGES_MAX} messages in one batch", next="Publish it in parts")
    return _plain_drafts(batch) or _drafts_one_by_one(batch, now_ms)


def _plain_drafts(batch: list[Outgoing]) -> list[Draft] | None:
    """The hot path, for messages of nothing but topic and data: each step over the whole batch, which takes two thirds
    of the time of a loop. None if some message needs a closer look."""
    if set(map(type, batch)) != {tuple} or set(map(len, batch)) != {2}:
        return None
    topics, payloads = zip(*batch, strict=True)
    try:
        checked = {topic: check_topic(topic) for topic in set(topics)}
        encoded = encode_all(payloads)
    except (InvalidInput, TypeError):
        return None
    if encoded is None:
        return None
    return list(map(Draft, map(checked.__getitem__, topics), *encoded))


def _drafts_one_by_one(batch: list[Outgoing], now_ms: int) -> list[Draft]:
    drafts: list[Draft] = []
    for message in batch:
        try:
            topic, data, options = parts_of(message)
            drafts.append(make_draft(check_topic(topic), data, options, now_ms))
        except InvalidInput as exc:
            raise type(exc)(
                exc.why,
                where=f"message {len(drafts)} of the batch" + (f" ({exc.where})" if exc.where else ""),
                next=exc.next or "Nothing of the batch was published",
            ) from exc
    return drafts


def parts_of(message: Outgoing) -> tuple[str, Any, PublishOptions]:
    if isinstance(message, Mapping):
        rest = dict(message)
        try:
            topic, data = rest.pop("topic"), rest.pop("data")
        except KeyError as exc:
            raise InvalidOption(f"{exc.args[0]!r} is missing", next="A message needs topic and data") from None
        if "from" in rest:
            rest["from_"] = rest.pop("from")
        return topic, data, cast(PublishOptions, rest)
    if isinstance(message, tuple) and len(message) in (2, 3):
        options = dict(message[2]) if len(message) == 3 else {}
        return message[0], message[1], cast(PublishOptions, options)
    raise InvalidOption(
        f"a {type(message).__name__} is no message",
        next="Pass (topic, data), (topic, data, options) or a mapping",
    )


def draft_of(message: Message, topic: str) -> Draft:
    """A stored message as a new one on another topic, with all its headers but without its id and times."""
    headers = bytes(message.raw_headers)
    return Draft(
        check_topic(topic),
        message.data_json,
        message.size,
        None,
        Extras(
            priority=message.priority,
            from_=message.from_,
            to=message.to,
            reply_to=message.reply_to,
            correlation_id=message.correlation_id,
            type=message.type,
            version=message.version,
            content_type=message.content_type,
            traceparent=message.traceparent,
            headers_json=None if headers == b"null" else headers.decode(),
        ),
    )
