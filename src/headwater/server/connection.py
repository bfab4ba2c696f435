"""One client: its frames in and out, its limits, and the calls it is waiting for."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import GeneratorType
from typing import Any, Protocol, cast

import msgspec
from msgspec import UNSET, Raw
from msgspec.json import decode

from headwater.broker.core import Tenant
from headwater.broker.flow import run_async
from headwater.broker.lanes import SOURCE
from headwater.errors import HeadwaterError, Overloaded, RequestTimeout, TooLarge, Unauthorized
from headwater.ports.records import SubscriptionRecord
from headwater.protocol.faults import error_of, fault_of
from headwater.protocol.jsonrpc import FRAME_BYTES_MIN, INTERNAL_ERROR, Answer, Call, Fault, params_of
from headwater.protocol.session import Exchange, Session
from headwater.protocol.wire import LostNotice
from headwater.server.budget import Account
from headwater.server.logger import logger
from headwater.server.parts import POLICY_VIOLATION, TOO_MANY_OF_A_TOKEN, Parts
from headwater.server.publishing import publish_batch_call, publish_calls
from headwater.server.rate import Bucket
from headwater.server.registry import CallContext, Middleware, Outcome, ShortCircuit
from headwater.server.scopes import EVERYTHING, Scopes, not_allowed
from headwater.server.shapes import SpecificationShapes
from headwater.server.subscriptions import Subscriptions
from headwater.server.tokens import Grant
from headwater.topics import Pattern, check_topic, parse_pattern

TOPICS_CHECKED_MAX = 10_000  # how many topics a connection remembers it may publish to
OUTGOING_BYTES_MAX = 8 * 1024 * 1024  # of a frame: any one message fits, however its payload is written
WAITING_MAX = 1_000  # calls to one client that have not been answered
GOING_AWAY = 1001
IN_PLACE = frozenset({"rpc.subscribe", "rpc.unsubscribe"})  # they wait for nothing
UNTIMED = frozenset({"rpc.fetch"})  # it has a wait of its own
CANCELLED = Fault(INTERNAL_ERROR, "the connection ended before it was done")
REVOKED_CLOSE_S = 2.0  # for the answer to the close; nothing else passes by then
NOT_ITS_OWN = "the token that the connection has now may not have it"
LARGE = frozenset(  # their answers may be, so that few are read at a time
    {"rpc.topics", "rpc.subscriptions", "rpc.stats", "rpc.dead_letters", "rpc.dead_letters.get"}
    | {"rpc.dead_letters.stats", "rpc.dead_letters.export", "rpc.dead_letters.import"}
)
LARGE_AT_ONCE_MAX = 2
LARGE_BYTES = 1024 * 1024  # reserved for one of them


class Wire(Protocol):
    """What carries frames to and from the client."""

    def send(self, texts: Sequence[bytes]) -> None: ...

    def buffered_bytes(self) -> int: ...

    def hold(self, bytes: int) -> None:
        """So many bytes more, or less, of frames with calls that have no answer."""

    def reserve(self, bytes: int) -> None:
        """So many bytes more, or less, that are being read to be sent."""

    @property
    def outbound(self) -> Account:
        """Of what is reserved, and what was sent and not read."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self, code: int, reason: str, within_s: float = ...) -> None: ...


def _never() -> None:
    """Waiting is never in vain."""


class OpenFrame:
    """A frame with calls that have no answer yet, and what was reserved for their answers."""

    __slots__ = ("bytes", "calls", "reserved_bytes")

    def __init__(self, calls: int, bytes: int) -> None:
        self.calls = calls
        self.bytes = bytes
        self.reserved_bytes = 0


class Connection:
    def __init__(
        self,
        parts: Parts,
        wire: Wire,
        address: str,
        grant: Grant | None,
        shapes: type[SpecificationShapes] = SpecificationShapes,
    ) -> None:
        limits = parts.limits
        self.parts = parts
        self.core = parts.core
        self.loop = asyncio.get_running_loop()
        self.session = Session(
            frame_bytes_max=max(limits.frame_bytes, FRAME_BYTES_MIN),  # where less is allowed, the door sees to it
            batch_max=limits.batch_calls,
            outgoing_bytes_max=OUTGOING_BYTES_MAX,
        )
        self.session.on_outgoing = self._flush_soon
        self.subscriptions = Subscriptions(self)
        self.shapes = shapes(self.subscriptions)
        self.grant = grant
        self.publisher: str | None = None
        self.takes_batches = False  # whether several calls and notifications may go in one frame
        self.is_gone = False
        self._wire = wire
        self._address = address
        self._bucket = Bucket(limits.requests_per_second, limits.burst)
        self._working = 0  # calls that have no answer yet
        self._open: dict[Exchange, OpenFrame] = {}  # the frames they came in
        self._reserved: dict[asyncio.Task[Any], int] = {}  # bytes of outbound room, by who answers a call
        self._rooms: deque[asyncio.Future[None]] = deque()  # those that wait for some
        self._large = asyncio.Semaphore(LARGE_AT_ONCE_MAX)
        self._is_paused = False
        self._draining: asyncio.Event | None = None  # set when the last call is answered
        self._writable = asyncio.Event()
        self._writable.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, asyncio.Future[Raw]] = {}
        self._may_publish: set[str] = set()

    # --- who it is ----------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return self._address

    @property
    def is_stranger(self) -> bool:
        return self.grant is None and self.parts.needs_token

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
    def who(self) -> dict[str, str]:
        """For the logs."""
        return {
            "address": self._address,
            "label": self.label,
            "token": "" if self.grant is None else self.grant.token_id,
        }

    @property
    def scopes(self) -> Scopes:
        if self.grant is not None:
            return self.grant.scopes
        if self.parts.needs_token:
            raise Unauthorized(
                "this server wants a token",
                where=self._address,
                next="Send it as 'Authorization: Bearer …', or call rpc.authenticate first",
            )
        return EVERYTHING

    def authenticate(self, grant: Grant | None) -> None:
        if grant is None:
            raise Unauthorized("the token is unknown or expired", where=self._address, next="Ask for a new one")
        if grant.owner != self.owner:
            most = self.parts.limits.connections_per_token
            if len(self.parts.holders(grant.owner)) >= most:
                next = "Close some of them, or raise limits.connections_per_token"
                raise Overloaded(f"{TOO_MANY_OF_A_TOKEN}: {most}", where=self._address, next=next)
            self.parts.remove_holder(self)
        before, self.grant = self.grant, grant
        self.parts.add_holder(self)
        self._may_publish.clear()
        if before is not None and before.owner != grant.owner:
            self.parts.forget_publisher(self)
        for pattern in self.parts.live.patterns(self):
            if not self.scopes.may_read(pattern):
                self.parts.live.remove(self, pattern.text)
                self.notify("rpc.lost", LostNotice("", NOT_ITS_OWN, pattern.text))
        self.subscriptions.drop_forbidden(NOT_ITS_OWN)

    def require_method(self, name: str) -> None:
        """Refuse a call that its token has no right for, whatever it asks for, before middleware sees it."""
        method = self.parts.registry.get(name)
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
                raise Unauthorized(
                    "the subscription belongs to another token",
                    where=record.id,
                    next="Use another name, or a token with the manage right for its topics",
                )
            raise not_allowed("consume", record.id)

    @property
    def tenant(self) -> Tenant | None:
        """On whose behalf it subscribes; None where there are no tokens."""
        if self.grant is None:
            return None
        return Tenant(self.grant.owner, self.require_use, self.parts.limits.subscriptions_per_token)

    def fault_for(self, exc: BaseException, method: str) -> Fault:
        """What the client is told; a refusal for want of a right is recorded."""
        if isinstance(exc, Unauthorized):
            is_stranger = self.grant is None or method == "rpc.authenticate"
            event = "authentication.refused" if is_stranger else "right.refused"
            self.parts.audit.refused(event, self.who, method=method, why=exc.why, where=exc.where)
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
        self._wire.hold(bytes)
        self._read_or_not()
        retry_after = self._bucket.take(len(calls))
        if retry_after:
            self._refuse_all(exchange, retry_after)
            return
        # What nobody wants to look into is begun here and now, in the order of the frame.
        in_place = not self.parts.registry.middleware
        publishes: list[Call] = []
        for call in calls:
            if in_place and call.method == "rpc.publish":
                publishes.append(call)
                continue
            if publishes:
                publish_calls(self, exchange, publishes)
                publishes = []
            if in_place and call.method == "rpc.publish.batch":
                publish_batch_call(self, exchange, call)
            elif in_place and call.method in IN_PLACE:
                self._do_in_place(exchange, call)
            else:
                task = self.loop.create_task(self._work(exchange, call))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        if publishes:
            publish_calls(self, exchange, publishes)

    def _refuse_all(self, exchange: Exchange, retry_after: float) -> None:
        error = Overloaded("too many calls a second", where=self._address, next=f"Try again in {retry_after:.1f} s")
        fault = fault_of(error)
        fault.data = {**(fault.data or {}), "retry_after": round(retry_after, 3)}
        for call in exchange.calls:
            exchange.refuse(call, fault)
        self.parts.metrics.count_calls("limited", "refused", len(exchange.calls))
        self.finished(len(exchange.calls), exchange)

    def finished(self, count: int, exchange: Exchange) -> None:
        """So many calls of a frame have been answered."""
        self._working -= count
        frame = self._open[exchange]
        frame.calls -= count
        if not frame.calls:
            del self._open[exchange]
            self._wire.hold(-frame.bytes)
            if frame.reserved_bytes:
                self.flush()
                self.give_room_back(frame.reserved_bytes)
        self._read_or_not()
        if self._draining is not None and not self._working:
            self._draining.set()

    def _do_in_place(self, exchange: Exchange, call: Call) -> None:
        try:
            self.require_method(call.method)
            method = self.parts.registry.find(call.method)
            assert method.params is not None
            exchange.answer(call, method.run(self, params_of(call, method.params)))
            outcome = "done"
        except Exception as exc:
            exchange.refuse(call, self.fault_for(exc, call.method))
            outcome = "refused"
        self.finished(1, exchange)
        self.parts.metrics.count_calls(call.method, outcome, 1)

    async def _work(self, exchange: Exchange, call: Call) -> None:
        began = time.perf_counter()
        SOURCE.set(self if self.grant is None else self.grant.owner)  # also of what the call leaves running
        outcome = Outcome(fault=Fault(-32603, "the server stopped before it was done"))
        try:
            async with self._large if call.method in LARGE else nullcontext():
                if call.method in LARGE:
                    await self.writable()
                    refuse = partial(self._refuse_what_waits_for_itself, call)
                    self.keep_room(await self.room(LARGE_BYTES, LARGE_BYTES, refuse))
                outcome = await self._through_middleware(call)
            if outcome.fault is None:
                exchange.answer(call, outcome.result)
        except HeadwaterError as exc:
            outcome = Outcome(fault=fault_of(exc))
        except (TypeError, ValueError) as exc:  # a result that is not JSON
            told = {"method": call.method, "why": str(exc)}
            logger.error("method %(method)s gave a result that is not JSON: %(why)s", told, extra=self.who)
            outcome = Outcome(fault=fault_of(exc))
        finally:
            if outcome.fault is not None:
                exchange.refuse(call, outcome.fault)
            self._reserve_for_answer(exchange, call)
            self.finished(1, exchange)
            name = call.method if self.parts.registry.knows(call.method) else "unknown"
            self.parts.metrics.observe_call(name, outcome.fault is None, time.perf_counter() - began)

    def _refuse_what_waits_for_itself(self, call: Call) -> None:
        """The answers of a batch go out together, so that none of them makes room for the next."""
        kept_bytes = sum(frame.reserved_bytes for frame in self._open.values())
        if kept_bytes + LARGE_BYTES > max(self.parts.limits.outbound_bytes, LARGE_BYTES):
            raise TooLarge(
                "the answers to a batch take too much together", where=call.method, next="Ask for less at once"
            )

    def _reserve_for_answer(self, exchange: Exchange, call: Call) -> None:
        """As much as the answer takes while it waits for the others of its batch; the last one is sent at once."""
        task, frame = asyncio.current_task(), self._open[exchange]
        reserved_bytes = 0 if task is None else self._reserved.pop(task, 0)
        if not reserved_bytes:  # as a rule
            return
        kept_bytes = reserved_bytes if frame.calls == 1 else min(reserved_bytes, exchange.kept_bytes(call))
        frame.reserved_bytes += kept_bytes
        self.give_room_back(reserved_bytes - kept_bytes)

    async def _through_middleware(self, call: Call) -> Outcome:
        context = CallContext(call, self)
        passed: list[Middleware] = []
        outcome = Outcome(fault=CANCELLED)
        try:
            self.require_method(call.method)
            outcome = await self._before_and_call(context, call, passed)
        except Exception as exc:
            outcome = Outcome(fault=self.fault_for(exc, call.method))
        finally:  # also when the client has gone
            for middleware in reversed(passed):
                try:
                    await middleware.after(context, outcome)
                except Exception:
                    logger.exception("a middleware failed after %(method)s", {"method": call.method}, extra=self.who)
        return outcome

    async def _before_and_call(self, context: CallContext, call: Call, passed: list[Middleware]) -> Outcome:
        is_stranger = self.grant is None and self.parts.needs_token
        for middleware in () if is_stranger else self.parts.registry.middleware:
            passed.append(middleware)
            short = await middleware.before(context)
            if isinstance(short, ShortCircuit):
                return Outcome(short.result)
        return Outcome(await self._invoke(call, context))

    async def _invoke(self, call: Call, context: CallContext) -> Any:
        method = self.parts.registry.find(call.method)
        seconds = None if call.method in UNTIMED else self.parts.limits.request_timeout
        try:
            async with asyncio.timeout(seconds):
                params = call if method.params is None else params_of(call, method.params)
                audit = self.parts.audit
                with audit.change(call.method, self.who, **_told(params)) if method.audited else nullcontext():
                    outcome = method.run(context if method.params is None else self, params)
                    if isinstance(outcome, GeneratorType):
                        outcome = await run_async(outcome)
                    elif inspect.isawaitable(outcome):
                        outcome = await outcome
                    return outcome
        except TimeoutError as exc:
            raise RequestTimeout(
                f"not done within {seconds:g} s", where=call.method, next="Ask for less at once, or try again"
            ) from exc

    # --- frames out ---------------------------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        self.loop.call_soon(self.flush)

    def flush(self) -> None:
        texts = self.session.texts_to_send()
        if self.is_gone:
            return
        self._wire.send(texts)
        if self.is_full:  # who does not read its answers gets no more of them: it is not listened to either
            self._writable.clear()
            self._read_or_not()

    @property
    def is_full(self) -> bool:
        """More is waiting to be read by the client than is good, for it or for all."""
        return self._wire.buffered_bytes() > self.parts.limits.outbound_bytes or not self._wire.outbound.may_grow

    def has_room(self, bytes: int) -> bool:
        """Whether so much may be sent that nothing was reserved for."""
        return not self.is_full and self._wire.outbound.fits(bytes)

    def on_drained(self) -> None:
        if not self.is_full:
            self._writable.set()
            self._read_or_not()
            self._pass_room_on()

    async def room(self, bytes: int, least_bytes: int, refuse: Callable[[], None] = _never) -> int:
        """Wait until so many bytes may be read to be sent, or `least_bytes` where there is no more room than that.
        `refuse` raises where waiting is in vain."""
        while (room_bytes := self._room_bytes(least_bytes)) < least_bytes:
            refuse()
            waiter = self.loop.create_future()
            self._rooms.append(waiter)
            try:
                await waiter
            except BaseException:
                if waiter in self._rooms:
                    self._rooms.remove(waiter)
                else:
                    self._pass_room_on()
                raise
        bytes = min(bytes, room_bytes)
        self._wire.reserve(bytes)
        self._pass_room_on()  # there may be room for the next one as well
        return bytes

    def _room_bytes(self, least_bytes: int) -> int:
        if self.is_gone:
            return 2 * self.parts.limits.outbound_bytes
        account = self._wire.outbound
        own_bytes = self.parts.limits.outbound_bytes - account.bytes
        if not account.bytes:
            own_bytes = max(own_bytes, least_bytes)
        return own_bytes if own_bytes >= least_bytes and account.may_take else 0

    def keep_room(self, bytes: int) -> None:
        """Until the call that is being answered by this task has its answer on the way."""
        task = asyncio.current_task()
        assert task is not None
        self._reserved[task] = self._reserved.get(task, 0) + bytes

    def give_room_back(self, bytes: int) -> None:
        if not self.is_gone:
            self._wire.reserve(-bytes)
        self._pass_room_on()

    def _pass_room_on(self) -> None:
        while self._rooms:
            waiter = self._rooms.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _read_or_not(self) -> None:
        """Calls are read while there are few unanswered ones, and while the answers are read."""
        most = self.parts.limits.requests_in_flight
        too_many = self._working > (most // 2 if self._is_paused else most)
        pause = too_many or not self._writable.is_set() or self._draining is not None
        if pause is not self._is_paused:
            self._is_paused = pause
            if pause:
                self._wire.pause_reading()
            else:
                self._wire.resume_reading()

    async def writable(self) -> None:
        """Wait until the client has read most of what was sent to it."""
        await self._writable.wait()

    # --- calls to the client ------------------------------------------------------------------------------------

    async def call(self, method: str, params: Any = None, *, timeout: float | None = None) -> Any:
        if self.is_gone:
            raise RequestTimeout("the client has gone", where=self._address)
        if len(self._waiting) >= WAITING_MAX:
            raise Overloaded(f"{WAITING_MAX} calls to this client have no answer yet", where=self._address)
        future: asyncio.Future[Raw] = self.loop.create_future()
        number = self.session.call(method, params, alone=not self.takes_batches)
        self._waiting[number] = future
        try:
            async with asyncio.timeout(self.parts.limits.request_timeout if timeout is None else timeout):
                return decode(await future)
        except TimeoutError as exc:
            raise RequestTimeout("the client did not answer in time", where=method) from exc
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
            future.set_exception(error_of(answer.error, self._address))
        elif answer.result is not UNSET:
            future.set_result(answer.result)

    # --- ending -------------------------------------------------------------------------------------------------

    def close(self, code: int, reason: str) -> None:
        if not self.is_gone:
            self.flush()
            self._wire.close(code, reason)

    def cut_off(self, reason: str) -> None:
        """All that came by its token ends now: calls under way, subscriptions, what is live."""
        for task in self._tasks:
            task.cancel()
        self.parts.live.remove_all(self)
        self.parts.forget_publisher(self)
        self.subscriptions.end()
        self.flush()
        self._wire.close(POLICY_VIOLATION, reason, REVOKED_CLOSE_S)

    async def drain(self) -> None:
        """Take no more work: deliver nothing more, let what runs finish, send the answers, say goodbye."""
        self._draining = asyncio.Event()
        self._read_or_not()
        await self.subscriptions.stop_delivering()
        if self._working:
            await self._draining.wait()
        self.close(GOING_AWAY, "the server is going away")

    async def gone(self, *, vanished: bool) -> None:
        """The connection is no more: give back what it held."""
        self.is_gone = True
        self._writable.set()
        for waiter in self._rooms:
            if not waiter.done():
                waiter.set_result(None)
        self.parts.live.remove_all(self)
        self.parts.forget_publisher(self)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(RequestTimeout("the client has gone", where=self._address))
        await self.subscriptions.close(vanished=vanished)
        for task in list(self._tasks):
            task.cancel()


def _told(params: Any) -> dict[str, Any]:
    """What an audited call was asked to do; of what it brings, only how much."""
    fields = msgspec.structs.asdict(params)
    return {name: len(value) if name == "lines" else value for name, value in fields.items()}
