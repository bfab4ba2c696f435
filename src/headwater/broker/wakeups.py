"""Waiters by topic pattern, and waking those that a change concerns. A wake-up is a hint: the waiter reads the log.

A consumer that waits may stand by: the transaction that publishes what it waits for claims for it, and the wake-up then
finds the messages in its buffer. Consumers that stand by for the same messages take turns.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headwater.broker.flow import Completion, complete
from headwater.errors import SubscriptionError
from headwater.topics import Pattern, TopicTrie

if TYPE_CHECKING:
    from headwater.broker.committer import Published, TransactionHooks
    from headwater.ports.store import Writer

CLAIMS_MAX = 8  # consumers that one transaction serves; the others claim for themselves
TOPICS_CLAIMED_MAX = 8  # of a transaction that serves consumers


class Waiter:
    """Arm it, look at the log, and only then wait on the completion: a wake-up in between is not lost."""

    def __init__(self, pattern: Pattern, subscription: str, *, wake_on_settle: bool = False) -> None:
        self.pattern = pattern
        self.subscription = subscription
        self.wake_on_settle = wake_on_settle
        self.is_stale = True
        """More may have changed than that messages were published; its consumer resets it before it looks."""
        self._ticket: Completion[None] = Completion()
        self._lock = threading.Lock()

    def arm(self) -> Completion[None]:
        if self._ticket.done:
            with self._lock:  # two that arm at once get the same completion
                if self._ticket.done:
                    self._ticket = Completion()
        return self._ticket

    def wake(self) -> None:
        self.is_stale = True
        self.wake_for_messages()

    def wake_for_messages(self) -> None:
        complete([(self._ticket, None, None)])


ClaimPublished = Callable[[int, "Writer", "TransactionHooks"], bool]
"""Claims for a consumer in the transaction that published up to this seq; whether it claimed something."""


class Wakeups:
    """`announced` is the highest seq that waiters have been woken for, `last_known` the highest that is known to be
    stored."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trie: TopicTrie[Waiter] = TopicTrie()
        self._waiters: set[Waiter] = set()
        self._standing_by: dict[Waiter, tuple[int, ClaimPublished]] = {}
        self._turns = itertools.count()
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

    def published(self, topics: set[str], first_seq: int, last_seq: int, *, elsewhere: bool = False) -> None:
        """`elsewhere`: by another process, which may have settled something, too."""
        with self._lock:
            self.last_known = max(self.last_known, last_seq)
            # Seqs below ours that we have not announced are another process's: leave them to the watcher.
            if first_seq <= self.announced + 1:
                self.announced = max(self.announced, last_seq)
            awake = {waiter for topic in topics for waiter in self._trie.match(topic)} if self._waiters else ()
        for waiter in awake:
            if elsewhere:
                waiter.wake()
            else:
                waiter.wake_for_messages()

    def note_stored(self, seqs: Sequence[int]) -> bool:
        """Messages were stored without `published`; returns whether a waiter is to be woken for them. Then they are not
        announced yet: if the caller is interrupted, a watcher wakes the waiter. Takes no lock: two threads may leave
        `announced` too low, which the first consumer's watcher mends."""
        self.last_known = max(self.last_known, seqs[-1])
        if self._waiters:
            return True
        if seqs[0] == self.announced + 1:
            self.announced = seqs[-1]
        return False

    def stand_by(self, waiter: Waiter, claim: ClaimPublished) -> None:
        """Let transactions that publish call `claim`, from now on, until it has claimed something or `stand_down`."""
        with self._lock:
            self._standing_by[waiter] = next(self._turns), claim

    def stand_down(self, waiter: Waiter) -> None:
        with self._lock:
            self._standing_by.pop(waiter, None)

    def claim_published(self, published: Published, writer: Writer, hooks: TransactionHooks) -> None:
        """Inside the transaction. A consumer that is refused has lost its subscription, and learns of it by itself."""
        if not self._standing_by or len(published.topics) > TOPICS_CLAIMED_MAX:
            return
        with self._lock:
            found = {waiter for topic in published.topics for waiter in self._trie.match(topic)}
            ready = [(*self._standing_by[waiter], waiter) for waiter in found if waiter in self._standing_by]
        for _, claim, waiter in sorted(ready, key=lambda each: each[0])[:CLAIMS_MAX]:
            try:
                has_claimed = claim(published.last_seq, writer, hooks)
            except SubscriptionError:
                has_claimed = True
            if has_claimed:
                self.stand_down(waiter)

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

    @property
    def has_waiters(self) -> bool:
        return bool(self._waiters)
