"""What the two faces of a log share: nothing in here waits, so nothing in here has a colour."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from headwater.broker.claims import Claimed, Failure
from headwater.broker.consumer import Consumer
from headwater.broker.dead_letters import LetterFilter
from headwater.broker.flow import Flow
from headwater.broker.handlers import Handler, Handlers, Registration, Worker
from headwater.broker.live import LiveVerbs
from headwater.broker.options import SubscribeOptions, check_subscription_id, make_spec
from headwater.broker.received import Received
from headwater.broker.verbs import LogVerbs, RemoteVerbs
from headwater.errors import InvalidOption
from headwater.message import Span, check_whole, span_ms
from headwater.ports.dedupe import DedupeQueue
from headwater.ports.records import Gap

if TYPE_CHECKING:
    from headwater.broker.tracing import Tracing

CONCURRENCY_MAX = 1_000

Function = TypeVar("Function", bound=Callable[..., Any])


class LogFace(ABC):
    _runs_coroutines = False

    def __init__(self, core: LogVerbs, tracing: Tracing | None = None) -> None:
        self._core = core if tracing is None else tracing.of_log(core)
        self._tracing = tracing
        self._handlers = Handlers(self._core, self._spawn)

    @abstractmethod
    def _spawn(self, flow: Flow[None], name: str) -> Worker:
        """Run a flow on a thread or in a task of its own."""

    @abstractmethod
    def _receiving(self, consumer: Consumer) -> Callable[[Claimed], Any]:
        """How the claims of a consumer become messages for users."""

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
            run = handler if self._tracing is None else self._tracing.of_handler(handler, awaits=self._runs_coroutines)
            self._handlers.declare(
                Registration(
                    name, pattern, run, concurrency, auto_ack, on_gap, dedupe, options, receiving=self._receiving
                )
            )
            return handler

        return declare

    def _with_handlers(self, health: dict[str, Any]) -> dict[str, Any]:
        handlers = self._handlers.health()
        return {**health, "handlers": handlers} if handlers else health


def refuse_other_colour(tx: Any, *, awaits: bool) -> None:
    """A blocking connection would stop the event loop, and nobody would await what an asynchronous one answers."""
    if inspect.iscoroutinefunction(getattr(tx, "execute", None)) != awaits:
        kind = "an asynchronous" if awaits else "a blocking"
        raise InvalidOption(f"tx must be {kind} connection here", next="psycopg has both: Connection, AsyncConnection")


class SubscriptionFace:
    def __init__(self, core: LogVerbs, consumer: Consumer) -> None:
        self._core = core
        self._consumer = consumer

    def __repr__(self) -> str:
        spec = self._consumer.spec
        return f"<{type(self).__name__} {self.id}: {spec.pattern}, {spec.mode}>"

    @property
    def id(self) -> str:
        return self._consumer.id

    @property
    def resumed_from(self) -> int:
        """Everything at or below this seq was settled when the subscription began here; 0 for a new one."""
        return self._consumer.resumed_from

    def on_gap(self, callback: Callable[[Gap], None]) -> Callable[[Gap], None]:
        """Call this when messages were deleted before they were settled here."""
        self._consumer.on_gap = callback
        return callback

    def _ack_all(self, messages: Sequence[Received]) -> Flow[None]:
        """An ack that is asked for cannot be taken back: one that is cancelled and repeated waits for the first."""
        ack = messages[0]._ack if messages else None
        if ack is None or ack.error is not None or any(message._ack is not ack for message in messages):
            ack = self._consumer.ack(claimed_of(messages))
        try:
            yield ack
        except BaseException:
            for message in messages:
                message._ack = ack
            raise
        mark_settled(messages)


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
