"""A server: a log behind one port. Made by `headwater.serve`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from headwater.broker.core import Core
from headwater.broker.flow import run_async
from headwater.configuration import Limits, Settings
from headwater.configuration.kinds import is_loopback
from headwater.errors import DiskFull, InvalidConfiguration, InvalidOption
from headwater.ports.annex import Annex, HttpRequest, HttpResponse, Refusal, UpgradeRequest
from headwater.server.acceptor import Acceptor
from headwater.server.annexes import Annexes, TokenRights
from headwater.server.audit import Audit
from headwater.server.budget import Budget
from headwater.server.connection import Connection, Wire
from headwater.server.door import Admission, Admitted, Door, SocketWire
from headwater.server.http import path_of, plain
from headwater.server.logger import logger
from headwater.server.logs import LineLimit
from headwater.server.methods import METHODS
from headwater.server.metrics import Metrics
from headwater.server.pages import Files, Pages
from headwater.server.parts import POLICY_VIOLATION, TOO_MANY_OF_A_TOKEN, Parts
from headwater.server.registry import Middleware, Registry
from headwater.server.scopes import RIGHTS, Scopes
from headwater.server.shapes import ImplementationShapes, SpecificationShapes
from headwater.server.tls import Certificates
from headwater.server.tokens import Grant, Token, TokenFile

SWEEP_S = 2.0  # how often revoked and expired tokens are looked for
RETAIN_AGAIN_S = 5.0  # between attempts to set the retention of the settings on a full disk
UNFINISHED_S = 60.0  # so long a frame may be unfinished without more of it
BUDGETS_S = 1.0  # how often connections are looked for that hold too much and do not move
CUT_OFF_S = 1.0  # of the shutdown timeout, for clients that are cut off to give back what they held
CLOSING_S = 1.0  # and for the log, which has more if the clients left early
RPC_PATHS = {"/": SpecificationShapes, "/rpc": SpecificationShapes, "/jrow": ImplementationShapes}
NOT_THIS_ORIGIN = "pages of this origin may not connect; see the setting server.origins"
Function = TypeVar("Function", bound=Callable[..., Any])


class Server:
    """Declare methods and middleware, then `async with server:` or `server.run()`. `files`: for browsers, by path;
    `annexes`: what else is offered on the port."""

    def __init__(
        self,
        open_core: Callable[[], Core],
        settings: Settings,
        version: str = "",
        files: Files | None = None,
        annexes: Sequence[Annex] = (),
    ) -> None:
        self.settings = settings
        self.limits: Limits = settings.limits
        self.registry = Registry(METHODS, settings.limits.method_threads)
        self.metrics = Metrics()
        self._annexes = Annexes(annexes, self.metrics)
        self._open_core = open_core
        self._version = version
        if not logger.filters:
            logger.addFilter(LineLimit())  # also where an application sees to the logs itself
        self._files = files or {}
        self._tokens = None if settings.server.tokens is None else TokenFile(settings.server.tokens)
        self._certificates: Certificates | None = None
        self._parts: Parts | None = None
        self._pages: Pages | None = None
        self.inbound = Budget(self.limits.inbound_total_bytes, patience_s=UNFINISHED_S)
        self.outbound = Budget(self.limits.outbound_total_bytes)
        self._acceptor = Acceptor(self.limits, partial(Door, self), self._refused_for_lack_of_room)
        self._doors = self._acceptor.connections
        self._is_running = False
        self._clients: set[ServedConnection] = set()
        self._leaving: set[asyncio.Task[None]] = set()
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
        """Let every call pass through this one too; the first one added sees a call first."""
        self.registry.middleware.append(middleware)
        return middleware

    @property
    def connections(self) -> list[Connection]:
        """The clients connected now; `await connection.call(…)` calls a method that a client has offered."""
        return [*self._clients]

    @property
    def port(self) -> int:
        if not self._is_running:
            raise InvalidOption("the server is not running", next="Use it inside `async with server:`")
        return self._acceptor.port

    @property
    def url(self) -> str:
        scheme = "wss" if self.settings.server.tls_certificate else "ws"
        host = self.settings.server.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    # --- beginning ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
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
            self._parts = Parts(core, self.registry, self.settings, self.metrics, authenticate, self._version, audit)
            self._pages = Pages(self._parts, self.settings.server, self._files)
            try:
                await self._apply_retention(core)
            except DiskFull as exc:
                logger.warning("retention is set when there is room: %(why)s", {"why": exc.why})
                self._retaining = asyncio.create_task(self._retain_later(core))
            await self._annexes.start(core, audit, needs_token=self._tokens is not None)
            await self._listen()
        except BaseException:
            await self._annexes.stop()
            await asyncio.to_thread(core.close)
            if audit is not None:
                await asyncio.to_thread(audit.close)
            raise
        self._is_running = True
        self._sweepers = [asyncio.create_task(self._sweep(known)), asyncio.create_task(self._sweep_budgets())]
        self._pages.ready = True
        logger.info("serving %(log)s on %(url)s", {"log": core.name, "url": self.url})
        if self._tokens is not None and self._certificates is None and not is_loopback(settings.host):
            logger.warning("tokens come in clear text, unless a proxy in front of this port speaks TLS")

    async def _listen(self) -> None:
        host, port = self.settings.server.host, self.settings.server.port
        try:
            await self._acceptor.listen(host, port, self._certificates)
        except OSError as exc:
            raise InvalidConfiguration(
                _why_it_cannot_listen(exc),
                where=f"{host}:{port}",
                next="Choose another host or port; port 0 is any that is free",
            ) from exc

    async def _retain_later(self, core: Core) -> None:
        while True:
            await asyncio.sleep(RETAIN_AGAIN_S)
            with contextlib.suppress(DiskFull):
                return await self._apply_retention(core)

    async def _apply_retention(self, core: Core) -> None:
        for topic in self.settings.topics:
            await run_async(
                core.retain(
                    topic.pattern,
                    max_age=topic.max_age,
                    max_count=topic.max_count,
                    max_bytes=topic.max_bytes,
                    keep_unacked=topic.keep_unacked,
                    dialect=topic.dialect,
                )
            )

    # --- who comes and goes: see `door` ---------------------------------------------------------------------------

    def _refused_for_lack_of_room(self) -> None:
        self.metrics.refused.labels("full").inc()
        logger.warning("a connection is refused: there are %(count)d", {"count": len(self._acceptor.connections)})

    def recognised(self, door: Door) -> None:
        self._acceptor.recognise(door)

    def left(self, door: Door) -> None:
        self._acceptor.remove(door)

    def admit(self, request: UpgradeRequest, wire: SocketWire) -> Admission:
        parts = self._parts
        if parts is None or self._pages is None or not self._pages.ready:
            return self._refuse(request, 503, "not_ready", "the server is not ready")
        annex = self._annexes.at(request.target)
        shapes = RPC_PATHS.get(path_of(request.target))
        if annex is None and shapes is None:
            no_replicas = "this server keeps no replicas; the setting replicas.directory says where it should"
            is_sapi = path_of(request.target).startswith("/sapi/")
            return self._refuse(request, 404, "path", no_replicas if is_sapi else "JSON-RPC is at /rpc")
        if not self._origin_is_welcome(request.headers):
            return self._refuse(request, 403, "origin", NOT_THIS_ORIGIN)
        token = bearer(request.headers)
        grant = None if token is None or self._tokens is None else self._authenticate(token)
        if annex is not None:  # a bearer that is no token of ours may be a key of the annex's own
            return self._admit_to(annex, request, wire, token, grant)
        if token is not None and self._tokens is not None and grant is None:
            return self._refuse(request, 401, "token", "the token is unknown or expired")
        assert shapes is not None
        if grant is not None and len(parts.holders(grant.owner)) >= self.limits.connections_per_token:
            return self._refuse(request, 503, "full", TOO_MANY_OF_A_TOKEN)
        client = ServedConnection(self, parts, wire, request.address, grant, shapes)
        self._clients.add(client)
        if grant is not None:
            parts.add_holder(client)
        self.metrics.connections.inc()
        self.metrics.connected.inc()
        logger.debug("client connected", extra=client.who)
        return Admitted(client, speaks_rpc=True)

    async def _admit_to(
        self, annex: Annex, request: UpgradeRequest, wire: SocketWire, token: str | None, grant: Grant | None
    ) -> Admitted | Refusal:
        guest = await annex.admit(request, wire, token, self._rights(grant))
        if isinstance(guest, Refusal):
            return self._refuse(request, guest.status, "annex", guest.text.strip())
        return self._annexes.welcome(annex, guest)

    def _refuse(self, request: UpgradeRequest, status: int, why: str, text: str) -> Refusal:
        self.metrics.refused.labels(why).inc()
        logger.debug("client refused", extra={"address": request.address, "status": status, "why": text})
        self._audit_refusal(request, status, text)
        return Refusal(status, f"{text}\n")

    def _origin_is_welcome(self, headers: dict[str, str]) -> bool:
        """Browsers say which page asks; any other page could otherwise speak with the rights of who looks at it."""
        origin, settings = headers.get("origin"), self.settings.server
        if origin is None or "*" in settings.origins or origin in settings.origins:
            return True
        if origin.partition("://")[2] != headers.get("host"):
            return False
        # A name can be made to point here by whoever owns it, and then its page looks like ours. Where no token is
        # needed, only names that nobody else can own are believed.
        return self._tokens is not None or is_unmistakable(_name_in(origin), settings.host)

    def _host_is_welcome(self, headers: dict[str, str]) -> bool:
        """A page whose name was made to point here sends no Origin when it reads, but its own name as the Host."""
        host, settings = headers.get("host"), self.settings.server
        if host is None or self._tokens is not None or "*" in settings.origins:
            return True
        if any(urlsplit(origin).netloc == host for origin in settings.origins):
            return True
        return is_unmistakable(_name_in(f"//{host}"), settings.host)

    def _authenticate(self, token: str) -> Grant | None:
        if self._tokens is None or self._parts is None:
            return None
        return self._tokens.check(token, self._parts.core.engine.clock.now_ms())

    def _rights(self, grant: Grant | None) -> TokenRights | None:
        """They end with the token: a visit may last for days."""
        tokens, parts = self._tokens, self._parts
        if grant is None or tokens is None or parts is None:
            return None
        token_id, clock = grant.token_id, parts.core.engine.clock

        def scopes() -> Scopes | None:
            now = tokens.grant(token_id, clock.now_ms())
            return None if now is None else now.scopes

        return TokenRights(grant, scopes)

    def _audit_refusal(self, request: UpgradeRequest | HttpRequest, status: int, why: str) -> None:
        if self._parts is not None and status in (401, 403):
            who = {"address": request.address}
            self._parts.audit.refused("authentication.refused", who, path=path_of(request.target), why=why)

    async def answer(self, request: HttpRequest) -> HttpResponse:
        response = await self._answer(request)
        self._audit_refusal(request, response.status, f"HTTP {response.status}")
        return response

    async def _answer(self, request: HttpRequest) -> HttpResponse:
        assert self._pages is not None
        if not self._host_is_welcome(request.headers):
            return plain(421, "the server does not know this name of its own; see the setting server.origins")
        grant = None
        if (token := bearer(request.headers)) is not None:
            grant = self._authenticate(token)
        annex = self._annexes.at(request.target)
        if annex is not None:
            if not self._pages.ready:
                return plain(503, "the server is not ready")
            if not self._origin_is_welcome(request.headers):
                return plain(403, NOT_THIS_ORIGIN)
            return await annex.answer(request, token, self._rights(grant))
        return await self._pages.answer(request, grant)

    def client_left(self, client: ServedConnection, *, vanished: bool) -> None:
        self._clients.discard(client)
        assert self._parts is not None
        self._parts.remove_holder(client)
        self.metrics.connections.dec()
        seconds = round(client.loop.time() - client.since_s, 3)
        logger.debug("client left", extra={**client.who, "seconds": seconds, "vanished": vanished})
        task = asyncio.ensure_future(client.gone(vanished=vanished))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def reload(self) -> None:
        """Read certificates and tokens again, if they have changed."""
        if self._certificates is not None:
            self._certificates.refresh()
        if self._tokens is not None:
            self._tokens.refresh()

    async def _sweep(self, known: dict[str, Token]) -> None:
        """Let go of clients whose token was revoked or has expired."""
        tokens, parts, seen = self._tokens, self._parts, -1
        while True:
            await asyncio.sleep(SWEEP_S)
            self.reload()
            if tokens is None or parts is None:
                continue
            now_ms = parts.core.engine.clock.now_ms()
            generation = tokens.refresh()
            if generation != seen:
                known = _audit_changes(parts.audit, known, tokens)
            for client in list(self._clients):
                grant = client.grant
                if grant is None or (generation == seen and (grant.expires_ms or now_ms + 1) > now_ms):
                    continue
                if tokens.grant(grant.token_id, now_ms) != grant:
                    client.cut_off("the token was revoked, changed or has expired")
            seen = generation

    async def _sweep_budgets(self) -> None:
        while True:
            await asyncio.sleep(BUDGETS_S)
            self.inbound.sweep()
            self.outbound.sweep()

    # --- ending -------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Take nobody new, deliver nothing more, finish what runs, close with 1001; all within the shutdown timeout."""
        if not self._is_running or self._parts is None or self._pages is None:
            return
        self._pages.ready = self._is_running = False
        logger.info("stopping", extra={"clients": len(self._clients)})
        self._acceptor.close()
        for task in (*self._sweepers, self._retaining):
            if task is not None:
                task.cancel()
        now_s, timeout_s = asyncio.get_running_loop().time(), self.settings.server.shutdown_timeout
        until_s = now_s + timeout_s
        try:
            async with asyncio.timeout_at(now_s + max(timeout_s - CUT_OFF_S - CLOSING_S, timeout_s / 2)):
                drained = (client.drain() for client in list(self._clients))
                await asyncio.gather(self._annexes.stop(), *drained, return_exceptions=True)
                while self._clients or self._leaving or self._annexes.visitors:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            left = len(self._clients) + len(self._annexes.visitors)
            logger.warning("%(clients)d clients did not leave in time and are cut off", {"clients": left})
        for accepted in list(self._acceptor.connections):
            accepted.drop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CUT_OFF_S):
                while self._leaving or self._clients or self._annexes.visitors:
                    await asyncio.sleep(0.01)
                await self._parts.live.close()
        for task in self._leaving:
            task.cancel()
        left_s = until_s - asyncio.get_running_loop().time()
        await self._close_core(self._parts, max(left_s, CLOSING_S))

    async def _close_core(self, parts: Parts, seconds: float) -> None:
        """On a thread that does not keep the process from ending, should the store never come back."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def close() -> None:
            try:
                parts.core.close()
                parts.audit.close()
            except Exception:
                logger.exception("the log was not closed well")
            with contextlib.suppress(RuntimeError):  # the loop has not waited
                loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=close, name="headwater-closing", daemon=True).start()
        try:
            async with asyncio.timeout(seconds):
                await closed.wait()
        except TimeoutError:
            logger.warning("the log is not closed after %(seconds).1f s and is left as it is", {"seconds": seconds})
            return
        logger.info("stopped")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def ask_to_stop(self) -> None:
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
        """The same, blocking."""
        asyncio.run(self.serve_until_stopped(on_ready))


class ServedConnection(Connection):
    """A connection that tells its server when it is over, and must say who it is in time."""

    def __init__(
        self,
        server: Server,
        parts: Parts,
        wire: Wire,
        address: str,
        grant: Grant | None,
        shapes: type[SpecificationShapes],
    ) -> None:
        super().__init__(parts, wire, address, grant, shapes)
        self._server = server
        self.since_s = self.loop.time()
        if parts.needs_token and grant is None:
            self.loop.call_later(parts.limits.authenticate_timeout, self._let_strangers_go)

    def _let_strangers_go(self) -> None:
        if self.grant is None:
            self.close(POLICY_VIOLATION, "no token came in time")

    def on_closed(self, *, vanished: bool) -> None:
        self._server.client_left(self, vanished=vanished)


def _audit_changes(audit: Audit, known: dict[str, Token], tokens: TokenFile) -> dict[str, Token]:
    """Commands write the file of tokens and know of no audit trail: the server tells what has become of it."""
    now = {token.id: token for token in tokens.list()}
    for id, token in {**known, **now}.items():
        if known.get(id) != now.get(id):
            event = "token.revoked" if id not in now else "token.changed" if id in known else "token.made"
            scopes = {name: given for name in RIGHTS if (given := getattr(token.scopes, name))}
            audit.record(event, {"token": id, "label": token.label}, scopes=scopes, file=tokens.path)
    return now


@contextlib.contextmanager
def _on_signals(stop: Callable[[], None], reload: Callable[[], None]) -> Iterator[None]:
    """Inside, SIGTERM and SIGINT call `stop` and SIGHUP calls `reload`; afterwards they do what they did before."""
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Any] = {}
    acts = {signal.SIGTERM: stop, signal.SIGINT: stop}
    if not os.isatty(0):  # a terminal that is closed sends it, too, and then the server should end
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
            if former is not None:  # it was not installed by Python, and cannot be
                signal.signal(number, former)


def _name_in(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:  # brackets around what is no address
        return ""


def is_unmistakable(name: str, own_host: str) -> bool:
    """Whether a page under this name is surely the server's own: an address, this machine, or what it was told."""
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
