"""A database that pushes itself, for as long as it runs.

Decisions are made by `schedule`, which is pure; here are its eyes (`watcher`), its voice (`line`) and its hands
(`push`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from headwater.errors import HeadwaterError, NotADatabase, VersionConflict
from headwater.replication.following import HOPELESS, Following
from headwater.replication.line import SubscriptionLine, Told
from headwater.replication.link import Link, is_partial, plain
from headwater.replication.names import CHANGED, CLAIM, RELEASE, Remote
from headwater.replication.outcome import OnFailure, OnOutcome, OnProgress, Outcome
from headwater.replication.push import PushOptions, push
from headwater.replication.reporting import Reporter
from headwater.replication.schedule import Changed, Claim, Push, PushSchedule, Release
from headwater.replication.spans import Timers, span_text
from headwater.replication.watcher import DatabaseWatcher

STOP_GRACE_S = 10.0  # for a push that runs when the end is asked for
LAST_PUSH_S_MAX = 60.0  # for the one that is then begun, if that is wanted; with all its tries
SHRUNK = 10  # times smaller than what was pushed before: worth a warning

logger = logging.getLogger("headwater")


def _now_ms() -> int:
    """Spans between events only; a clock that is set does not move it."""
    return time.monotonic_ns() // 1_000_000


class Watcher(Protocol):
    """Calls somebody, from a thread of its own, when a database was written. Both of these block."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


Watch = Callable[[str, Callable[[], object]], Watcher]


class PushSubscription(Following):
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
        push_on_exit: bool = False,
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
        self._push_on_exit = push_on_exit
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
        self._pushed_bytes: int | None = None  # the size of the database that was pushed last
        self._was_cut_off = False  # the last push, so that nobody knows what became of it

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        watcher = self._watch(self._local, lambda: loop.call_soon_threadsafe(self._wrote))
        line = asyncio.create_task(self.run_line(self._line))
        try:
            await asyncio.to_thread(watcher.start)
            while not self._stopping:
                await self._act_and_wait()
            await self._finish()
        finally:
            if self._pushing is not None:
                self._pushing.cancel()
            line.cancel()
            await asyncio.gather(line, *([self._pushing] if self._pushing else []), return_exceptions=True)
            await asyncio.to_thread(watcher.stop)
        if self._fault is not None:
            raise self._fault

    def push_soon(self) -> None:
        """Whatever the timers say; with others, when it is our turn. On the event loop."""
        self._schedule.want_push(_now_ms())
        self._stirred.set()

    async def _act_and_wait(self) -> None:
        await self._act()
        wake_ms = self._schedule.wake_ms()
        await self._wait(None if wake_ms is None else max(0, wake_ms - _now_ms()) / 1000)

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
            self._was_cut_off = False
            self._options = self._options.without_message()
            if self._remote.version is not None and self._remote.version.number is not None:
                self._remote = msgspec.structs.replace(self._remote, version=None)
            self._reporter.note_success()
            self._warn_if_shrunk(task.result())
            try:
                self._on_outcome(task.result())
            except Exception as exc:  # one that fails ends the subscription
                self._fail(exc)
            return
        is_wrong_path = isinstance(fault, NotADatabase) and self._pushed_bytes is None  # later it may be deleted
        # The server may have taken the push that was cut off while this one ran; the next one tells it so.
        met_itself = isinstance(fault, VersionConflict) and self._was_cut_off
        self._was_cut_off = not isinstance(fault, VersionConflict) and (is_partial(fault) or self._was_cut_off)
        if not met_itself:
            self._reporter.note_failure(_now_ms(), fault)
        is_hopeless = isinstance(fault, HOPELESS) and not met_itself
        if is_wrong_path or is_hopeless or not isinstance(fault, HeadwaterError | OSError):
            self._fail(fault)
        else:
            self.tell_failure(fault, "the push failed and will be tried again in %s: %s", self._pause_text(), fault)

    def _pause_text(self) -> str:
        pause_ms = max(0, (self._schedule.retry_ms or 0) - _now_ms())
        return span_text(max(1000, round(pause_ms, -3)))

    def _warn_if_shrunk(self, outcome: Outcome) -> None:
        before, self._pushed_bytes = self._pushed_bytes, outcome.size
        if before is not None and outcome.size * SHRUNK <= before:
            logger.warning(
                "%s had %s bytes and has %s now: if that is a mistake, version %s has what was there",
                self._local,
                f"{before:,}",
                f"{outcome.size:,}",
                outcome.base,
            )

    async def _finish(self) -> None:
        """A push that runs is given a little time, one that is wanted now more; then the turn is given back, and
        reports go out."""
        if self._push_on_exit and self._fault is None:
            self._schedule.want_push(_now_ms())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_PUSH_S_MAX):
                    while self._schedule.owes_push and self._fault is None:
                        await self._act_and_wait()
        elif self._pushing is not None:
            with contextlib.suppress(TimeoutError, Exception):
                async with asyncio.timeout(STOP_GRACE_S):
                    await asyncio.shield(self._pushing)
        # What was written while the last push ran may be in it, or not.
        is_left = self._schedule.owes_push if self._push_on_exit else self._schedule.has_changes
        if is_left and self._fault is None:
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
        logger.debug("another client pushes %s within %.1f s", self._remote.key, span_ms / 1000)
        self._schedule.claimed_by_other(_now_ms(), span_ms)
        self._stirred.set()

    def on_released(self) -> None:
        self._schedule.released_by_other(_now_ms())
        self._stirred.set()
