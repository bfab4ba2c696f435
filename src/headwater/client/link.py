"""The connection to a server: kept up, and what was not answered is sent again.

All of it runs on one event loop; `enqueue` may be called from any thread. Every call is finished in the end: by its
answer, by its time limit, or because there is no more hope for a connection.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from headwater.broker.flow import Ticket, finish
from headwater.broker.logger import logger
from headwater.client.numbering import Numbering
from headwater.client.options import Settings, is_hopeless, unreachable, why_not_connected
from headwater.client.outcomes import Outcome, gathered, outcome_of, outcomes_of, too_late
from headwater.client.request import Request, Resuming
from headwater.client.wire import ANSWER_BYTES_MAX, Wire, open_wire
from headwater.errors import Closed, HeadwaterError, Unauthorized, Unreachable
from headwater.protocol.faults import fault_of
from headwater.protocol.jsonrpc import FRAME_BYTES_MAX, Answer, Call, Fault
from headwater.protocol.session import Exchange, Session
from headwater.protocol.wire import Hello, Welcome

LOOK_S = 0.25  # how often time limits are looked at
GATHER_MAX = 200  # publishes in one call
DRAIN_SECONDS_MAX = 5.0  # for the last answers when it is closed
UNANSWERED_MAX = 10_000  # calls on their way at a time; more wait here

_welcome = msgspec.json.Decoder(Welcome)


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
        self._numbering = Numbering()
        self._pid = os.getpid()
        self._is_closed = False
        self._is_over = False
        self._gave_up: str | None = None  # why there will be no connection any more
        self._closing: asyncio.Event | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._looker: asyncio.TimerHandle | None = None

    # --- for everybody ------------------------------------------------------------------------------------------

    def enqueue(self, request: Request, timeout_s: float | None = None) -> Ticket[Any]:
        """Send it when possible; its ticket is finished in any case. No time limit means the link's own; infinity means
        that it waits for as long as there is hope."""
        if self._is_closed or self.forked:
            finish([(request.ticket, None, self._closed())])
            return request.ticket
        limit_s = self.settings.timeout_s if timeout_s is None else timeout_s
        request.deadline_s = self.loop.time() + limit_s
        self._inbox.append(request)
        if len(self._inbox) >= GATHER_MAX and threading.get_ident() == self._thread:
            self._take_inbox()  # enough for a frame: let the server begin while more gathers
            self._flush()
        elif not self._is_scheduled:
            self._is_scheduled = True
            here = threading.get_ident() == self._thread
            try:
                (self.loop.call_soon if here else self.loop.call_soon_threadsafe)(self._take_inbox)
            except RuntimeError:  # the loop has been closed
                self.refuse_stranded()
        return request.ticket

    def refuse_stranded(self) -> None:
        """From any thread: the loop is closed and takes nothing any more."""
        self._is_scheduled = False
        self._refuse_all(self._closed())

    def on_state(self, callback: Callable[[str], None]) -> None:
        self._listeners.append(callback)

    # --- keeping the connection -----------------------------------------------------------------------------------

    def start(self) -> None:
        """On the loop."""
        self._thread = threading.get_ident()
        self._closing = asyncio.Event()
        self._keeper = self.loop.create_task(self._supervise())
        self._looker = self.loop.call_later(LOOK_S, self._look_at_deadlines)

    async def _supervise(self) -> None:
        """However the keeping ends, each call that waits or comes later has an outcome that names the cause."""
        try:
            error = await self._keep()
        except BaseException as exc:
            is_cancelled = isinstance(exc, asyncio.CancelledError)
            why = "the task that keeps the connection was cancelled" if is_cancelled else why_not_connected(exc)
            error = unreachable(self.settings, why)
            error.__cause__ = exc
            if not isinstance(exc, Exception):
                raise
            logger.exception("the connection to %s cannot be kept", self.settings.host)
        finally:
            self._fail(self._closed() if self._is_closed else error)

    async def _keep(self) -> HeadwaterError:
        """Connect again and again. The trouble that waiting may mend is waited for; the rest is returned or raised."""
        attempt = 0
        give_up_s = self.loop.time() + self.settings.connect_timeout_s
        while not self._is_closed:
            self._become("connecting" if not self.first_connection.done else "reconnecting")
            try:
                async with asyncio.timeout(self.settings.connect_timeout_s):
                    lost = await self._connect()
            except (OSError, TimeoutError, HeadwaterError) as exc:
                attempt += 1
                delay_s = self.settings.backoff.delay_s(attempt, random.random())
                hopeless = is_hopeless(exc) or delay_s is None
                too_late = not self.first_connection.done and self.loop.time() + (delay_s or 0) >= give_up_s
                if hopeless or too_late:
                    return exc if isinstance(exc, Unauthorized) else unreachable(self.settings, why_not_connected(exc))
                await self._pause(delay_s or 0.0)
                continue
            attempt = 0
            await lost
            self._lose()
            if not self._is_closed and self.settings.backoff.strategy == "none":
                return unreachable(self.settings, "the connection broke")
        return self._closed()

    async def _pause(self, delay_s: float) -> None:
        assert self._closing is not None
        try:
            async with asyncio.timeout(delay_s):
                await self._closing.wait()
        except TimeoutError:
            pass

    async def _connect(self) -> asyncio.Future[None]:
        """Connect, say hello, take up what is to be resumed, send what was not answered."""
        self._session = session = Session(frame_bytes_max=ANSWER_BYTES_MAX, outgoing_bytes_max=FRAME_BYTES_MAX)
        session.on_outgoing = self._flush_soon
        self._wire = wire = await open_wire(self.settings, self._receive, self.send_waiting)
        try:
            self.welcome = await self._greet(wire)
            session.respect(frame_bytes_max=self.welcome.frame_bytes_max, batch_max=self.welcome.batch_calls_max)
            for resuming in list(self.resuming):
                request = resuming.resume()
                if request is not None:
                    request.deadline_s = self.loop.time() + self.settings.timeout_s
                    self._send(request)
        except BaseException:
            wire.abort()
            self._lose()
            raise
        self._become("connected")
        finish([(self.first_connection, None, None)])
        self.send_waiting()
        return wire.lost

    async def _greet(self, wire: Wire) -> Welcome:
        answered: asyncio.Future[Any] = self.loop.create_future()
        hello = Request("rpc.hello", Hello("headwater", self._publisher), _welcome.decode, again=False)
        hello.ticket.then(self.loop, answered.set_result)
        self._send(hello)
        await asyncio.wait([answered, wire.lost], return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise Unreachable("the connection broke at once")
        welcome: Welcome = hello.ticket.result()
        if not welcome.authenticated:
            raise Unauthorized("this server wants a token", where=self.settings.host, next="Pass token=…")
        return welcome

    def _lose(self) -> None:
        """The connection is gone. What may be sent again waits for the next one; the outcome of the rest is unknown."""
        self._wire = None
        for resuming in list(self.resuming):
            resuming.lost_connection()
        unanswered, self._unanswered = self._unanswered, {}
        again: list[Request] = []
        unknown: list[Outcome] = []
        for request in unanswered.values():
            if request.parts:
                again.extend(request.parts)
            elif request.again:
                again.append(request)
            else:
                error = Unreachable(
                    "the connection broke before the answer came; it may have been done", where=request.method
                )
                unknown.append((request.ticket, None, error))
        self._numbering.broken(again)
        self._waiting.extendleft(reversed(again))
        finish(unknown)

    def _fail(self, error: HeadwaterError) -> None:
        self._gave_up = error.why
        try:
            if self._wire is not None:
                self._wire.abort()
                self._wire = None
            if not self._is_closed:
                self._become("failed")
        finally:
            finish([(self.first_connection, None, error)])
            self._refuse_all(error)

    def _refuse_all(self, error: Exception) -> None:
        sent = [each for request in self._unanswered.values() for each in (request.parts or [request])]
        requests = [*sent, *self._waiting]
        self._unanswered.clear()
        self._waiting.clear()
        while self._inbox:  # one by one: other threads may put more into it meanwhile
            requests.append(self._inbox.popleft())
        finish([(request.ticket, None, error) for request in requests])

    def refuse_waiting(self, consumer: Resuming, error: Exception) -> None:
        """From any thread: what it asked for and was not sent is no use any more."""
        unsent = [*self._waiting.copy(), *self._inbox.copy()]
        finish([(request.ticket, None, error) for request in unsent if request.consumer is consumer])

    def _become(self, state: str) -> None:
        if state != self.state:
            self.state = state
            for listener in self._listeners:
                try:
                    listener(state)
                except (Exception, asyncio.CancelledError) as exc:
                    self.loop.call_exception_handler({"message": "an on_state callback failed", "exception": exc})

    # --- sending ------------------------------------------------------------------------------------------------

    def _take_inbox(self) -> None:
        self._is_scheduled = False
        if self._is_over:
            self._refuse_all(self._closed())
            return
        if self._gave_up is not None:
            self._refuse_all(unreachable(self.settings, f"no more attempts are made to connect: {self._gave_up}"))
            return
        inbox, waiting = self._inbox, self._waiting
        while inbox:
            waiting.append(inbox.popleft())
        self.send_waiting()
        self._flush()

    def send_waiting(self) -> None:
        if self.state != "connected" or self._wire is None:
            return
        not_ready: list[Request] = []
        publishes: list[Request] = []  # neighbours that go together
        while self._waiting and len(self._unanswered) < UNANSWERED_MAX and not self._wire.is_full:
            request = self._waiting.popleft()
            if request.ticket.done:  # too late, or nobody wants it any more
                continue
            if request.gathers:
                self._numbering.give(request)
                if len(publishes) == GATHER_MAX or (publishes and request.number != publishes[-1].number + 1):
                    self._send_together(publishes)
                    publishes = []
                publishes.append(request)
                continue
            if publishes:
                self._send_together(publishes)
                publishes = []
            if request.consumer is not None and not request.consumer.is_ready:
                not_ready.append(request)
                continue
            self._send(request)
        if publishes:
            self._send_together(publishes)
        self._waiting.extendleft(reversed(not_ready))

    def _send_together(self, publishes: list[Request]) -> None:
        self._send(publishes[0] if len(publishes) == 1 else gathered(publishes))

    def _send(self, request: Request) -> None:
        if request.count:
            self._numbering.give(request)
        try:
            params = request.params() if callable(request.params) else request.params
            id = self._session.call(request.method, params, alone=request.alone)
        except Exception as exc:
            if request.parts:  # too much for one frame
                half = len(request.parts) // 2
                self._send_together(request.parts[:half])
                self._send_together(request.parts[half:])
                return
            self._numbering.settle(request, self.loop.time())
            finish([(request.ticket, None, exc)])
            return
        self._unanswered[id] = request

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
        done: list[Outcome] = []
        try:
            for item in self._session.receive_text(text):
                if isinstance(item, Answer):
                    request = self._unanswered.pop(item.id, None)  # type: ignore[arg-type]
                    if request is not None:
                        done += self._outcomes(request, item)
                else:
                    self._take_calls(item)
        finally:
            finish(done)
        if self._waiting:
            self.send_waiting()

    def _outcomes(self, request: Request, answer: Answer) -> list[Outcome]:
        parts, now_s = request.parts or [request], self.loop.time()
        outcomes = outcomes_of(request, answer) if request.parts else [outcome_of(request, answer)]
        if outcomes is None:  # each finds out by itself
            for part in parts:
                part.gathers = False
            self._waiting.extendleft(reversed(parts))
            return []
        for part in parts:
            self._numbering.settle(part, now_s)
        return outcomes

    def _take_calls(self, exchange: Exchange) -> None:
        for call in exchange.calls:
            try:
                if self.on_call is None:
                    raise Fault(-32601, "Method not found")
                self.on_call(exchange, call)
            except Exception as exc:
                exchange.refuse(call, exc if isinstance(exc, Fault) else fault_of(exc))

    def _look_at_deadlines(self) -> None:
        self._looker = self.loop.call_later(LOOK_S, self._look_at_deadlines)  # first: no error may end the looking
        now_s = self.loop.time()
        late: list[Request] = []
        try:
            for id, request in list(self._unanswered.items()):
                if request.deadline_s is not None and request.deadline_s <= now_s:
                    del self._unanswered[id]
                    self._session.forget(id)
                    late += request.parts or [request]
            late += [each for each in self._waiting if not each.ticket.done and _is_late(each, now_s)]
            for request in late:
                self._numbering.settle(request, now_s, given_up=True)
            self._numbering.look(now_s)
        finally:
            finish([(request.ticket, None, too_late(request)) for request in late])

    # --- ending -------------------------------------------------------------------------------------------------

    @property
    def forked(self) -> bool:
        """A forked child has no thread that would bring it an answer, and must leave its parent's socket alone."""
        return os.getpid() != self._pid

    def refuse_closed(self) -> None:
        if self._is_closed or self.forked:
            raise self._closed()

    def _closed(self) -> Closed:
        if self.forked:
            why = "the log was opened by the process that this one was forked from"
            return Closed(why, where=self.settings.url, next="Open it again in this process")
        why = "the log is closed" if self._is_closed else "the event loop of the log is closed"
        return Closed(why, where=self.settings.url, next="Open it again")

    async def _drain(self, wire: Wire) -> None:
        """Wait for the answers to what was published or settled, unless the connection breaks."""
        sent = [each for request in self._unanswered.values() for each in (request.parts or [request])]
        awaited = [each for each in (*sent, *self._waiting) if each.count or (each.consumer and not each.alone)]
        answers: asyncio.Future[Any] = asyncio.gather(*(request.ticket.wait_async() for request in awaited))
        ends: list[asyncio.Future[Any]] = [answers, wire.lost]
        await asyncio.wait(ends, timeout=DRAIN_SECONDS_MAX, return_when=asyncio.FIRST_COMPLETED)
        answers.cancel()

    async def close(self) -> None:
        """Send what is queued, wait for its answers for a while, and say goodbye."""
        self._is_closed = True
        try:
            self._take_inbox()
            if self._wire is not None and self.state == "connected":
                await self._drain(self._wire)
        finally:  # also if it is cancelled meanwhile
            self._is_over = True
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


def _is_late(request: Request, now_s: float) -> bool:
    if request.deadline_s is not None and request.deadline_s <= now_s:
        return True
    return request.consumer is not None and request.consumer.is_leaving
