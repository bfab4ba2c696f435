"""Ctrl-C and SIGTERM for work that may be cut off anywhere, as a lake's is: they end it at once, and in order."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SAME_SIGNAL_S = 0.5  # a wrapper such as timeout(1) may pass on what the process got by itself
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopAtOnce:
    """In its `with` block the first signal interrupts the work. What comes in the moment after is the same wish; a
    later one interrupts the tidying up too. Where stopping is how the work ends (`is_fine`), the block ends as if it
    were done; elsewhere it ends with KeyboardInterrupt.

    Whatever else is raised after a signal is taken for its consequence: Spark's client is left in the middle of a
    conversation, and what it says next makes little sense.
    """

    def __init__(self, *, is_fine: bool = False, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._is_fine = is_fine
        self._monotonic = monotonic
        self._asked_s: float | None = None
        self._is_impatient = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopAtOnce:
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        self.listen()
        return self

    @property
    def was_asked(self) -> bool:
        return self._asked_s is not None

    def listen(self) -> None:
        """Again after a start of Spark, which takes Ctrl-C for itself."""
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> bool:
        if self._asked_s is None or self._is_impatient:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            return False
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # it ends, whoever still wants it to; that must not be disturbed
        if exc is not None and not self._is_fine:
            raise KeyboardInterrupt from exc
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = self._monotonic()
        if self._asked_s is None:
            self._asked_s = now_s
        elif now_s - self._asked_s < SAME_SIGNAL_S:
            return
        else:
            self._is_impatient = True
        raise KeyboardInterrupt
