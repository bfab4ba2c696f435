"""Holds what the processes wrote down against what the log holds. Pure: events and rows in, violations out.

What makes it sharp: a call that returned proves what was true while it ran. A holder whose ack returned has held its
subscription from the return of its subscribe to the call of that ack, without a break, or the fence would have stopped
the ack. And once an ack of some attempt returned, no higher attempt can exist.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from crash_witness import (
    ACK_WAIT_S,
    SUBSCRIPTIONS,
    AnyEvent,
    Closing,
    Event,
    Failed,
    Held,
    Published,
    Received,
    Refused,
    Settled,
    Settling,
    Trying,
)

E = TypeVar("E", bound=Event)

CLOCK_SLACK_NS = 10_000_000  # leases count in whole milliseconds of the wall clock, witnesses in ns of the other one


class Row(NamedTuple):
    """A message as the log holds it in the end."""

    seq: int
    topic: str
    token: str
    id: str | None


class Ending(NamedTuple):
    """The log after all processes have ended."""

    rows: Sequence[Row]
    lags: dict[str, int]
    dead_letters: int
    integrity: str


class Delivery(NamedTuple):
    subscription: str
    holder: str
    seq: int
    attempt: int
    token: str
    began: int
    t: int
    fetched_ahead: bool = False
    actor: str = ""


class History:
    """Events sorted into what the checks ask for."""

    def __init__(self, events: Iterable[AnyEvent]) -> None:
        self.events = sorted(events, key=lambda event: event.t)
        self.deliveries = [
            Delivery(event.subscription, event.holder, *found, event.began, event.t, event.fetched_ahead, event.actor)
            for event in self.of(Received)
            for found in event.found
        ]
        self.by_message: dict[tuple[str, int], list[Delivery]] = defaultdict(list)
        for delivery in self.deliveries:
            self.by_message[delivery.subscription, delivery.seq].append(delivery)
        self.acked = {
            (event.subscription, *key) for event in self.of(Settled) if event.how == "ack" for key in event.keys
        }
        refused = {(event.holder, event.how, *key) for event in self.of(Refused) for key in event.keys}
        self.perhaps_acked = {
            (event.subscription, key[0])
            for event in self.of(Settling)
            if event.how == "ack"
            for key in event.keys
            if (event.holder, event.how, *key) not in refused
        }

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]


def check(events: Iterable[AnyEvent], ending: Ending) -> list[str]:
    """All that is wrong; an empty list if every promise was kept."""
    history = History(events)
    return [problem for check in CHECKS for problem in check(history, ending)]


# --- publishing -----------------------------------------------------------------------------------------------------


def no_process_failed(history: History, ending: Ending) -> Iterable[str]:
    for event in history.of(Failed):
        yield f"{event.actor} failed: {event.error}"


def integrity_holds(history: History, ending: Ending) -> Iterable[str]:
    if ending.integrity != "ok":
        yield f"integrity_check says {ending.integrity}"


def nothing_published_is_missing(history: History, ending: Ending) -> Iterable[str]:
    seq_of = {row.token: row.seq for row in ending.rows}
    for event in history.of(Published):
        for token, seq in zip(event.tokens, event.seqs, strict=True):
            if token not in seq_of:
                yield f"{token} was published as {seq} and is not in the log"
            elif seq_of[token] != seq:
                yield f"{token} was published as {seq} and stands at {seq_of[token]}"


def nothing_is_made_up(history: History, ending: Ending) -> Iterable[str]:
    tried = {token for event in history.of(Trying) for token in event.tokens}
    for row in ending.rows:
        if row.token not in tried:
            yield f"message {row.seq} ({row.token}) was never published"


def every_token_is_there_once(history: History, ending: Ending) -> Iterable[str]:
    for token, times in Counter(row.token for row in ending.rows).items():
        if times > 1:
            yield f"{token} is in the log {times} times"
    for seq, times in Counter(row.seq for row in ending.rows).items():
        if times > 1:
            yield f"seq {seq} was given {times} times"


def batches_are_whole(history: History, ending: Ending) -> Iterable[str]:
    seq_of = {row.token: row.seq for row in ending.rows}
    for event in history.of(Trying):
        seqs = [seq_of[token] for token in event.tokens if token in seq_of]
        if seqs and len(seqs) != len(event.tokens):
            yield f"of the batch {event.tokens[0]}… only {len(seqs)} of {len(event.tokens)} are in the log"
        elif seqs and seqs != list(range(seqs[0], seqs[0] + len(seqs))):
            yield f"the batch {event.tokens[0]}… is not in order: {seqs}"


def seqs_grow_for_each_publisher(history: History, ending: Ending) -> Iterable[str]:
    first_tried: dict[str, str] = {}
    last_seq: dict[str, int] = defaultdict(int)
    done: set[str] = set()
    for event in history.events:
        if isinstance(event, Trying):
            for token in event.tokens:
                first_tried.setdefault(token, event.actor)
        elif isinstance(event, Published):
            for token, seq in zip(event.tokens, event.seqs, strict=True):
                if token in done or first_tried.get(token) != event.actor:
                    continue  # a repeat keeps its first seq
                done.add(token)
                if seq <= last_seq[event.actor]:
                    yield f"{event.actor} got seq {seq} for {token} after {last_seq[event.actor]}"
                last_seq[event.actor] = max(seq, last_seq[event.actor])


# --- delivery -------------------------------------------------------------------------------------------------------


def what_was_delivered_is_what_was_published(history: History, ending: Ending) -> Iterable[str]:
    row_of = {row.seq: row for row in ending.rows}
    for delivery in history.deliveries:
        row = row_of.get(delivery.seq)
        if row is None or row.token != delivery.token:
            yield f"{delivery.holder} received {delivery.seq} as {delivery.token}, the log has {row}"
        elif row.topic not in SUBSCRIPTIONS[delivery.subscription][2]:
            yield f"{delivery.holder} received {delivery.seq} on {row.topic}, which it did not ask for"


def everything_is_delivered_until_acked(history: History, ending: Ending) -> Iterable[str]:
    for id, (_, _, topics) in SUBSCRIPTIONS.items():
        for row in ending.rows:
            if row.topic in topics and (id, row.seq) not in history.perhaps_acked:
                times = len(history.by_message[id, row.seq])
                yield f"message {row.seq} was never acked in {id}, and delivered {times} times"
        if ending.lags.get(id) != 0:
            yield f"{id} ends with a lag of {ending.lags.get(id)}"
    if ending.dead_letters:
        yield f"{ending.dead_letters} dead letters, though nothing had used up its attempts"


def nothing_comes_again_after_its_ack(history: History, ending: Ending) -> Iterable[str]:
    acked_at = {(id, seq): attempt for id, seq, attempt in sorted(history.acked, reverse=True)}
    for delivery in history.deliveries:
        acked = acked_at.get((delivery.subscription, delivery.seq))
        if acked is not None and delivery.attempt > acked:
            yield (
                f"message {delivery.seq} came to {delivery.holder} as attempt {delivery.attempt}, "
                f"though attempt {acked} was acked in {delivery.subscription}"
            )
    times = Counter((id, seq) for id, seq, _ in history.acked)
    yield from (f"message {seq} was acked {count} times in {id}" for (id, seq), count in times.items() if count > 1)


def repeats_have_a_reason(history: History, ending: Ending) -> Iterable[str]:
    """A message comes again only with a higher attempt, and only after a nack, a lost holder or a lease run out."""
    nacked: dict[tuple[str, int, int], int] = {}
    for event in history.of(Settling):
        if event.how == "nack":
            for seq, attempt in event.keys:
                nacked.setdefault((event.subscription, seq, attempt), event.t)
    closed = {event.holder: event.t for event in history.of(Closing)}
    for (id, seq), deliveries in history.by_message.items():
        deliveries.sort(key=lambda delivery: (delivery.attempt, delivery.t))
        for first, second in itertools.pairwise(deliveries):
            pair = f"message {seq} came to {first.holder} and to {second.holder}"
            if second.attempt == first.attempt:
                yield f"{pair}, both as attempt {first.attempt}"
                continue
            if second.t < first.began:
                yield f"{pair} as attempt {second.attempt} before it came as attempt {first.attempt}"
            after = min(
                nacked.get((id, seq, first.attempt), second.t + 1),
                closed.get(first.holder, second.t + 1),
                first.began + round(ACK_WAIT_S * 1e9) - CLOCK_SLACK_NS,
            )
            passed_on = SUBSCRIPTIONS[id][0] == "exclusive" and second.holder != first.holder
            if second.t < after and not passed_on:
                yield f"{pair} while {first.holder} still had it"


def first_deliveries_are_in_order(history: History, ending: Ending) -> Iterable[str]:
    """A holder that freezes in a fetch may return from it after others have taken over and gone on: what it has then is
    late, and its acks are refused."""
    last: dict[str, int] = defaultdict(int)
    received: dict[str, dict[str, int]] = defaultdict(dict)  # by subscription, when each holder did so last
    given_back = _first_given_back_unseen(history)
    for delivery in history.deliveries:  # events are sorted by time, and batches keep their order
        if delivery.attempt > 1 or delivery.t > given_back.get(delivery.subscription, delivery.t):
            continue
        exclusive = SUBSCRIPTIONS[delivery.subscription][0] == "exclusive"
        reader = delivery.subscription if exclusive else delivery.holder
        if delivery.fetched_ahead:
            reader = f"{delivery.holder} {delivery.actor}"  # what its threads write down comes in any order
        others = (t for holder, t in received[delivery.subscription].items() if holder != delivery.holder)
        was_frozen = exclusive and not delivery.fetched_ahead and max(others, default=0) > delivery.began
        if delivery.seq <= last[reader] and not was_frozen:
            yield f"message {delivery.seq} came first to {delivery.holder} after {last[reader]}"
        last[reader] = max(delivery.seq, last[reader])
        received[delivery.subscription][delivery.holder] = delivery.t


def _first_given_back_unseen(history: History) -> dict[str, int]:
    """By shared subscription: from when on others may get messages for the first time, and late, that a holder had
    fetched ahead and gave back when it closed."""
    ahead = {delivery.holder for delivery in history.deliveries if delivery.fetched_ahead}
    closings = [event for event in history.of(Closing) if event.holder in ahead]
    return {
        event.subscription: event.t for event in reversed(closings) if SUBSCRIPTIONS[event.subscription][0] == "shared"
    }


def one_holder_at_a_time(history: History, ending: Ending) -> Iterable[str]:
    """From the return of subscribe to the call of the last ack or fetch that worked, a holder was alone."""
    spans: dict[tuple[str, str], tuple[int, int]] = {}
    for event in history.events:
        if isinstance(event, Held) and SUBSCRIPTIONS[event.subscription][0] == "exclusive":
            spans[event.subscription, event.holder] = (event.t, event.t)
        elif isinstance(event, Settled | Received) and (event.subscription, event.holder) in spans:
            begin, end = spans[event.subscription, event.holder]
            spans[event.subscription, event.holder] = (begin, max(end, event.began))
    for id in SUBSCRIPTIONS:
        mine = sorted((span, holder) for (subscription, holder), span in spans.items() if subscription == id)
        for ((_, end), first), ((begin, _), second) in itertools.pairwise(mine):
            if begin < end:
                yield f"{first} and {second} held {id} at the same time, for {(end - begin) / 1e6:.1f} ms"


def no_message_has_two_owners(history: History, ending: Ending) -> Iterable[str]:
    """From its delivery to the call of an ack or nack that worked, a message was in one consumer's hands only. That a
    late holder hands out what it had fetched ahead proves nothing, until it settles it."""
    settled_at = {(event.holder, *key): event.began for event in history.of(Settled) for key in event.keys}
    for (id, seq), deliveries in history.by_message.items():
        spans = sorted(
            (delivery.t, settled_at.get((delivery.holder, seq, delivery.attempt), delivery.t), delivery.holder)
            for delivery in deliveries
            if not delivery.fetched_ahead or (delivery.holder, seq, delivery.attempt) in settled_at
        )
        for (_, end, first), (begin, _, second) in itertools.pairwise(spans):
            if begin < end:
                yield f"{first} and {second} had message {seq} of {id} at the same time"


CHECKS: tuple[Callable[[History, Ending], Iterable[str]], ...] = (
    no_process_failed,
    integrity_holds,
    nothing_published_is_missing,
    nothing_is_made_up,
    every_token_is_there_once,
    batches_are_whole,
    seqs_grow_for_each_publisher,
    what_was_delivered_is_what_was_published,
    everything_is_delivered_until_acked,
    nothing_comes_again_after_its_ack,
    repeats_have_a_reason,
    first_deliveries_are_in_order,
    one_holder_at_a_time,
    no_message_has_two_owners,
)


def figures(events: Iterable[AnyEvent]) -> dict[str, int]:
    history = History(events)
    return {
        "published": sum(len(event.tokens) for event in history.of(Published)),
        "unsure": len(history.of(Trying)) - len(history.of(Published)),
        "delivered": len(history.deliveries),
        "again": sum(1 for delivery in history.deliveries if delivery.attempt > 1),
        "acked": len(history.acked),
        "nacked": sum(1 for event in history.of(Settled) if event.how == "nack"),
        "refused": len(history.of(Refused)),
        "sessions": len(history.of(Held)),
    }
