"""The front door, and the only place that picks concrete parts: which store, which clock, which notifier."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import weakref
from collections.abc import Generator
from typing import Any, TypedDict, Unpack

from headwater.broker.asynchronous import AsyncLog
from headwater.broker.blocking import Log
from headwater.broker.core import Core
from headwater.broker.engine import Engine
from headwater.delivery.dedupe import DedupeWindow
from headwater.errors import InvalidOption
from headwater.message import Span, check_whole, span_ms
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
    housekeeping: Span | None
    busy_timeout: Span
    adopt: bool
    clock: Clock
    heartbeats: bool


def open(url: str | os.PathLike[str], **options: Unpack[OpenOptions]) -> Log:
    """Open a log, making it if it is not there: a file path, `sqlite:path` or `memory:`."""
    return Log(open_core(url, **options))


def connect(url: str | os.PathLike[str], **options: Unpack[OpenOptions]) -> Connecting:
    """The same for asyncio: `async with headwater.connect("events.db") as log`, or `log = await headwater.connect(…)`
    and later `await log.close()`."""
    return Connecting(url, options)


class Connecting:
    """A log about to be opened, off the event loop."""

    def __init__(self, url: str | os.PathLike[str], options: OpenOptions) -> None:
        self._url = url
        self._options = options
        self._log: AsyncLog | None = None

    async def _open(self) -> AsyncLog:
        self._log = AsyncLog(await asyncio.to_thread(open_core, self._url, **self._options))
        return self._log

    def __await__(self) -> Generator[Any, None, AsyncLog]:
        return self._open().__await__()

    async def __aenter__(self) -> AsyncLog:
        return await self._open()

    async def __aexit__(self, *exc: object) -> None:
        if self._log is not None:
            await self._log.close()


def open_core(url: str | os.PathLike[str], **options: Unpack[OpenOptions]) -> Core:
    unknown = options.keys() - OpenOptions.__annotations__.keys()
    if unknown:
        raise InvalidOption(
            f"unknown option {sorted(unknown)[0]!r}", next=f"Known ones: {', '.join(OpenOptions.__annotations__)}"
        )
    default = DedupeWindow()
    window = DedupeWindow(
        span_ms(options["dedupe"], "dedupe") if "dedupe" in options else default.span_ms,
        check_whole("dedupe_count", options.get("dedupe_count", default.count), 0, 2**63 - 1),
    )
    housekeeping = options.get("housekeeping", HOUSEKEEPING_S)
    if housekeeping is not None:
        housekeeping = span_ms(housekeeping, "housekeeping") / 1000
    store = _open_store(os.fspath(url), options)
    try:
        engine = Engine(store, options.get("clock") or SystemClock(), dedupe=window)
    except BaseException:
        store.close()
        raise
    if isinstance(store, SqliteStore):
        engine.watch_with(lambda on_change: SqliteWatcher(store, on_change))
    core = Core(engine, housekeeping_s=housekeeping, heartbeats=options.get("heartbeats", True))
    _open_cores.add(core)
    return core


_open_cores: weakref.WeakSet[Core] = weakref.WeakSet()


@atexit.register
def _close_what_is_open() -> None:
    """A script that ends without closing its log gives back what it holds all the same."""
    for core in list(_open_cores):
        with contextlib.suppress(Exception):  # whatever it is, the others want to be closed too
            core.close()


def _open_store(url: str, options: OpenOptions) -> Store:
    durability = options.get("durability", "full")
    if durability not in ("full", "relaxed"):
        raise InvalidOption(f"durability is 'full' or 'relaxed', not {durability!r}", where=url)
    if url == "memory:":
        return MemoryStore()
    if url == ":memory:":
        raise InvalidOption("this would be a file of that name", where=url, next="A log in memory is memory:")
    scheme, found, rest = url.partition("://")
    if found and scheme != "sqlite":
        raise InvalidOption(f"there is no store for {scheme}:// here", where=url, next="Use a file path or memory:")
    path = rest.removeprefix("/") if found else url.removeprefix("sqlite:")  # sqlite:///relative, sqlite:////absolute
    return SqliteStore(
        path,
        durability=durability,
        busy_timeout_ms=span_ms(options.get("busy_timeout", BUSY_TIMEOUT_S), "busy_timeout"),
        adopt=options.get("adopt", False),
    )
