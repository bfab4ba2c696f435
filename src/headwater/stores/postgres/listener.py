"""Notices commits of other stores: by LISTEN on a connection of its own, and by a slow poll in case a notification is
lost.

A notification is lost while the connection is down, and behind poolers that hand out a server connection per
transaction there are none at all. So every (re)connection is followed by a look, and a look is taken every second in
any case; with `poll_only` a quicker poll is all there is.
"""

from __future__ import annotations

import logging
import os
import random
import selectors
import threading
from collections.abc import Callable, Iterator

import psycopg
from psycopg import sql

from headwater.errors import HeadwaterError
from headwater.stores.postgres.store import PostgresStore

FALLBACK_POLL_S = 1.0
POLL_S = 0.1
RECONNECT_S_MIN, RECONNECT_S_MAX = 0.1, 5.0

logger = logging.getLogger("headwater")


class PostgresListener:
    """`ports.store.Notifier`: calls `on_change` after a commit by another store object, here or elsewhere."""

    def __init__(self, store: PostgresStore, on_change: Callable[[], None], *, poll_only: bool = False) -> None:
        self._store = store
        self._on_change = on_change
        self._failure = ""
        self._poll_only = poll_only
        self._stopping = threading.Event()
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="headwater-listener", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if not self._stopping.is_set():
            self._stopping.set()
            os.write(self._stop_write, b"x")
            if self._thread.is_alive():
                self._thread.join()
            os.close(self._stop_read)
            os.close(self._stop_write)

    def _run(self) -> None:
        if self._poll_only:
            while not self._stopping.wait(POLL_S):
                self._look()
            return
        pause_s = RECONNECT_S_MIN
        while not self._stopping.is_set():
            try:
                with self._store.connect("listener") as connection:
                    connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._store.place.channel)))
                    self._look()  # what was committed before we listened
                    pause_s = RECONNECT_S_MIN
                    for _ in self._news(connection):
                        self._look()
            except Exception as exc:  # whatever it is, waiting consumers must not wait for ever
                logger.warning("%s: not listening for news (%s); trying again", self._store.name, str(exc).strip())
                self._stopping.wait(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(RECONNECT_S_MAX, pause_s * 2)
                self._look()

    def _news(self, connection: psycopg.Connection) -> Iterator[None]:
        """Yield once for every notification of another, or for several at a time, and at least once in
        FALLBACK_POLL_S."""
        with selectors.DefaultSelector() as selector:  # select() knows no descriptor above 1023
            for descriptor in (connection.fileno(), self._stop_read):
                selector.register(descriptor, selectors.EVENT_READ)
            while True:
                selector.select(FALLBACK_POLL_S)
                if self._stopping.is_set():
                    return
                senders = {each.payload for each in connection.notifies(timeout=0)}
                if senders != {self._store.sender}:
                    yield

    def _look(self) -> None:
        try:
            self._on_change()
            self._failure = ""
        except HeadwaterError as exc:
            if not self._stopping.is_set() and str(exc) != self._failure:  # once, however often it is notified
                logger.warning("could not look for news: %s", exc)
            self._failure = str(exc)
