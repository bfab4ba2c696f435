"""The front door, and the only place that picks concrete parts: which store, which clock, which notifier."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import weakref
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from headwater.broker.asynchronous import AsyncLog
from headwater.broker.blocking import Log
from headwater.broker.core import Core
from headwater.broker.engine import Engine
from headwater.broker.verbs import LogVerbs
from headwater.client.options import RemoteOptions
from headwater.delivery.dedupe import DedupeWindow
from headwater.errors import InvalidOption
from headwater.message import Span, check_whole, span_ms
from headwater.ports.clock import Clock, SystemClock
from headwater.ports.store import Store
from headwater.stores.memory import MemoryStore
from headwater.stores.sqlite import Durability, SqliteStore, SqliteWatcher
from headwater.version import VERSION

if TYPE_CHECKING:
    from headwater.broker.tracing import Tracing
    from headwater.configuration import Settings
    from headwater.server.serving import Server

HOUSEKEEPING_S = 60.0
BUSY_TIMEOUT_S = 10.0


class OpenOptions(TypedDict, total=False):
    """`durability`: "full" (default: what was published survives power loss) or "relaxed" (it survives a crash of the
    process). `dedupe`, `dedupe_count`: how long, and how many messages back, a given id is remembered.
    `housekeeping`: seconds between rounds, None for never. `adopt`: add the log's tables to an existing database.
    `tracing`: spans of OpenTelemetry for publishes and handlers."""

    durability: Durability
    dedupe: Span
    dedupe_count: int
    housekeeping: Span | None
    busy_timeout: Span
    adopt: bool
    clock: Clock
    heartbeats: bool
    tracing: bool


class AllOptions(OpenOptions, RemoteOptions, total=False):
    """Those for a log here, and those for a log behind a server; which of them apply, the url says."""


def open(url: str | os.PathLike[str], **options: Unpack[AllOptions]) -> Log:
    """Open a log, making it if it is not there: a file path, `sqlite:path` or `memory:`. Or one behind a server:
    `ws://host:port`, `wss://host:port`."""
    tracing = _tracing(options)
    if _is_remote(url):
        return Log(_open_remote(str(url), options), tracing)
    return Log(open_core(url, **cast(OpenOptions, options)), tracing)


def serve(url: str | os.PathLike[str] | None = None, **flags: Any) -> Server:
    """A server for a log: `async with headwater.serve("events.db", port=0) as server`, or `headwater.serve(…).run()`.
    Settings are those of `headwater.toml`, by name: `port`, `tokens`, `limits_burst`, …; and what `open` takes for a
    log here: `durability`, `dedupe`, `housekeeping`, …"""
    from headwater.configuration import load_settings  # not before a server is wanted: it costs a third of a second

    log_options = {name: flags.pop(name) for name in OpenOptions.__annotations__ if name in flags}
    paths = {_setting_path(name): value for name, value in flags.items() if name not in ("config", "profile")}
    if url is not None:
        paths["server.log"] = os.fspath(url)
    settings = load_settings(
        config=flags.get("config"),
        profile=flags.get("profile"),
        flags=paths,
        environment=os.environ,
        directory=os.getcwd(),
    )
    return make_server(settings, **cast(OpenOptions, log_options))


def _setting_path(name: str) -> str:
    from headwater.configuration import ServerSettings

    section, _, key = name.partition("_")
    is_elsewhere = section in ("limits", "log") and key and name not in ServerSettings.model_fields  # log_level is here
    return f"{section}.{key}" if is_elsewhere else f"server.{name}"


def make_server(settings: Settings, **log_options: Unpack[OpenOptions]) -> Server:
    """What is said of the log here goes before the settings."""
    from headwater.console.pages import console_files
    from headwater.server.serving import Server

    def open_log() -> Core:
        options: OpenOptions = {
            "durability": settings.log.durability,
            "dedupe": settings.log.dedupe,
            "dedupe_count": settings.log.dedupe_count,
            "housekeeping": settings.log.retention_interval,
            **log_options,
        }
        return open_core(settings.server.log, **options)

    files = console_files() if settings.server.console else {}
    server = Server(open_log, settings, VERSION, files)
    if _is_wanted("tracing", log_options.get("tracing", settings.server.tracing)):
        with _extra("otel", "server.tracing"):
            from headwater.server.tracing import CallTracing
        server.use(CallTracing(server.registry.knows))
    return server


def connect(url: str | os.PathLike[str], **options: Unpack[AllOptions]) -> Connecting:
    """The same for asyncio: `async with headwater.connect("events.db") as log`, or `log = await headwater.connect(…)`
    and later `await log.close()`."""
    return Connecting(url, options)


class Connecting:
    """A log about to be opened, off the event loop."""

    def __init__(self, url: str | os.PathLike[str], options: AllOptions) -> None:
        self._url = url
        self._options = options
        self._log: AsyncLog | None = None

    async def _open(self) -> AsyncLog:
        tracing = _tracing(self._options)
        core: LogVerbs
        if _is_remote(self._url):
            core = await _connect_remote(str(self._url), self._options)
        else:
            core = await asyncio.to_thread(open_core, self._url, **cast(OpenOptions, self._options))
        self._log = AsyncLog(core, tracing)
        return self._log

    def __await__(self) -> Generator[Any, None, AsyncLog]:
        return self._open().__await__()

    async def __aenter__(self) -> AsyncLog:
        return await self._open()

    async def __aexit__(self, *exc: object) -> None:
        if self._log is not None:
            await self._log.close()


def _tracing(options: AllOptions) -> Tracing | None:
    if not _is_wanted("tracing", options.get("tracing", False)):
        return None
    with _extra("otel", "tracing"):
        from headwater.broker.tracing import Tracing
    return Tracing()


def _is_wanted(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidOption(f"{name} is True or False, not {value!r}")
    return value


@contextlib.contextmanager
def _extra(name: str, where: str) -> Iterator[None]:
    """Around the import of what needs an extra."""
    try:
        yield
    except ImportError as exc:
        raise InvalidOption(
            f"this needs a package that is not installed ({exc})",
            where=where,
            next=f"pip install 'headwater[{name}]'",
        ) from exc


def _is_remote(url: str | os.PathLike[str]) -> bool:
    return isinstance(url, str) and url.startswith(("ws://", "wss://"))


def _open_remote(url: str, options: AllOptions) -> LogVerbs:
    from headwater.client import core as remote  # not before it is wanted

    settings = remote.read_options(url, cast(RemoteOptions, options))
    core = remote.open_on_a_thread(lambda loop: remote.Link(settings, remote.new_publisher(), loop), SystemClock())
    _open_cores.add(core)
    return core


async def _connect_remote(url: str, options: AllOptions) -> LogVerbs:
    from headwater.client import core as remote

    settings = remote.read_options(url, cast(RemoteOptions, options))
    link = remote.Link(settings, remote.new_publisher(), asyncio.get_running_loop())
    return await remote.open_on_this_loop(link, SystemClock())


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


_open_cores: weakref.WeakSet[Any] = weakref.WeakSet()  # of everything with a close()


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
        raise InvalidOption(
            f"there is no store for {scheme}:// here", where=url, next="Use a file path, memory: or ws://"
        )
    path = rest.removeprefix("/") if found else url.removeprefix("sqlite:")  # sqlite:///relative, sqlite:////absolute
    return SqliteStore(
        path,
        durability=durability,
        busy_timeout_ms=span_ms(options.get("busy_timeout", BUSY_TIMEOUT_S), "busy_timeout"),
        adopt=options.get("adopt", False),
    )
