"""What a log promises, in plain lists and dicts: no cursor, no window, no rows. The state machine holds a log to it.

The model does not foretell what a fetch returns, for how many come at a time is the log's business. It judges what did
come: whether each delivery was due, with the right attempt, in the right order; and, when nothing came, whether there
was truly nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

UNREAD = "unread"  # not delivered yet
WAITING = "waiting"  # for another attempt: failed, given back or redriven
FLIGHT = "in flight"
ACKED = "acked"
DEAD = "dead"
LOST = "lost"  # deleted before it was settled: in a gap

UNSETTLED = (UNREAD, WAITING, FLIGHT)


@dataclass
class Published:
    seq: int
    topic: str
    published_ms: int
    deliver_ms: int | None = None
    expires_ms: int | None = None
    stored: bool = True

    def expired(self, now_ms: int) -> bool:
        return self.expires_ms is not None and self.expires_ms <= now_ms


@dataclass
class Delivery:
    """One message for one subscription. `due_ms`: the end of its wait, or of its ack wait if it is in flight."""

    message: Published
    state: str = UNREAD
    attempts: int = 0
    due_ms: int = 0
    handle: Any = None  # the only one that may settle it
    suspect: bool = False  # in flight, and the time before it was not settled: of these a consumer has one at a time

    def due(self, now_ms: int) -> bool:
        if self.state == UNREAD:
            return (self.message.deliver_ms or 0) <= now_ms
        return self.state in (WAITING, FLIGHT) and self.due_ms <= now_ms


@dataclass
class Letter:
    reason: str
    redrives: int = 0
    redriving: bool = False


@dataclass
class Reader:
    """One durable subscription."""

    topics: frozenset[str]
    ack_wait_ms: int
    max_attempts: int
    backoff_ms: int
    deliveries: dict[int, Delivery] = field(default_factory=dict)
    letters: dict[int, Letter] = field(default_factory=dict)  # by seq
    acked: int = 0
    redelivered: int = 0
    gaps: int = 0

    # --- what may be asked ------------------------------------------------------------------------------------------

    def lag(self) -> int:
        return sum(delivery.state in UNSETTLED for delivery in self.deliveries.values())

    def holds(self, handle: Any) -> bool:
        """Whether this handle still has the right to settle its message."""
        delivery = self.deliveries[handle.seq]
        return delivery.state == FLIGHT and delivery.handle is handle

    def overdue(self, handle: Any, now_ms: int) -> bool:
        return self.deliveries[handle.seq].due_ms <= now_ms

    def overlooked(self, in_flight: Iterable[Any], now_ms: int) -> list[int]:
        """What an empty fetch should have returned, or dead-lettered."""
        waits = self._suspects(in_flight, now_ms)
        return [
            seq
            for seq, delivery in self.deliveries.items()
            if delivery.due(now_ms) and not (waits and delivery.state == FLIGHT)
        ]

    def _suspects(self, in_flight: Iterable[Any], now_ms: int) -> list[int]:
        held = {id(handle) for handle in in_flight}
        return [
            seq
            for seq, delivery in self.deliveries.items()
            if delivery.suspect
            and delivery.state == FLIGHT
            and not delivery.due(now_ms)
            and id(delivery.handle) in held
        ]

    # --- what happened ----------------------------------------------------------------------------------------------

    def delivered(self, handle: Any, in_flight: Iterable[Any], now_ms: int) -> None:
        seq = handle.seq
        assert seq in self.deliveries, f"message {seq} is none of this subscription's"
        delivery = self.deliveries[seq]
        assert delivery.due(now_ms), f"message {seq} was {delivery.state} and not due, yet it came"
        assert not delivery.message.expired(now_ms), f"message {seq} had expired"
        assert handle.attempt == delivery.attempts + 1, f"message {seq} came as attempt {handle.attempt}"
        assert delivery.attempts < self.max_attempts, f"message {seq} had all its attempts"
        if delivery.state == UNREAD and delivery.message.deliver_ms is None:
            assert not self._passed_over(seq, now_ms), f"message {seq} came before a lower one"
        self.redelivered += handle.attempt > 1
        delivery.suspect = delivery.state == FLIGHT
        others = self._suspects(in_flight, now_ms)
        assert not (delivery.suspect and others), f"message {seq} came beside another suspect, {others}"
        delivery.state, delivery.attempts = FLIGHT, handle.attempt
        delivery.due_ms, delivery.handle = now_ms + self.ack_wait_ms, handle

    def _passed_over(self, seq: int, now_ms: int) -> list[int]:
        return [
            lower
            for lower, delivery in self.deliveries.items()
            if lower < seq
            and delivery.state == UNREAD
            and delivery.message.deliver_ms is None
            and not delivery.message.expired(now_ms)
        ]

    def dead_lettered_by_itself(self, seq: int, reason: str, now_ms: int) -> None:
        """The log gave up on a message: was it right?"""
        delivery = self.deliveries[seq]
        assert delivery.due(now_ms), f"message {seq} was dead-lettered ({reason}) while it was {delivery.state}"
        if reason != "expired":  # it was given back, or lost, once too often
            assert reason in ("timeout", "max_attempts")
            assert delivery.attempts >= self.max_attempts
        else:
            assert delivery.message.expired(now_ms)
        self._dead_letter(delivery, reason)

    def _dead_letter(self, delivery: Delivery, reason: str) -> None:
        delivery.state, delivery.handle = DEAD, None
        letter = self.letters.setdefault(delivery.message.seq, Letter(reason))
        letter.reason, letter.redriving = reason, False

    def ack(self, handle: Any) -> None:
        delivery = self.deliveries[handle.seq]
        delivery.state, delivery.handle = ACKED, None
        self.letters.pop(handle.seq, None)
        self.acked += 1

    def nack(self, handle: Any, delay_ms: int | None, now_ms: int) -> None:
        delivery = self.deliveries[handle.seq]
        if delivery.attempts >= self.max_attempts:
            self._dead_letter(delivery, "max_attempts")
            return
        wait_ms = self.backoff_ms * 2 ** (delivery.attempts - 1) if delay_ms is None else delay_ms
        delivery.state, delivery.due_ms, delivery.handle = WAITING, now_ms + wait_ms, None

    def reject(self, handle: Any) -> None:
        self._dead_letter(self.deliveries[handle.seq], "rejected")

    def extend(self, handle: Any, now_ms: int) -> None:
        self.deliveries[handle.seq].due_ms = now_ms + self.ack_wait_ms

    def given_back(self, handles: Iterable[Any], now_ms: int) -> None:
        """Closed in good order: what was in flight is due at once, and no attempt is charged."""
        for handle in handles:
            if self.holds(handle):
                delivery = self.deliveries[handle.seq]
                delivery.state, delivery.due_ms, delivery.handle = WAITING, now_ms, None

    def orphaned(self, now_ms: int | None) -> None:
        """The holder vanished. Its deliveries come again when their wait ends, or now, if a time is given."""
        for delivery in self.deliveries.values():
            if delivery.state == FLIGHT:
                delivery.handle = None
                if now_ms is not None:
                    delivery.due_ms = now_ms

    def redriven(self, now_ms: int) -> int:
        count = 0
        for seq, letter in self.letters.items():
            if not letter.redriving:
                letter.redriving, letter.redrives = True, letter.redrives + 1
                delivery = self.deliveries[seq]
                delivery.state, delivery.attempts, delivery.due_ms = WAITING, 0, now_ms
                count += 1
        return count

    def deleted(self, seqs: Iterable[int], now_ms: int) -> int:
        """Messages went from the log; returns how many this subscription has lost by that."""
        lost = 0
        for seq in seqs:
            delivery = self.deliveries.get(seq)
            if delivery is None or delivery.state not in UNSETTLED:
                continue
            if seq in self.letters:  # it is being redriven, and its letter carries a copy
                continue
            in_flight = delivery.state == FLIGHT and now_ms < delivery.due_ms and delivery.handle is not None
            assert not in_flight, f"message {seq} was deleted while it was being handled"
            delivery.state, delivery.handle = LOST, None
            lost += 1
        self.gaps += lost
        return lost


@dataclass
class Model:
    readers: dict[str, Reader]
    messages: dict[int, Published] = field(default_factory=dict)
    ids: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def last_seq(self) -> int:
        return len(self.messages)

    def publish(
        self, topic: str, id: str | None, window: int, now_ms: int, delay_ms: int | None, ttl_ms: int | None
    ) -> int:
        """`window`: ids of messages at or below this seq are forgotten."""
        known = None if id is None else self.ids.get((topic, id))
        if known is not None and known > window:
            return known
        seq = self.last_seq + 1
        message = Published(
            seq,
            topic,
            now_ms,
            None if delay_ms is None else now_ms + delay_ms,
            None if ttl_ms is None else now_ms + ttl_ms,
        )
        self.messages[seq] = message
        if id is not None:
            self.ids[topic, id] = seq
        for reader in self.readers.values():
            if topic in reader.topics:
                reader.deliveries[seq] = Delivery(message)
        return seq

    def stored(self) -> list[int]:
        return [seq for seq, message in self.messages.items() if message.stored]
