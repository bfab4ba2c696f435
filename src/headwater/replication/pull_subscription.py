"""A copy that stays up to date, for as long as it runs."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

from headwater.delivery.retry import backoff_ms
from headwater.errors import DiskFull, HeadwaterError, InputOutput, Locked, RemoteError, UnknownReplica
from headwater.replication.beside import Beside
from headwater.replication.following import HOPELESS, Following
from headwater.replication.line import NO_LINE, SubscriptionLine, Told
from headwater.replication.link import Link, is_partial, plain
from headwater.replication.names import Remote
from headwater.replication.outcome import OnFailure, OnOutcome, OnProgress, Outcome
from headwater.replication.pull import PullOptions, pull
from headwater.replication.schedule import BACKOFF

PASSING = (RemoteError, UnknownReplica, Locked, DiskFull)  # what a pull waits out
LATER_PASSING = (InputOutput, OSError)  # and this, once it has worked: until then it is more likely a wrong path

logger = logging.getLogger("headwater")


class PullSubscription(Following):
    """Pulls each new version as it is told, also those that came while the line was down."""

    def __init__(
        self,
        remote: Remote,
        local: str,
        options: PullOptions,
        *,
        asked_spans: dict[str, Any],
        connect: Callable[[str], Link],
        on_outcome: OnOutcome,
        on_progress: OnProgress | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        super().__init__(on_failure)
        self._remote = remote
        self._local = local
        self._options = options
        self._on_outcome = on_outcome
        self._on_progress = on_progress
        config = {"coordinate": False, **asked_spans}
        self._line = SubscriptionLine(remote, config, self, connect, on_down=self._on_line_down)
        self._newest = 0
        self._have = 0
        self._replica_id: str | None = None  # of what we have
        self._is_first_word = True  # of a line: it may repeat what is known

    async def run(self) -> None:
        line = asyncio.create_task(self.run_line(self._line))
        failures = 0
        try:
            while not self._stopping:
                if self._newest > self._have:
                    failures = 0 if await self._pull() else failures + 1
                if self._newest > self._have:
                    await self._wait(backoff_ms(BACKOFF, max(failures, 1), random.random()) / 1000)
                elif not self._stopping:
                    await self._wait(None)
        finally:
            line.cancel()
            await asyncio.gather(line, return_exceptions=True)
        if self._fault is not None:
            raise self._fault

    async def _pull(self) -> bool:
        pulling = asyncio.create_task(pull(self._remote, self._local, self._options, self._on_progress))
        try:
            outcome = await self._unless_stopped(pulling)
        except (HeadwaterError, OSError) as exc:
            passing = PASSING if self._replica_id is None else PASSING + LATER_PASSING
            if isinstance(exc, HOPELESS) or not (isinstance(exc, passing) or is_partial(exc)):
                raise
            self.tell_failure(exc, "the pull failed and will be tried again: %s", exc)
            return False
        if outcome is not None:
            self._have = outcome.version or self._newest
            self._replica_id = Beside(self._local).noted(self._remote).replica_id
            self._on_outcome(outcome)
        return True

    async def _unless_stopped(self, work: asyncio.Task[Outcome]) -> Outcome | None:
        """The outcome; None when the end was asked for first. A pull cut off leaves the copy as it was."""
        try:
            while not work.done():
                waiting = asyncio.create_task(self._stirred.wait())
                try:
                    await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiting.cancel()
                if work.done():
                    break
                if self._stopping:
                    return None
                self._stirred.clear()
            return work.result()
        finally:
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

    # --- what comes in ------------------------------------------------------------------------------------------

    def on_connected(self, told: Told) -> None:
        if told.warning:
            logger.warning("%s", plain(told.warning))
        if self._replica_id != told.replica_id:  # made anew while the line was down
            self._have = 0
        self._is_first_word = True

    def on_disconnected(self) -> None:
        """It comes back by itself."""

    def _on_line_down(self, fault: Exception) -> None:
        self.tell_failure(fault, NO_LINE, self._remote.key, fault)

    def on_version(self, number: int) -> None:
        # Numbers of a replica only grow: it was made anew, or a pull was faster than the news, and is made once more.
        if number < self._have or (number == self._have and not self._is_first_word):
            self._have = 0
        if not number and self._is_first_word:
            logger.warning("%s has no version yet: its first one is waited for", self._remote.key)
        self._is_first_word = False
        self._newest = number
        self._stirred.set()

    def on_granted(self) -> None:
        """Who pulls claims nothing."""

    def on_claimed(self, span_ms: int) -> None:
        """See above."""

    def on_released(self) -> None:
        """See above."""
