"""How commands end: their exit codes, and Ctrl-C or SIGTERM between two messages."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from headwater.errors import (
    HeadwaterError,
    InvalidInputError,
    SubscriptionMismatchError,
    UnknownDeadLetterError,
    UnknownReplicaError,
    UnknownSubscriptionError,
)

OK, FINDING, USAGE, STORE, INTERRUPTED = 0, 1, 2, 3, 130
SAME_SIGNAL_S = 0.5  # a wrapper such as timeout(1) may pass on what the process got by itself

T = TypeVar("T")


def exit_code_of(exc: HeadwaterError) -> int:
    unusable = (
        InvalidInputError,
        UnknownSubscriptionError,
        SubscriptionMismatchError,
        UnknownDeadLetterError,
        UnknownReplicaError,
    )
    return getattr(exc, "exit_code", USAGE if isinstance(exc, unusable) else STORE)


def is_debugged() -> bool:
    """Tracebacks are wanted."""
    return os.environ.get("HEADWATER_DEBUG") == "1"


class Stop:
    """In its `with` block the first signal only sets `requested` and ends `wait_for`. The second one raises
    KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False
        self._waiting = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait_for(self, work: Callable[[], T]) -> T | None:
        """What `work` returns, or None if a signal came before or during it."""
        try:
            self._waiting = True
            return None if self.requested else work()
        except KeyboardInterrupt:
            self.requested = True
            return None
        finally:
            self._waiting = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        interrupt = self.requested or self._waiting
        self.requested = True
        if interrupt:
            raise KeyboardInterrupt


def treat_terminate_as_interrupt() -> None:
    """Make SIGTERM unwind every command like Ctrl-C, so that `with` blocks release what they hold."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
