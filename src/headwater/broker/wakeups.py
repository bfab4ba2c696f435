"""Waiters by topic pattern, and waking those that a change concerns. A wake-up is a hint: the waiter reads the log."""

from __future__ import annotations

import threading

from headwater.broker.flow import Completion, complete
from headwater.topics import Pattern, TopicTrie


class Waiter:
    """Arm it, look at the log, and only then wait on the completion: a wake-up in between is not lost."""

    def __init__(self, pattern: Pattern, subscription: str, *, wake_on_settle: bool = False) -> None:
        self.pattern = pattern
        self.subscription = subscription
        self.wake_on_settle = wake_on_settle
        self._ticket: Completion[None] = Completion()
        self._lock = threading.Lock()

    def arm(self) -> Completion[None]:
        if self._ticket.done:
            with self._lock:  # two that arm at once get the same completion
                if self._ticket.done:
                    self._ticket = Completion()
        return self._ticket

    def wake(self) -> None:
        complete([(self._ticket, None, None)])


class Wakeups:
    """`announced` is the highest seq that waiters have been woken for, `last_known` the highest that is known to be
    stored."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trie: TopicTrie[Waiter] = TopicTrie()
        self._waiters: set[Waiter] = set()
        self.announced = self.last_known = 0

    def add(self, pattern: Pattern, subscription: str, *, wake_on_settle: bool) -> Waiter:
        """`wake_on_settle`: an ack, nack or release of another consumer may make something deliverable here."""
        waiter = Waiter(pattern, subscription, wake_on_settle=wake_on_settle)
        with self._lock:
            self._trie.add(pattern, waiter)
            self._waiters.add(waiter)
        return waiter

    def remove(self, waiter: Waiter) -> None:
        with self._lock:
            self._trie.remove(waiter.pattern, waiter)
            self._waiters.discard(waiter)

    def leave(self, waiter: Waiter) -> None:
        """Its consumer is closed: others may have what it released."""
        self.remove(waiter)
        self.settled()

    def published(self, topics: set[str], first_seq: int, last_seq: int) -> None:
        with self._lock:
            self.last_known = max(self.last_known, last_seq)
            # Seqs below ours that we have not announced are another process's: leave them to the watcher.
            if first_seq <= self.announced + 1:
                self.announced = max(self.announced, last_seq)
            awake = {waiter for topic in topics for waiter in self._trie.match(topic)} if self._waiters else ()
        for waiter in awake:
            waiter.wake()

    def settled(self, subscription: str | None = None) -> None:
        """Something became deliverable in this subscription; None if it is not known in which."""
        with self._lock:
            awake = [
                waiter
                for waiter in self._waiters
                if waiter.wake_on_settle and subscription in (None, waiter.subscription)
            ]
        for waiter in awake:
            waiter.wake()

    def wake_all(self) -> None:
        with self._lock:
            awake = list(self._waiters)
        for waiter in awake:
            waiter.wake()

    def __len__(self) -> int:
        return len(self._waiters)
