"""Bytes that connections make the server hold, within a limit for all of them together.

Every connection has two accounts: one for what it sent and was not answered yet, one for what is to be sent to it and
was not read yet. While the limit is kept, an account may hold what the limits of its connection allow. Beyond it, only
accounts that hold no more than their share may grow, and the one that has waited longest, so that a frame which is
half there can be finished. An account over its share that does not move for a while is given up.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

SHARE_BYTES_MIN = 64 * 1024
STALLED_S = 10.0  # so long an account over its share may go without moving, while others need the room


class Holder(Protocol):
    """Whose account it is."""

    def moved_bytes(self) -> int:
        """Grows as long as the client does its part."""

    def on_room(self) -> None:
        """It had to wait, and need not wait any more."""

    def on_stalled(self) -> None:
        """It holds too much for too long."""


class Budget:
    def __init__(self, bytes_max: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self.bytes_max = bytes_max
        self.total_bytes = 0
        self._now_s = now_s
        self._accounts: set[Account] = set()  # those that hold something
        self._waiting: OrderedDict[Account, None] = OrderedDict()  # the longest first
        self._first: Account | None = None  # of those, which may go on

    @property
    def is_exceeded(self) -> bool:
        return self.total_bytes > self.bytes_max

    @property
    def share_bytes(self) -> int:
        return max(SHARE_BYTES_MIN, self.bytes_max // max(1, len(self._accounts)))

    def changed(self, account: Account, by_bytes: int) -> None:
        self.total_bytes += by_bytes
        if account.bytes:
            self._accounts.add(account)
        else:
            self._accounts.discard(account)
        if account in self._waiting and account.bytes <= self.share_bytes:
            del self._waiting[account]
            account.holder.on_room()
        self._wake()

    def wait(self, account: Account) -> None:
        self._waiting.setdefault(account)

    def is_first(self, account: Account) -> bool:
        return next(iter(self._waiting), None) is account

    def _wake(self) -> None:
        if not self.is_exceeded:
            waiting, self._waiting, self._first = self._waiting, OrderedDict(), None
            for account in waiting:
                account.holder.on_room()
            return
        first = next(iter(self._waiting), None)
        if first is not self._first:
            self._first = first
            if first is not None:
                first.holder.on_room()

    def sweep(self) -> None:
        """Give up what stalls while others need the room."""
        if not self.is_exceeded:
            return
        now_s, share_bytes = self._now_s(), self.share_bytes
        for account in list(self._accounts):
            if account.bytes <= share_bytes or (account in self._waiting and not self.is_first(account)):
                account.stalled_since_s = None
                continue
            moved_bytes = account.holder.moved_bytes()
            if account.stalled_since_s is None or moved_bytes != account.moved_bytes:
                account.stalled_since_s, account.moved_bytes = now_s, moved_bytes
            elif now_s - account.stalled_since_s >= STALLED_S:
                account.holder.on_stalled()


class Account:
    __slots__ = ("_budget", "bytes", "holder", "moved_bytes", "stalled_since_s")

    def __init__(self, budget: Budget, holder: Holder) -> None:
        self._budget = budget
        self.holder = holder
        self.bytes = 0
        self.moved_bytes = 0
        self.stalled_since_s: float | None = None

    def set(self, bytes: int) -> None:
        if bytes != self.bytes:
            by_bytes, self.bytes = bytes - self.bytes, bytes
            self._budget.changed(self, by_bytes)

    @property
    def may_grow(self) -> bool:
        """False: it has to wait for `on_room`."""
        budget = self._budget
        if not budget.is_exceeded or self.bytes <= budget.share_bytes:
            return True
        budget.wait(self)
        return budget.is_first(self)

    @property
    def room_bytes(self) -> int:
        """By how much it may grow."""
        budget = self._budget
        return max(budget.bytes_max - budget.total_bytes, budget.share_bytes - self.bytes, 0)
