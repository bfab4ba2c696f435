"""Bytes that connections make the server hold, within a limit for all of them together.

Every connection has two accounts: one for what it sent and was not answered yet, one for what is to be sent to it and
was not read yet. While the limit is kept, an account may hold what the limits of its connection allow. Beyond it, the
accounts of one owner, which is a token, stand in line: the first few may go on, so that a frame which is half there
can be finished, and one owner's connections do not keep another's out. An account that waits for its client is given
up when the client does too little for too long.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Protocol

SHARE_BYTES_MIN = 64 * 1024
TURNS = 2  # accounts of one owner that may go on while the limit is exceeded
MOVED_BYTES_MIN = 64 * 1024  # so many must move
STALLED_S = 10.0  # within so long, while others need the room


class Holder(Protocol):
    """Whose account it is."""

    @property
    def owner(self) -> str:
        """Its accounts share a line."""

    def is_awaited(self) -> bool:
        """The client has to do its part, and can: it is not the server that it waits for."""

    def moved_bytes(self) -> int:
        """Grows as long as the client does its part."""

    def on_room(self) -> None:
        """It had to wait, and need not wait any more."""

    def on_stalled(self) -> None:
        """It holds too much for too long."""


class Budget:
    """`patience_s`: for so long an account may wait for its client in any case; None is for ever."""

    def __init__(
        self, bytes_max: int, now_s: Callable[[], float] = time.monotonic, *, patience_s: float | None = None
    ) -> None:
        self.bytes_max = bytes_max
        self.total_bytes = 0
        self._now_s = now_s
        self._patience_s = patience_s
        self._accounts: set[Account] = set()  # those that hold something
        self._lines: dict[str, OrderedDict[Account, None]] = {}  # by owner

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
        if not self.is_exceeded:
            lines, self._lines = self._lines, {}
            for each in (each for line in lines.values() for each in line):
                each.line = None
                each.holder.on_room()
        elif by_bytes < 0 and account.line is not None and account.bytes <= self.share_bytes:
            self._leave(account, account.line)

    def has_turn(self, account: Account) -> bool:
        """False: it stands in line, and is told when it has."""
        if account.line is None:
            account.line = account.holder.owner
            self._lines.setdefault(account.line, OrderedDict())[account] = None
        return account in islice(self._lines[account.line], TURNS)

    def _leave(self, account: Account, owner: str) -> None:
        line = self._lines[owner]
        had_turn = account in islice(line, TURNS)
        account.line = None
        del line[account]
        if not line:
            del self._lines[owner]
        account.holder.on_room()
        if had_turn:
            for following in islice(line, TURNS - 1, TURNS):
                following.holder.on_room()

    def forget(self, account: Account) -> None:
        if account.line is not None:
            self._leave(account, account.line)

    def sweep(self) -> None:
        """Give up what stalls while others need the room, or for longer than any frame takes."""
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
        for owner, line in list(self._lines.items()):
            for account in list(islice(line, TURNS)):
                if not account.holder.is_awaited():  # it makes no use of its turn
                    self._leave(account, owner)


class Account:
    __slots__ = ("_budget", "awaited_since_s", "bytes", "holder", "line", "moved_bytes")

    def __init__(self, budget: Budget, holder: Holder) -> None:
        self._budget = budget
        self.holder = holder
        self.bytes = 0
        self.moved_bytes = 0
        self.awaited_since_s: float | None = None
        self.line: str | None = None  # whose it stands in

    def set(self, bytes: int) -> None:
        if bytes != self.bytes:
            by_bytes, self.bytes = bytes - self.bytes, bytes
            self._budget.changed(self, by_bytes)

    def close(self) -> None:
        self.set(0)
        self._budget.forget(self)

    @property
    def may_grow(self) -> bool:
        """By a little. False: it has to wait for `on_room`."""
        return self.bytes <= self._budget.share_bytes or self.may_take

    @property
    def may_take(self) -> bool:
        """By as much as its connection may hold. False: it has to wait for `on_room`."""
        return not self._budget.is_exceeded or self._budget.has_turn(self)

    def fits(self, bytes: int) -> bool:
        """Whether so much more is within the limit, or else within its share. It does not stand in line for it."""
        return not self._budget.is_exceeded or self.bytes + bytes <= self._budget.share_bytes
