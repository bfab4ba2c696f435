"""A server: a log behind one port; its lifecycle, and the admission of clients. Made by `headwater.serve`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from headwater.broker.flow import run_async
from headwater.broker.log import LocalLog
from headwater.errors import DiskFullError, InvalidConfigurationError, InvalidStateError
from headwater.server.audit import Audit
from headwater.server.auth import Grant, Scopes, Token, TokenFile
from headwater.server.budget import Budget
from headwater.server.connection import TOO_MANY_OF_A_TOKEN, Connection, ServerContext
from headwater.server.listener import Acceptor, Admission, Admitted, WebSocketTransport
from headwater.server.logging import LineLimit, logger
from headwater.server.methods import METHODS
from headwater.server.mount import (
    OUTBOUND_BYTES_MAX,
    HttpRequest,
    HttpResponse,
    Mount,
    Mounts,
    Refusal,
    Rights,
    UpgradeRequest,
    path_of,
    text_response,
)
from headwater.server.pages import Files, Metrics, Pages
from headwater.server.registry import Middleware, Registry
from headwater.server.shapes import ImplementationShapes, SpecificationShapes
from headwater.server.tls import Certificates
from headwater.settings import Limits, Settings, is_loopback

SWEEP_S = 2.0  # between two checks for revoked and expired tokens
RETAIN_AGAIN_S = 5.0  # between attempts to set the retention of the settings on a full disk
UNFINISHED_S = 60.0  # for a partial frame without new data
BUDGETS_S = 1.0  # between two checks for stalled connections
CUT_OFF_S = 1.0  # of the shutdown timeout, for aborted connections to release what they held
CLOSING_S = 1.0  # at least, for closing the log
RPC_PATHS = {"/": SpecificationShapes, "/rpc": SpecificationShapes, "/jrow": ImplementationShapes}
NOT_THIS_ORIGIN = "pages of this origin may not connect; see the setting server.origins"
Function = TypeVar("Function", bound=Callable[..., Any])


class Server:
    """Declare methods and middleware, then `async with server:` or `server.run()`. `files`: for browsers, by path;
    `mounts`: paths that other packages serve."""

    def __init__(
        self,
        open_core: Callable[[], LocalLog],
        settings: Settings,
        version: str = "",
        files: Files | None = None,
        mounts: Sequence[Mount] = (),
    ) -> None:
        self.settings = settings
        self.limits: Limits = settings.limits
        self.registry = Registry(METHODS, settings.limits.method_threads)
        self.metrics = Metrics()
        self._mounts = Mounts(mounts, self.metrics)
        self._open_core = open_core
        self._version = version
        if not logger.filters:
            logger.addFilter(LineLimit())  # also where an application configures logging itself
        self._files = files or {}
        self._tokens = None if settings.server.tokens is None else TokenFile(settings.server.tokens)
        self._certificates: Certificates | None = None
        self._context: ServerContext | None = None
        self._pages: Pages | None = None
        self.inbound = Budget(self.limits.inbound_total_bytes, patience_s=UNFINISHED_S)
        self.outbound = Budget(self.limits.outbound_total_bytes)
        self.acceptor = Acceptor(self)
        self._is_running = False
        self._retaining: asyncio.Task[None] | None = None
        self._sweepers: list[asyncio.Task[None]] = []
        self._stop_asked: asyncio.Event | None = None

    # --- for applications ---------------------------------------------------------------------------------------

    def method(self, name: str) -> Callable[[Function], Function]:
        """Declare a method: a plain function or a coroutine function; a first parameter named `call` gets the call."""

        def declare(function: Function) -> Function:
            self.registry.add(name, function)
            return function

        return declare

    def use(self, middleware: Middleware) -> Middleware:
        """Add a middleware; the first one added sees a call first."""
        self.registry.middleware.append(middleware)
        return middleware

    @property
    def connections(self) -> list[Connection]:
        """The clients connected now; `await connection.call(…)` calls a method that a client has offered."""
        return [] if self._context is None else [*self._context.connections]

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        if not self._is_running:
            raise InvalidStateError("the server is not running", next="Use it inside `async with server:`")
        return self.acceptor.port

    @property
    def url(self) -> str:
        """The address for `headwater.open`."""
        scheme = "wss" if self.settings.server.tls_certificate else "ws"
        host = self.settings.server.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    # --- starting -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the log and listen; returns when clients can connect."""
        settings = self.settings.server
        self._certificates = Certificates.read(settings)
        known: dict[str, Token] = {}
        if self._tokens is not None:
            self._tokens.load()
            known = {token.id: token for token in self._tokens.list()}
        core = await asyncio.to_thread(self._open_core)
        audit = None
        try:
            authenticate = None if self._tokens is None else self._authenticate
            audit = Audit(settings.audit, core.engine.clock)
            self._context = ServerContext(
                core, self.registry, self.settings, self.metrics, authenticate, self._version, audit
            )
            self._pages = Pages(self._context, self.settings.server, self._files)
            core.engine.committer.commit_on(asyncio.get_running_loop())
            try:
                await self._apply_retention(core)
            except DiskFullError as exc:
                logger.warning("retention is set when the disk has room: %(why)s", {"why": exc.why})
                self._retaining = asyncio.create_task(self._retain_later(core))
            await self._mounts.start(core, audit, needs_token=self._tokens is not None)
            await self._listen()
            core.record_history()
        except BaseException:
            await self._mounts.stop()
            await asyncio.to_thread(core.close)
            if audit is not None:
                await asyncio.to_thread(audit.close)
            raise
        self._is_running = True
        self._sweepers = [asyncio.create_task(self._sweep(known)), asyncio.create_task(self._sweep_budgets())]
        self._pages.ready = True
        logger.info("serving %(log)s on %(url)s", {"log": core.name, "url": self.url})
        if self._tokens is not None and self._certificates is None and not is_loopback(settings.host):
            logger.warning("tokens are sent in clear text, unless a proxy in front of this port terminates TLS")

    async def _listen(self) -> None:
        host, port = self.settings.server.host, self.settings.server.port
        try:
            await self.acceptor.listen(host, port, self._certificates)
        except OSError as exc:
            raise InvalidConfigurationError(
                _why_it_cannot_listen(exc),
                where=f"{host}:{port}",
                next="Choose another host or port; port 0 is any that is free",
            ) from exc

    async def _retain_later(self, core: LocalLog) -> None:
        """Apply the retention of the settings as soon as the disk, which was full at the start, has room."""
        while True:
            await asyncio.sleep(RETAIN_AGAIN_S)
            with contextlib.suppress(DiskFullError):
                return await self._apply_retention(core)

    async def _apply_retention(self, core: LocalLog) -> None:
        for topic in self.settings.topics:
            await run_async(core.retain(topic.pattern, topic.limits, topic.dialect))

    # --- admission: called by `listener` ------------------------------------------------------------------------

    def admit(self, request: UpgradeRequest, transport: WebSocketTransport) -> Admission:
        context = self._context
        if context is None or self._pages is None or not self._pages.ready:
            return self._refuse(request, 503, "not_ready", "the server is not ready")
        mount = self._mounts.find(request.target)
        shapes = RPC_PATHS.get(path_of(request.target))
        if mount is None and shapes is None:
            no_replicas = "this server keeps no replicas; the setting replicas.directory says where it should"
            is_sapi = path_of(request.target).startswith("/sapi/")
            return self._refuse(request, 404, "path", no_replicas if is_sapi else "JSON-RPC is at /rpc")
        if not self._origin_is_allowed(request.headers):
            return self._refuse(request, 403, "origin", NOT_THIS_ORIGIN)
        token = bearer(request.headers)
        grant = None if token is None or self._tokens is None else self._authenticate(token)
        if mount is not None:  # a bearer that is no token of the server may be a key of the mount
            return self._admit_to(mount, request, transport, token, grant)
        if token is not None and self._tokens is not None and grant is None:
            return self._refuse(request, 401, "token", "the token is unknown or expired")
        assert shapes is not None
        if grant is not None and len(context.connections_of(grant.owner)) >= self.limits.connections_per_token:
            return self._refuse(request, 503, "full", TOO_MANY_OF_A_TOKEN)
        connection = Connection(context, transport, request.address, grant, shapes)
        context.on_connect(connection)
        return Admitted(connection, speaks_rpc=True)

    async def _admit_to(
        self,
        mount: Mount,
        request: UpgradeRequest,
        transport: WebSocketTransport,
        token: str | None,
        grant: Grant | None,
    ) -> Admitted | Refusal:
        session = await mount.admit(request, transport, token, self._rights(grant))
        if isinstance(session, Refusal):
            return self._refuse(request, session.status, "mount", session.text.strip())
        counted = self._mounts.add(session)
        return Admitted(counted, session.receive_binary, mount.message_bytes_max, OUTBOUND_BYTES_MAX)

    def _refuse(self, request: UpgradeRequest, status: int, why: str, text: str) -> Refusal:
        self.metrics.refused.labels(why).inc()
        logger.debug("client refused", extra={"address": request.address, "status": status, "why": text})
        self._audit_refusal(request, status, text)
        return Refusal(status, f"{text}\n")

    def _origin_is_allowed(self, headers: dict[str, str]) -> bool:
        """Browsers send the origin of the page; otherwise any page could act with the rights of its reader."""
        origin, settings = headers.get("origin"), self.settings.server
        if origin is None or "*" in settings.origins or origin in settings.origins:
            return True
        if origin.partition("://")[2] != headers.get("host"):
            return False
        # The owner of a name can point it here (DNS rebinding), and then its page has our origin. Without tokens, only
        # names that cannot belong to another owner are accepted.
        return self._tokens is not None or is_own_name(_name_in(origin), settings.host)

    def _host_is_allowed(self, headers: dict[str, str]) -> bool:
        """A page whose name points here sends no Origin when it reads, but its own name as the Host."""
        host, settings = headers.get("host"), self.settings.server
        if host is None or self._tokens is not None or "*" in settings.origins:
            return True
        if any(urlsplit(origin).netloc == host for origin in settings.origins):
            return True
        return is_own_name(_name_in(f"//{host}"), settings.host)

    def _authenticate(self, token: str) -> Grant | None:
        if self._tokens is None or self._context is None:
            return None
        return self._tokens.check(token, self._context.core.engine.clock.now_ms())

    def _rights(self, grant: Grant | None) -> Rights | None:
        """Looked up at each use, because a session may outlive its token."""
        tokens, context = self._tokens, self._context
        if grant is None or tokens is None or context is None:
            return None
        token_id, clock = grant.token_id, context.core.engine.clock

        def scopes() -> Scopes | None:
            now = tokens.grant(token_id, clock.now_ms())
            return None if now is None else now.scopes

        return Rights(grant, scopes)

    def _audit_refusal(self, request: UpgradeRequest | HttpRequest, status: int, why: str) -> None:
        if self._context is not None and status in (401, 403):
            identity = {"address": request.address}
            self._context.audit.refused("authentication.refused", identity, path=path_of(request.target), why=why)

    async def answer(self, request: HttpRequest) -> HttpResponse:
        response = await self._answer(request)
        self._audit_refusal(request, response.status, f"HTTP {response.status}")
        return response

    async def _answer(self, request: HttpRequest) -> HttpResponse:
        assert self._pages is not None
        if not self._host_is_allowed(request.headers):
            return text_response(421, "the server does not know this name of its own; see the setting server.origins")
        grant = None
        if (token := bearer(request.headers)) is not None:
            grant = self._authenticate(token)
        mount = self._mounts.find(request.target)
        if mount is not None:
            if not self._pages.ready:
                return text_response(503, "the server is not ready")
            if not self._origin_is_allowed(request.headers):
                return text_response(403, NOT_THIS_ORIGIN)
            return await mount.answer(request, token, self._rights(grant))
        return await self._pages.answer(request, grant)

    # --- periodic work ------------------------------------------------------------------------------------------

    def reload(self) -> None:
        """Read certificates and tokens again, if they have changed."""
        if self._certificates is not None:
            self._certificates.refresh()
        if self._tokens is not None:
            self._tokens.refresh()

    async def _sweep(self, known: dict[str, Token]) -> None:
        """Disconnect clients whose token was revoked or has expired."""
        tokens, context, seen = self._tokens, self._context, -1
        while True:
            await asyncio.sleep(SWEEP_S)
            self.reload()
            if tokens is None or context is None:
                continue
            now_ms = context.core.engine.clock.now_ms()
            generation = tokens.refresh()
            if generation != seen:
                known = _audit_changes(context.audit, known, tokens)
            for connection in list(context.connections):
                grant = connection.grant
                if grant is None or (generation == seen and (grant.expires_ms or now_ms + 1) > now_ms):
                    continue
                found = tokens.grant(grant.token_id, now_ms)
                if found != grant:
                    is_over = grant.expires_ms is not None and grant.expires_ms <= now_ms
                    ended = "has expired" if is_over else "was revoked"
                    connection.revoke(f"the token {'was changed' if found else ended}")
            seen = generation

    async def _sweep_budgets(self) -> None:
        while True:
            await asyncio.sleep(BUDGETS_S)
            self.inbound.sweep()
            self.outbound.sweep()

    # --- stopping -----------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Accept no clients, stop deliveries, finish running calls, and close connections with 1001, all within the
        shutdown timeout."""
        context, mounts = self._context, self._mounts
        if not self._is_running or context is None or self._pages is None:
            return
        self._pages.ready = self._is_running = False
        logger.info("stopping", extra={"clients": len(context.connections)})
        self.acceptor.close()
        for task in (*self._sweepers, self._retaining):
            if task is not None:
                task.cancel()
        now_s, timeout_s = asyncio.get_running_loop().time(), self.settings.server.shutdown_timeout
        until_s = now_s + timeout_s
        try:
            async with asyncio.timeout_at(now_s + max(timeout_s - CUT_OFF_S - CLOSING_S, timeout_s / 2)):
                drained = (connection.drain() for connection in list(context.connections))
                await asyncio.gather(mounts.stop(), *drained, return_exceptions=True)
                while context.connections or context.closing or mounts.sessions:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            left = len(context.connections) + len(mounts.sessions)
            logger.warning("%(clients)d clients did not leave in time and are cut off", {"clients": left})
        for incoming in list(self.acceptor.connections):
            incoming.drop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CUT_OFF_S):
                while context.closing or context.connections or mounts.sessions:
                    await asyncio.sleep(0.01)
                await context.live.close()
        for task in context.closing:
            task.cancel()
        left_s = until_s - asyncio.get_running_loop().time()
        await self._close_core(context, max(left_s, CLOSING_S))

    async def _close_core(self, context: ServerContext, seconds: float) -> None:
        """Close on a daemon thread, because the store may never return."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def close() -> None:
            try:
                context.core.close()
                context.audit.close()
            except Exception:
                logger.exception("the log was not closed cleanly")
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=close, name="headwater-closing", daemon=True).start()
        try:
            async with asyncio.timeout(seconds):
                await closed.wait()
        except TimeoutError:
            logger.warning("the log is not closed after %(seconds).1f s; not waiting any longer", {"seconds": seconds})
            return
        logger.info("stopped")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def ask_to_stop(self) -> None:
        """Begin to stop, and return at once."""
        if self._stop_asked is not None:
            self._stop_asked.set()

    async def serve_until_stopped(self, on_ready: Callable[[Server], None] | None = None) -> None:
        """Serve until SIGTERM, SIGINT or `ask_to_stop`."""
        self._stop_asked = asyncio.Event()
        with _on_signals(self.ask_to_stop, self.reload):
            async with self:
                if on_ready is not None:
                    on_ready(self)
                await self._stop_asked.wait()

    def run(self, on_ready: Callable[[Server], None] | None = None) -> None:
        """`serve_until_stopped` in an event loop of its own. Blocks."""
        asyncio.run(self.serve_until_stopped(on_ready))


def _audit_changes(audit: Audit, known: dict[str, Token], tokens: TokenFile) -> dict[str, Token]:
    """Commands write the file of tokens without an audit trail, so the server records its changes."""
    now = {token.id: token for token in tokens.list()}
    for id, token in {**known, **now}.items():
        if known.get(id) != now.get(id):
            event = "token.revoked" if id not in now else "token.changed" if id in known else "token.made"
            audit.record(event, {"token": id, "label": token.label}, scopes=token.scopes.granted, file=tokens.path)
    return now


@contextlib.contextmanager
def _on_signals(stop: Callable[[], None], reload: Callable[[], None]) -> Iterator[None]:
    """Inside, SIGTERM and SIGINT call `stop` and SIGHUP calls `reload`; the former handlers are restored."""
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Any] = {}
    acts = {signal.SIGTERM: stop, signal.SIGINT: stop}
    if not os.isatty(0):  # a closing terminal sends SIGHUP, too, and then the server should stop
        acts[signal.SIGHUP] = reload
    for number, act in acts.items():
        former = signal.getsignal(number)
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not on every thread
            loop.add_signal_handler(number, act)
            before[number] = former
    try:
        yield
    finally:
        for number, former in before.items():
            loop.remove_signal_handler(number)
            if former is not None:  # None: not installed by Python, which cannot restore it
                signal.signal(number, former)


def _name_in(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:  # brackets around something that is not an address
        return ""


def is_own_name(name: str, own_host: str) -> bool:
    """Whether a page under this name is surely the server's own: an address, this machine, or the configured host."""
    if name == own_host or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def bearer(headers: dict[str, str]) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def _why_it_cannot_listen(exc: OSError) -> str:
    known = {
        errno.EADDRINUSE: "another program listens here already",
        errno.EADDRNOTAVAIL: "this machine has no such address",
        errno.EACCES: "this user may not listen here; ports below 1024 are often kept for the system",
    }
    return known.get(exc.errno or 0, f"cannot listen here ({exc.strerror or exc})")
