"""What the two faces of a log share: nothing in here waits, so nothing in here has a colour."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from headwater.broker.claims import Claimed, Failure
from headwater.broker.dead_letters import LetterFilter
from headwater.broker.flow import Flow, Ticket, Within
from headwater.broker.handlers import Handler, report_ack
from headwater.broker.live import LiveVerbs
from headwater.broker.options import SubscribeOptions, check_subscription_id, make_spec
from headwater.broker.reading import Prefetch
from headwater.broker.received import Received
from headwater.broker.verbs import Consumer, LogVerbs, RemoteVerbs
from headwater.errors import InvalidOption
from headwater.message import Span, check_whole, span_ms
from headwater.ports.dedupe import DedupeQueue
from headwater.ports.records import Gap

if TYPE_CHECKING:
    from headwater.broker.tracing import Tracing

CONCURRENCY_MAX = 1_000

Function = TypeVar("Function", bound=Callable[..., Any])


class Registration(NamedTuple):
    """A handler as declared with `@log.on(...)`."""

    id: str
    pattern: str
    handler: Handler
    concurrency: int
    auto_ack: bool
    on_gap: Callable[[Gap], None] | None
    dedupe: DedupeQueue | None
    options: SubscribeOptions


class LogFace:
    _runs_coroutines = False

    def __init__(self, core: LogVerbs, tracing: Tracing | None = None) -> None:
        self._core = core if tracing is None else tracing.of_log(core)
        self._tracing = tracing
        self._registrations: list[Registration] = []
        self._ended: set[str] = set()  # handlers that ran and were stopped

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    @property
    def live(self) -> LiveVerbs:
        """Plain callbacks for messages as they come: subscribe, unsubscribe, unsubscribe_all."""
        return self._core.live

    @property
    def name(self) -> str:
        return self._core.name

    def _declare(
        self,
        pattern: str,
        id: str | None,
        concurrency: int,
        auto_ack: bool,
        on_gap: Callable[[Gap], None] | None,
        dedupe: DedupeQueue | None,
        options: SubscribeOptions,
    ) -> Callable[[Handler], Handler]:
        check_whole("concurrency", concurrency, 1, CONCURRENCY_MAX)
        _check_dedupe(dedupe, auto_ack, pattern)
        kept = {name: value for name, value in options.items() if name not in ("start", "wait", "takeover")}
        make_spec(pattern, kept)  # complain here, not when it is started

        def declare(handler: Handler) -> Handler:
            if inspect.iscoroutinefunction(handler) and not self._runs_coroutines:
                raise InvalidOption(
                    f"{handler.__qualname__} is a coroutine function", where=pattern, next="Use headwater.connect()"
                )
            name = check_subscription_id(id or str(getattr(handler, "__name__", "handler")))
            known = [registration.id for registration in self._registrations]
            if name in self._ended:  # it ran and was stopped: this one takes its place
                self._ended.discard(name)
                del self._registrations[known.index(name)]
            elif name in known:
                raise InvalidOption(
                    f"there is a handler for subscription '{name}' already",
                    where=pattern,
                    next="Give this one another id; to do more at a time, raise concurrency",
                )
            run = handler if self._tracing is None else self._tracing.of_handler(handler, awaits=self._runs_coroutines)
            self._registrations.append(Registration(name, pattern, run, concurrency, auto_ack, on_gap, dedupe, options))
            return handler

        return declare

    def _require_handlers(self) -> None:
        if not self._registrations:
            raise InvalidOption("there is no handler to run", next="Declare one with @log.on(pattern) first")


def refuse_other_colour(tx: Any, *, awaits: bool) -> None:
    """A blocking connection would stop the event loop, and nobody would await what an asynchronous one answers."""
    if inspect.iscoroutinefunction(getattr(tx, "execute", None)) != awaits:
        kind = "an asynchronous" if awaits else "a blocking"
        raise InvalidOption(f"tx must be {kind} connection here", next="psycopg has both: Connection, AsyncConnection")


class SubscriptionFace:
    def __init__(self, core: LogVerbs, subscriber: Consumer) -> None:
        self._core = core
        self._subscriber = subscriber
        self._prefetch = Prefetch(subscriber.spec, subscriber.prefetch)
        self._buffer: list[Claimed] = []  # fetched ahead by the iterator, next one last
        self._unawaited: list[Ticket[list[int]]] = []  # acks that nobody waits for
        self._unawaited_lock = threading.Lock()

    def __repr__(self) -> str:
        spec = self._subscriber.spec
        return f"<{type(self).__name__} {self.id}: {spec.pattern}, {spec.mode}>"

    @property
    def id(self) -> str:
        return self._subscriber.id

    @property
    def resumed_from(self) -> int:
        """Everything at or below this seq was settled when the subscription began here; 0 for a new one."""
        return self._subscriber.resumed_from

    def on_gap(self, callback: Callable[[Gap], None]) -> Callable[[Gap], None]:
        """Call this when messages were deleted before they were settled here."""
        self._subscriber.on_gap = callback
        return callback

    def _fetch_ahead(self, wait: float | None) -> Flow[list[Claimed]]:
        """For the iterator: keep what is fetched ahead, and its leases, until the user gets to it."""
        self._prefetch.emptied(time.monotonic())
        found = yield from self._subscriber.fetch(self._prefetch.size, wait)
        self._prefetch.filled(len(found), time.monotonic())
        for claimed in found:
            self._subscriber.began(claimed)
        self._buffer = found[::-1]
        return found

    def _take(self) -> Claimed:
        claimed = self._buffer.pop()
        self._subscriber.ended(claimed)
        return claimed

    def _unseen(self) -> list[int]:
        return [claimed.message.seq for claimed in self._buffer]

    def _ack_soon(self, settled: list[Claimed]) -> None:
        """Ask for an ack and go on; should it fail, that is logged with a later one, or at the end."""
        with self._unawaited_lock:
            self._unawaited.append(self._subscriber.submit_ack(settled, then=lambda: None))
            done = [ack for ack in self._unawaited if ack.done]
            self._unawaited = [ack for ack in self._unawaited if not ack.done]
        for ack in done:
            report_ack(self._subscriber, ack)

    def _close(self) -> Flow[None]:
        with self._unawaited_lock:
            unawaited, self._unawaited = self._unawaited, []
        for ack in unawaited:
            yield Within(ack, None)
            report_ack(self._subscriber, ack)
        yield from self._subscriber.close(self._unseen())
        self._core.forget(self._subscriber)


class RemoteFace:
    def __init__(self, inner: RemoteVerbs) -> None:
        self._inner = inner

    @property
    def state(self) -> str:
        """disconnected, connecting, connected, reconnecting or failed."""
        return self._inner.state

    def on_state(self, callback: Callable[[str], None]) -> Callable[[str], None]:
        """Call this with the new state whenever it changes."""
        self._inner.on_state(callback)
        return callback

    def notify(self, method: str, params: Any = None) -> None:
        """Tell the server something and expect no answer."""
        self._inner.notify(method, params)

    def method(self, name: str) -> Callable[[Function], Function]:
        """Declare a function that the server may call."""

        def declare(function: Function) -> Function:
            self._inner.offer(name, function)
            return function

        return declare


def _check_dedupe(dedupe: object, auto_ack: bool, pattern: str) -> None:
    if dedupe is None:
        return
    if not callable(getattr(dedupe, "begin", None)):
        raise InvalidOption(f"dedupe must be a dedupe queue, not {dedupe!r}", where=pattern)
    if not auto_ack:
        raise InvalidOption(
            "without auto_ack nobody knows when a message is done, and dedupe has to",
            where=pattern,
            next="Leave auto_ack on; the handler may still ack, nack or reject by itself",
        )


def by_id(ids: tuple[int, ...], given: LetterFilter) -> LetterFilter:
    """Dead letters named one by one, as well as by filter."""
    for id in ids:
        check_whole("the id of a dead letter", id, 1, 2**63 - 1)
    return {**given, "ids": ids} if ids else given


def claimed_of(messages: Iterable[Received]) -> list[Claimed]:
    return [message._claimed for message in messages]


def mark_settled(messages: Iterable[Received]) -> None:
    for message in messages:
        message.settled = True


def nack_arguments(delay: Span | None, error: str | None) -> tuple[int | None, Failure]:
    return (None if delay is None else span_ms(delay, "delay")), Failure("processing_error", error)
