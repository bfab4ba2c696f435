"""The connection to a server: it reconnects, and sends again what was not answered.

All of it runs on one event loop; `enqueue` may be called from any thread. Every call completes: by its answer, by its
timeout, or because no more attempts are made to connect.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headwater import processes
from headwater.broker.flow import Completion, complete
from headwater.broker.logger import logger
from headwater.client.options import ConnectionSettings, is_permanent, unreachable, why_not_connected
from headwater.client.outbox import Numbering, Outcome, Request, Resumable, gather, outcome_of, outcomes_of, too_late
from headwater.client.transport import ANSWER_BYTES_MAX, ClientTransport, connect_transport
from headwater.errors import ClosedError, HeadwaterError, UnauthorizedError, UnreachableError
from headwater.protocol.jsonrpc import FRAME_BYTES_MAX, METHOD_NOT_FOUND, Answer, Call, Fault, fault_of
from headwater.protocol.methods import Hello, Welcome
from headwater.protocol.session import Exchange, Session

DEADLINES_S = 0.25  # between two checks of deadlines
GATHER_MAX = 200  # publishes in one call
DRAIN_SECONDS_MAX = 5.0  # for the last answers when it is closed
UNANSWERED_MAX = 10_000  # calls under way at a time; more wait

_welcome = msgspec.json.Decoder(Welcome)


class Connection:
    def __init__(self, settings: ConnectionSettings, publisher: str, loop: asyncio.AbstractEventLoop) -> None:
        self.settings = settings
        self.loop = loop
        self.state = "disconnected"
        self.resumables: list[Resumable] = []
        self.on_call: Callable[[Exchange, Call], None] | None = None  # calls and notifications of the server
        self.first_connection: Completion[None] = Completion()
        self._thread = threading.get_ident()
        self._publisher = publisher
        self._state_callbacks: list[Callable[[str], None]] = []
        self._inbox: deque[Request] = deque()
        self._is_scheduled = False
        self._is_flushing = False  # a flush follows, so none is scheduled
        self._waiting: deque[Request] = deque()  # for a connection, or for answers
        self._unanswered: dict[int, Request] = {}
        self._session = Session()
        self._transport: ClientTransport | None = None
        self._numbering = Numbering()
        self._pid = processes.ask()
        self._is_closed = False
        self._is_over = False
        self._failure: str | None = None  # why no more attempts are made
        self._closing: asyncio.Event | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None

    # --- from any thread ----------------------------------------------------------------------------------------

    def enqueue(self, request: Request, timeout_s: float | None = None) -> Completion[Any]:
        """Send it when possible; its completion is finished in any case. The default timeout is that of the connection;
        infinity waits as long as attempts are made to connect."""
        if self._is_closed or processes.pid != self._pid:
            complete([(request.completion, None, self._closed())])
            return request.completion
        limit_s = self.settings.timeout_s if timeout_s is None else timeout_s
        request.deadline_s = self.loop.time() + limit_s
        self._inbox.append(request)
        if len(self._inbox) >= GATHER_MAX and threading.get_ident() == self._thread:
            self._drain_inbox()  # enough for a frame: the server begins while more gathers
        elif not self._is_scheduled and self.forked:
            self.refuse_stranded()
        elif not self._is_scheduled:
            self._is_scheduled = True
            here = threading.get_ident() == self._thread
            try:
                (self.loop.call_soon if here else self.loop.call_soon_threadsafe)(self._drain_inbox)
            except RuntimeError:  # the loop has been closed
                self.refuse_stranded()
        return request.completion

    def refuse_stranded(self) -> None:
        """Refuse what was queued: the loop is closed, so it will not be sent."""
        self._is_scheduled = False
        self._refuse_all(self._closed())

    def on_state(self, callback: Callable[[str], None]) -> None:
        self._state_callbacks.append(callback)

    # --- keeping the connection -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start connecting, on the loop."""
        self._thread = threading.get_ident()
        self._closing = asyncio.Event()
        self._supervisor = self.loop.create_task(self._supervise())
        self._deadline_timer = self.loop.call_later(DEADLINES_S, self._check_deadlines)

    async def _supervise(self) -> None:
        """However this ends, each call that waits or comes later gets an error with the cause."""
        try:
            error = await self._reconnect()
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

    async def _reconnect(self) -> HeadwaterError:
        """Connect again and again. Temporary errors are retried; a permanent one is returned or raised."""
        attempt = 0
        give_up_s = self.loop.time() + self.settings.connect_timeout_s
        while not self._is_closed:
            self._set_state("connecting" if not self.first_connection.done else "reconnecting")
            try:
                async with asyncio.timeout(self.settings.connect_timeout_s):
                    lost = await self._connect()
            except (OSError, TimeoutError, HeadwaterError) as exc:
                attempt += 1
                delay_s = self.settings.backoff.delay_s(attempt, random.random())
                permanent = is_permanent(exc) or delay_s is None
                too_late = not self.first_connection.done and self.loop.time() + (delay_s or 0) >= give_up_s
                if permanent or too_late:
                    return (
                        exc
                        if isinstance(exc, UnauthorizedError)
                        else unreachable(self.settings, why_not_connected(exc))
                    )
                await self._pause(delay_s or 0.0)
                continue
            attempt = 0
            await lost
            self._on_lost()
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
        """Connect, say hello, resume subscriptions, send what was not answered."""
        self._session = session = Session(frame_bytes_max=ANSWER_BYTES_MAX, outgoing_bytes_max=FRAME_BYTES_MAX)
        session.on_outgoing = self._flush_soon
        self._transport = transport = await connect_transport(self.settings, self._receive, self.send_waiting)
        try:
            welcome = await self._greet(transport)
            session.respect(frame_bytes_max=welcome.frame_bytes_max, batch_max=welcome.batch_calls_max)
            for resumable in list(self.resumables):
                request = resumable.resume()
                if request is not None:
                    request.deadline_s = self.loop.time() + self.settings.timeout_s
                    self._send(request)
        except BaseException:
            transport.abort()
            self._on_lost()
            raise
        self._set_state("connected")
        complete([(self.first_connection, None, None)])
        self.send_waiting()
        return transport.lost

    async def _greet(self, transport: ClientTransport) -> Welcome:
        answered: asyncio.Future[Any] = self.loop.create_future()
        hello = Request("rpc.hello", Hello("headwater", self._publisher), _welcome.decode, again=False)
        hello.completion.then(self.loop, answered.set_result)
        self._send(hello)
        await asyncio.wait([answered, transport.lost], return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise UnreachableError("the connection broke at once")
        welcome: Welcome = hello.completion.result()
        if not welcome.authenticated:
            raise UnauthorizedError("this server requires a token", where=self.settings.host, next="Pass token=…")
        return welcome

    def _on_lost(self) -> None:
        """Calls that may be sent again wait for the next connection; the outcome of the others is unknown."""
        self._transport = None
        for resumable in list(self.resumables):
            resumable.lost_connection()
        unanswered, self._unanswered = self._unanswered, {}
        again: list[Request] = []
        unknown: list[Outcome] = []
        for request in unanswered.values():
            if request.parts:
                again.extend(request.parts)
            elif request.again:
                again.append(request)
            else:
                error = UnreachableError(
                    "the connection broke before the answer came; it may have been done", where=request.method
                )
                unknown.append((request.completion, None, error))
        self._numbering.broken(again)
        self._waiting.extendleft(reversed(again))
        complete(unknown)

    def _fail(self, error: HeadwaterError) -> None:
        self._failure = error.why
        try:
            if self._transport is not None:
                self._transport.abort()
                self._transport = None
            if not self._is_closed:
                self._set_state("failed")
        finally:
            complete([(self.first_connection, None, error)])
            self._refuse_all(error)

    def _refuse_all(self, error: Exception) -> None:
        sent = [each for request in self._unanswered.values() for each in (request.parts or [request])]
        requests = [*sent, *self._waiting]
        self._unanswered.clear()
        self._waiting.clear()
        while self._inbox:  # one by one: other threads may append meanwhile
            requests.append(self._inbox.popleft())
        complete([(request.completion, None, error) for request in requests])

    def refuse_waiting(self, consumer: Resumable, error: Exception) -> None:
        """Fail the calls of a consumer that were not sent yet; from any thread."""
        unsent = [*self._waiting.copy(), *self._inbox.copy()]
        complete([(request.completion, None, error) for request in unsent if request.consumer is consumer])

    def _set_state(self, state: str) -> None:
        if state != self.state:
            self.state = state
            for callback in self._state_callbacks:
                try:
                    callback(state)
                except (Exception, asyncio.CancelledError) as exc:
                    self.loop.call_exception_handler({"message": "an on_state callback failed", "exception": exc})

    # --- sending ------------------------------------------------------------------------------------------------

    def _drain_inbox(self) -> None:
        self._is_scheduled = False
        if self._is_over:
            self._refuse_all(self._closed())
            return
        if self._failure is not None:
            self._refuse_all(unreachable(self.settings, f"no more attempts are made to connect: {self._failure}"))
            return
        inbox, waiting = self._inbox, self._waiting
        while inbox:
            waiting.append(inbox.popleft())
        self._is_flushing = True
        try:
            self.send_waiting()
        finally:
            self._is_flushing = False
        self._flush()

    def send_waiting(self) -> None:
        if self.state != "connected" or self._transport is None:
            return
        not_ready: list[Request] = []
        publishes: list[Request] = []  # consecutive ones, which go together
        while self._waiting and len(self._unanswered) < UNANSWERED_MAX and not self._transport.is_full:
            request = self._waiting.popleft()
            if request.completion.done:  # timed out or cancelled
                continue
            if request.count:
                self._numbering.assign(request)
            if request.gathers:
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

    def _send_together(self, publishes: Sequence[Request]) -> None:
        self._send(publishes[0] if len(publishes) == 1 else gather(publishes))

    def _send(self, request: Request) -> None:
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
            complete([(request.completion, None, exc)])
            return
        self._unanswered[id] = request

    def notify(self, method: str, params: Any) -> None:
        """Send a notification, on the loop; it is lost if there is no connection."""
        if self._transport is not None:
            self._session.notify(method, params)

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._transport is not None and (texts := self._session.texts_to_send()):
            self._transport.send(texts)

    # --- receiving ------------------------------------------------------------------------------------------------

    def _receive(self, text: bytes) -> None:
        done: list[Outcome] = []
        try:
            for item in self._session.receive_text(text):
                if isinstance(item, Answer):
                    request = self._unanswered.pop(item.id, None)  # type: ignore[arg-type]
                    if request is None:  # it timed out, or was answered before
                        continue
                    if request.parts:
                        done += self._outcomes_of_parts(request, item)
                        continue
                    done.append(outcome_of(request, item))
                    if request.number:
                        self._numbering.settle(request, self.loop.time())
                else:
                    self._take_calls(item)
        finally:
            goes_on = complete(done)
        if self._waiting:
            self.send_waiting()
        if goes_on and not self._is_scheduled:  # behind those that go on: what they ask next is sent in the same turn
            self._is_scheduled = True
            self.loop.call_soon(self._drain_inbox)

    def _outcomes_of_parts(self, batch: Request, answer: Answer) -> list[Outcome]:
        outcomes, now_s = outcomes_of(batch, answer), self.loop.time()
        if outcomes is None:  # sent one by one, each gets its own answer
            for part in batch.parts:
                part.gathers = False
            self._waiting.extendleft(reversed(batch.parts))
            return []
        for part in batch.parts:
            self._numbering.settle(part, now_s)
        return outcomes

    def _take_calls(self, exchange: Exchange) -> None:
        for call in exchange.calls:
            try:
                if self.on_call is None:
                    raise Fault(METHOD_NOT_FOUND, "Method not found")
                self.on_call(exchange, call)
            except Exception as exc:
                exchange.refuse(call, fault_of(exc))

    def _check_deadlines(self) -> None:
        self._deadline_timer = self.loop.call_later(
            DEADLINES_S, self._check_deadlines
        )  # first: an error must not end the checks
        now_s = self.loop.time()
        late: list[Request] = []
        try:
            for id, request in list(self._unanswered.items()):
                if request.deadline_s is not None and request.deadline_s <= now_s:
                    del self._unanswered[id]
                    late += request.parts or [request]
            late += [each for each in self._waiting if not each.completion.done and _is_late(each, now_s)]
            for request in late:
                self._numbering.settle(request, now_s, given_up=True)
            self._numbering.confirm_late(now_s)
        finally:
            complete([(request.completion, None, too_late(request)) for request in late])

    # --- ending -------------------------------------------------------------------------------------------------

    @property
    def forked(self) -> bool:
        return processes.is_forked(self._pid)

    def refuse_closed(self) -> None:
        if self._is_closed or self.forked:
            raise self._closed()

    def _closed(self) -> ClosedError:
        if self.forked:
            return processes.forked_error(self.settings.url)
        why = "the log is closed" if self._is_closed else "the event loop of the log is closed"
        return ClosedError(why, where=self.settings.url, next="Open it again")

    async def _drain(self, transport: ClientTransport) -> None:
        """Wait for the answers to publishes and settlements, unless the connection breaks."""
        sent = [each for request in self._unanswered.values() for each in (request.parts or [request])]
        awaited = [each for each in (*sent, *self._waiting) if each.count or (each.consumer and not each.alone)]
        answers: asyncio.Future[Any] = asyncio.gather(*(request.completion.wait_async() for request in awaited))
        ends: list[asyncio.Future[Any]] = [answers, transport.lost]
        await asyncio.wait(ends, timeout=DRAIN_SECONDS_MAX, return_when=asyncio.FIRST_COMPLETED)
        answers.cancel()

    async def close(self) -> None:
        """Send queued calls, wait up to DRAIN_SECONDS_MAX for their answers, and close."""
        self._is_closed = True
        try:
            self._drain_inbox()
            if self._transport is not None and self.state == "connected":
                await self._drain(self._transport)
        finally:  # also if it is cancelled meanwhile
            self._is_over = True
            if self._closing is not None:
                self._closing.set()
            if self._deadline_timer is not None:
                self._deadline_timer.cancel()
            if self._transport is not None:
                self._flush()
                await self._transport.close()
            if self._supervisor is not None:
                self._supervisor.cancel()
                await asyncio.gather(self._supervisor, return_exceptions=True)
            self._refuse_all(self._closed())
        if self.state != "failed":
            self._set_state("disconnected")


def _is_late(request: Request, now_s: float) -> bool:
    if request.deadline_s is not None and request.deadline_s <= now_s:
        return True
    return request.consumer is not None and request.consumer.is_leaving
