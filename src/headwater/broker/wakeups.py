"""Who waits for which topics, and waking just those. Hints only: whoever wakes looks at the log for the truth."""

from __future__ import annotations

import threading

from headwater.broker.flow import Ticket, finish
from headwater.topics import Pattern, TopicTrie


class Waiter:
    """Arm it, look at the log, and only then wait on the ticket: a wake-up in between is not lost."""

    def __init__(self, pattern: Pattern, subscription: str, *, minds_settling: bool = False) -> None:
        self.pattern = pattern
        self.subscription = subscription
        self.minds_settling = minds_settling
        self._ticket: Ticket[None] = Ticket()
        self._lock = threading.Lock()

    def arm(self) -> Ticket[None]:
        if self._ticket.done:
            with self._lock:  # two that arm at once hear the same
                if self._ticket.done:
                    self._ticket = Ticket()
        return self._ticket

    def wake(self) -> None:
        finish([(self._ticket, None, None)])


class Wakeups:
    """Waiters by pattern. `announced` is the highest seq of which all waiters have been told, `last_known` the highest
    that is known to be stored."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trie: TopicTrie[Waiter] = TopicTrie()
        self._waiters: set[Waiter] = set()
        self.announced = self.last_known = 0

    def add(self, pattern: Pattern, subscription: str, *, minds_settling: bool) -> Waiter:
        """`minds_settling`: what others ack, nack or release may make something deliverable here."""
        waiter = Waiter(pattern, subscription, minds_settling=minds_settling)
        with self._lock:
            self._trie.add(pattern, waiter)
            self._waiters.add(waiter)
        return waiter

    def remove(self, waiter: Waiter) -> None:
        with self._lock:
            self._trie.remove(waiter.pattern, waiter)
            self._waiters.discard(waiter)

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
        """Somebody gave something back, in this subscription, or in some if it is not known in which."""
        with self._lock:
            awake = [
                waiter
                for waiter in self._waiters
                if waiter.minds_settling and subscription in (None, waiter.subscription)
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
