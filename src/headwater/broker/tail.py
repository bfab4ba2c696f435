"""An ephemeral reader: sees the log go by, keeps no state, settles nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

from headwater.broker.claims import Claimed, Failure, is_expired
from headwater.broker.engine import Engine
from headwater.broker.flow import Flow, Ticket, finish
from headwater.broker.reading import LogReader
from headwater.ports.records import SubscriptionSpec

T = TypeVar("T")


def _nothing_to_do() -> Flow[None]:
    return
    yield  # makes this a flow


def _done(outcome: T) -> Ticket[T]:
    ticket: Ticket[T] = Ticket()
    finish([(ticket, outcome, None)])
    return ticket


class Tail(LogReader):
    """Has the verbs of a Subscriber, so that both are used alike; a Tail's acks and nacks have nothing to settle."""

    def __init__(self, engine: Engine, id: str, spec: SubscriptionSpec, after: int) -> None:
        super().__init__(engine, id, spec, minds_settling=False)
        self.resumed_from = self._position = after

    def _claim_all(self, limit: int) -> Flow[int | None]:
        while True:
            (messages, scanned_to), last_seq = yield from self.engine.read(
                lambda reader: (
                    reader.scan(self._selection, self._position, limit, None, self.claim_bytes_max),
                    reader.last_seq(),
                ),
                self._lane,
            )
            now_ms = self._now_ms()
            with self._lock:  # another taker may have read this far meanwhile
                fresh = [message for message in messages if message.seq > self._position]
                self._position = max(self._position, scanned_to)
                self.deliver([Claimed(message, 1, 0) for message in fresh if not is_expired(message, now_ms)])
            if self._buffer or self._position >= last_seq:
                return None

    def set_payloads_aside(self, sent: Sequence[Claimed]) -> None:
        """Nothing is in flight here."""

    def handed_out(self, seqs: Sequence[int], attempt: int | None = None) -> Flow[list[Claimed]]:
        return []
        yield  # makes this a flow

    def still_in_flight(self, seqs: Sequence[int]) -> list[Claimed]:
        return []

    def ack(self, settled: Sequence[Claimed]) -> Ticket[None]:
        return _done(None)

    def submit_ack(self, settled: Sequence[Claimed]) -> Ticket[list[int]]:
        return _done([])

    def nack(self, claimed: Claimed, delay_ms: int | None, failure: Failure) -> Flow[None]:
        return _nothing_to_do()

    def reject(self, claimed: Claimed, failure: Failure) -> Flow[None]:
        return _nothing_to_do()

    def extend(self, extended: Sequence[Claimed], by_ms: int | None) -> Flow[None]:
        return _nothing_to_do()

    def extend_held(self, seqs: Sequence[int]) -> Flow[None]:
        return _nothing_to_do()

    def release(self, untouched: Sequence[Claimed]) -> Ticket[None]:
        return _done(None)

    def heartbeat(self) -> Flow[None]:
        return _nothing_to_do()

    def _submit_close(self, seen: Collection[tuple[int, int]] | None, vanished: bool) -> None:
        self._leave(None)
