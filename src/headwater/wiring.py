"""Opens logs, servers, buses and transports: the only module that chooses a store, a clock or a notifier."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import os
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, Unpack, cast

from headwater.api._runtime import Opening, given
from headwater.api._sync import Log
from headwater.arguments import INT64_MAX, check_choice, check_flag, check_whole, hinted
from headwater.broker.engine import Engine
from headwater.broker.log import LocalLog
from headwater.broker.verbs import LogVerbs
from headwater.client.options import RemoteOptions, Strategy
from headwater.delivery.publishing import DedupeWindow
from headwater.errors import InvalidOptionError, NotALogError
from headwater.formats import Span, is_postgres, refuse_mistyped_url, span_ms, url_text
from headwater.ports.clock import Clock, SystemClock
from headwater.ports.store import Notifier, Store
from headwater.stores.sqlite import Durability, MemoryStore, SqliteStore, SqliteWatcher
from headwater.version import VERSION, install_hint

if TYPE_CHECKING:
    from types import EllipsisType

    from headwater.api._async import AsyncLog
    from headwater.broker.tracing import Tracing
    from headwater.delivery.circuit import BreakerPolicy
    from headwater.server.mount import Mount
    from headwater.server.server import Server
    from headwater.settings import Settings
    from headwater.settings.model import Profile
    from headwater.transports.base import BaseTransport
    from headwater.typed import AsyncBus, Bus

MAINTENANCE_S = 60.0
BUSY_TIMEOUT_S = 10.0


class OpenOptions(TypedDict, total=False):
    """The options of a log in this process; `open` documents them."""

    durability: Durability
    dedupe: Span
    dedupe_count: int
    maintenance_interval: Span | None
    busy_timeout: Span
    adopt: bool
    clock: Clock | None
    heartbeats: bool
    tracing: bool
    notify: Literal["listen", "poll"]
    create: bool


class AllOptions(OpenOptions, RemoteOptions, total=False):
    """The options of a log in this process, and of a log behind a server; the url selects which apply."""


@hinted("open")
def open(
    url: str | os.PathLike[str],
    *,
    durability: Durability = "full",
    dedupe: Span = 86_400.0,
    dedupe_count: int = 1_000_000,
    maintenance_interval: Span | None = MAINTENANCE_S,
    busy_timeout: Span = BUSY_TIMEOUT_S,
    adopt: bool = False,
    clock: Clock | None = None,
    heartbeats: bool = True,
    tracing: bool = False,
    notify: Literal["listen", "poll"] = "listen",
    create: bool = True,
    token: str | None = None,
    ca: str | os.PathLike[str] | None = None,
    certificate: str | os.PathLike[str] | None = None,
    timeout: Span = 30.0,
    connect_timeout: Span = 10.0,
    reconnect: Strategy = "exponential",
    reconnect_min: Span = 0.1,
    reconnect_max: Span = 30.0,
    reconnect_attempts: int | None = None,
    ping: Span = 10.0,
) -> Log:
    """Open a log: a file path, `sqlite:path`, `postgres://user@host/database`, `memory:`, or a server's `ws://host:port`
    or `wss://host:port`. A log in a file or a database is created if it does not exist.

    Options of a log in this process: with `durability="full"` messages survive power loss, with "relaxed" a crash of
    the process. `dedupe` and `dedupe_count` limit for how long, and for how many later messages, an id is remembered.
    `maintenance_interval` is the time between rounds of maintenance; None: no rounds. `busy_timeout` limits the wait
    for another process's lock. `adopt` adds the log's tables to a database with other tables. `notify="poll"` works
    without LISTEN, behind a pooler of PostgreSQL connections. With `create=False` a log that does not exist is an
    error. `clock` and `heartbeats` are for tests. `tracing` records OpenTelemetry spans, also behind a server.

    Options of a log behind a server: `token`, by default HEADWATER_TOKEN; `ca`, a file with the certificates to trust
    for wss://; `certificate`, a file with a client certificate and its key, by default HEADWATER_CERTIFICATE.
    `timeout` limits the wait for an answer, `connect_timeout` that for the first connection. `reconnect`,
    `reconnect_min`, `reconnect_max` and `reconnect_attempts` set how a broken connection is made again. A connection
    that is silent for twice `ping` is dropped.
    """
    options = given(AllOptions, open, locals())
    spans = _tracing(tracing)
    return Log(_open_remote(str(url), options) if _is_remote(url) else open_core(url, **_local(options)), spans)


def open_read_only(path: str) -> Log:
    """A log in a file that this user may not write. What would change it raises ReadOnlyError."""
    store = SqliteStore(path, busy_timeout_ms=span_ms(BUSY_TIMEOUT_S, "busy_timeout"), read_only=True)
    engine = Engine(store, SystemClock(), dedupe=DedupeWindow())
    engine.watch_with(lambda on_change: SqliteWatcher(store, on_change))
    core = LocalLog(engine, maintenance_s=None)
    _open_cores.add(core)
    return Log(core)


def serve(
    url: str | os.PathLike[str] | None = None,
    *,
    config: str | None = None,
    profile: Profile | None = None,
    host: str | None = None,
    port: int | None = None,
    allow_anonymous: bool | None = None,
    tokens: str | None = None,
    origins: Sequence[str] | None = None,
    tls_certificate: str | None = None,
    tls_key: str | None = None,
    tls_client_ca: str | None = None,
    shutdown_timeout: float | str | None = None,
    log_format: Literal["text", "json"] | None = None,
    log_level: Literal["debug", "info", "warning", "error"] | None = None,
    metrics_need_token: bool | None = None,
    console: bool | None = None,
    tracing: bool | None = None,
    audit: str | None = None,
    lake: str | None = None,
    limits_frame_bytes: int | str | None = None,
    limits_batch_calls: int | None = None,
    limits_connections: int | None = None,
    limits_connections_per_address: int | None = None,
    limits_requests_in_flight: int | None = None,
    limits_requests_per_second: int | None = None,
    limits_burst: int | None = None,
    limits_subscriptions_per_connection: int | None = None,
    limits_outbound_bytes: int | str | None = None,
    limits_request_timeout: float | str | None = None,
    limits_fetch_wait: float | str | None = None,
    limits_authenticate_timeout: float | str | None = None,
    limits_ping_interval: float | str | None = None,
    limits_ping_timeout: float | str | None = None,
    limits_http_head_bytes: int | str | None = None,
    limits_subscriptions_per_token: int | None = None,
    limits_method_threads: int | None = None,
    limits_unauthenticated: int | None = None,
    limits_unauthenticated_per_address: int | None = None,
    limits_unauthenticated_bytes: int | str | None = None,
    limits_inbound_bytes: int | str | None = None,
    limits_inbound_total_bytes: int | str | None = None,
    limits_outbound_total_bytes: int | str | None = None,
    limits_connections_per_token: int | None = None,
    log_durability: Durability | None = None,
    log_dedupe: float | str | None = None,
    log_dedupe_count: int | None = None,
    log_retention_interval: float | str | None = None,
    log_subscription_timeout: float | str | None = None,
    replicas_directory: str | None = None,
    replicas_keep_last: int | None = None,
    replicas_keep_age: float | str | None = None,
    replicas_max_bytes: int | str | None = None,
    replicas_max_replicas: int | None = None,
    replicas_pushes: int | None = None,
    replicas_idle_timeout: float | str | None = None,
    durability: Durability | None = None,
    dedupe: Span | None = None,
    dedupe_count: int | None = None,
    maintenance_interval: Span | EllipsisType | None = ...,
    busy_timeout: Span = BUSY_TIMEOUT_S,
    adopt: bool = False,
    clock: Clock | None = None,
    heartbeats: bool = True,
    notify: Literal["listen", "poll"] = "listen",
    create: bool = True,
) -> Server:
    """A server for a log: `async with headwater.serve("events.db", port=0) as server`, or `headwater.serve(…).run()`.

    The settings are those of `headwater.toml`, by name. A setting that is None comes from the environment, the file or
    the defaults; `headwater config show` prints each with its source. Durations may be texts like "30s", sizes like
    "4MB". The last ten are options of `open` and override `log_…`.
    """
    from headwater.settings import load_settings  # not before a server is wanted: it costs a third of a second

    arguments = locals()
    options = given(OpenOptions, serve, arguments)
    flags = {
        _setting_path(name): arguments[name]
        for name in inspect.signature(serve).parameters
        if name not in OpenOptions.__annotations__ and name not in ("url", "config", "profile")
    }
    flags["server.log"] = None if url is None else os.fsdecode(url)
    return make_server(load_settings(config=config, profile=profile, flags=flags), **options)


def _setting_path(name: str) -> str:
    from headwater.settings import ServerSettings

    section, _, key = name.partition("_")
    is_of_server = section not in ("limits", "log", "replicas") or name in ServerSettings.model_fields  # as log_level
    return f"server.{name}" if is_of_server else f"{section}.{key}"


def make_server(settings: Settings, **log_options: Unpack[OpenOptions]) -> Server:
    """`log_options` override the settings of the log."""
    from headwater.console import console_files
    from headwater.server.server import Server

    def open_log() -> LocalLog:
        options: OpenOptions = {**_log_options(settings), **log_options}
        core = open_core(settings.server.log, **options)
        core.engine.announce()
        return core

    files = console_files() if settings.server.console else {}
    server = Server(open_log, settings, VERSION, files, _mounts(settings))
    if check_flag("tracing", log_options.get("tracing", settings.server.tracing)):
        with _extra("otel", "server.tracing"):
            from headwater.server.tracing import CallTracing
        server.use(CallTracing(server.registry.knows))
    return server


def replicas_directory(settings: Settings) -> str | None:
    """The directory of the settings, or one beside a log that is a file."""
    from headwater.replication import DIRECTORY_SUFFIX

    log = settings.server.log
    if settings.replicas.directory is not None:
        return settings.replicas.directory
    return None if log == "memory:" or is_postgres(log) else f"{_sqlite_path(log)}{DIRECTORY_SUFFIX}"


def _mounts(settings: Settings) -> list[Mount]:
    from headwater.replication.host.endpoint import ReplicaEndpoint
    from headwater.replication.host.store import ReplicaStore
    from headwater.replication.host.versions import VersionRetention

    replicas, directory = settings.replicas, replicas_directory(settings)
    if directory is None:
        return []
    keep_age_ms = None if replicas.keep_age is None else round(replicas.keep_age * 1000)

    def make_store(clock: Clock) -> ReplicaStore:
        return ReplicaStore(
            directory,
            VersionRetention(replicas.keep_last, keep_age_ms),
            clock,
            bytes_max=replicas.max_bytes,
            replicas_max=replicas.max_replicas,
        )

    return [
        ReplicaEndpoint(
            make_store, bytes_max=replicas.max_bytes, pushes_max=replicas.pushes, idle_s=replicas.idle_timeout
        )
    ]


@hinted("open")
def open_async(
    url: str | os.PathLike[str],
    *,
    durability: Durability = "full",
    dedupe: Span = 86_400.0,
    dedupe_count: int = 1_000_000,
    maintenance_interval: Span | None = MAINTENANCE_S,
    busy_timeout: Span = BUSY_TIMEOUT_S,
    adopt: bool = False,
    clock: Clock | None = None,
    heartbeats: bool = True,
    tracing: bool = False,
    notify: Literal["listen", "poll"] = "listen",
    create: bool = True,
    token: str | None = None,
    ca: str | os.PathLike[str] | None = None,
    certificate: str | os.PathLike[str] | None = None,
    timeout: Span = 30.0,
    connect_timeout: Span = 10.0,
    reconnect: Strategy = "exponential",
    reconnect_min: Span = 0.1,
    reconnect_max: Span = 30.0,
    reconnect_attempts: int | None = None,
    ping: Span = 10.0,
) -> Opening[AsyncLog]:
    """`open` for asyncio: `async with headwater.open_async("events.db") as log`, or `log = await
    headwater.open_async(…)` and later `await log.close()`."""
    return Opening(_connect(url, given(AllOptions, open_async, locals())))


async def _connect(url: str | os.PathLike[str], options: AllOptions) -> AsyncLog:
    from headwater.api._async import AsyncLog  # not before it is wanted

    tracing = _tracing(options.get("tracing", False))
    core: LogVerbs
    if _is_remote(url):
        core = await _connect_remote(str(url), options)
    else:
        core = await asyncio.to_thread(open_core, url, **_local(options))
    return AsyncLog(core, tracing)


def open_transport(
    url: str | os.PathLike[str],
    *,
    breaker: BreakerPolicy | Mapping[str, Any] | str | bool | None = None,
    batch: Mapping[str, Any] | str | bool | None = None,
    **options: Any,
) -> BaseTransport:
    """Open a transport, which copies messages to another system: `redis://…`, `s3://bucket/prefix`,
    `file:///path.jsonl`, another log, …; `docs/reference/transports.md` lists them. All take `breaker` and `batch`; the
    other options are keyword arguments of the transport's class. Options may be in the url's query too."""
    from headwater.transports.open import open_transport as open_by_url

    return open_by_url(url, clock=SystemClock(), opener=open, breaker=breaker, batch=batch, **options)


@contextlib.contextmanager
def open_bus(
    url: str | os.PathLike[str] | None = None, *, config: str | None = None, profile: str | None = None
) -> Iterator[Bus]:
    """Open a log with the transports that `[transports.…]` and `[messages.…]` of headwater.toml set for its typed
    messages, in the selected profile. `url` overrides the log that the file names."""
    from headwater.settings import load_settings
    from headwater.typed import make_bus

    settings = load_settings(config=config, profile=profile, serves=False)
    place = url or settings.server.log
    with open(place, **_options_for(place, settings)) as log, make_bus(settings, log, open_transport) as bus:
        yield bus


@contextlib.asynccontextmanager
async def open_bus_async(
    url: str | os.PathLike[str] | None = None, *, config: str | None = None, profile: str | None = None
) -> AsyncIterator[AsyncBus]:
    """`open_bus` for asyncio."""
    from headwater.settings import load_settings
    from headwater.typed import make_bus

    settings = await asyncio.to_thread(load_settings, config=config, profile=profile, serves=False)
    place = url or settings.server.log
    async with (
        open_async(place, **_options_for(place, settings)) as log,
        await asyncio.to_thread(make_bus, settings, log, open_transport) as bus,
    ):
        yield bus


def _options_for(url: str | os.PathLike[str], settings: Settings) -> AllOptions:
    """The options in `[log]`, for a log in this process; a server has its own."""
    return {} if _is_remote(url) else cast(AllOptions, _log_options(settings))


def _log_options(settings: Settings) -> OpenOptions:
    return {
        "durability": settings.log.durability,
        "dedupe": settings.log.dedupe,
        "dedupe_count": settings.log.dedupe_count,
        "maintenance_interval": settings.log.retention_interval,
    }


def _tracing(wanted: bool) -> Tracing | None:
    if not check_flag("tracing", wanted):
        return None
    with _extra("otel", "tracing"):
        from headwater.broker.tracing import Tracing
    return Tracing()


@contextlib.contextmanager
def _extra(name: str, where: str) -> Iterator[None]:
    """Around the import of what needs an extra."""
    try:
        yield
    except ImportError as exc:
        raise InvalidOptionError(
            f"this needs a package that is not installed ({exc})",
            where=where,
            next=install_hint(name),
        ) from exc


def _is_remote(url: str | os.PathLike[str]) -> bool:
    return isinstance(url, str) and url.startswith(("ws://", "wss://"))


def _open_remote(url: str, options: AllOptions) -> LogVerbs:
    from headwater.client.connection import Connection  # not before it is wanted
    from headwater.client.log import new_publisher, open_on_a_thread
    from headwater.client.options import read_options

    settings = read_options(url, cast(RemoteOptions, options))
    core = open_on_a_thread(lambda loop: Connection(settings, new_publisher(), loop), SystemClock())
    _open_cores.add(core)
    return core


async def _connect_remote(url: str, options: AllOptions) -> LogVerbs:
    from headwater.client.connection import Connection
    from headwater.client.log import new_publisher, open_on_this_loop
    from headwater.client.options import read_options

    settings = read_options(url, cast(RemoteOptions, options))
    connection = Connection(settings, new_publisher(), asyncio.get_running_loop())
    return await open_on_this_loop(connection, SystemClock())


def _local(options: AllOptions) -> OpenOptions:
    for name in options.keys() - OpenOptions.__annotations__.keys():
        raise InvalidOptionError(
            f"{name} is an option of a log behind a server", next="Leave it out, or open ws://… or wss://…"
        )
    return cast(OpenOptions, options)


def open_core(url: str | os.PathLike[str], **options: Unpack[OpenOptions]) -> LocalLog:
    place = url_text(url, "a log")
    default = DedupeWindow()
    window = DedupeWindow(
        span_ms(options["dedupe"], "dedupe") if "dedupe" in options else default.span_ms,
        check_whole("dedupe_count", options.get("dedupe_count", default.count), 0, INT64_MAX),
    )
    interval = options.get("maintenance_interval", MAINTENANCE_S)
    maintenance_s = None if interval is None else span_ms(interval, "maintenance_interval") / 1000
    heartbeats = check_flag("heartbeats", options.get("heartbeats", True))
    clock = options.get("clock")
    if clock is not None and not callable(getattr(clock, "now_ms", None)):
        raise InvalidOptionError(f"clock must be a clock, not {clock!r}", next="Write clock=headwater.ManualClock()")
    opened = _open_store(place, options)
    try:
        engine = Engine(opened.store, clock or opened.clock(), dedupe=window)
    except BaseException:
        opened.store.close()
        raise
    if opened.watch is not None:
        engine.watch_with(opened.watch)
    core = LocalLog(engine, maintenance_s=maintenance_s, heartbeats=heartbeats)
    _open_cores.add(core)
    return core


_open_cores: weakref.WeakSet[Any] = weakref.WeakSet()  # of everything with a close()


@atexit.register
def _close_what_is_open() -> None:
    """A script that ends without closing its log releases its subscriptions all the same."""
    for core in list(_open_cores):
        with contextlib.suppress(Exception):  # whatever it is, the others want to be closed too
            core.close()


class _Opened(NamedTuple):
    """A store, how to notice the writes of other processes, and the clock of its log."""

    store: Store
    watch: Callable[[Callable[[], None]], Notifier] | None = None
    clock: Callable[[], Clock] = SystemClock


def _open_store(url: str, options: OpenOptions) -> _Opened:
    durability = check_choice("durability", options.get("durability", "full"), ("full", "relaxed"))
    notify = check_choice("notify", options.get("notify", "listen"), ("listen", "poll"))
    busy_timeout_ms = span_ms(options.get("busy_timeout", BUSY_TIMEOUT_S), "busy_timeout")
    create = check_flag("create", options.get("create", True))
    adopt = check_flag("adopt", options.get("adopt", False))
    if url == "memory:":
        return _Opened(MemoryStore(busy_timeout_ms=busy_timeout_ms))
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
        raise InvalidOptionError("this would be a file of that name", where=url, next="A log in memory is memory:")
    path = _sqlite_path(url)
    if not create and not os.path.exists(path):
        raise NotALogError("there is no log", where=path, next="Check the name, or pass create=True")
    store = SqliteStore(path, durability=durability, busy_timeout_ms=busy_timeout_ms, adopt=adopt)
    return _Opened(store, lambda on_change: SqliteWatcher(store, on_change))


_INSTEAD = {
    "http": "A server is opened with ws://",
    "https": "A server is opened with wss://",
    "postgres": "Write postgres:// without a driver",
    "postgresql": "Write postgresql:// without a driver",
    **dict.fromkeys(
        ("redis", "rediss", "s3"), "`headwater forward` copies a log there; the log itself is a file or postgres://"
    ),
}


def _sqlite_path(url: str) -> str:
    refuse_mistyped_url(url)
    scheme, found, rest = url.partition("://")
    if found and scheme != "sqlite":
        raise InvalidOptionError(
            f"there is no store for {scheme}:// here",  # without the rest of it: there may be a password
            next=_INSTEAD.get(scheme.partition("+")[0], "Use a file path, postgres://, ws:// or memory:"),
        )
    return rest.removeprefix("/") if found else url.removeprefix("sqlite:")  # sqlite:///relative, sqlite:////absolute
