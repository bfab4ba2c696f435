"""A transport behind a circuit breaker: a target that failed too often is left alone for a while."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from headwater.delivery.breaker import (
    Breaker,
    BreakerPolicy,
    BreakerState,
    ask,
    failed,
    not_tried,
    succeeded,
    until_ms,
)
from headwater.errors import CircuitOpen, Closed, InvalidInput
from headwater.message import Message, iso
from headwater.ports.clock import Clock
from headwater.ports.transport import Following, Handle, Subscribable, Transport, buffers, logs_fed_by
from headwater.transports.base import BaseTransport
from headwater.transports.lines import publish_only

logger = logging.getLogger("headwater")


class GuardedTransport(BaseTransport):
    """`on_state` is told each new state, in order and while others wait for it: let it be short."""

    def __init__(
        self,
        inner: Transport,
        policy: BreakerPolicy | None = None,
        *,
        clock: Clock,
        on_state: Callable[[BreakerState], None] | None = None,
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self.recognises_ids = inner.recognises_ids
        self.buffers = buffers(inner)
        self.feeds = logs_fed_by(inner)
        self._policy = policy or BreakerPolicy()
        self._clock = clock
        self._on_state = on_state
        self._breaker = Breaker()
        self._closed = False
        self._lock = threading.RLock()  # so that on_state may look at `state`

    @property
    def connected(self) -> bool:
        return self.inner.connected

    @property
    def state(self) -> BreakerState:
        """As it was left; an open one whose time is over turns half-open with the next publish."""
        return self._breaker.state

    def _publish(self, messages: Sequence[Message]) -> None:
        """Raises CircuitOpen without trying, or whatever the transport raises."""
        if self._closed or not messages:  # neither asks the target anything
            self.inner.publish_many(messages)
            return
        turn = self._ask()
        try:
            self.inner.publish_many(messages)
        except (InvalidInput, Closed):  # says nothing about the target
            self._become(lambda breaker: not_tried(self._policy, breaker, turn))
            raise
        except Exception:
            self._become(lambda breaker: failed(self._policy, breaker, turn, self._clock.now_ms()))
            raise
        except BaseException:  # interrupted
            self._become(lambda breaker: not_tried(self._policy, breaker, turn))
            raise
        self._become(lambda breaker: succeeded(breaker, turn, self._clock.now_ms()))

    def subscribe(
        self, pattern: str, handle: Handle, *, group: str | None = None, consumer: str | None = None
    ) -> Following:
        """Not guarded: who follows waits for the target anyway."""
        if not isinstance(self.inner, Subscribable):
            raise publish_only(type(self.inner).__name__, self.name, "Subscribe at its target")
        return self.inner.subscribe(pattern, handle, group=group, consumer=consumer)

    def close(self) -> None:
        self._closed = True
        self.inner.close()

    def _ask(self) -> int:
        with self._lock:
            breaker, turn = ask(self._policy, self._breaker, self._clock.now_ms())
            self._set(breaker)
            if turn is not None:
                return turn
            until = until_ms(self._policy, breaker)
        raise CircuitOpen(
            "not tried, because one try is under way"
            if until is None
            else f"not tried, because it failed too often; the next try may be made at {iso(until)}",
            where=self.name,
            next="Publish again after that",
        )

    def _become(self, step: Callable[[Breaker], Breaker]) -> None:
        with self._lock:
            self._set(step(self._breaker))

    def _set(self, breaker: Breaker) -> None:
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
