"""The front door, and the only place that picks concrete parts: which store, which clock, which notifier."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack, cast

from headwater.broker.asynchronous import AsyncLog
from headwater.broker.blocking import Log
from headwater.broker.core import Core
from headwater.broker.engine import Engine
from headwater.broker.verbs import LogVerbs
from headwater.client.options import RemoteOptions
from headwater.delivery.dedupe import DedupeWindow
from headwater.errors import InvalidOption, NotALog
from headwater.message import Span, check_whole, span_ms
from headwater.ports.clock import Clock, SystemClock
from headwater.ports.store import Notifier, Store
from headwater.stores.memory import MemoryStore
from headwater.stores.sqlite import Durability, SqliteStore, SqliteWatcher
from headwater.version import VERSION

if TYPE_CHECKING:
    from headwater.broker.tracing import Tracing
    from headwater.configuration import Settings
    from headwater.ports.annex import Annex
    from headwater.server.serving import Server
    from headwater.transports.base import BaseTransport
    from headwater.typed import AsyncBus, Bus

HOUSEKEEPING_S = 60.0
BUSY_TIMEOUT_S = 10.0


class OpenOptions(TypedDict, total=False):
    """`durability`: "full" (default: what was published survives power loss) or "relaxed" (it survives a crash of the
    process). `dedupe`, `dedupe_count`: how long, and how many messages back, a given id is remembered.
    `housekeeping`: seconds between rounds, None for never. `adopt`: add the log's tables to an existing database.
    `tracing`: spans of OpenTelemetry for publishes and handlers. `notify`: "listen" (default) or "poll", behind a
    pooler of PostgreSQL connections that breaks LISTEN. `create`: False if a log that is not there is a mistake."""

    durability: Durability
    dedupe: Span
    dedupe_count: int
    housekeeping: Span | None
    busy_timeout: Span
    adopt: bool
    clock: Clock
    heartbeats: bool
    tracing: bool
    notify: str
    create: bool


class AllOptions(OpenOptions, RemoteOptions, total=False):
    """Those for a log here, and those for a log behind a server; which of them apply, the url says."""


def open(url: str | os.PathLike[str], **options: Unpack[AllOptions]) -> Log:
    """Open a log, making it if it is not there: a file path, `sqlite:path`, `postgres://user@host/database` or
    `memory:`. Or one behind a server: `ws://host:port`, `wss://host:port`."""
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
        paths["server.log"] = os.fsdecode(url)
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
    is_elsewhere = (
        section in ("limits", "log", "replicas") and key and name not in ServerSettings.model_fields
    )  # log_level is here
    return f"{section}.{key}" if is_elsewhere else f"server.{name}"


def make_server(settings: Settings, **log_options: Unpack[OpenOptions]) -> Server:
    """What is said of the log here goes before the settings."""
    from headwater.console.pages import console_files
    from headwater.server.serving import Server

    def open_log() -> Core:
        options: OpenOptions = {**_log_options(settings), **log_options}
        core = open_core(settings.server.log, **options)
        core.engine.announce()
        return core

    files = console_files() if settings.server.console else {}
    server = Server(open_log, settings, VERSION, files, _annexes(settings))
    if _is_wanted("tracing", log_options.get("tracing", settings.server.tracing)):
        with _extra("otel", "server.tracing"):
            from headwater.server.tracing import CallTracing
        server.use(CallTracing(server.registry.knows))
    return server


def replicas_directory(settings: Settings) -> str | None:
    """Replicas are kept beside a log that is a file, if nothing else was said."""
    from headwater.replication.host.layout import BESIDE_A_LOG

    log = settings.server.log
    if settings.replicas.directory is not None:
        return settings.replicas.directory
    return None if log == "memory:" or is_postgres(log) else f"{_sqlite_path(log)}{BESIDE_A_LOG}"


def _annexes(settings: Settings) -> list[Annex]:
    from headwater.replication.host.endpoint import ReplicaEndpoint
    from headwater.replication.host.policy import Policy
    from headwater.replication.host.shelf import Shelf

    replicas, directory = settings.replicas, replicas_directory(settings)
    if directory is None:
        return []
    keep_age_ms = None if replicas.keep_age is None else round(replicas.keep_age * 1000)

    def make_shelf(clock: Clock) -> Shelf:
        return Shelf(
            directory,
            Policy(replicas.keep_last, keep_age_ms),
            clock,
            bytes_max=replicas.max_bytes,
            replicas_max=replicas.max_replicas,
        )

    return [
        ReplicaEndpoint(
            make_shelf, bytes_max=replicas.max_bytes, pushes_max=replicas.pushes, idle_s=replicas.idle_timeout
        )
    ]


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


def open_transport(url: str | os.PathLike[str], **options: Any) -> BaseTransport:
    """What carries copies to another system: `redis://…`, `s3://bucket/prefix`, `file:///path.jsonl`, another log, …;
    `docs/transports.md` has them all, with their options."""
    from headwater.transports.opening import open_transport as open_by_url

    return open_by_url(url, clock=SystemClock(), opener=open, **options)


@contextlib.contextmanager
def open_bus(
    url: str | os.PathLike[str] | None = None, *, config: str | None = None, profile: str | None = None
) -> Iterator[Bus]:
    """A log and the transports that `[transports.…]` and `[messages.…]` of headwater.toml give to its typed messages,
    in the profile that holds; `url` goes before the log that the file names."""
    from headwater.typed import make_bus

    settings = _settings_for_bus(config, profile)
    place = url or settings.server.log
    with open(place, **_options_for(place, settings)) as log, make_bus(settings, log, open_transport) as bus:
        yield bus


@contextlib.asynccontextmanager
async def connect_bus(
    url: str | os.PathLike[str] | None = None, *, config: str | None = None, profile: str | None = None
) -> AsyncIterator[AsyncBus]:
    """The same for asyncio."""
    from headwater.typed import make_bus

    settings = await asyncio.to_thread(_settings_for_bus, config, profile)
    place = url or settings.server.log
    async with (
        connect(place, **_options_for(place, settings)) as log,
        await asyncio.to_thread(make_bus, settings, log, open_transport) as bus,
    ):
        yield bus


def _settings_for_bus(config: str | None, profile: str | None) -> Settings:
    from headwater.configuration import load_settings

    return load_settings(
        config=config, profile=profile, flags={}, environment=os.environ, directory=os.getcwd(), serves=False
    )


def _options_for(url: str | os.PathLike[str], settings: Settings) -> AllOptions:
    """What `[log]` says, for a log here; a server has been told its own."""
    return {} if _is_remote(url) else cast(AllOptions, _log_options(settings))


def _log_options(settings: Settings) -> OpenOptions:
    return {
        "durability": settings.log.durability,
        "dedupe": settings.log.dedupe,
        "dedupe_count": settings.log.dedupe_count,
        "housekeeping": settings.log.retention_interval,
    }


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
    opened = _open_store(os.fsdecode(url), options)
    try:
        engine = Engine(opened.store, options.get("clock") or opened.clock(), dedupe=window)
    except BaseException:
        opened.store.close()
        raise
    if opened.watch is not None:
        engine.watch_with(opened.watch)
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


class _Opened(NamedTuple):
    """A store, how to notice what others write to it, and whose time its log goes by."""

    store: Store
    watch: Callable[[Callable[[], None]], Notifier] | None = None
    clock: Callable[[], Clock] = SystemClock


def _open_store(url: str, options: OpenOptions) -> _Opened:
    durability = _one_of("durability", options.get("durability", "full"), "full", "relaxed")
    notify = _one_of("notify", options.get("notify", "listen"), "listen", "poll")
    busy_timeout_ms = span_ms(options.get("busy_timeout", BUSY_TIMEOUT_S), "busy_timeout")
    create = options.get("create", True)
    if url == "memory:":
        return _Opened(MemoryStore())
    if is_postgres(url):
        with _extra("postgres", "postgres://"):
            from headwater.stores.postgres import DatabaseClock, PostgresListener, PostgresStore
        poll_only = notify == "poll"
        database = PostgresStore(
            url, durability=durability, busy_timeout_ms=busy_timeout_ms, poll_only=poll_only, create=create
        )
        return _Opened(
            database,
            lambda on_change: PostgresListener(database, on_change, poll_only=poll_only),
            lambda: DatabaseClock(database),
        )
    if url == ":memory:":
        raise InvalidOption("this would be a file of that name", where=url, next="A log in memory is memory:")
    path = _sqlite_path(url)
    if not create and not os.path.exists(path):
        raise NotALog("there is no log", where=path, next="Check the name, or let it be made: create=True")
    store = SqliteStore(path, durability=durability, busy_timeout_ms=busy_timeout_ms, adopt=options.get("adopt", False))
    return _Opened(store, lambda on_change: SqliteWatcher(store, on_change))


def _sqlite_path(url: str) -> str:
    scheme, found, rest = url.partition("://")
    if found and scheme != "sqlite":
        raise InvalidOption(
            f"there is no store for {scheme}:// here",  # without the rest of it: there may be a password
            next="Use a file path, postgres://, ws:// or memory:",
        )
    return rest.removeprefix("/") if found else url.removeprefix("sqlite:")  # sqlite:///relative, sqlite:////absolute


def is_postgres(url: str) -> bool:
    return url.startswith(("postgres://", "postgresql://"))


def _one_of(name: str, value: Any, *known: str) -> Any:
    if value not in known:
        raise InvalidOption(f"{name} is {' or '.join(map(repr, known))}, not {value!r}")
    return value
