"""A transport behind a circuit breaker: a target that failed too often is not tried for a while."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from headwater.delivery.circuit import Breaker, BreakerPolicy, BreakerState, TryOutcome, ask, ended, until_ms
from headwater.errors import CircuitOpenError, ClosedError, InvalidInputError
from headwater.formats import iso
from headwater.message import Message
from headwater.ports.clock import Clock
from headwater.ports.transport import Transport, buffers, logs_fed_by
from headwater.transports.base import WrappingTransport

logger = logging.getLogger("headwater")


class BreakerTransport(WrappingTransport):
    """`on_state` is called with each new state, in order. Other publishers wait for it, so it must be short. A
    subscription passes the breaker by: its consumer waits for the target anyway."""

    def __init__(
        self,
        inner: Transport,
        policy: BreakerPolicy | None = None,
        *,
        clock: Clock,
        on_state: Callable[[BreakerState], None] | None = None,
    ) -> None:
        super().__init__(inner)
        self.buffers = buffers(inner)
        self.feeds = logs_fed_by(inner)
        self._policy = policy or BreakerPolicy()
        self._clock = clock
        self._on_state = on_state
        self._breaker = Breaker()
        self._lock = threading.RLock()  # so that on_state may look at `state`

    @property
    def state(self) -> BreakerState:
        """The state as it was left; an open breaker whose time is over turns half-open with the next publish."""
        return self._breaker.state

    def _publish(self, messages: Sequence[Message]) -> None:
        """Raises CircuitOpenError without trying, or whatever the transport raises."""
        if self._closed or not messages:  # neither asks the target anything
            self.inner.publish_many(messages)
            return
        turn = self._ask()
        outcome: TryOutcome = "not tried"  # so it stays when it is interrupted
        try:
            self.inner.publish_many(messages)
            outcome = "succeeded"
        except (InvalidInputError, ClosedError):  # no failure of the target
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            with self._lock:
                self._become(ended(self._policy, self._breaker, turn, outcome, self._clock.now_ms()))

    def close(self) -> None:
        self._closed = True
        self.inner.close()

    def _ask(self) -> int:
        with self._lock:
            breaker, turn = ask(self._policy, self._breaker, self._clock.now_ms())
            self._become(breaker)
            if turn is not None:
                return turn
            until = until_ms(self._policy, breaker)
        raise CircuitOpenError(
            "not tried, because one try is under way"
            if until is None
            else f"not tried, because it failed too often; the next try may be made at {iso(until)}",
            where=self.name,
            next="Publish again after that",
        )

    def _become(self, breaker: Breaker) -> None:
        before, self._breaker = self._breaker.state, breaker
        if breaker.state == before:
            return
        logger.log(logging.WARNING if breaker.state == "open" else logging.INFO, "%s: circuit %s", self.name,
                   breaker.state)  # fmt: skip
        if self._on_state is None:
            return
        try:
            self._on_state(breaker.state)
        except Exception:
            logger.exception("%s: on_state failed", self.name)
