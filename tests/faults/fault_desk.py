"""A log on a disk that fails on demand."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from faulty_vfs import FaultyVfs

import headwater
from headwater.api._sync import Log
from headwater.broker.engine import Engine
from headwater.broker.log import LocalLog
from headwater.delivery.publishing import DedupeWindow
from headwater.ports.clock import Clock
from headwater.stores.sqlite import SqliteStore, SqliteWatcher

_numbers = itertools.count()


class Desk:
    """Opens logs on one file: through the faulty VFS, or `elsewhere` as another process would, without it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "log.db"
        self.vfs = FaultyVfs(f"faulty-{next(_numbers)}")
        self.clock = headwater.ManualClock()
        self._logs: list[Log] = []

    def open(
        self,
        *,
        busy_timeout_ms: int = 10_000,
        watching: bool = False,
        heartbeats: bool = False,
        clock: Clock | None = None,
    ) -> Log:
        store = SqliteStore(self.path, busy_timeout_ms=busy_timeout_ms, vfs=self.vfs.name)
        engine = Engine(store, clock or self.clock, dedupe=DedupeWindow())
        if watching:
            engine.watch_with(lambda on_change: SqliteWatcher(store, on_change))
        return self._kept(Log(LocalLog(engine, maintenance_s=None, heartbeats=heartbeats)))

    def elsewhere(self, **options: Any) -> Log:
        return self._kept(
            headwater.open(self.path, clock=self.clock, maintenance_interval=None, heartbeats=False, **options),
        )

    def forget(self, log: Log) -> None:
        """Its process is dead, as far as the others can tell: it never closes, and its leases run out."""
        self.clock.advance(3_600)

    def _kept(self, log: Log) -> Log:
        self._logs.append(log)
        return log

    def close(self) -> None:
        self.vfs.heal()
        for log in self._logs:
            log.close()
        self.vfs.unregister()
