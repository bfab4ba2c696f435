"""An ephemeral reader: sees the log go by, keeps no state, settles nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from headwater.broker.claims import Claimed, Failure, is_expired
from headwater.broker.engine import Engine
from headwater.broker.flow import Flow, Ticket, finish
from headwater.broker.reading import LogReader
from headwater.ports.records import SubscriptionSpec


def _nothing_to_do() -> Flow[None]:
    return
    yield  # makes this a flow


class Tail(LogReader):
    """Has the verbs of a Subscriber, so that both are used alike; a Tail's acks and nacks have nothing to settle."""

    def __init__(self, engine: Engine, id: str, spec: SubscriptionSpec, after: int) -> None:
        super().__init__(engine, id, spec, minds_settling=False)
        self.resumed_from = self._position = after

    def _try_fetch(self, limit: int) -> Flow[tuple[list[Claimed], int | None]]:
        while True:
            (messages, scanned_to), last_seq = yield from self.engine.read(
                lambda reader: (reader.scan(self._selection, self._position, limit), reader.last_seq())
            )
            self._position = max(self._position, scanned_to)
            now_ms = self.engine.clock.now_ms()
            found = [Claimed(message, 1, 0) for message in messages if not is_expired(message, now_ms)]
            if found or self._position >= last_seq:
                return found, None

    def cleared(self) -> Flow[None]:
        return _nothing_to_do()

    def unfetch(self, found: list[Claimed]) -> Flow[None]:
        self._position = min(self._position, found[0].message.seq - 1)
        return _nothing_to_do()

    def handed_out(self, seqs: Sequence[int]) -> Flow[list[Claimed]]:
        return []
        yield  # makes this a flow

    def still_in_flight(self, seqs: Sequence[int]) -> list[Claimed]:
        return []

    def ack(self, settled: Sequence[Claimed]) -> Flow[None]:
        return _nothing_to_do()

    def submit_ack(self, settled: Sequence[Claimed], then: Callable[[], None]) -> Ticket[list[int]]:
        ticket: Ticket[list[int]] = Ticket()
        finish([(ticket, [], None)])
        return ticket

    def nack(self, claimed: Claimed, delay_ms: int | None, failure: Failure) -> Flow[None]:
        return _nothing_to_do()

    def reject(self, claimed: Claimed, failure: Failure) -> Flow[None]:
        return _nothing_to_do()

    def extend(self, extended: Sequence[Claimed], by_ms: int | None) -> Flow[None]:
        return _nothing_to_do()

    def extend_held(self, seqs: Sequence[int]) -> Flow[None]:
        return _nothing_to_do()

    def heartbeat(self) -> Flow[None]:
        return _nothing_to_do()

    def began(self, claimed: Claimed) -> None:
        """Nothing to extend."""

    def ended(self, claimed: Claimed) -> None:
        """Nothing to extend."""

    def close(self, unseen: Iterable[int] = (), *, vanished: bool = False) -> Flow[None]:
        self._leave()
        return _nothing_to_do()
