"""Handlers for the tests of Redis: they collect, and let a test wait for what it expects."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from headwater import Message

PATIENCE_S = 20.0


class Collected:
    """A handler: keeps messages, and first does what `also` says, which may raise."""

    def __init__(self, also: Callable[[Message], Any] | None = None) -> None:
        self.messages: list[Message] = []
        self._also = also
        self._changed = threading.Condition()

    def __call__(self, message: Message) -> None:
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()
        if self._also is not None:
            self._also(message)

    @property
    def data(self) -> list[Any]:
        return [message.data for message in self.messages]

    def until(self, enough: Callable[[list[Message]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: enough(self.messages), PATIENCE_S), f"only {self.data}"

    def until_count(self, count: int) -> None:
        self.until(lambda messages: len(messages) >= count)
