"""A child process on a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import headwater

PATIENCE_S = 60.0  # no test waits so long, unless something is wrong

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["headwater"])


class Child:
    def __init__(self, role: Callable[..., None], *arguments: Any) -> None:
        self._pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=role, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def say(self, word: Any) -> None:
        self._pipe.send(word)

    def hear(self, patience_s: float = PATIENCE_S) -> Any:
        assert self._pipe.poll(patience_s), f"{self.process} says nothing"
        return self._pipe.recv()

    def hears_of(self, word: Any) -> Any:
        """Says it, and returns the answer."""
        self.say(word)
        return self.hear()

    def has_something_to_say(self, patience_s: float) -> bool:
        """Also when it has ended: then hearing it raises EOFError."""
        return self._pipe.poll(patience_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_S)

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        self.process.join(PATIENCE_S)
        assert self.process.exitcode == 0


def drain(subscription: headwater.Subscription, patience_s: float = 0.0) -> list[tuple[int, int, Any]]:
    """Fetches and acks all there is: (seq, attempt, data)."""
    found = []
    while messages := subscription.fetch(100, timeout=patience_s):
        found += [(message.seq, message.attempt, message.data) for message in messages]
        subscription.ack_many(messages)
    return found
