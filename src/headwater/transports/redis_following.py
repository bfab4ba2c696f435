"""A thread that follows something in Redis: begins where the caller can still be told of failure, comes back after lost
connections, and stops when it is asked to."""

from __future__ import annotations

import logging
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

import redis

from headwater.transports.redis_connection import reconnect_delay_s, translated

WAKE_EVERY_S = 0.05  # while stopping: how often a reader that waits for the server is woken

logger = logging.getLogger("headwater")


class RedisFollowing(ABC):
    """`ports.transport.Following`. `report` is told whether the last word from the server was a good one."""

    def __init__(self, name: str, report: Callable[[bool], None]) -> None:
        self._name = name
        self._report = report
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"headwater-{name}", daemon=True)

    def start(self) -> None:
        """Raises TransportFailed if it cannot even begin."""
        try:
            with translated(self._name, "subscribing"):
                self._open()
        except BaseException:
            self._close()
            self._dispose()
            raise
        self._report(True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if threading.current_thread() is self._thread:  # the handler itself asks; it cannot wait for itself
            return
        while self._thread.is_alive():
            self._wake()
            self._thread.join(WAKE_EVERY_S)
        self._dispose()

    @property
    def has_ended(self) -> bool:
        return self._stopping.is_set() and not self._thread.is_alive()

    def _run(self) -> None:
        failures = 0
        try:
            while not self._stopping.is_set():
                try:
                    if failures:
                        self._open()
                        self._connected_again()
                    self._round()
                    if failures:
                        failures = 0
                        self._report(True)
                except Exception as exc:
                    failures += 1
                    if not self._stopping.is_set():
                        self._tell(exc, failures)
                        self._close()
                        self._stopping.wait(reconnect_delay_s(failures, random.random()))
        finally:
            try:
                self._farewell()
            except Exception as exc:
                logger.warning("%s: could not take leave (%s)", self._name, exc)
            self._close()

    def _tell(self, exc: Exception, failures: int) -> None:
        self._report(False)
        if not isinstance(exc, (redis.RedisError, OSError)):
            logger.error("%s: an error of Headwater's own; trying again", self._name, exc_info=exc)
        elif failures == 1:
            logger.warning("%s: lost (%s); trying again", self._name, exc)
        else:
            logger.info("%s: still not there (%s)", self._name, exc)

    @abstractmethod
    def _open(self) -> None:
        """Connect and get ready. Also called again after a failure, after `_close`."""

    def _connected_again(self) -> None:
        logger.info("%s: connected again", self._name)

    @abstractmethod
    def _round(self) -> None:
        """Wait a while for messages and handle those that came."""

    @abstractmethod
    def _wake(self) -> None:
        """Make a `_round` that waits for the server return soon. Called by who stops it, not by its thread. Never
        raises."""

    def _farewell(self) -> None:  # noqa: B027
        """The last thing before the connection goes; it may be gone already."""

    @abstractmethod
    def _close(self) -> None:
        """Let go of what the thread connected. Twice is harmless; never raises."""

    def _dispose(self) -> None:  # noqa: B027
        """Let go of what others use beside the thread, when there is no thread any more. As harmless."""
