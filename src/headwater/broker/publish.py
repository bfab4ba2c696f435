"""Publishing: checked and encoded in the caller's thread, stored by the committer."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple, cast

from headwater.broker.committer import TransactionHooks, append, bytes_of
from headwater.broker.engine import Engine
from headwater.broker.flow import Completion
from headwater.delivery.publishing import receipts_for, stored_seqs
from headwater.errors import InvalidInputError, InvalidOptionError, TooLargeError
from headwater.message import BATCH_MESSAGES_MAX, Draft, PublishOptions, encode_all, make_draft
from headwater.ports.records import Appended
from headwater.ports.store import PUBLISHING, Writer
from headwater.topics import check_topic

Outgoing = tuple[str, Any] | tuple[str, Any, Mapping[str, Any]] | Mapping[str, Any]
"""One of several: (topic, data), (topic, data, options), or a mapping with topic, data and options."""


class PublisherBatch(NamedTuple):
    """The publisher, the number of its first message, and the number below which it has all confirmations."""

    publisher: str
    first: int
    confirmed: int = 0


def submit_drafts(
    engine: Engine, drafts: list[Draft], numbered: PublisherBatch | None, source: Hashable = None
) -> Completion[Appended]:
    """Store messages, all or none; what a numbered publisher sends again is recognised and gets its first seq. Sources
    take turns: see `committer`."""

    def work(writer: Writer, hooks: TransactionHooks) -> Appended:
        now_ms = engine.clock.now_ms()
        if numbered is None:
            return append(writer, hooks, drafts, now_ms, engine.dedupe)
        publisher, first, confirmed = numbered
        receipts = writer.receipts(publisher, first, len(drafts))
        if not receipts:  # as a rule
            stored = append(writer, hooks, drafts, now_ms, engine.dedupe)
            numbers = range(first, first + len(drafts))
            writer.add_receipts(publisher, receipts_for(numbers, stored.seqs), now_ms)
            if confirmed:
                writer.forget_receipts(publisher, confirmed)
            return stored
        known = stored_seqs(receipts, first, len(drafts))
        missing = [at for at in range(len(drafts)) if first + at not in known]
        stored = append(writer, hooks, [drafts[at] for at in missing], now_ms, engine.dedupe)
        seq_at = dict(zip(missing, stored.seqs, strict=True))
        seqs = [seq_at[at] if at in seq_at else known[first + at] for at in range(len(drafts))]
        duplicates = {at for at in range(len(drafts)) if at not in seq_at} | {
            missing[index] for index in stored.duplicates
        }
        # For the new ones alone: the receipt of a known one may reach further than this time's frame.
        writer.add_receipts(publisher, receipts_for([first + at for at in missing], stored.seqs), now_ms)
        if confirmed:
            writer.forget_receipts(publisher, confirmed)
        return Appended(seqs, frozenset(duplicates))

    engine.check_usable()
    return engine.committer.submit(work, len(drafts), bytes=bytes_of(drafts), touching=PUBLISHING, source=source)


def make_drafts(messages: Iterable[Outgoing], now_ms: int) -> list[Draft]:
    try:
        batch = list(messages)
    except TypeError:
        raise InvalidOptionError(
            f"expected a list of messages, not {messages!r:.80}", next="Write [(topic, data), …]"
        ) from None
    if len(batch) > BATCH_MESSAGES_MAX:
        raise TooLargeError(f"more than {BATCH_MESSAGES_MAX} messages in one batch", next="Publish it in parts")
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
        if encoded is None:
            return None
        return list(map(Draft, map(checked.__getitem__, topics), map(bytes.decode, encoded), map(len, encoded)))
    except (InvalidInputError, TypeError, UnicodeDecodeError):  # raw JSON may be no UTF-8
        return None


def _drafts_one_by_one(batch: list[Outgoing], now_ms: int) -> list[Draft]:
    drafts: list[Draft] = []
    for message in batch:
        try:
            topic, data, options = parts_of(message)
            drafts.append(make_draft(check_topic(topic), data, options, now_ms))
        except InvalidInputError as exc:
            if len(batch) == 1:
                raise
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
            raise InvalidOptionError(f"{exc.args[0]!r} is missing", next="A message needs topic and data") from None
        if "from" in rest:
            rest["from_"] = rest.pop("from")
        return topic, data, cast(PublishOptions, rest)
    if isinstance(message, tuple) and len(message) in (2, 3):
        options = dict(message[2]) if len(message) == 3 else {}
        return message[0], message[1], cast(PublishOptions, options)
    raise InvalidOptionError(
        f"expected (topic, data), not {message!r:.80}",
        next="A batch is a list of (topic, data), (topic, data, options) or mappings",
    )
