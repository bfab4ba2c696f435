"""What the proxy has done so far, and a way to wait for more of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

WAIT_S_MAX = 10.0


@dataclass(frozen=True)
class Counts:
    connections: int = 0
    """Accepted and joined to the server, ever."""
    open: int = 0
    """Of these, with at least one end that the proxy still holds."""
    unreachable: int = 0
    """Accepted, but the server could not be reached; the client was reset."""
    to_server_bytes: int = 0
    to_client_bytes: int = 0
    swallowed_bytes: int = 0
    cuts: int = 0
    """Connections that `cut_after` ended."""
    orphaned: int = 0
    """Connections that lost their client while the server still believes in them."""
    held_bytes: int = 0
    """On their way to the server, kept back by the proxy: now, not ever."""
    late_bytes: int = 0
    """Reached the server on an orphaned connection."""


class Tally:
    """Counted by the proxy's thread, read and waited for by any other."""

    def __init__(self) -> None:
        self._counts = Counts()
        self._changed = threading.Condition()

    def add(self, **more: int) -> None:
        with self._changed:
            self._counts = replace(
                self._counts, **{name: getattr(self._counts, name) + number for name, number in more.items()}
            )
            self._changed.notify_all()

    def now(self) -> Counts:
        with self._changed:
            return self._counts

    def wait_until(self, reached: Callable[[Counts], bool], timeout_s: float = WAIT_S_MAX) -> Counts:
        with self._changed:
            if not self._changed.wait_for(lambda: reached(self._counts), timeout_s):
                raise TimeoutError(f"not reached in {timeout_s} s: {self._counts}")
            return self._counts
