"""What the host of replicas counts, for `/metrics`. No figure is about one replica: there may be very many, and who may
scrape need not know their names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Literal

from headwater.errors import HeadwaterError
from headwater.ports.annex import Meter
from headwater.replication.host.records import Totals
from headwater.replication.host.visit import Abort
from headwater.replication.names import Session

TOTALS_S_MIN = 5.0  # between two looks at how much there is
_REFUSALS = ("TOO_LARGE", "DISK_FULL", "CORRUPT", "BUSY", "UNAUTHORIZED")  # of aborts; any other is a failure

SessionEnd = Literal["accepted", "unchanged", "done", "dry", "conflict", "refused", "failed"]
PUSHED: tuple[SessionEnd, ...] = ("accepted", "unchanged", "dry", "conflict", "refused", "failed")
PULLED: tuple[SessionEnd, ...] = ("done", "dry", "refused", "failed")

logger = logging.getLogger("headwater")


class Figures:
    """`running`: how many sessions of a kind there are now; `pushes_max`: at once."""

    def __init__(self, meter: Meter, running: Callable[[Session], int], pushes_max: int) -> None:
        self._totals = Totals(0, 0, 0)
        self._stirred = asyncio.Event()
        self.stir = self._stirred.set
        """There may be more or less by now."""
        self._ended: dict[Session, Callable[[str], None]] = {
            "push": meter.counter_by("replica_pushes", "Pushes by outcome.", "outcome", PUSHED),
            "pull": meter.counter_by("replica_pulls", "Pulls by outcome.", "outcome", PULLED),
        }
        self.count_received = meter.counter("replica_received_bytes", "Bytes of pages and hashes that came.")
        self.count_sent = meter.counter("replica_sent_bytes", "Bytes of pages and hashes that went out.")
        self.observe_acceptance = meter.duration(
            "replica_acceptance_duration", "From the last page of a push to its version."
        )
        meter.gauge("replica_pushes_active", "Pushes under way.", lambda: running("push"))
        meter.gauge("replica_pushes_limit", "Pushes that may be under way at once.", lambda: pushes_max)
        meter.gauge("replica_pulls_active", "Pulls under way.", lambda: running("pull"))
        meter.gauge("replica_subscriptions_active", "Clients that follow a replica.", lambda: running("subscribe"))
        meter.gauge("replicas", "Replicas kept.", lambda: self._look().replicas)
        meter.gauge("replica_versions", "Their versions.", lambda: self._look().versions)
        meter.gauge("replica_stored_bytes", "What these take on disk.", lambda: self._look().stored_bytes)

    def ended(self, session: Session, outcome: SessionEnd) -> None:
        if session in self._ended:
            self._ended[session](outcome)

    def _look(self) -> Totals:
        """As they were a moment ago, for nothing may block here; whoever looks again sees them as they are now."""
        self.stir()
        return self._totals

    async def keep(self, totals: Callable[[], Awaitable[Totals]]) -> None:
        """Until cancelled. Nobody looks, nothing is pushed: nothing is counted."""
        while True:
            self._stirred.clear()
            try:
                self._totals = await totals()
            except HeadwaterError as exc:
                logger.debug("replicas were not counted: %s", exc)
            await asyncio.sleep(TOTALS_S_MIN)
            await self._stirred.wait()


def outcome_of(abort: Abort) -> SessionEnd:
    if abort.code == "VERSION_CONFLICT":
        return "conflict"
    return "refused" if abort.code in _REFUSALS else "failed"
