"""A pool of connections without threads and without a logger. The one of psycopg logs every failed attempt to connect
as a warning; here the error that the caller gets says it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg

from headwater.stores.postgres.connection import is_broken

Begin = Callable[[psycopg.Connection], object]

RECONNECT_S_MIN, RECONNECT_S_MAX = 0.05, 1.0
IDLE_S_MAX = 600.0  # an idle connection is closed after this long


class PoolTimeout(Exception):
    """No connection became free in time."""


class Pool:
    def __init__(self, connect: Callable[[], psycopg.Connection], most: int) -> None:
        self._connect = connect
        self._free = threading.Semaphore(most)
        self._lock = threading.Lock()
        self._idle: list[tuple[psycopg.Connection, float]] = []  # and since when, the latest last
        self._closed = False

    @contextmanager
    def connection(self, begin: Begin, timeout_s: float) -> Iterator[psycopg.Connection]:
        """A connection on which `begin` has succeeded. Idle ones that broke are dropped; an unreachable server is tried
        again until the time is over. Raises PoolTimeout, or psycopg's error."""
        until = time.monotonic() + timeout_s
        if not self._free.acquire(timeout=timeout_s):
            raise PoolTimeout(f"no connection became free in {timeout_s:.0f} s")
        try:
            connection = self._begun(begin, until)
            try:
                yield connection
            finally:
                self._put(connection)
        finally:
            self._free.release()

    def _begun(self, begin: Begin, until: float) -> psycopg.Connection:
        pause_s = RECONNECT_S_MIN
        while True:
            connection = idle = self._take()
            try:
                connection = idle or self._connect()
                begin(connection)
                return connection
            except psycopg.Error as exc:
                if connection is not None and not is_broken(connection, exc):
                    self._put(connection)
                    raise
                if time.monotonic() + pause_s > until:
                    raise
            except BaseException:
                if connection is not None:
                    connection.close()
                raise
            if idle is None:
                time.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(RECONNECT_S_MAX, pause_s * 2)

    def _take(self) -> psycopg.Connection | None:
        with self._lock:
            return self._idle.pop()[0] if self._idle else None

    def _put(self, connection: psycopg.Connection) -> None:
        now = time.monotonic()
        with self._lock:
            if not self._closed and not connection.closed:
                self._idle.append((connection, now))
                if now - self._idle[0][1] <= IDLE_S_MAX:
                    return
                connection, _ = self._idle.pop(0)
        connection.close()

    def close(self) -> None:
        """Close idle connections now, and those in use when they come back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()
