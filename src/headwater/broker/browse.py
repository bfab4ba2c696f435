"""Views of a log's messages: a search, one message with its deliveries, and what a seek would do.

Nothing here is needed to deliver. It reads on the threads of filters and statistics, in looks that are bounded in rows,
bytes and time, so that neither the writer nor a delivery waits for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec

from headwater.broker.engine import Engine
from headwater.broker.flow import Flow
from headwater.broker.shared_consumers import consumer_of, live_consumers
from headwater.broker.statistics import LAG_LOOKED_AT_MAX, Waiting, look_upto
from headwater.broker.subscribe import Allow, Start, load_movable, start_position
from headwater.delivery.window import Range
from headwater.errors import InvalidFilterError
from headwater.formats import iso
from headwater.message import Message, MessageDocument, to_document
from headwater.ports.records import (
    DeadLetter,
    DeadLetterQuery,
    Found,
    Selection,
    SubscriptionRecord,
    selection_of,
)
from headwater.ports.store import SEQ_MAX, Reader
from headwater.topics import parse_pattern

SEARCH_S = 2.0  # how long a search looks, unless it has found enough
LOOK_SEQS = 10_000  # at which one look of a search looks
PREVIEW_CHARS = 240  # of a payload, in a list
PREVIEWED_BYTES_MAX = 16 * 1024  # of a payload; of a larger one nothing is shown in a list
LETTERS_SHOWN_MAX = 100  # dead letters of one message
SUBSCRIPTIONS_SHOWN_MAX = 1_000
FILTERED_LOOKED_AT_MAX = 100_000  # messages at which the preview of a seek looks where their content is asked for
RANGES_COUNTED_MAX = 100  # settled ranges above the floor
FIRST_SHOWN = 5

_ALL = parse_pattern(">")


class Brief(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message in a list. `preview` is the beginning of its data; None if the data is large, or may not be read."""

    seq: int
    topic: str
    id: str
    published_at: str
    size: int
    type: str | None = None
    preview: str | None = None


class FoundMessages(msgspec.Struct, frozen=True):
    """`looked_to`: how far the search looked, for the next call; `more`: whether anything is left behind it."""

    messages: list[Brief]
    looked_to: int
    more: bool


State = Literal["not_matching", "undelivered", "in_flight", "waiting", "settled", "dead", "unknown"]


class DeliveryInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a message in one subscription. `due_ms`: the end of its lease if it is in flight, else when it is
    delivered next. `holder`: the consumer that has it, as long as that shows life. `settled` includes what lies before
    the subscription's start. `unknown`: its filter is broken."""

    subscription: str
    pattern: str
    mode: str
    state: State
    attempts: int = 0
    holder: str | None = None
    due_ms: int | None = None
    redriving: bool = False
    paused: bool = False


class MessageInfo(msgspec.Struct, frozen=True):
    """`message` is None if there is none of this seq; `pruned`: retention has deleted it."""

    message: MessageDocument | None
    pruned: bool
    deliveries: list[DeliveryInfo]
    dead_letters: list[DeadLetter]


class SeekPreview(msgspec.Struct, frozen=True):
    """What a seek would do. `again`: messages that were settled and would be delivered again; `skipped`: messages that
    are not settled and would not be delivered. `…_is_least`: counting stopped, so there may be more. `next`: the first
    messages that would be delivered; `first_skipped`: the first of those skipped."""

    sequence_id: int
    again: int
    again_is_least: bool
    skipped: int
    skipped_is_least: bool
    next: list[Brief]
    first_skipped: list[Brief]


# --- searching --------------------------------------------------------------------------------------------------------


def search(
    engine: Engine,
    selection: Selection,
    *,
    after: int = 0,
    upto: int = SEQ_MAX,
    since_ms: int | None = None,
    until_ms: int | None = None,
    limit: int = 50,
    newest_first: bool = True,
) -> Flow[FoundMessages]:
    """Messages in (after, upto], published from one time on and before another. Other works of the thread have their
    turns between two looks."""
    deadline_s = time.monotonic() + SEARCH_S
    low, high = yield from engine.read(lambda reader: _bounds(reader, after, upto, since_ms, until_ms), engine.filters)
    seqs: list[int] = []
    while low < high and len(seqs) < limit:
        look = partial(_look, selection, low, high, limit - len(seqs), newest_first)
        found, looked_to = yield from engine.read(look, engine.filters)
        seqs += found
        low, high = (low, looked_to) if newest_first else (looked_to, high)
        if time.monotonic() > deadline_s:
            break
    briefs = yield from engine.read(lambda reader: _briefs(reader, seqs), engine.filters)
    return FoundMessages(briefs, high if newest_first else low, low < high)


def _look(selection: Selection, low: int, high: int, limit: int, newest_first: bool, reader: Reader) -> Found:
    if newest_first:
        return reader.find(selection, max(low, high - LOOK_SEQS), high, limit, newest_first=True)
    return reader.find(selection, low, min(high, low + LOOK_SEQS), limit)


def _bounds(reader: Reader, after: int, upto: int, since_ms: int | None, until_ms: int | None) -> tuple[int, int]:
    """The bounds of what is stored, so that seqs that retention has deleted at the front are not searched."""
    if since_ms is not None:
        after = max(after, reader.seq_before(since_ms))
    if until_ms is not None:
        upto = min(upto, reader.seq_before(until_ms))
    first = reader.oldest(_ALL, after, 1)
    return (first[0].seq - 1, min(upto, reader.last_seq())) if first else (after, after)


def _briefs(reader: Reader, seqs: list[int], may_read: Callable[[str], bool] = lambda topic: True) -> list[Brief]:
    heads = reader.heads(seqs)
    small = [each.seq for each in heads.values() if each.size <= PREVIEWED_BYTES_MAX and may_read(each.topic)]
    whole = reader.messages(small)
    return [_brief(heads[seq], whole.get(seq)) for seq in seqs if seq in heads]


def _brief(head: Message, whole: Message | None) -> Brief:
    preview = None if whole is None else bytes(whole.raw).decode(errors="replace")[:PREVIEW_CHARS]
    return Brief(head.seq, head.topic, head.id, iso(head.published_ms), head.size, head.type, preview)


# --- one message ------------------------------------------------------------------------------------------------------


def inspect(
    engine: Engine,
    seq: int,
    may_read: Callable[[str], bool] = lambda topic: True,
    may_use: Callable[[SubscriptionRecord], bool] = lambda record: True,
    manages: Callable[[str], bool] = lambda topic: True,
) -> Flow[MessageInfo]:
    """One message with its deliveries to the subscriptions that may be used, and with its dead letters if its topic may
    be managed. A message that may not be read is reported as missing."""

    def look(reader: Reader) -> MessageInfo:
        message = reader.messages([seq]).get(seq)
        if message is None or not may_read(message.topic):
            return MessageInfo(None, message is None and bool(reader.pruned(seq, seq)), [], [])
        letters = reader.dead_letters(DeadLetterQuery(seqs=(seq,)), 0, LETTERS_SHOWN_MAX)
        own = [each for each in letters if each.message.scoped_id == message.scoped_id]  # or imported from another log
        dead = {each.subscription for each in own}
        usable = filter(may_use, reader.subscriptions())
        now_ms = engine.clock.now_ms()
        infos = [
            _delivery(reader, record, message, record.id in dead, now_ms)
            for record, _ in zip(usable, range(SUBSCRIPTIONS_SHOWN_MAX), strict=False)
        ]
        return MessageInfo(to_document(message), False, infos, own if manages(message.topic) else [])

    return engine.read(look, engine.filters)


def _delivery(reader: Reader, record: SubscriptionRecord, message: Message, is_dead: bool, now_ms: int) -> DeliveryInfo:
    state, attempts, holder, due_ms, redriving = _state(reader, record, message, is_dead, now_ms)
    spec = record.spec
    is_paused = spec.paused_ms is not None
    return DeliveryInfo(record.id, spec.pattern, spec.mode, state, attempts, holder, due_ms, redriving, is_paused)


def _state(
    reader: Reader, record: SubscriptionRecord, message: Message, is_dead: bool, now_ms: int
) -> tuple[State, int, str | None, int | None, bool]:
    holder = record.lease.owner if record.lease.live(now_ms) else None
    row = reader.deliveries(record.id, [message.seq]).get(message.seq)
    if row is not None:
        is_redriving = row.dead_letter is not None
        if row.token and now_ms < row.due_ms:
            if record.spec.mode == "shared":
                holder = consumer_of(row.token, live_consumers(reader, record.id, now_ms))
            return "in_flight", row.attempts, holder, row.due_ms, is_redriving
        return "waiting", row.attempts, None, row.due_ms, is_redriving
    try:
        if not selection_of(record.spec).keeps(message):
            return "not_matching", 0, None, None, False
    except InvalidFilterError:
        return "unknown", 0, None, None, False
    if record.window.is_settled(message.seq):
        return "dead" if is_dead else "settled", 0, None, None, False
    if message.seq > record.window.delivered:
        return "undelivered", 0, None, message.deliver_ms, False
    # Delivered without a row: an exclusive consumer has it in its window.
    if holder is None:
        return "waiting", 1, None, None, False
    return "in_flight", 1, holder, record.lease.until_ms, False


# --- what a seek would do ---------------------------------------------------------------------------------------------


def preview_seek(
    engine: Engine,
    id: str,
    start: Start,
    allow: Allow | None = None,
    may_read: Callable[[str], bool] = lambda topic: True,
) -> Flow[SeekPreview]:
    """What `seek` would do, and refused as it would be. Changes nothing."""

    def look(reader: Reader) -> SeekPreview:
        record = load_movable(reader, id, allow, engine.clock.now_ms())
        target = start_position(reader, start)
        selection, window = selection_of(record.spec), record.window
        count = _counting(reader, selection)
        rows_below = sum(reader.delivery_counts(id, target)[:2])
        rows_above = sum(reader.delivery_counts(id)[:2]) - rows_below
        ranges = window.settled[:RANGES_COUNTED_MAX]
        is_cut = len(ranges) < len(window.settled)
        again = [count(target, window.floor), *(count(max(low - 1, target), high) for low, high in ranges)]
        settled_below = [count(low - 1, min(high, target)) for low, high in ranges]
        unsettled = count(window.floor, target)
        due = reader.due(id, SEQ_MAX, FIRST_SHOWN, "seq", bytes_max=PREVIEWED_BYTES_MAX)
        rows = [row.seq for row, _ in due if row.seq <= target]
        fresh = _first(reader, selection, window.floor, target, window.settled)
        return SeekPreview(
            target,
            max(0, sum(each.messages for each in again) - rows_above),
            is_cut or any(each.is_least for each in again),
            max(0, unsettled.messages - sum(each.messages for each in settled_below)) + rows_below,
            unsettled.is_least,
            _briefs(reader, _first(reader, selection, target, SEQ_MAX), may_read),
            _briefs(reader, sorted({*rows, *fresh})[:FIRST_SHOWN], may_read),
        )

    return engine.read(look, engine.statistics)


def _counting(reader: Reader, selection: Selection) -> Callable[[int, int], Waiting]:
    """Counts matching messages in a range; all counts together look at so many messages."""
    left = LAG_LOOKED_AT_MAX if selection.is_topics_only else FILTERED_LOOKED_AT_MAX

    def count(after: int, upto: int) -> Waiting:
        nonlocal left
        if upto <= after:
            return Waiting(0, False)
        bound = min(upto, look_upto(reader, after, left))
        left = max(0, left - (bound - after))
        return Waiting(reader.count(selection, after, bound) if after < bound else 0, bound < upto)

    return count


def _first(reader: Reader, selection: Selection, after: int, upto: int, settled: tuple[Range, ...] = ()) -> list[int]:
    """The first few that match in a range and are in none of the settled ones, as far as one look tells."""
    found = reader.find(selection, after, upto, FIRST_SHOWN + sum(high - low + 1 for low, high in settled)).seqs
    return [seq for seq in found if not any(low <= seq <= high for low, high in settled)][:FIRST_SHOWN]
