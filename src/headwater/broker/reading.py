"""Waiting for messages of a log in this process, the same for durable and ephemeral readers."""

from __future__ import annotations

import time
from abc import abstractmethod

from headwater.broker.consumer import Consumer
from headwater.broker.engine import Engine, refuse_in_transaction
from headwater.broker.flow import Flow, Ticket, Within, finish
from headwater.errors import LeaseLost
from headwater.ports.records import SubscriptionSpec, selection_of

NET_POLL_S = 5.0  # the net under lost wake-ups of this process; other processes have the watcher's


class LogReader(Consumer):
    """Has a place in the log and waits there. What it does with a message it finds is up to the kind of reader."""

    def __init__(self, engine: Engine, id: str, spec: SubscriptionSpec, *, minds_settling: bool) -> None:
        self._selection = selection_of(spec)
        super().__init__(id, spec, engine.wakeups.add(self._selection.pattern, id, minds_settling=minds_settling))
        self.engine = engine
        self._lane = engine.filters if self._selection.takes_time else engine.readers
        self._look_again_ms: int | None = None
        engine.ensure_watching()

    def _now_ms(self) -> int:
        return self.engine.clock.now_ms()

    def _fill(self, limit: int, until_s: float | None) -> Flow[None]:
        while True:
            ticket, deliveries = self._waiter.arm(), self._deliveries
            if self._buffer or self._has_ended:
                return
            look_again_ms = yield from self._look(limit)
            left_s = None if until_s is None else until_s - time.monotonic()
            # Others may have taken all that came: then there may be more.
            if self._deliveries != deliveries or (left_s is not None and left_s <= 0):
                return
            self._tell_gaps()
            due_s = None if look_again_ms is None else (look_again_ms - self._now_ms()) / 1000
            yield Within(ticket, max(0.0, min(s for s in (left_s, due_s, NET_POLL_S) if s is not None)))

    def news(self) -> Ticket[None]:
        """Asked for before a look that finds nothing: what `wait_for` waits for afterwards."""
        return self._waiter.arm()

    def wait_for(self, news: Ticket[None], timeout_s: float | None) -> Flow[None]:
        """Until another look may find something, and no longer than this. Claims nothing."""
        due_ms = self._look_again_ms
        due_s = None if due_ms is None else (due_ms - self._now_ms()) / 1000
        yield Within(news, max(0.0, min(s for s in (timeout_s, due_s, NET_POLL_S) if s is not None)))

    def _look(self, limit: int) -> Flow[int | None]:
        """Claim what is there now; the outcome is when to look again at the latest, even if nothing wakes us."""
        refuse_in_transaction(self.engine)
        self.engine.refuse_closed()
        try:
            self._look_again_ms = yield from self._claim_all(limit)
            return self._look_again_ms
        except LeaseLost as exc:
            self.lose(exc)
            raise

    @abstractmethod
    def _claim_all(self, limit: int) -> Flow[int | None]: ...

    def _leave(self, error: BaseException | None) -> None:
        self._buffer.clear()
        self.engine.wakeups.remove(self._waiter)
        self.engine.wakeups.settled()
        finish([(self.gone, None, error)])
