"""Waiting for messages, the same for durable and ephemeral readers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from headwater.broker.claims import Claimed, taken_over
from headwater.broker.engine import Engine
from headwater.broker.flow import Flow, Within
from headwater.errors import Closed
from headwater.message import check_whole
from headwater.ports.records import Gap, SubscriptionSpec, selection_of

FETCH_MAX = 10_000
PREFETCH = 100
PREFETCH_SHARED = 4  # to begin with few, so that one consumer does not sit on work that others could do
PREFETCH_S = 0.1  # shared consumers take about as much at a time as they get done in this time
NET_POLL_S = 5.0  # the net under lost wake-ups of this process; other processes have the watcher's


class Prefetch:
    """How many messages an iterator or a handler takes at a time. Where others compete for them, as many as it has
    shown to get done quickly."""

    def __init__(self, spec: SubscriptionSpec, most: int = PREFETCH) -> None:
        self._most = min(most, spec.max_in_flight)
        self._adapts = spec.mode == "shared"
        self.size = min(PREFETCH_SHARED, self._most) if self._adapts else self._most
        self._filled_s: float | None = None

    def filled(self, count: int, now_s: float) -> None:
        self._filled_s = now_s if count >= self.size else None

    def emptied(self, now_s: float) -> None:
        """All that was taken is done; take more next time if that was quick, less if it was slow."""
        if self._adapts and self._filled_s is not None:
            took_s = now_s - self._filled_s
            self.size = min(self.size * 2, self._most) if took_s < PREFETCH_S / 2 else self.size
            self.size = max(self.size // 2, 1) if took_s > PREFETCH_S * 2 else self.size


class LogReader(ABC):
    """Has a place in the log and waits there. What it does with a message it finds is up to the kind of reader."""

    def __init__(self, engine: Engine, id: str, spec: SubscriptionSpec, *, minds_settling: bool) -> None:
        self.engine = engine
        self.id = id
        self.spec = spec
        self._selection = selection_of(spec)
        self._closed = False
        self._interrupted = False
        self.prefetch = PREFETCH
        self.on_gap: Callable[[Gap], None] | None = None
        self.lost = False  # found out that somebody else has taken it over
        self._waiter = engine.wakeups.add(self._selection.pattern, id, minds_settling=minds_settling)
        engine.ensure_watching()

    @property
    def closed(self) -> bool:
        return self._closed

    def fetch(self, limit: int, wait_s: float | None) -> Flow[list[Claimed]]:
        """Up to `limit` messages; waits for the first as long as told (None: for ever), returns [] when time is up."""
        check_whole("the number to fetch", limit, 1, FETCH_MAX)
        until = None if wait_s is None else time.monotonic() + wait_s
        while True:
            ticket = self._waiter.arm()
            if self._closed:
                raise Closed(f"subscription '{self.id}' is closed", where=self.id, next="Subscribe again")
            if self._interrupted:
                return []
            if self.lost:
                raise taken_over(self.id)
            found, look_again_ms = yield from self._try_fetch(limit)
            if found:
                return found
            left_s = None if until is None else until - time.monotonic()
            if left_s is not None and left_s <= 0:
                return []
            due_s = None if look_again_ms is None else (look_again_ms - self.engine.clock.now_ms()) / 1000
            yield Within(ticket, max(0.0, min(s for s in (left_s, due_s, NET_POLL_S) if s is not None)))

    @abstractmethod
    def _try_fetch(self, limit: int) -> Flow[tuple[list[Claimed], int | None]]:
        """What is there now, and when to look again at the latest even if nobody wakes us."""

    def interrupt(self) -> None:
        """Let a waiting fetch return, and every later one."""
        self._interrupted = True
        self._waiter.wake()

    def lose(self) -> None:
        """Somebody else has taken it over; a waiting fetch learns it now."""
        self.lost = True
        self._waiter.wake()

    def _leave(self) -> None:
        self._closed = True
        self.engine.wakeups.remove(self._waiter)
        self._waiter.wake()
