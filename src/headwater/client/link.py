"""The connection to a server: kept up, and what was not answered is sent again.

All of it runs on one event loop; `enqueue` may be called from any thread. Every call is finished in the end: by its
answer, by its time limit, or because there is no more hope for a connection.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from headwater.broker.flow import Ticket, finish
from headwater.client.options import Settings, unreachable
from headwater.client.wire import Wire, open_wire
from headwater.errors import Closed, HeadwaterError, RequestTimeout, Unauthorized, Unreachable
from headwater.protocol.faults import error_of, fault_of
from headwater.protocol.jsonrpc import Answer, Call, Fault
from headwater.protocol.session import Exchange, Session
from headwater.protocol.wire import Hello, PublishBatch, Welcome

LOOK_S = 0.25  # how often time limits are looked at
TELL_CONFIRMED = 1_000  # after so many confirmed messages the server may forget their receipts
UNANSWERED_MAX = 10_000  # calls on their way at a time; more wait here

_welcome = msgspec.json.Decoder(Welcome)


class Request:
    """A call on its way. `again`: whether it may be sent again after the connection broke. `count`: how many messages
    it publishes. `decode` turns the raw result into what the ticket gets."""

    __slots__ = ("again", "alone", "consumer", "count", "deadline_s", "decode", "method", "number", "params", "ticket")

    def __init__(
        self,
        method: str,
        params: Any,
        decode: Callable[[Any], Any],
        *,
        again: bool = True,
        alone: bool = False,
        count: int = 0,
        consumer: Resuming | None = None,
    ) -> None:
        self.method = method
        self.params = params
        self.decode = decode
        self.again = again
        self.alone = alone
        self.count = count
        self.number = 0
        self.consumer = consumer
        self.deadline_s: float | None = None
        self.ticket: Ticket[Any] = Ticket()


class Resuming(Protocol):
    """What has to be taken up again on a new connection, before its own calls are sent."""

    @property
    def is_ready(self) -> bool: ...

    def resume(self) -> Request | None: ...

    def lost_connection(self) -> None: ...


class Link:
    def __init__(self, settings: Settings, publisher: str, loop: asyncio.AbstractEventLoop) -> None:
        self.settings = settings
        self.loop = loop
        self.state = "disconnected"
        self.welcome: Welcome | None = None
        self.resuming: list[Resuming] = []
        self.on_call: Callable[[Exchange, Call], None] | None = None  # calls and notifications of the server
        self.first_connection: Ticket[None] = Ticket()
        self._thread = threading.get_ident()
        self._publisher = publisher
        self._listeners: list[Callable[[str], None]] = []
        self._inbox: deque[Request] = deque()
        self._is_scheduled = False
        self._waiting: deque[Request] = deque()  # no connection, or too many unanswered
        self._unanswered: dict[int, Request] = {}
        self._session = Session()
        self._wire: Wire | None = None
        self._next_number = 1
        self._unconfirmed: dict[int, int] = {}  # number of the first message -> count, in order
        self._told_confirmed = 0
        self._is_closed = False
        self._closing: asyncio.Event | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._looker: asyncio.TimerHandle | None = None

    # --- for everybody ------------------------------------------------------------------------------------------

    def enqueue(self, request: Request, timeout_s: float | None = None) -> Ticket[Any]:
        """Send it when possible; its ticket is finished in any case. No time limit means the link's own; infinity means
        that it waits for as long as there is hope."""
        if self._is_closed:
            finish([(request.ticket, None, self._closed())])
            return request.ticket
        limit_s = self.settings.timeout_s if timeout_s is None else timeout_s
        request.deadline_s = self.loop.time() + limit_s
        self._inbox.append(request)
        if not self._is_scheduled:
            self._is_scheduled = True
            if threading.get_ident() == self._thread:
                self.loop.call_soon(self._take_inbox)
            else:
                try:
                    self.loop.call_soon_threadsafe(self._take_inbox)
                except RuntimeError:  # the loop has been closed
                    self._refuse_all(self._closed())
        return request.ticket

    def on_state(self, callback: Callable[[str], None]) -> None:
        self._listeners.append(callback)

    # --- keeping the connection -----------------------------------------------------------------------------------

    def start(self) -> None:
        """On the loop."""
        self._thread = threading.get_ident()
        self._closing = asyncio.Event()
        self._keeper = self.loop.create_task(self._keep())
        self._looker = self.loop.call_later(LOOK_S, self._look_at_deadlines)

    async def _keep(self) -> None:
        attempt = 0
        give_up_s = self.loop.time() + self.settings.connect_timeout_s
        while not self._is_closed:
            self._become("connecting" if not self.first_connection.done else "reconnecting")
            try:
                async with asyncio.timeout(self.settings.connect_timeout_s):
                    lost = await self._connect()
            except (OSError, TimeoutError, HeadwaterError) as exc:
                why = exc.why if isinstance(exc, HeadwaterError) else str(exc) or "no answer in time"
                attempt += 1
                delay_s = self.settings.backoff.delay_s(attempt, random.random())
                hopeless = isinstance(exc, Unauthorized) or delay_s is None
                too_late = not self.first_connection.done and self.loop.time() + (delay_s or 0) >= give_up_s
                if hopeless or too_late:
                    self._fail(exc if isinstance(exc, Unauthorized) else unreachable(self.settings, why))
                    return
                await self._pause(delay_s or 0.0)
                continue
            attempt = 0
            await lost
            self._lose()
            if not self._is_closed and self.settings.backoff.strategy == "none":
                self._fail(unreachable(self.settings, "the connection broke"))

    async def _pause(self, delay_s: float) -> None:
        assert self._closing is not None
        try:
            async with asyncio.timeout(delay_s):
                await self._closing.wait()
        except TimeoutError:
            pass

    async def _connect(self) -> asyncio.Future[None]:
        """Connect, say hello, take up what is to be resumed, send what was not answered."""
        self._session = session = Session()
        session.on_outgoing = self._flush_soon
        wire = await open_wire(self.settings, self._receive, self.send_waiting)
        self._wire = wire
        try:
            welcome: asyncio.Future[Any] = self.loop.create_future()
            hello = Request("rpc.hello", Hello("headwater", self._publisher), _welcome.decode, again=False)
            hello.ticket.then(self.loop, welcome.set_result)
            self._send(hello)
            await asyncio.wait([welcome, wire.lost], return_when=asyncio.FIRST_COMPLETED)
            if not welcome.done():
                raise Unreachable("the connection broke at once")
            self.welcome = welcome.result().result()
        except BaseException:
            wire.abort()
            self._wire = None
            raise
        if not self.welcome.authenticated:
            wire.abort()
            raise Unauthorized("this server wants a token", where=self.settings.host, next="Pass token=…")
        session.respect(frame_bytes_max=self.welcome.frame_bytes_max, batch_max=self.welcome.batch_calls_max)
        for resuming in list(self.resuming):
            request = resuming.resume()
            if request is not None:
                request.deadline_s = self.loop.time() + self.settings.timeout_s
                self._send(request)
        self._become("connected")
        finish([(self.first_connection, None, None)])
        self.send_waiting()
        return wire.lost

    def _lose(self) -> None:
        """The connection is gone. What may be sent again waits for the next one; the outcome of the rest is unknown."""
        self._wire = None
        for resuming in self.resuming:
            resuming.lost_connection()
        unanswered, self._unanswered = self._unanswered, {}
        again: list[Request] = []
        unknown: list[tuple[Ticket[Any], Any, BaseException | None]] = []
        for request in unanswered.values():
            if request.again:
                again.append(request)
            else:
                error = Unreachable(
                    "the connection broke before the answer came; it may have been done", where=request.method
                )
                unknown.append((request.ticket, None, error))
        self._waiting.extendleft(reversed(again))
        finish(unknown)
        if not self._is_closed:
            self._become("reconnecting")

    def _fail(self, error: Exception) -> None:
        self._become("failed")
        finish([(self.first_connection, None, error)])
        self._refuse_all(error)

    def _refuse_all(self, error: Exception) -> None:
        requests = [*self._unanswered.values(), *self._waiting, *self._inbox]
        self._unanswered.clear()
        self._waiting.clear()
        self._inbox.clear()
        finish([(request.ticket, None, error) for request in requests])

    def _become(self, state: str) -> None:
        if state != self.state:
            self.state = state
            for listener in self._listeners:
                try:
                    listener(state)
                except Exception as exc:
                    self.loop.call_exception_handler({"message": "an on_state callback failed", "exception": exc})

    # --- sending ------------------------------------------------------------------------------------------------

    def _take_inbox(self) -> None:
        self._is_scheduled = False
        if self._is_closed:
            self._refuse_all(self._closed())
            return
        if self.state == "failed":
            self._refuse_all(unreachable(self.settings, "there is no connection, and no more attempts to get one"))
            return
        inbox, waiting = self._inbox, self._waiting
        while inbox:
            waiting.append(inbox.popleft())
        self.send_waiting()

    def send_waiting(self) -> None:
        if self.state != "connected" or self._wire is None:
            return
        not_ready: list[Request] = []
        while self._waiting and len(self._unanswered) < UNANSWERED_MAX and not self._wire.is_full:
            request = self._waiting.popleft()
            if request.ticket.done:  # too late, or nobody wants it any more
                continue
            if request.consumer is not None and not request.consumer.is_ready:
                not_ready.append(request)
                continue
            self._send(request)
        self._waiting.extendleft(reversed(not_ready))

    def send_now(self, request: Request) -> None:
        """For what a consumer sends once it is ready, ahead of what waits."""
        if self._wire is not None:
            self._send(request)

    def _send(self, request: Request) -> None:
        if request.count:
            self._number(request)
        params = request.params() if callable(request.params) else request.params
        try:
            id = self._session.call(request.method, params, alone=request.alone)
        except HeadwaterError as exc:
            self._confirm(request)
            finish([(request.ticket, None, exc)])
            return
        self._unanswered[id] = request

    def _number(self, request: Request) -> None:
        if not request.number:
            request.number = self._next_number
            self._next_number += request.count
            self._unconfirmed[request.number] = request.count
        request.params.number = request.number
        confirmed = next(iter(self._unconfirmed))
        if confirmed - self._told_confirmed >= TELL_CONFIRMED or isinstance(request.params, PublishBatch):
            self._told_confirmed = request.params.confirmed = confirmed

    def _confirm(self, request: Request) -> None:
        if request.number:
            self._unconfirmed.pop(request.number, None)

    def notify(self, method: str, params: Any) -> None:
        """On the loop; lost if there is no connection."""
        if self._wire is not None:
            self._session.notify(method, params)

    def _flush_soon(self) -> None:
        self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._wire is not None:
            self._wire.send(self._session.texts_to_send())

    # --- receiving ------------------------------------------------------------------------------------------------

    def _receive(self, text: bytes) -> None:
        done: list[tuple[Ticket[Any], Any, BaseException | None]] = []
        for item in self._session.receive_text(text):
            if isinstance(item, Answer):
                request = self._unanswered.pop(item.id, None)  # type: ignore[arg-type]
                if request is not None:
                    done.append(self._outcome(request, item))
            else:
                self._take_calls(item)
        if done:
            finish(done)
            if self._waiting:
                self.send_waiting()

    def _outcome(self, request: Request, answer: Answer) -> tuple[Ticket[Any], Any, BaseException | None]:
        self._confirm(request)
        if answer.error is not UNSET:
            return request.ticket, None, error_of(answer.error, request.method)
        try:
            return request.ticket, request.decode(answer.result), None
        except (msgspec.DecodeError, HeadwaterError) as exc:
            error = Unreachable(f"the server's answer cannot be read ({exc})", where=request.method)
            return request.ticket, None, error

    def _take_calls(self, exchange: Exchange) -> None:
        for call in exchange.calls:
            try:
                if self.on_call is None:
                    raise Fault(-32601, "Method not found")
                self.on_call(exchange, call)
            except Exception as exc:
                exchange.refuse(call, exc if isinstance(exc, Fault) else fault_of(exc))

    def _look_at_deadlines(self) -> None:
        now_s = self.loop.time()
        late: list[tuple[Ticket[Any], Any, BaseException | None]] = []
        for id, request in list(self._unanswered.items()):
            if request.deadline_s is not None and request.deadline_s <= now_s:
                del self._unanswered[id]
                self._session.forget(id)
                late.append((request.ticket, None, _too_late(request)))
        for request in self._waiting:
            if request.deadline_s is not None and request.deadline_s <= now_s and not request.ticket.done:
                late.append((request.ticket, None, _too_late(request)))
        finish(late)
        self._looker = self.loop.call_later(LOOK_S, self._look_at_deadlines)

    # --- ending -------------------------------------------------------------------------------------------------

    def _closed(self) -> Closed:
        return Closed("the connection is closed", where=self.settings.host, next="Open it again")

    async def close(self) -> None:
        """Send what is queued and say goodbye."""
        self._is_closed = True
        if self._closing is not None:
            self._closing.set()
        if self._looker is not None:
            self._looker.cancel()
        if self._wire is not None:
            self._flush()
            await self._wire.close()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._refuse_all(self._closed())
        if self.state != "failed":
            self._become("disconnected")


def _too_late(request: Request) -> RequestTimeout:
    what = "give the message an id before you publish it again" if request.count else "ask again"
    return RequestTimeout(
        "no answer in time; it may have been done all the same", where=request.method, next=f"To be safe, {what}"
    )
