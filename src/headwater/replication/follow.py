"""`headwater.follow`: a subscription on a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import threading

from headwater.errors import InvalidOptionError
from headwater.formats import Span
from headwater.replication.names import Place, place_of
from headwater.replication.outcome import OnFailure, OnOutcome, Outcome
from headwater.replication.subscription import PushSubscription, Subscription
from headwater.replication.sync import Keys, Sync
from headwater.replication.timers import Timers
from headwater.replication.watch import WatcherProcess

logger = logging.getLogger("headwater")


def follow(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    wait_idle: Span | None = None,
    min_interval: Span | None = None,
    max_interval: Span | None = None,
    coordinate: bool = False,
    push_on_exit: bool = False,
    message: str = "",
    push_key: str | None = None,
    pull_key: str | None = None,
    token: str | None = None,
    ca: str | None = None,
    overwrite: bool = False,
    on_outcome: OnOutcome | None = None,
    on_error: OnFailure | None = None,
) -> Follower:
    """Keep `target` equal to `source` until closed: push a database whenever it has changed, or pull each new version.

    As `headwater sync --subscribe`; one of the two is a replica, `ws://host:8765/namespace/name`. Spans are seconds,
    timedeltas or texts like `1h30m`. Missing keys are read from the environment, as by `headwater.sync`.

    With `push_on_exit`, `close()` begins with one more push, which may take a minute.

    `on_outcome` is called after each push or pull, `on_error` after each failure: those that are retried, and the one
    that ends the follower. Both are called on the thread of the follower, which waits for them; an exception that one
    raises ends it."""
    timers = Timers.of(wait_idle, min_interval, max_interval)
    work = Sync(
        _absolute(place_of(os.fspath(source))),
        _absolute(place_of(os.fspath(target))),
        message=message,
        keys=Keys.from_environment(push_key, pull_key, token),
        ca=None if ca is None else os.path.abspath(ca),
        overwrite=overwrite,
    )
    subscription = work.follow(
        timers,
        on_outcome=on_outcome,
        on_failure=on_error,
        coordinate=coordinate,
        push_on_exit=push_on_exit,
        watch=WatcherProcess,
    )
    return Follower(f"{work.source} to {work.target}", subscription, on_error)


def _absolute(place: Place) -> Place:
    """The current directory may change meanwhile."""
    return os.path.abspath(place) if isinstance(place, str) else place


class Follower:
    """Keeps a database and its replica equal, on a thread of its own.

    If the program exits without `close()`, no data is damaged: a running push is rolled back, and other clients wait
    until a claim of this follower expires.

    The follower ends with the main thread, because Python starts no threads after it. A forked process does not inherit
    the follower and must start its own."""

    def __init__(self, name: str, subscription: Subscription, on_error: OnFailure | None) -> None:
        self._name = name
        self._subscription = subscription
        self._on_error = on_error
        self._error: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="headwater-follow", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Follower of {self._name}>"

    @property
    def outcome(self) -> Outcome | None:
        """The outcome of the newest push or pull."""
        return self._subscription.outcome

    @property
    def error(self) -> Exception | None:
        """What ended it, if that was not `close()`: a permanent error, like a VersionConflictError."""
        return self._error

    def close(self, timeout: float | None = None) -> None:
        """End it in order: a running push gets 10 s to finish; changes that were not due are left for the next time, or
        pushed first with `push_on_exit`. Raises `error`, if there is one."""
        with self._lock:
            self._closing = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._subscription.stop)
        self.join(timeout)

    def push_soon(self) -> None:
        """Push without waiting for the timers; with `coordinate` at its next turn. `on_outcome` is called after it."""
        if not isinstance(self._subscription, PushSubscription):
            raise InvalidOptionError("this follower pulls", where=self._name)
        with self._lock:
            if self._loop is not None:  # otherwise it has ended, or is starting, which it does with a push
                self._loop.call_soon_threadsafe(self._subscription.push_soon)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for its end; False if it still runs after `timeout` seconds. Raises `error`, if there is one."""
        if self._thread is threading.current_thread():  # called by a callback; it ends after that
            return False
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        try:
            self.close()
        except Exception:
            if kind is None:  # otherwise that exception is more important
                raise

    def _run(self) -> None:
        try:
            asyncio.run(self._follow())
        except Exception as exc:  # raised by `close` and `join`
            self._error = exc
            level = logging.WARNING if self._on_error is None else logging.INFO
            logger.log(level, "following %s has ended: %s", self._name, exc)
            if self._on_error is not None:
                try:
                    self._on_error(exc)
                except Exception:
                    logger.exception("on_error of the follower of %s failed", self._name)

    async def _follow(self) -> None:
        with self._lock:
            self._loop = asyncio.get_running_loop()
            if self._closing:
                self._subscription.stop()
        try:
            await self._subscription.run()
        finally:
            with self._lock:
                self._loop = None
