"""The consumer of an ephemeral subscription: reads the log from a position on, keeps no state, settles nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headwater.broker.consumer import Consumer
from headwater.broker.deliveries import Claimed, Failure, is_expired
from headwater.broker.engine import Engine, refuse_in_transaction
from headwater.broker.flow import Completion, Flow, complete, finished
from headwater.ports.records import SubscriptionSpec, selection_of


def _nothing_to_do() -> Flow[None]:
    return
    yield  # makes this a flow


class TailConsumer(Consumer):
    """Has the verbs of a durable consumer, so that both are used alike; its acks and nacks have nothing to settle."""

    def __init__(self, engine: Engine, id: str, spec: SubscriptionSpec, after: int) -> None:
        self._selection = selection_of(spec)
        waiter = engine.wakeups.add(self._selection.pattern, id, wake_on_settle=False)
        super().__init__(id, spec, waiter, engine.clock.now_ms)
        self.engine = engine
        self._lane = engine.filters if self._selection.takes_time else engine.readers
        self.resumed_from = self._position = after
        engine.ensure_watching()

    def claim(self, limit: int) -> Flow[int | None]:
        refuse_in_transaction(self.engine)
        self.engine.refuse_closed()
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

    def find_in_flight(self, seqs: Sequence[int], attempt: int | None = None) -> Flow[list[Claimed]]:
        return []
        yield  # makes this a flow

    def ack(self, settled: Sequence[Claimed]) -> Completion[None]:
        return finished(None)

    def submit_ack(self, settled: Sequence[Claimed], *, lazy: bool = False) -> Completion[list[int]]:
        return finished([])

    def nack(self, claimed: Claimed, delay_ms: int | None, failure: Failure) -> Flow[None]:
        return _nothing_to_do()

    def reject(self, claimed: Claimed, failure: Failure) -> Flow[None]:
        return _nothing_to_do()

    def extend(self, extended: Sequence[Claimed], by_ms: int | None) -> Flow[None]:
        return _nothing_to_do()

    def extend_in_flight(self, seqs: Sequence[int]) -> Flow[None]:
        return _nothing_to_do()

    def release(self, untouched: Sequence[Claimed]) -> Completion[None]:
        return self.ack(untouched)

    def heartbeat(self) -> Flow[None]:
        return _nothing_to_do()

    def _submit_close(self, seen: Collection[tuple[int, int]] | None, vanished: bool) -> None:
        self._buffer.clear()
        self.engine.wakeups.leave(self._waiter)
        complete([(self.gone, None, None)])
