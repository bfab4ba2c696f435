"""One client: its frames, its rights and limits, and calls in both directions; and what all clients share."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from types import GeneratorType
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec import UNSET, Raw
from msgspec.json import decode

from headwater.broker.background import SOURCE
from headwater.broker.flow import run_async
from headwater.broker.log import LocalLog
from headwater.broker.subscribe import Tenant
from headwater.errors import (
    HeadwaterError,
    OverloadedError,
    RequestTimeoutError,
    TooLargeError,
    UnauthorizedError,
    UnreachableError,
)
from headwater.ports.records import SubscriptionRecord
from headwater.protocol.jsonrpc import (
    FRAME_BYTES_MIN,
    INTERNAL_ERROR,
    NOT_JSON,
    Answer,
    Call,
    Fault,
    error_of,
    fault_of,
    params_of,
)
from headwater.protocol.methods import LostNotice
from headwater.protocol.session import Exchange, Session
from headwater.protocol.websocket import GOING_AWAY, POLICY_VIOLATION
from headwater.server.audit import Audit
from headwater.server.auth import EVERYTHING, Grant, Scopes, not_allowed
from headwater.server.budget import RateLimit
from headwater.server.live import LiveHub
from headwater.server.logging import logger
from headwater.server.pages import Metrics
from headwater.server.publish import start_ack, start_batch, start_publishes
from headwater.server.registry import CallContext, Middleware, Outcome, Registry, ShortCircuit
from headwater.server.shapes import SpecificationShapes
from headwater.server.subscriptions import Subscriptions
from headwater.settings import Settings
from headwater.topics import Pattern, check_topic, parse_pattern

if TYPE_CHECKING:
    from headwater.server.listener import WebSocketTransport

TOPICS_CHECKED_MAX = 10_000  # topics whose publish right a connection caches
OUTGOING_BYTES_MAX = 8 * 1024 * 1024  # of a frame: any one message fits, however its payload is escaped
WAITING_MAX = 1_000  # calls to one client without an answer
IN_PLACE = frozenset({"rpc.subscribe", "rpc.unsubscribe", "rpc.credit"})  # they never wait
UNTIMED = frozenset({"rpc.fetch"})  # it has a timeout of its own
CANCELLED = Fault(INTERNAL_ERROR, "the connection ended before it was done")
REVOKED_CLOSE_S = 2.0  # for the answer to the close
TOO_MANY_OF_A_TOKEN = "the token has as many connections as one may have"
NOT_ITS_OWN = "the token that the connection has now may not have it"
LARGE = frozenset(  # methods with large answers, of which few are read at a time
    {
        "rpc.topics",
        "rpc.subscriptions",
        "rpc.stats",
        "rpc.stats.history",
        "rpc.lake",
        "rpc.dead_letters",
        "rpc.dead_letters.get",
    }
    | {"rpc.dead_letters.stats", "rpc.dead_letters.export", "rpc.dead_letters.import"}
)
LARGE_AT_ONCE_MAX = 2
LARGE_BYTES = 1024 * 1024  # reserved for one of them


class ServerContext:
    """What all connections of a server share."""

    def __init__(
        self,
        core: LocalLog,
        registry: Registry,
        settings: Settings,
        metrics: Metrics,
        authenticate: Callable[[str], Grant | None] | None,
        version: str,
        audit: Audit,
    ) -> None:
        self.core = core
        self.registry = registry
        self.limits = settings.limits
        self.subscription_timeout = settings.log.subscription_timeout
        self.lake = settings.server.lake
        self.metrics = metrics
        self.needs_token = authenticate is not None
        self.authenticate = authenticate or (lambda _: None)
        self.version = version
        self.connections: set[Connection] = set()
        self.closing: set[asyncio.Task[None]] = set()  # of connections that release what they held
        self.audit = audit
        self.live = LiveHub(core, metrics)
        self._publishers: dict[str, Connection] = {}
        self.writing_large = asyncio.Lock()
        self._by_owner: dict[str, set[Connection]] = {}  # the owner of their token

    def on_connect(self, connection: Connection) -> None:
        self.connections.add(connection)
        if connection.grant is not None:
            self.add_to_owner(connection)
        self.metrics.connections.inc()
        self.metrics.connected.inc()
        logger.debug("client connected", extra=connection.identity)

    def on_disconnect(self, connection: Connection, *, vanished: bool) -> None:
        self.connections.discard(connection)
        self.remove_from_owner(connection)
        self.metrics.connections.dec()
        seconds = round(connection.loop.time() - connection.since_s, 3)
        logger.debug("client left", extra={**connection.identity, "seconds": seconds, "vanished": vanished})
        task = asyncio.ensure_future(connection.release_all(vanished=vanished))
        self.closing.add(task)
        task.add_done_callback(self.closing.discard)

    def connections_of(self, owner: str) -> Collection[Connection]:
        """The connections of a token, or of all tokens with its label."""
        return self._by_owner.get(owner, ())

    def add_to_owner(self, connection: Connection) -> None:
        self._by_owner.setdefault(connection.owner, set()).add(connection)

    def remove_from_owner(self, connection: Connection) -> None:
        own = self._by_owner.get(connection.owner, set())
        own.discard(connection)
        if not own:
            self._by_owner.pop(connection.owner, None)

    def register_publisher(self, given: str, connection: Connection) -> None:
        """A publisher has one connection, and a new one closes the earlier one: its messages under way would otherwise
        be stored after they were sent again on the new one. Names are kept by owner, so that tokens do not share them:
        no label has a line break, so the first one ends the owner."""
        self.release_publisher(connection)
        name = given if connection.grant is None else f"{connection.grant.owner}\n{given}"
        before = self._publishers.get(name)
        if before is not None:
            before.publisher = None
            before.close(POLICY_VIOLATION, "this publisher has connected anew")
        self._publishers[name] = connection
        connection.publisher = name

    def release_publisher(self, connection: Connection) -> None:
        name, connection.publisher = connection.publisher, None
        if name is not None and self._publishers.get(name) is connection:
            del self._publishers[name]


def _never() -> None:
    """The default `refuse` of `room`: waiting can always help, so nothing is refused."""


class OpenFrame:
    """A frame with calls that have no answer yet, and the bytes reserved for their answers."""

    __slots__ = ("bytes", "calls", "reserved_bytes")

    def __init__(self, calls: int, bytes: int) -> None:
        self.calls = calls
        self.bytes = bytes
        self.reserved_bytes = 0


class Connection:
    def __init__(
        self,
        context: ServerContext,
        transport: WebSocketTransport,
        address: str,
        grant: Grant | None,
        shapes: type[SpecificationShapes] = SpecificationShapes,
    ) -> None:
        limits = context.limits
        self.context = context
        self.core = context.core
        self.loop = asyncio.get_running_loop()
        self.session = Session(
            frame_bytes_max=max(limits.frame_bytes, FRAME_BYTES_MIN),  # a lower limit is applied by the listener
            batch_max=limits.batch_calls,
            outgoing_bytes_max=OUTGOING_BYTES_MAX,
        )
        self.session.on_outgoing = self._flush_soon
        self.subscriptions = Subscriptions(self)
        self.shapes = shapes(self.subscriptions)
        self.grant = grant
        self.publisher: str | None = None
        self.takes_batches = False  # several calls and notifications may go in one frame
        self.is_gone = False
        self.since_s = self.loop.time()
        self._transport = transport
        self.address = address
        per_second = limits.requests_per_second
        self._rate = RateLimit(per_second, limits.burst) if per_second else None
        self._requests_max = limits.requests_in_flight
        self.is_answering = False  # `finished` follows at once
        self._is_flush_due = False  # at the end of this turn
        self._working = 0  # calls that have no answer yet
        self._open: dict[Exchange, OpenFrame] = {}  # the frames of those calls
        self._reserved: dict[asyncio.Task[Any], int] = {}  # bytes of outbound room, by the task that answers a call
        self._room_waiters: deque[asyncio.Future[None]] = deque()
        self._large = asyncio.Semaphore(LARGE_AT_ONCE_MAX)
        self._is_paused = False
        self._draining: asyncio.Event | None = None  # set when the last call is answered
        self._writable = asyncio.Event()
        self._writable.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, asyncio.Future[Raw]] = {}
        self._may_publish: set[str] = set()
        if self.is_unauthenticated:
            self.loop.call_later(limits.authenticate_timeout, self._close_unauthenticated)

    def _close_unauthenticated(self) -> None:
        if self.is_unauthenticated:
            self.close(POLICY_VIOLATION, "no token came in time")

    # --- identity and rights ------------------------------------------------------------------------------------

    @property
    def is_unauthenticated(self) -> bool:
        return self.grant is None and self.context.needs_token

    @property
    def is_busy(self) -> bool:
        return self._working > 0

    @property
    def owner(self) -> str:
        return "" if self.grant is None else self.grant.owner

    @property
    def label(self) -> str:
        return "" if self.grant is None else self.grant.label

    @property
    def identity(self) -> dict[str, str]:
        """Who is connected, for logs and the audit trail."""
        return {
            "address": self.address,
            "label": self.label,
            "token": "" if self.grant is None else self.grant.token_id,
        }

    @property
    def scopes(self) -> Scopes:
        if self.grant is not None:
            return self.grant.scopes
        if self.context.needs_token:
            raise UnauthorizedError(
                "this server requires a token",
                where=self.address,
                next="Send it as 'Authorization: Bearer …', or call rpc.authenticate first",
            )
        return EVERYTHING

    def authenticate(self, grant: Grant | None) -> None:
        if grant is None:
            raise UnauthorizedError("the token is unknown or expired", where=self.address, next="Ask for a new one")
        if grant.owner != self.owner:
            most = self.context.limits.connections_per_token
            if len(self.context.connections_of(grant.owner)) >= most:
                next = "Close some of them, or raise limits.connections_per_token"
                raise OverloadedError(f"{TOO_MANY_OF_A_TOKEN}: {most}", where=self.address, next=next)
            self.context.remove_from_owner(self)
        before, self.grant = self.grant, grant
        self.context.add_to_owner(self)
        self._may_publish.clear()
        if before is not None and before.owner != grant.owner:
            self.context.release_publisher(self)
        for pattern in self.context.live.patterns(self):
            if not self.scopes.may_read(pattern):
                self.context.live.remove(self, pattern.text)
                self.notify("rpc.lost", LostNotice("", NOT_ITS_OWN, pattern.text))
        self.subscriptions.drop_forbidden(NOT_ITS_OWN)

    def require_method(self, name: str) -> None:
        """Refuse a call of a method that the token has no right for at all, before middleware sees it."""
        method = self.context.registry.get(name)
        if method is not None and not method.needs.rights:
            return
        scopes = self.scopes  # a client that has not authenticated gets no further
        if method is None and name.startswith("rpc."):
            return  # it will not be found
        if method is None or method.params is None:
            if not scopes.may_call(name):
                raise not_allowed("call", name)
        elif not any(map(scopes.has, method.needs.rights)):
            raise not_allowed(" or ".join(method.needs.rights), name)

    def may_publish(self, topic: str) -> bool:
        try:
            self.require_publish(topic)
        except HeadwaterError:
            return False
        return True

    def require_publish(self, topic: str) -> str:
        if topic not in self._may_publish:
            check_topic(topic)
            if not self.scopes.may_publish(topic):
                raise not_allowed("publish", topic)
            if len(self._may_publish) >= TOPICS_CHECKED_MAX:
                self._may_publish.clear()
            self._may_publish.add(topic)
        return topic

    def require_read(self, pattern: Pattern) -> None:
        if not self.scopes.may_read(pattern):
            raise not_allowed("read", pattern.text)

    def require_manage(self, pattern: Pattern) -> None:
        if not self.scopes.may_manage(pattern):
            raise not_allowed("manage", pattern.text)

    def may_use(self, id: str, pattern: Pattern, owner: str | None) -> bool:
        is_own = owner is None or (self.grant is not None and owner == self.grant.owner)
        return self.scopes.may_use(id, pattern, is_own=is_own)

    def require_use(self, record: SubscriptionRecord) -> None:
        spec = record.spec
        if not self.may_use(record.id, parse_pattern(spec.pattern, spec.dialect), spec.owner):
            if self.scopes.may_consume(record.id):
                raise UnauthorizedError(
                    "the subscription belongs to another token",
                    where=record.id,
                    next="Use another name, or a token with the manage right for its topics",
                )
            raise not_allowed("consume", record.id)

    @property
    def tenant(self) -> Tenant | None:
        """The owner of its subscriptions; None where there are no tokens."""
        if self.grant is None:
            return None
        return Tenant(self.grant.owner, self.require_use, self.context.limits.subscriptions_per_token)

    def fault_for(self, exc: BaseException, method: str) -> Fault:
        """The error for the client; a missing right is recorded in the audit trail."""
        if isinstance(exc, UnauthorizedError):
            is_unauthenticated = self.grant is None or method == "rpc.authenticate"
            event = "authentication.refused" if is_unauthenticated else "right.refused"
            self.context.audit.refused(event, self.identity, method=method, why=exc.why, where=exc.where)
        if isinstance(exc, Fault):
            return exc
        if not isinstance(exc, HeadwaterError):
            logger.error("method %(method)s failed", {"method": method}, exc_info=exc)
        return fault_of(cast(Exception, exc))

    # --- frames in ----------------------------------------------------------------------------------------------

    def receive_text(self, text: bytes) -> None:
        for item in self.session.receive_text(text):
            if isinstance(item, Answer):
                self._take_answer(item)
            else:
                self._take_calls(item, len(text))

    def _take_calls(self, exchange: Exchange, bytes: int) -> None:
        calls = exchange.calls
        self._working += len(calls)
        self._open[exchange] = OpenFrame(len(calls), bytes)
        self._transport.hold(bytes)
        if self._working > self._requests_max:
            self._update_reading()
        if self._rate is not None and (retry_after := self._rate.take(len(calls))):
            self._refuse_all(exchange, retry_after)
            return
        # Without middleware these calls start here, in the order of the frame.
        in_place = not self.context.registry.middleware
        publishes: list[Call] = []
        for call in calls:
            if in_place and call.method == "rpc.publish":
                publishes.append(call)
                continue
            if publishes:
                start_publishes(self, exchange, publishes)
                publishes = []
            if in_place and call.method == "rpc.publish.batch":
                start_batch(self, exchange, call)
            elif in_place and call.method == "rpc.acknowledge.persistent" and start_ack(self, exchange, call):
                continue
            elif in_place and call.method in IN_PLACE:
                self._answer_at_once(exchange, call)
            else:
                task = self.loop.create_task(self._work(exchange, call))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        if publishes:
            start_publishes(self, exchange, publishes)

    def _refuse_all(self, exchange: Exchange, retry_after: float) -> None:
        error = OverloadedError("too many calls a second", where=self.address, next=f"Try again in {retry_after:.1f} s")
        fault = fault_of(error)
        fault.data = {**(fault.data or {}), "retry_after": round(retry_after, 3)}
        for call in exchange.calls:
            exchange.refuse(call, fault)
        self.context.metrics.count_calls("limited", "refused", len(exchange.calls))
        self.finished(len(exchange.calls), exchange)

    def finished(self, count: int, exchange: Exchange) -> None:
        """Note that calls of a frame have their answers. While other calls have none, the answers are sent at the end
        of the turn, in which more may come."""
        self.is_answering = False
        self._working -= count
        frame = self._open[exchange]
        frame.calls -= count
        if self._working or self._transport.is_dispatching:
            if self.session.has_something_to_send:
                self._flush_soon()
        else:
            self.flush()
        if not frame.calls:
            del self._open[exchange]
            self._transport.hold(-frame.bytes)
            if frame.reserved_bytes:
                self.flush()
                self.release_room(frame.reserved_bytes)
        if self._is_paused:
            self._update_reading()
        if self._draining is not None and not self._working:
            self._draining.set()

    def _answer_at_once(self, exchange: Exchange, call: Call) -> None:
        try:
            self.require_method(call.method)
            method = self.context.registry.find(call.method)
            assert method.params is not None
            self.is_answering = True
            exchange.answer(call, method.run(self, params_of(call, method.params)))
            outcome = "done"
        except Exception as exc:
            exchange.refuse(call, self.fault_for(exc, call.method))
            outcome = "refused"
        self.finished(1, exchange)
        self.context.metrics.count_calls(call.method, outcome, 1)

    async def _work(self, exchange: Exchange, call: Call) -> None:
        began = time.perf_counter()
        SOURCE.set(self if self.grant is None else self.grant.owner)  # also of tasks that outlive the call
        outcome = Outcome(fault=Fault(-32603, "the server stopped before it was done"))
        try:
            async with self._large if call.method in LARGE else nullcontext():
                if call.method in LARGE:
                    await self.writable()
                    refuse = partial(self._refuse_self_wait, call)
                    self.keep_room(await self.room(LARGE_BYTES, LARGE_BYTES, refuse))
                outcome = await self._through_middleware(call)
            self.is_answering = True
            if outcome.fault is None:
                exchange.answer(call, outcome.result)
        except HeadwaterError as exc:
            outcome = Outcome(fault=fault_of(exc))
        except NOT_JSON as exc:  # a result that is not JSON
            details = {"method": call.method, "why": str(exc)}
            logger.error("method %(method)s gave a result that is not JSON: %(why)s", details, extra=self.identity)
            outcome = Outcome(fault=fault_of(exc))
        finally:
            if outcome.fault is not None:
                exchange.refuse(call, outcome.fault)
            self._reserve_for_answer(exchange, call)
            self.finished(1, exchange)
            name = call.method if self.context.registry.knows(call.method) else "unknown"
            self.context.metrics.observe_call(name, outcome.fault is None, time.perf_counter() - began)

    def _refuse_self_wait(self, call: Call) -> None:
        """The answers of a batch are sent together, so none of them makes room for the next."""
        kept_bytes = sum(frame.reserved_bytes for frame in self._open.values())
        if kept_bytes + LARGE_BYTES > max(self.context.limits.outbound_bytes, LARGE_BYTES):
            raise TooLargeError(
                "the answers to a batch take too much together", where=call.method, next="Ask for less at once"
            )

    def _reserve_for_answer(self, exchange: Exchange, call: Call) -> None:
        """The bytes of the answer, while it waits for the others of its batch; the last one is sent at once."""
        task, frame = asyncio.current_task(), self._open[exchange]
        reserved_bytes = 0 if task is None else self._reserved.pop(task, 0)
        if not reserved_bytes:  # as a rule
            return
        kept_bytes = reserved_bytes if frame.calls == 1 else min(reserved_bytes, exchange.kept_bytes(call))
        frame.reserved_bytes += kept_bytes
        self.release_room(reserved_bytes - kept_bytes)

    async def _through_middleware(self, call: Call) -> Outcome:
        context = CallContext(call, self)
        passed: list[Middleware] = []
        outcome = Outcome(fault=CANCELLED)
        try:
            self.require_method(call.method)
            outcome = await self._before_and_call(context, call, passed)
        except Exception as exc:
            outcome = Outcome(fault=self.fault_for(exc, call.method))
        finally:  # also when the client has disconnected
            for middleware in reversed(passed):
                try:
                    await middleware.after(context, outcome)
                except Exception:
                    logger.exception(
                        "a middleware failed after %(method)s", {"method": call.method}, extra=self.identity
                    )
        return outcome

    async def _before_and_call(self, context: CallContext, call: Call, passed: list[Middleware]) -> Outcome:
        for middleware in () if self.is_unauthenticated else self.context.registry.middleware:
            passed.append(middleware)
            short = await middleware.before(context)
            if isinstance(short, ShortCircuit):
                return Outcome(short.result)
        return Outcome(await self._invoke(call, context))

    async def _invoke(self, call: Call, context: CallContext) -> Any:
        method = self.context.registry.find(call.method)
        seconds = None if call.method in UNTIMED else self.context.limits.request_timeout
        try:
            async with asyncio.timeout(seconds):
                params = call if method.params is None else params_of(call, method.params)
                audit = self.context.audit
                is_change = method.audited and not getattr(params, "dry_run", False)
                with audit.change(call.method, self.identity, **_audited(params)) if is_change else nullcontext():
                    outcome = method.run(context if method.params is None else self, params)
                    if isinstance(outcome, GeneratorType):
                        outcome = await run_async(outcome)
                    elif inspect.isawaitable(outcome):
                        outcome = await outcome
                    return outcome
        except HeadwaterError:
            raise
        except TimeoutError as exc:
            raise RequestTimeoutError(
                f"not done within {seconds:g} s", where=call.method, next="Ask for less at once, or try again"
            ) from exc

    # --- frames out ---------------------------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        """Send at the end of this turn, with all that is queued until then."""
        if not (self.is_answering or self._is_flush_due):
            self._is_flush_due = True
            self.loop.call_soon(self._flush_due)

    def _flush_due(self) -> None:
        self._is_flush_due = False
        self.flush()

    def flush(self) -> None:
        texts = self.session.texts_to_send()
        if self.is_gone or not texts:
            return
        self._transport.send(texts)
        if self.is_full:  # a client that does not read its answers is not read from
            self._writable.clear()
            self._update_reading()

    @property
    def is_full(self) -> bool:
        """The client has too much to read, for its own limit or for that of all."""
        return (
            self._transport.buffered_bytes() > self.context.limits.outbound_bytes
            or not self._transport.outbound.may_grow
        )

    def has_room(self, bytes: int) -> bool:
        """Whether so many bytes may be sent without a reservation."""
        return not self.is_full and self._transport.outbound.fits(bytes)

    def on_drained(self) -> None:
        if not self.is_full:
            self._writable.set()
            self._update_reading()
            self._wake_room_waiter()

    async def room(self, bytes: int, least_bytes: int, refuse: Callable[[], None] = _never) -> int:
        """Reserve so many outbound bytes, or fewer down to `least_bytes`; wait until there is room for those. `refuse`
        raises where waiting cannot help."""
        while (room_bytes := self._room_bytes(least_bytes)) < least_bytes:
            refuse()
            waiter = self.loop.create_future()
            self._room_waiters.append(waiter)
            try:
                await waiter
            except BaseException:
                if waiter in self._room_waiters:
                    self._room_waiters.remove(waiter)
                else:
                    self._wake_room_waiter()
                raise
        bytes = min(bytes, room_bytes)
        self._transport.reserve(bytes)
        self._wake_room_waiter()  # there may be room for the next one as well
        return bytes

    def _room_bytes(self, least_bytes: int) -> int:
        if self.is_gone:
            return 2 * self.context.limits.outbound_bytes
        account = self._transport.outbound
        own_bytes = self.context.limits.outbound_bytes - account.bytes
        if not account.bytes:
            own_bytes = max(own_bytes, least_bytes)
        return own_bytes if own_bytes >= least_bytes and account.may_take else 0

    def keep_room(self, bytes: int) -> None:
        """Keep reserved bytes until the answer of this task's call is sent."""
        task = asyncio.current_task()
        assert task is not None
        self._reserved[task] = self._reserved.get(task, 0) + bytes

    def release_room(self, bytes: int) -> None:
        if not self.is_gone:
            self._transport.reserve(-bytes)
        self._wake_room_waiter()

    def _wake_room_waiter(self) -> None:
        while self._room_waiters:
            waiter = self._room_waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _update_reading(self) -> None:
        """Reads calls while few are unanswered, and while the client reads its answers."""
        most = self._requests_max
        too_many = self._working > (most // 2 if self._is_paused else most)
        pause = too_many or not self._writable.is_set() or self._draining is not None
        if pause is not self._is_paused:
            self._is_paused = pause
            if pause:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    async def writable(self) -> None:
        """Wait until the client has read most of the data sent to it."""
        await self._writable.wait()

    # --- calls to the client ------------------------------------------------------------------------------------

    async def call(self, method: str, params: Any = None, *, timeout: float | None = None) -> Any:
        if self.is_gone:
            raise RequestTimeoutError("the client has gone", where=self.address)
        if len(self._waiting) >= WAITING_MAX:
            raise OverloadedError(f"{WAITING_MAX} calls to this client have no answer yet", where=self.address)
        future: asyncio.Future[Raw] = self.loop.create_future()
        number = self.session.call(method, params, alone=not self.takes_batches)
        self._waiting[number] = future
        try:
            async with asyncio.timeout(self.context.limits.request_timeout if timeout is None else timeout) as limit:
                answer = await future
            return decode(answer)
        except (msgspec.DecodeError, RecursionError) as exc:
            raise UnreachableError(f"the client's answer cannot be read ({exc})", where=method) from exc
        except TimeoutError as exc:
            if not limit.expired():  # the client disconnected
                raise
            raise RequestTimeoutError("the client did not answer in time", where=method) from exc
        finally:
            self._waiting.pop(number, None)
            self.session.forget(number)

    def notify(self, method: str, params: Any = None) -> None:
        self.session.notify(method, params, alone=not self.takes_batches)

    def _take_answer(self, answer: Answer) -> None:
        future = self._waiting.get(answer.id) if isinstance(answer.id, int) else None
        if future is None or future.done():
            return
        if answer.error is not UNSET:
            future.set_exception(error_of(answer.error, self.address))
        elif answer.result is not UNSET:
            future.set_result(answer.result)

    # --- ending -------------------------------------------------------------------------------------------------

    def close(self, code: int, reason: str) -> None:
        if not self.is_gone:
            self.flush()
            self._transport.close(code, reason)

    def revoke(self, reason: str) -> None:
        """End calls under way, subscriptions and live subscriptions now: the token was revoked."""
        for task in self._tasks:
            task.cancel()
        self.context.live.remove_all(self)
        self.context.release_publisher(self)
        self.subscriptions.drop_all()
        self.flush()
        self._transport.close(POLICY_VIOLATION, reason, REVOKED_CLOSE_S)

    async def drain(self) -> None:
        """Stop reading calls and delivering, finish running calls, send their answers, and close with 1001."""
        self._draining = asyncio.Event()
        self._update_reading()
        await self.subscriptions.stop_delivering()
        if self._working:
            await self._draining.wait()
        self.close(GOING_AWAY, "the server is going away")

    def on_closed(self, *, vanished: bool) -> None:
        self.context.on_disconnect(self, vanished=vanished)

    async def release_all(self, *, vanished: bool) -> None:
        """Release subscriptions and fail calls to the client, after the disconnect."""
        self.is_gone = True
        self._writable.set()
        for waiter in self._room_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.context.live.remove_all(self)
        self.context.release_publisher(self)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(RequestTimeoutError("the client has gone", where=self.address))
        await self.subscriptions.close(vanished=vanished)
        for task in list(self._tasks):
            task.cancel()


def _audited(params: Any) -> dict[str, Any]:
    """The params of an audited call; of imported lines, only their number."""
    fields = msgspec.structs.asdict(params)
    return {name: len(value) if name == "lines" else value for name, value in fields.items()}
