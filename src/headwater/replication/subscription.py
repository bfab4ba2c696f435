"""Subscriptions: a database that is pushed whenever it has changed, and a copy that follows each new version.

`schedule` decides when to push; the subscription watches the database, keeps a connection to the server, and pushes.
Nothing is kept per push or pull, so a subscription may run for weeks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from headwater.delivery.retry import backoff_ms
from headwater.errors import (
    DiskFullError,
    HeadwaterError,
    InputOutputError,
    InvalidInputError,
    LockedError,
    NotADatabaseError,
    RemoteError,
    TooLargeError,
    UnauthorizedError,
    UnknownReplicaError,
    UnsyncedChangesError,
    VersionConflictError,
)
from headwater.formats import format_duration
from headwater.replication.connection import (
    UNREADABLE,
    ReplicaConnection,
    http_request,
    http_url,
    is_partial,
    plain,
)
from headwater.replication.names import Remote
from headwater.replication.outcome import Callbacks, Outcome, TransferOptions
from headwater.replication.protocol import CHANGED, CLAIM, CONFIG, LATEST, RELEASE, ReportKind, SubscribeInfo
from headwater.replication.pull import pull
from headwater.replication.push import push
from headwater.replication.schedule import BACKOFF, Changed, Claim, Push, PushSchedule, Release
from headwater.replication.sync_state import SyncState
from headwater.replication.threads import running
from headwater.replication.timers import Timers, seconds_text

PERMANENT_ERRORS = (
    UnauthorizedError,
    VersionConflictError,
    UnsyncedChangesError,
    TooLargeError,
    InvalidInputError,
)  # never retried
TRANSIENT_PULL_ERRORS = (RemoteError, UnknownReplicaError, LockedError, DiskFullError)
TRANSIENT_AFTER_SUCCESS = (InputOutputError, OSError)  # before the first pull more likely a wrong path

STOP_GRACE_S = 10.0  # for a running push when the end is requested
LAST_PUSH_S_MAX = 60.0  # for the push at exit, with its retries
SHRUNK = 10  # times smaller than the last push: worth a warning
REPORT_AFTER_MS = 5 * 60_000  # a failure that may pass by itself is reported when it has lasted this long
REPORT_CHARS_MAX = 4_000

PONG_S_MAX = 20.0  # a subscription carries little data, so a lost connection is noticed soon
VERSION_DIGITS_MAX = 18
NOT_CONNECTED = "no connection to %s, trying again: %s"

logger = logging.getLogger("headwater")


def _now_ms() -> int:
    """Monotonic, for spans between events only."""
    return time.monotonic_ns() // 1_000_000


class Subscription:
    """Runs until `stop()`, or until a permanent error.

    It keeps a connection to `/sapi/subscribe/…`: it receives new versions, and claims go both ways. A lost one is
    opened again, with growing pauses; only a refusal ends it. Nothing is lost with it: claims are advisory, and the
    server sends the newest version at every opening. The methods `on_…` are its events."""

    def __init__(
        self,
        local: str,
        remote: Remote,
        options: TransferOptions,
        config: Mapping[str, object],
        callbacks: Callbacks,
    ) -> None:
        self._local = local
        self._remote = remote
        self._options = options
        self._config = config
        self._on_outcome, self._on_progress, self._on_failure = callbacks
        self._wake = asyncio.Event()
        self._stopping = False
        self._error: BaseException | None = None
        self.outcome: Outcome | None = None
        """Of the newest push or pull."""
        self._connection: ReplicaConnection | None = None
        self._was_open = False

    def stop(self) -> None:
        """End soon and in order. Call it on the event loop."""
        self._stopping = True
        self._wake.set()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self.stop()

    def _report_outcome(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if self._on_outcome is not None:
            self._on_outcome(outcome)

    def _report_failure(self, error: Exception, text: str, *values: object) -> None:
        """Report to the caller's callback, otherwise as a warning."""
        logger.log(logging.WARNING if self._on_failure is None else logging.INFO, text, *values)
        try:
            if self._on_failure is not None:
                self._on_failure(error)
        except Exception as exc:  # one that fails ends the subscription
            self._fail(exc)

    async def _wait(self, timeout_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        self._wake.clear()

    async def run(self) -> None:
        """Ends after `stop`; a permanent error is raised."""
        async with running(self.keep_connected()):
            await self.follow()
        if self._error is not None:
            raise self._error

    async def follow(self) -> None:
        """Push or pull until `stop` is called."""
        raise NotImplementedError

    # --- the connection -----------------------------------------------------------------------------------------

    async def keep_connected(self) -> None:
        """Run until cancelled, or until the server refuses for good."""
        failures = 0
        try:
            while True:
                failures = 1 if await self._listen(failures) else failures + 1
                await asyncio.sleep(backoff_ms(BACKOFF, failures, random.random()) / 1000)
        except Exception as exc:  # without its connection a subscription would wait for ever
            self._fail(exc)

    async def _listen(self, failures: int) -> bool:
        """Listen until the connection is lost; returns whether anything came. `failures`: in a row, before this."""
        has_heard = False
        try:
            async with ReplicaConnection(
                self._remote.endpoint("subscribe"), self._options, pong_s_max=PONG_S_MAX
            ) as connection:
                await connection.send_config(self._config)
                self._connection, self._was_open = connection, True
                while (frame := await connection.next()) is not None:
                    has_heard = True
                    self._receive(frame)
        except UnauthorizedError:
            raise
        except UnknownReplicaError:
            if not self._was_open:  # this server hosts no replicas; later it is one that restarts
                raise
            logger.debug("the server does not serve %s at the moment", self._remote.key)
        except (RemoteError, *UNREADABLE) as exc:
            if has_heard or not failures:
                self.on_connection_down(exc)
            else:
                logger.debug(NOT_CONNECTED, self._remote.key, exc)
        finally:
            if self._connection is not None:
                self._connection = None
                self.on_disconnected()
        return has_heard

    def _receive(self, frame: str | bytes) -> None:
        if isinstance(frame, bytes):
            return
        if frame.startswith(CONFIG):
            info = msgspec.json.decode(frame.removeprefix(CONFIG), type=SubscribeInfo)
            if info.warning:
                logger.warning("%s", plain(info.warning))
            self.on_connected(info)
            return
        word, _, rest = frame.partition(" ")
        self.on_word(word, rest)

    async def _send(self, word: str, span_ms: int | None = None) -> None:
        """Does nothing while disconnected: `on_disconnected` was called."""
        if self._connection is not None:
            try:
                await self._connection.send_text(word if span_ms is None else f"{word} {seconds_text(span_ms)}")
            except HeadwaterError:
                logger.debug("the connection to %s broke while sending", self._remote.key)

    def on_connected(self, info: SubscribeInfo) -> None: ...

    def on_disconnected(self) -> None: ...

    def on_connection_down(self, error: Exception) -> None:
        """Called for the first of several failures in a row."""
        logger.debug(NOT_CONNECTED, self._remote.key, error)

    def on_word(self, word: str, rest: str) -> None:
        """A frame of the server: a version, a claim, a release."""


def _ms(text: str) -> int:
    try:
        return max(0, round(float(text) * 1000))
    except (ValueError, OverflowError):
        return 0


# --- pushing --------------------------------------------------------------------------------------------------------


class Watcher(Protocol):
    """Calls back from a thread of its own when a database was written. Both methods block."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


Watch = Callable[[str, Callable[[], object]], Watcher]


class PushSubscription(Subscription):
    """Pushes at the start, and then when the timers are due."""

    def __init__(
        self,
        local: str,
        remote: Remote,
        options: TransferOptions,
        callbacks: Callbacks,
        timers: Timers,
        *,
        coordinate: bool,
        push_on_exit: bool,
        watch: Watch,
    ) -> None:
        """`watch`: a process that has the database open itself needs `WatcherProcess`."""
        config = {
            "coordinate": coordinate,
            "waitIdle": timers.wait_idle_ms / 1000,
            "minInterval": timers.min_interval_ms / 1000,
            "maxInterval": timers.max_interval_ms / 1000,
        }
        super().__init__(local, remote, options, config, callbacks)
        self._watch = watch
        self._coordinate = coordinate
        self._push_on_exit = push_on_exit
        self._schedule = PushSchedule(timers, coordinate, _now_ms(), random.random)
        self._reporter = Reporter(remote, options.key, options.ca)
        self._pushing: asyncio.Task[Outcome] | None = None
        self._pushed_bytes: int | None = None  # by the last push
        self._was_cut_off = False  # the last push: its result is unknown

    async def follow(self) -> None:
        loop = asyncio.get_running_loop()
        watcher = self._watch(self._local, lambda: loop.call_soon_threadsafe(self._wrote))
        try:
            await asyncio.to_thread(watcher.start)
            while not self._stopping:
                await self._act_and_wait()
            await self._finish()
        finally:
            if self._pushing is not None:
                self._pushing.cancel()
                await asyncio.gather(self._pushing, return_exceptions=True)
            await asyncio.to_thread(watcher.stop)

    def push_soon(self) -> None:
        """Push without waiting for the timers; with `coordinate`, at the next turn. Call it on the event loop."""
        self._schedule.want_push(_now_ms())
        self._wake.set()

    async def _act_and_wait(self) -> None:
        await self._act()
        wake_ms = self._schedule.wake_ms()
        await self._wait(None if wake_ms is None else max(0, wake_ms - _now_ms()) / 1000)

    async def _act(self) -> None:
        for action in self._schedule.step(_now_ms()):
            match action:
                case Claim(span_ms):
                    await self._send(CLAIM, span_ms)
                case Changed(span_ms):
                    await self._send(CHANGED, span_ms)
                case Release():
                    await self._send(RELEASE)
                case Push():
                    self._pushing = asyncio.create_task(
                        push(self._local, self._remote, self._options, self._on_progress)
                    )
                    self._pushing.add_done_callback(self._pushed)

    def _pushed(self, task: asyncio.Task[Outcome]) -> None:
        self._pushing = None
        self._wake.set()
        if task.cancelled():
            return
        error = task.exception()
        self._schedule.push_ended(_now_ms(), error is None)
        if error is None:
            # The message and a base by its number are for the first push only; `@latest` is for all of them.
            self._was_cut_off = False
            self._options = msgspec.structs.replace(self._options, message="")
            if self._remote.version is not None and self._remote.version.number is not None:
                self._remote = msgspec.structs.replace(self._remote, version=None)
            self._reporter.note_success()
            self._warn_if_shrunk(task.result())
            try:
                self._report_outcome(task.result())
            except Exception as exc:  # one that fails ends the subscription
                self._fail(exc)
            return
        is_wrong_path = isinstance(error, NotADatabaseError) and self._pushed_bytes is None  # later it may be deleted
        # The server may have accepted the push that was cut off while this one ran; the next one names its id.
        is_own_version = isinstance(error, VersionConflictError) and self._was_cut_off
        self._was_cut_off = not isinstance(error, VersionConflictError) and (is_partial(error) or self._was_cut_off)
        if not is_own_version:
            self._reporter.note_failure(_now_ms(), error)
        is_permanent = isinstance(error, PERMANENT_ERRORS) and not is_own_version
        if is_wrong_path or is_permanent or not isinstance(error, HeadwaterError | OSError):
            self._fail(error)
        else:
            self._report_failure(error, "the push failed and will be tried again in %s: %s", self._pause_text(), error)

    def _pause_text(self) -> str:
        pause_ms = max(0, (self._schedule.retry_ms or 0) - _now_ms())
        return format_duration(max(1000, round(pause_ms, -3)))

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
        """A running push gets a little time, a push at exit more; then the claim is released and reports are sent."""
        if self._push_on_exit and self._error is None:
            self._schedule.want_push(_now_ms())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_PUSH_S_MAX):
                    while self._schedule.owes_push and self._error is None:
                        await self._act_and_wait()
        elif self._pushing is not None:
            with contextlib.suppress(TimeoutError, Exception):
                async with asyncio.timeout(STOP_GRACE_S):
                    await asyncio.shield(self._pushing)
        # A write during the last push may be in it, or not.
        is_left = self._schedule.owes_push if self._push_on_exit else self._schedule.has_changes
        if is_left and self._error is None:
            logger.warning("it ends with changes that are not pushed: the next start pushes them")
        if self._coordinate and self._pushing is None:
            # Also a claim without a push: other clients would wait for it, perhaps for days. The server ignores a
            # release without a claim.
            await self._send(RELEASE)
        await self._reporter.flush()

    # --- events -------------------------------------------------------------------------------------------------

    def _wrote(self) -> None:
        self._schedule.wrote(_now_ms())
        self._wake.set()

    def on_connected(self, info: SubscribeInfo) -> None:
        self._schedule.connected(_now_ms())
        self._wake.set()

    def on_disconnected(self) -> None:
        self._schedule.disconnected(_now_ms())
        self._wake.set()

    def on_word(self, word: str, rest: str) -> None:
        if word == LATEST:
            logger.debug("version %s is the newest of %s", plain(rest), self._remote.key)
        elif word == RELEASE:
            self._schedule.released_by_other(_now_ms())
        elif word == CLAIM and not rest:
            self._schedule.granted(_now_ms())
        elif word == CLAIM:
            span_ms = _ms(rest)
            logger.debug("another client pushes %s within %.1f s", self._remote.key, span_ms / 1000)
            self._schedule.claimed_by_other(_now_ms(), span_ms)
        self._wake.set()


# --- pulling --------------------------------------------------------------------------------------------------------


class PullSubscription(Subscription):
    """Pulls each new version as it is announced, also those that came while disconnected."""

    def __init__(
        self,
        local: str,
        remote: Remote,
        options: TransferOptions,
        callbacks: Callbacks,
        given_timers: Mapping[str, float],
    ) -> None:
        super().__init__(local, remote, options, {"coordinate": False, **given_timers}, callbacks)
        self._newest = 0
        self._have = 0
        self._replica_id: str | None = None  # of the replica that is followed
        self._has_pulled = False
        self._is_outdated = False  # what is pulled now, because the replica was made anew
        self._is_first_version = True  # of a connection: it may be known already
        self._pulling: asyncio.Task[Outcome] | None = None

    def stop(self) -> None:
        super().stop()
        if self._pulling is not None:
            self._pulling.cancel()  # a cancelled pull leaves the copy as it was

    async def follow(self) -> None:
        failures = 0
        while not self._stopping:
            if self._newest > self._have:
                failures = 0 if await self._pull() else failures + 1
                self._wake.clear()  # what came during the pull is looked at now
            if not self._stopping:
                is_behind = self._newest > self._have
                await self._wait(backoff_ms(BACKOFF, max(failures, 1), random.random()) / 1000 if is_behind else None)

    async def _pull(self) -> bool:
        newest, task, self._is_outdated = self._newest, asyncio.current_task(), False
        assert task is not None
        self._pulling = asyncio.create_task(pull(self._remote, self._local, self._options, self._on_progress))
        try:
            outcome = await self._pulling
        except asyncio.CancelledError:
            if task.cancelling() or not self._stopping:
                raise
            return False
        except (HeadwaterError, OSError) as exc:
            transient: tuple[type[Exception], ...] = TRANSIENT_PULL_ERRORS
            if self._has_pulled:
                transient += TRANSIENT_AFTER_SUCCESS
            if isinstance(exc, PERMANENT_ERRORS) or not (isinstance(exc, transient) or is_partial(exc)):
                raise
            self._report_failure(exc, "the pull failed and will be tried again: %s", exc)
            return False
        finally:
            self._pulling = None
        self._has_pulled = True
        if not self._is_outdated:
            self._have = outcome.version or newest
            self._replica_id = SyncState(self._local).load(self._remote).replica_id
        self._report_outcome(outcome)
        return True

    # --- events -------------------------------------------------------------------------------------------------

    def on_connected(self, info: SubscribeInfo) -> None:
        if self._replica_id != info.replica_id:
            self._replica_id = info.replica_id
            self._pull_anew()
        self._is_first_version = True

    def _pull_anew(self) -> None:
        self._have, self._is_outdated = 0, True

    def on_connection_down(self, error: Exception) -> None:
        self._report_failure(error, NOT_CONNECTED, self._remote.key, error)

    def on_word(self, word: str, rest: str) -> None:
        if word != LATEST or not rest.isdecimal() or len(rest) > VERSION_DIGITS_MAX:
            return
        number = int(rest)
        is_known = number == self._newest and not self._is_first_version
        if number < max(self._have, self._newest) or is_known:  # otherwise numbers grow
            self._pull_anew()
        if not number and self._is_first_version:
            logger.warning("%s has no version yet: waiting for the first one", self._remote.key)
        self._is_first_version = False
        self._newest = number
        self._wake.set()


# --- error reports --------------------------------------------------------------------------------------------------


class ErrorReport(msgspec.Struct, frozen=True):
    kind: ReportKind
    error: str
    since: float
    """Seconds since the first of the failed pushes."""


class Reporter:
    """Sends error reports to the server of a push subscription: its terminal may go unread for weeks.

    A push that was cut off and a conflict are always reported; an error that often passes by itself, like a network
    failure, when it has lasted five minutes. Only the newest report waits until it can be sent."""

    def __init__(self, remote: Remote, key: str | None, ca: str | None) -> None:
        self._remote = remote
        self._key = key
        self._ca = ca
        self._failing_since_ms: int | None = None
        self._long_failure_reported = False
        self._pending: ErrorReport | None = None
        self._sending: asyncio.Task[None] | None = None

    def note_failure(self, now_ms: int, error: BaseException) -> None:
        if self._failing_since_ms is None:
            self._failing_since_ms = now_ms
        failing_ms = now_ms - self._failing_since_ms
        kind = kind_of(error)
        passes = kind in ("network", "local")
        if not passes or (failing_ms >= REPORT_AFTER_MS and not self._long_failure_reported):
            self._long_failure_reported = self._long_failure_reported or passes
            self._pending = ErrorReport(kind, str(error)[:REPORT_CHARS_MAX], failing_ms / 1000)
        self._send_soon()

    def note_success(self) -> None:
        self._failing_since_ms = None
        self._long_failure_reported = False
        self._send_soon()

    async def flush(self) -> None:
        """Try to send the newest one once."""
        self._send_soon()
        if self._sending is not None:
            await asyncio.gather(self._sending, return_exceptions=True)

    def _send_soon(self) -> None:
        if self._pending is not None and (self._sending is None or self._sending.done()):
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        """Send reports until none is left that was not tried."""
        tried = None
        while self._pending is not tried:
            tried = self._pending
            try:
                body = msgspec.json.encode(tried)
                await asyncio.to_thread(http_request, http_url(self._remote), key=self._key, ca=self._ca, body=body)
            except HeadwaterError as exc:
                logger.debug("the error report could not be sent: %s", exc)
            else:
                if self._pending is tried:
                    self._pending = tried = None


def kind_of(error: BaseException) -> ReportKind:
    if isinstance(error, VersionConflictError):
        return "conflict"
    if is_partial(error):
        return "partial"
    return "network" if isinstance(error, RemoteError) else "local"
