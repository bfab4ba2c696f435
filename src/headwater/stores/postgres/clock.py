"""The database's time. Leases are compared across hosts, whose clocks differ; the server's is one for all."""

from __future__ import annotations

from headwater.ports.clock import SystemClock
from headwater.stores.postgres.store import PostgresStore


class DatabaseClock(SystemClock):
    """This host's clock, moved by how far the server's is ahead of it; every transaction compares the two anew."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    def now_ms(self) -> int:
        return super().now_ms() + self._store.ahead_ms
