"""What a push subscription and a pull subscription have in common: something runs until it is asked to stop, or fails
for good. Nothing is kept per push or pull, so that it may run for weeks."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from headwater.errors import InvalidInput, TooLarge, Unauthorized, UnsyncedChanges, VersionConflict
from headwater.replication.line import SubscriptionLine
from headwater.replication.outcome import OnFailure

HOPELESS = (Unauthorized, VersionConflict, UnsyncedChanges, TooLarge, InvalidInput)  # trying again changes nothing

logger = logging.getLogger("headwater")


class Following:
    """What both have in common: something runs until it is asked to stop, or fails for good."""

    def __init__(self, on_failure: OnFailure | None) -> None:
        self._on_failure = on_failure
        self._stirred = asyncio.Event()
        self._stopping = False
        self._fault: BaseException | None = None

    def stop(self) -> None:
        """End soon and in order. On the event loop."""
        self._stopping = True
        self._stirred.set()

    def _fail(self, fault: BaseException) -> None:
        self._fault = self._fault or fault
        self.stop()

    def tell_failure(self, fault: Exception, text: str, *values: object) -> None:
        """Once: to whoever asked to be told, or else as a warning."""
        logger.log(logging.WARNING if self._on_failure is None else logging.INFO, text, *values)
        try:
            if self._on_failure is not None:
                self._on_failure(fault)
        except Exception as exc:  # one that fails ends the subscription
            self._fail(exc)

    async def _wait(self, timeout_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._stirred.wait()
        self._stirred.clear()

    async def run_line(self, line: SubscriptionLine) -> None:
        try:
            await line.run()
        except Exception as exc:  # without its line a subscription would wait for ever
            self._fail(exc)
