"""The numbers of a client's messages, by which the server knows what it has stored already. Pure.

The server keeps a receipt for a number until it is told that all below a later one is confirmed. Confirmed means more
than answered: a message that was sent again after the connection broke may have its first copy still on its way, kept
back somewhere in the network. Until no copy can come any more, its receipt is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from headwater.client.request import Request

TELL_CONFIRMED = 1_000  # after so many confirmed messages the server may forget their receipts
LATE_COPY_S = 300.0  # servers give up a connection that is silent for less than this, and nothing can come on it then


class Numbering:
    def __init__(self) -> None:
        self._next = 1
        self._open: dict[int, None] = {}  # the first number of each request that is not confirmed, in order
        self._told = 0
        self._may_come_twice: set[int] = set()
        self._settled_late: deque[tuple[float, int]] = deque()  # when a number is confirmed after all

    def give(self, request: Request) -> None:
        """Number what it publishes, the first time; now and then it tells the server what is confirmed."""
        if not request.number:
            request.number = self._next
            self._next += request.count
            self._open[request.number] = None
        request.params.number = request.number
        confirmed = next(iter(self._open))
        if confirmed - self._told >= TELL_CONFIRMED:
            self._told = request.params.confirmed = confirmed

    def broken(self, unanswered: Iterable[Request]) -> None:
        """The connection that these were sent on is gone."""
        self._may_come_twice.update(request.number for request in unanswered if request.number)

    def settle(self, request: Request, now_s: float, *, given_up: bool = False) -> None:
        """It has been answered, was never sent, or nobody waits for it any more."""
        number = request.number
        if number and (given_up or number in self._may_come_twice):
            self._may_come_twice.discard(number)
            self._settled_late.append((now_s + LATE_COPY_S, number))
        else:
            self._open.pop(number, None)

    def look(self, now_s: float) -> None:
        while self._settled_late and self._settled_late[0][0] <= now_s:
            self._open.pop(self._settled_late.popleft()[1], None)
