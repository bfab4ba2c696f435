"""What has come for one consumer and was not taken yet, and the bell for those who wait for it. Safe for threads."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable

from headwater.broker.claims import Claimed
from headwater.broker.flow import Ticket, finish
from headwater.broker.logger import logger
from headwater.ports.records import Gap


class Arrivals:
    def __init__(self) -> None:
        self._messages: deque[Claimed] = deque()
        self._gaps: deque[Gap] = deque()
        self._bell: Ticket[None] = Ticket()
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._messages)

    def arm(self) -> Ticket[None]:
        """Done at the next ring. Arm first, then look: so nothing is missed in between."""
        if self._bell.done:
            with self._lock:  # two who arm at once must hear the same bell
                if self._bell.done:
                    self._bell = Ticket()
        return self._bell

    def ring(self) -> None:
        finish([(self._bell, None, None)])

    # --- messages -----------------------------------------------------------------------------------------------

    def add(self, found: Iterable[Claimed]) -> None:
        self._messages.extend(found)

    def take(self, limit: int) -> list[Claimed]:
        taken: list[Claimed] = []
        with contextlib.suppress(IndexError):
            while len(taken) < limit:
                taken.append(self._messages.popleft())
        return taken

    def drop(self, claimed: Claimed) -> None:
        with contextlib.suppress(ValueError, IndexError):  # then another thread has taken it
            self._messages.remove(claimed)

    def seqs(self) -> list[int]:
        return [claimed.message.seq for claimed in self._messages.copy()]

    def keep_only(self, seqs: set[int]) -> None:
        for claimed in self._messages.copy():
            if claimed.message.seq not in seqs:
                self.drop(claimed)

    # --- gaps ---------------------------------------------------------------------------------------------------

    def add_gap(self, gap: Gap) -> None:
        self._gaps.append(gap)
        self.ring()

    def tell_gaps(self, on_gap: Callable[[Gap], None] | None) -> None:
        """To be called by whoever fetches, as for a log in this process: there a callback may ask the log something,
        which it could not where answers come in."""
        with contextlib.suppress(IndexError):
            while True:
                _tell(self._gaps.popleft(), on_gap)


def _tell(gap: Gap, on_gap: Callable[[Gap], None] | None) -> None:
    logger.warning("subscription %s lost %d messages (%s)", gap.subscription, gap.count, gap.why)
    if on_gap is not None:
        try:
            on_gap(gap)
        except Exception:  # the messages that came with it must reach their consumer
            logger.exception("the on_gap callback of subscription %s failed", gap.subscription)
