"""Limits shared by connections: the bytes that all of them make the server hold, and the rate of calls of each.

Every connection has two accounts: one for bytes that it sent and that are not answered yet, one for bytes that it has
not read yet. Below the limit of the budget, an account may hold what the limits of its connection allow. Above it, the
accounts of one owner (a token) queue: the first few may continue, so that a partial frame can be completed, and the
connections of one owner do not lock out those of another. An account that waits for its client is closed when the
client moves too few bytes for too long.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Protocol

SHARE_BYTES_MIN = 64 * 1024
TURNS = 2  # accounts of one owner that may continue while the limit is exceeded
MOVED_BYTES_MIN = 64 * 1024  # must move within STALLED_S
STALLED_S = 10.0  # while other accounts need the room


class Holder(Protocol):
    """The connection of an account."""

    @property
    def owner(self) -> str:
        """Accounts of one owner share a queue."""

    def is_awaited(self) -> bool:
        """Whether the server waits for the client, and not the client for the server."""

    def moved_bytes(self) -> int:
        """Grows while the client sends or reads."""

    def on_room(self) -> None:
        """The account had to wait, and may continue."""

    def on_stalled(self) -> None:
        """The account holds too much for too long."""


class Budget:
    """`patience_s`: how long an account may wait for its client while there is room; None is without limit."""

    def __init__(
        self, bytes_max: int, now_s: Callable[[], float] = time.monotonic, *, patience_s: float | None = None
    ) -> None:
        self.bytes_max = bytes_max
        self.total_bytes = 0
        self._now_s = now_s
        self._patience_s = patience_s
        self._accounts: set[Account] = set()  # those with bytes
        self._queues: dict[str, OrderedDict[Account, None]] = {}  # by owner

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
        if self.total_bytes <= self.bytes_max:
            if self._queues:
                queues, self._queues = self._queues, {}
                for each in [account for queue in queues.values() for account in queue]:
                    each.queue = None
                    each.holder.on_room()
        elif by_bytes < 0 and account.queue is not None and account.bytes <= self.share_bytes:
            self._leave(account, account.queue)

    def has_turn(self, account: Account) -> bool:
        """Whether it may continue; if not, it waits in its queue for `on_room`."""
        if account.queue is None:
            account.queue = account.holder.owner
            self._queues.setdefault(account.queue, OrderedDict())[account] = None
        return account in islice(self._queues[account.queue], TURNS)

    def _leave(self, account: Account, owner: str) -> None:
        queue = self._queues[owner]
        had_turn = account in islice(queue, TURNS)
        account.queue = None
        del queue[account]
        if not queue:
            del self._queues[owner]
        account.holder.on_room()
        if had_turn:
            for following in islice(queue, TURNS - 1, TURNS):
                following.holder.on_room()

    def forget(self, account: Account) -> None:
        if account.queue is not None:
            self._leave(account, account.queue)

    def sweep(self) -> None:
        """Close accounts that stall while others need the room, or for longer than any frame takes."""
        patience_s = STALLED_S if self.is_exceeded else self._patience_s
        if patience_s is None:
            return
        now_s = self._now_s()
        for account in list(self._accounts):
            if not account.holder.is_awaited():
                account.awaited_since_s = None
                continue
            moved_bytes = account.holder.moved_bytes()
            if account.awaited_since_s is None or moved_bytes - account.moved_bytes >= MOVED_BYTES_MIN:
                account.awaited_since_s, account.moved_bytes = now_s, moved_bytes
            elif now_s - account.awaited_since_s >= patience_s:
                account.holder.on_stalled()
        for owner, queue in list(self._queues.items()):
            for account in list(islice(queue, TURNS)):
                if not account.holder.is_awaited():  # it does not use its turn
                    self._leave(account, owner)


class Account:
    __slots__ = ("_budget", "awaited_since_s", "bytes", "holder", "moved_bytes", "queue")

    def __init__(self, budget: Budget, holder: Holder) -> None:
        self._budget = budget
        self.holder = holder
        self.bytes = 0
        self.moved_bytes = 0
        self.awaited_since_s: float | None = None
        self.queue: str | None = None  # the owner of the queue it waits in

    def set(self, bytes: int) -> None:
        if bytes != self.bytes:
            by_bytes, self.bytes = bytes - self.bytes, bytes
            self._budget.changed(self, by_bytes)

    def close(self) -> None:
        self.set(0)
        self._budget.forget(self)

    @property
    def may_grow(self) -> bool:
        """Whether it may grow by a little. If not, it has to wait for `on_room`."""
        budget = self._budget
        return budget.total_bytes <= budget.bytes_max or self.bytes <= budget.share_bytes or budget.has_turn(self)

    @property
    def may_take(self) -> bool:
        """Whether it may grow by as much as its connection may hold. If not, it has to wait for `on_room`."""
        return not self._budget.is_exceeded or self._budget.has_turn(self)

    def fits(self, bytes: int) -> bool:
        """Whether so many more bytes are within the limit, or else within its share. It does not queue for them."""
        return not self._budget.is_exceeded or self.bytes + bytes <= self._budget.share_bytes


class RateLimit:
    """A token bucket: `per_second` calls in the long run, `burst` at once; 0 per second is no limit."""

    def __init__(self, per_second: float, burst: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = max(burst, 1)
        self._now_s = now_s
        self._left = float(self._burst)
        self._at_s = now_s() if per_second else 0.0

    def take(self, count: int) -> float:
        """Returns 0.0 if so many calls may be made now, else the seconds to wait. A batch larger than the bucket passes
        when the bucket is full, and leaves it in debt."""
        if not self._per_second:
            return 0.0
        now_s = self._now_s()
        self._left = min(float(self._burst), self._left + (now_s - self._at_s) * self._per_second)
        self._at_s = now_s
        needed = min(count, self._burst)
        if self._left < needed:
            return (needed - self._left) / self._per_second
        self._left -= count
        return 0.0
