"""Following, for as long as it runs: a database that pushes itself (`PushSubscription`), and a copy that stays up to
date (`PullSubscription`).

Decisions are made by `schedule`, which is pure; here are its eyes (`watcher`), its voice (`line`) and its hands
(`push`, `pull`). Nothing is kept per push, so that it may run for weeks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from headwater.delivery.retry import backoff_ms
from headwater.errors import (
    DiskFull,
    HeadwaterError,
    InputOutput,
    InvalidInput,
    Locked,
    NotADatabase,
    RemoteError,
    TooLarge,
    Unauthorized,
    UnknownReplica,
    UnsyncedChanges,
    VersionConflict,
)
from headwater.replication.beside import Beside
from headwater.replication.line import NO_LINE, SubscriptionLine, Told
from headwater.replication.link import Link, is_partial, plain
from headwater.replication.names import CHANGED, CLAIM, RELEASE, Remote
from headwater.replication.outcome import OnFailure, OnOutcome, OnProgress, Outcome
from headwater.replication.pull import PullOptions, pull
from headwater.replication.push import PushOptions, push
from headwater.replication.reporting import Reporter
from headwater.replication.schedule import BACKOFF, Changed, Claim, Push, PushSchedule, Release
from headwater.replication.spans import Timers
from headwater.replication.watcher import DatabaseWatcher

STOP_GRACE_S = 10.0  # for a push that runs when the end is asked for
HOPELESS = (Unauthorized, VersionConflict, UnsyncedChanges, TooLarge, InvalidInput)  # trying again changes nothing
PASSING = (RemoteError, UnknownReplica, Locked, DiskFull)  # what a pull waits out
LATER_PASSING = (InputOutput, OSError)  # and this, once it has worked: until then it is more likely a wrong path

logger = logging.getLogger("headwater")


def _now_ms() -> int:
    """Spans between events only; a clock that is set does not move it."""
    return time.monotonic_ns() // 1_000_000


class Watcher(Protocol):
    """Calls somebody, from a thread of its own, when a database was written. Both of these block."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


Watch = Callable[[str, Callable[[], object]], Watcher]


class _Following:
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

    def _tell_failure(self, fault: Exception, text: str, *values: object) -> None:
        """Once: to whoever asked to be told, or else as a warning."""
        logger.log(logging.WARNING if self._on_failure is None else logging.INFO, text, *values)
        try:
            if self._on_failure is not None:
                self._on_failure(fault)
        except Exception as exc:  # nobody reads it any more
            self._fail(exc)

    async def _wait(self, timeout_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._stirred.wait()
        self._stirred.clear()

    async def _run_line(self, line: SubscriptionLine) -> None:
        try:
            await line.run()
        except Exception as exc:  # without its line a subscription would wait for ever
            self._fail(exc)


class PushSubscription(_Following):
    """Pushes at the start, and then whenever the timers say so. `run()` ends after `stop()`, or with the error that no
    waiting mends."""

    def __init__(
        self,
        local: str,
        remote: Remote,
        options: PushOptions,
        timers: Timers,
        *,
        coordinate: bool,
        connect: Callable[[str], Link],
        on_outcome: OnOutcome,
        on_progress: OnProgress | None = None,
        on_failure: OnFailure | None = None,
        watch: Watch = DatabaseWatcher,
    ) -> None:
        """`on_failure` hears of what is tried again. `watch` is for a process that has the database open itself."""
        super().__init__(on_failure)
        self._watch = watch
        self._local = local
        self._remote = remote
        self._options = options
        self._coordinate = coordinate
        self._on_outcome = on_outcome
        self._on_progress = on_progress
        self._schedule = PushSchedule(timers, coordinate, _now_ms(), random.random)
        config = {
            "coordinate": coordinate,
            "waitIdle": timers.wait_idle_ms / 1000,
            "minInterval": timers.min_interval_ms / 1000,
            "maxInterval": timers.max_interval_ms / 1000,
        }
        self._line = SubscriptionLine(remote, config, self, connect)
        self._reporter = Reporter(remote, options.key, options.ca)
        self._pushing: asyncio.Task[Outcome] | None = None
        self._has_pushed = False
        self._was_cut_off = False  # the last push, so that nobody knows what became of it

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        watcher = self._watch(self._local, lambda: loop.call_soon_threadsafe(self._wrote))
        line = asyncio.create_task(self._run_line(self._line))
        try:
            await asyncio.to_thread(watcher.start)
            while not self._stopping:
                await self._act()
                wake_ms = self._schedule.wake_ms()
                await self._wait(None if wake_ms is None else max(0, wake_ms - _now_ms()) / 1000)
            await self._finish()
        finally:
            if self._pushing is not None:
                self._pushing.cancel()
            line.cancel()
            await asyncio.gather(line, *([self._pushing] if self._pushing else []), return_exceptions=True)
            await asyncio.to_thread(watcher.stop)
        if self._fault is not None:
            raise self._fault

    async def _act(self) -> None:
        for action in self._schedule.step(_now_ms()):
            match action:
                case Claim(span_ms):
                    await self._line.send(CLAIM, span_ms)
                case Changed(span_ms):
                    await self._line.send(CHANGED, span_ms)
                case Release():
                    await self._line.send(RELEASE)
                case Push():
                    self._pushing = asyncio.create_task(
                        push(self._local, self._remote, self._options, self._on_progress)
                    )
                    self._pushing.add_done_callback(self._pushed)

    def _pushed(self, task: asyncio.Task[Outcome]) -> None:
        self._pushing = None
        self._stirred.set()
        if task.cancelled():
            return
        fault = task.exception()
        self._schedule.push_ended(_now_ms(), fault is None)
        if fault is None:
            # One message was given, for the first push; those that follow are the database's own. So is a base by its
            # number; `@latest` is meant for all of them.
            self._has_pushed, self._was_cut_off = True, False
            self._options = self._options.without_message()
            if self._remote.version is not None and self._remote.version.number is not None:
                self._remote = msgspec.structs.replace(self._remote, version=None)
            self._reporter.note_success()
            try:
                self._on_outcome(task.result())
            except Exception as exc:  # nobody reads it any more
                self._fail(exc)
            return
        self._reporter.note_failure(_now_ms(), fault)
        is_wrong_path = isinstance(fault, NotADatabase) and not self._has_pushed  # later it may have been deleted
        # The server may have taken the push that was cut off while this one ran; the next one tells it so.
        met_itself = isinstance(fault, VersionConflict) and self._was_cut_off
        self._was_cut_off = not isinstance(fault, VersionConflict) and (is_partial(fault) or self._was_cut_off)
        is_hopeless = isinstance(fault, HOPELESS) and not met_itself
        if is_wrong_path or is_hopeless or not isinstance(fault, HeadwaterError | OSError):
            self._fail(fault)
        else:
            self._tell_failure(fault, "the push failed and will be tried again: %s", fault)

    async def _finish(self) -> None:
        """A push that runs is given a little time; then the turn is given back, and reports go out."""
        if self._pushing is not None:
            with contextlib.suppress(TimeoutError, Exception):
                async with asyncio.timeout(STOP_GRACE_S):
                    await asyncio.shield(self._pushing)
        if self._schedule.has_changes and self._fault is None:
            logger.warning("it ends with changes that are not pushed: the next start pushes them")
        if self._coordinate and self._pushing is None:
            # Also a turn that was only claimed: others would wait for a push that does not come, for days perhaps. Who
            # has none says this in vain.
            await self._line.send(RELEASE)
        await self._reporter.flush()

    # --- what comes in ------------------------------------------------------------------------------------------

    def _wrote(self) -> None:
        self._schedule.wrote(_now_ms())
        self._stirred.set()

    def on_connected(self, told: Told) -> None:
        if told.warning:
            logger.warning("%s", plain(told.warning))
        self._schedule.connected(_now_ms())
        self._stirred.set()

    def on_disconnected(self) -> None:
        self._schedule.disconnected(_now_ms())
        self._stirred.set()

    def on_version(self, number: int) -> None:
        logger.debug("version %d is the newest of %s", number, self._remote.key)

    def on_granted(self) -> None:
        self._schedule.granted(_now_ms())
        self._stirred.set()

    def on_claimed(self, span_ms: int) -> None:
        logger.debug("another client pushes %s within %d ms", self._remote.key, span_ms)
        self._schedule.claimed_by_other(_now_ms(), span_ms)
        self._stirred.set()

    def on_released(self) -> None:
        self._schedule.released_by_other(_now_ms())
        self._stirred.set()


class PullSubscription(_Following):
    """Pulls each new version as it is told, also those that came while the line was down."""

    def __init__(
        self,
        remote: Remote,
        local: str,
        options: PullOptions,
        *,
        timers: dict[str, Any],
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
        config = {"coordinate": False, **timers}
        self._line = SubscriptionLine(remote, config, self, connect, on_down=self._on_line_down)
        self._newest = 0
        self._have = 0
        self._replica_id: str | None = None  # of what we have
        self._is_first_word = True  # of a line: it may repeat what is known

    async def run(self) -> None:
        line = asyncio.create_task(self._run_line(self._line))
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
            self._tell_failure(exc, "the pull failed and will be tried again: %s", exc)
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
        self._tell_failure(fault, NO_LINE, self._remote.key, fault)

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
