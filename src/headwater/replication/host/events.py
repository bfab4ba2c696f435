"""What a server reports about its replicas: a message of the log for each version, and metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal

from headwater.delivery.retry import RetryPolicy, backoff_ms
from headwater.errors import HeadwaterError
from headwater.replication.host.catalogue import Catalogue, Replica, Totals, Version, version_document
from headwater.replication.host.session import Abort
from headwater.replication.protocol import ABORT_ERRORS, SessionKind
from headwater.replication.threads import Threads
from headwater.server.mount import Publish

if TYPE_CHECKING:
    from headwater.server.pages import Metrics

PUBLISH_S_MAX = 10.0  # that a push waits for its message; the version stands, and the message comes later
TOO_LONG = "it took too long"

logger = logging.getLogger("headwater")
BACKOFF = RetryPolicy(base_ms=1_000, factor=2.0, cap_ms=60_000, jitter=0.0)
TOTALS_S_MIN = 5.0  # between two counts

SessionOutcome = Literal["accepted", "unchanged", "done", "dry", "conflict", "refused", "failed"]
PUSHED: tuple[SessionOutcome, ...] = ("accepted", "unchanged", "dry", "conflict", "refused", "failed")
PULLED: tuple[SessionOutcome, ...] = ("done", "refused", "failed")


class VersionAnnouncer:
    """Publishes each accepted version as a message of the log, and tries again until it succeeds.

    The message has an id of its own: if the server is killed after publishing it, it is published again and stored
    once."""

    def __init__(self, catalogue: Catalogue, publish: Publish, threads: Threads) -> None:
        self._catalogue = catalogue
        self._publish = publish
        self._threads = threads
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()

    async def announce(self, replica: Replica, version: Version) -> None:
        """Announce it, after older versions of its replica: the log has them in order. Never raises: `run` tries again
        what cannot be published now."""
        try:
            async with asyncio.timeout(PUBLISH_S_MAX):
                why = await self._announce_all()
        except TimeoutError:
            why = TOO_LONG
        if why:
            details = {"replica": replica.name.path, "version": version.number, "why": why}
            logger.warning("version %(version)d of %(replica)s is not announced yet: %(why)s", details)
            self._wake.set()

    async def run(self) -> None:
        """Announce, until cancelled, what the last run of the server left, and what failed since."""
        failures = 0
        while True:
            if why := await self._announce_all():
                logger.debug("announcing will be tried again: %s", why)
            else:
                failures = 0
                await self._wake.wait()
            self._wake.clear()
            failures += 1
            await asyncio.sleep(backoff_ms(BACKOFF, failures, 0.0) / 1000)

    async def _announce_all(self) -> str:
        """Returns why the first one failed, after all replicas were tried; empty if none did."""
        failed: dict[str, str] = {}
        try:
            async with self._turn:
                for replica, version in await self._threads.do(self._catalogue.unannounced):
                    if replica.id in failed:
                        continue
                    try:
                        await self._announce(replica, version)
                    except (HeadwaterError, TimeoutError) as exc:
                        failed[replica.id] = str(exc) or TOO_LONG
        except HeadwaterError as exc:  # of the catalogue
            return str(exc)
        except Exception as exc:
            logger.exception("announcing versions failed, and will be tried again")
            return repr(exc)
        return next(iter(failed.values()), "")

    async def _announce(self, replica: Replica, version: Version) -> None:
        async with asyncio.timeout(PUBLISH_S_MAX):
            document = version_document(replica, version)
            await self._publish(replica.name.topic, document, f"replica-{replica.id}-{version.number}")
        await self._threads.do(self._catalogue.announced, replica.id, version.number)


class ReplicaMetrics:
    """For `/metrics`. No metric has the name of a replica: there may be very many, and a scraper need not know them.

    `running`: the number of sessions of a kind; `pushes_max`: at once."""

    def __init__(self, meter: Metrics, running: Callable[[SessionKind], int], pushes_max: int) -> None:
        self._totals = Totals(0, 0, 0)
        self._stale = asyncio.Event()
        self.refresh = self._stale.set
        """The totals may have changed."""
        self._ended: dict[SessionKind, Callable[[str], None]] = {
            "push": meter.counter_by("replica_pushes", "Pushes by outcome.", "outcome", PUSHED),
            "pull": meter.counter_by("replica_pulls", "Pulls by outcome.", "outcome", PULLED),
        }
        self.count_received = meter.counter("replica_received_bytes", "Bytes of pages and hashes received.")
        self.count_sent = meter.counter("replica_sent_bytes", "Bytes of pages and hashes sent.")
        self.observe_acceptance = meter.duration(
            "replica_acceptance_duration", "Time from the last page of a push to its version."
        )
        meter.gauge("replica_pushes_active", "Pushes under way.", lambda: running("push"))
        meter.gauge("replica_pushes_limit", "Pushes that may run at the same time.", lambda: pushes_max)
        meter.gauge("replica_pulls_active", "Pulls under way.", lambda: running("pull"))
        meter.gauge("replica_subscriptions_active", "Clients that follow a replica.", lambda: running("subscribe"))
        meter.gauge("replicas", "Replicas kept.", lambda: self._last_totals().replicas)
        meter.gauge("replica_versions", "Versions of the replicas.", lambda: self._last_totals().versions)
        meter.gauge("replica_stored_bytes", "Disk space of these versions.", lambda: self._last_totals().stored_bytes)

    def ended(self, session: SessionKind, outcome: SessionOutcome) -> None:
        if session in self._ended:
            self._ended[session](outcome)

    def _last_totals(self) -> Totals:
        """The last known totals, because nothing may block here; the next look has newer ones."""
        self.refresh()
        return self._totals

    async def run(self, totals: Callable[[], Awaitable[Totals]]) -> None:
        """Count until cancelled, and only after a scrape or a push."""
        while True:
            self._stale.clear()
            try:
                self._totals = await totals()
            except HeadwaterError as exc:
                logger.debug("replicas were not counted: %s", exc)
            await asyncio.sleep(TOTALS_S_MIN)
            await self._stale.wait()


def outcome_of(abort: Abort) -> SessionOutcome:
    if abort.code == "VERSION_CONFLICT":
        return "conflict"
    return "refused" if abort.code in ABORT_ERRORS else "failed"
