"""The front door, and the only place that picks concrete parts: which store, which clock, which notifier."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypedDict, Unpack

from headwater.broker.asynchronous import AsyncLog
from headwater.broker.blocking import Log
from headwater.broker.core import Core
from headwater.broker.engine import Engine
from headwater.delivery.dedupe import DedupeWindow
from headwater.errors import InvalidOption
from headwater.message import Span, span_ms
from headwater.ports.clock import Clock, SystemClock
from headwater.ports.store import Store
from headwater.stores.memory import MemoryStore
from headwater.stores.sqlite import Durability, SqliteStore, SqliteWatcher

HOUSEKEEPING_S = 60.0
BUSY_TIMEOUT_S = 10.0


class OpenOptions(TypedDict, total=False):
    """`durability`: "full" (default: what was published survives power loss) or "relaxed" (it survives a crash of the
    process). `dedupe`, `dedupe_count`: how long, and how many messages back, a given id is remembered.
    `housekeeping`: seconds between rounds, None for never. `adopt`: add the log's tables to an existing database."""

    durability: Durability
    dedupe: Span
    dedupe_count: int
    housekeeping: float | None
    busy_timeout: Span
    adopt: bool
    clock: Clock
    heartbeats: bool


def open(url: str | os.PathLike[str], **options: Unpack[OpenOptions]) -> Log:
    """Open a log, making it if it is not there: a file path, `sqlite:path` or `memory:`."""
    return Log(open_core(url, **options))


@asynccontextmanager
async def connect(url: str | os.PathLike[str], **options: Unpack[OpenOptions]) -> AsyncIterator[AsyncLog]:
    """The same for asyncio: `async with headwater.connect("events.db") as log`."""
    log = AsyncLog(open_core(url, **options))
    try:
        yield log
    finally:
        await log.close()


def open_core(url: str | os.PathLike[str], **options: Unpack[OpenOptions]) -> Core:
    unknown = options.keys() - OpenOptions.__annotations__.keys()
    if unknown:
        raise InvalidOption(
            f"unknown option {sorted(unknown)[0]!r}", next=f"Known ones: {', '.join(OpenOptions.__annotations__)}"
        )
    default = DedupeWindow()
    window = DedupeWindow(
        span_ms(options["dedupe"], "dedupe") if "dedupe" in options else default.span_ms,
        options.get("dedupe_count", default.count),
    )
    store = _open_store(os.fspath(url), options)
    try:
        engine = Engine(store, options.get("clock") or SystemClock(), dedupe=window)
    except BaseException:
        store.close()
        raise
    if isinstance(store, SqliteStore):
        engine.watch_with(lambda on_change: SqliteWatcher(store, on_change))
    return Core(
        engine,
        housekeeping_s=options.get("housekeeping", HOUSEKEEPING_S),
        heartbeats=options.get("heartbeats", True),
    )


def _open_store(url: str, options: OpenOptions) -> Store:
    if url == "memory:":
        return MemoryStore()
    scheme, found, rest = url.partition("://")
    if found and scheme != "sqlite":
        raise InvalidOption(f"there is no store for {scheme}:// here", where=url, next="Use a file path or memory:")
    path = rest if found else url.removeprefix("sqlite:")
    durability = options.get("durability", "full")
    if durability not in ("full", "relaxed"):
        raise InvalidOption(f"durability is 'full' or 'relaxed', not {durability!r}", where=url)
    return SqliteStore(
        path,
        durability=durability,
        busy_timeout_ms=span_ms(options.get("busy_timeout", BUSY_TIMEOUT_S), "busy_timeout"),
        adopt=options.get("adopt", False),
    )
