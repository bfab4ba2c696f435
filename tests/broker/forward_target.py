"""A target that the test can take away, and that refuses what the test says; and waiting for a forwarder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headwater import Log, ManualClock
from headwater.api.forwarder import Forwarder
from headwater.errors import TooLargeError, TransportFailedError
from headwater.message import Message
from headwater.transports.memory import MemoryTransport

PATIENCE_S = 30.0


class Target(MemoryTransport):
    name = "target"

    def __init__(self) -> None:
        super().__init__(max_messages=100_000)
        self.away = False
        self.refused: set[Any] = set()
        self.unfit: set[Any] = set()
        self.arrived: list[Any] = []  # data, as often as it came
        self.batches: list[int] = []
        self._tries = 0
        self._tried = threading.Condition()

    @property
    def connected(self) -> bool:
        return not self.away

    def publish_many(self, messages: Sequence[Message]) -> None:
        try:
            data = [message.data for message in messages]
            if self.away:
                raise TransportFailedError("the target is away", where=self.name)
            if self.unfit.intersection(data):
                raise TooLargeError("this is too large for the target", where=self.name)
            if self.refused.intersection(data):
                raise TransportFailedError("the target refuses this", where=self.name)
            super().publish_many(messages)
            self.arrived += data
            self.batches.append(len(data))
        finally:
            with self._tried:
                self._tries += 1
                self._tried.notify_all()

    @property
    def tries(self) -> int:
        return self._tries

    def wait_for_tries(self, count: int) -> None:
        with self._tried:
            assert self._tried.wait_for(lambda: self._tries >= count, PATIENCE_S), f"tried {self._tries} times"


def publish(log: Log, *numbers: int) -> None:
    log.publish_many([("orders.new", number) for number in numbers])


def drained(forwarder: Forwarder) -> bool:
    return forwarder.drain(PATIENCE_S)


def wait_for(condition: Callable[[], bool], forwarder: Forwarder) -> None:
    """For what can only change with the forwarder."""
    for _ in range(int(PATIENCE_S * 100)):
        seen = forwarder._changes
        if condition():
            return
        forwarder._wait_for_change(seen, 0.01)
    pytest.fail("it does not come to that")


def advance_until(condition: Callable[[], bool], clock: ManualClock) -> None:
    """Time passes, so quickly that a thread that sleeps by the clock must see it."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S * 200)):
        if condition():
            return
        clock.advance(5)
        pause.wait(0.001)
    pytest.fail("it does not come to that")
