"""Spans of OpenTelemetry for what a log does: one for each publish, one for each message that a handler runs for.

Imported only for a log that is opened with `tracing=True`; without it, nothing of this is on any path. What is
published carries the context of its span in the header `traceparent`, unless the publisher gave another, to which the
span then links. A handler's span is the child of what the header names: it stands for one message, so it can have a
parent. A span that stands for several, as that of `publish_many`, has links.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import isawaitable
from typing import Any, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headwater.broker.consumer import Consumer
from headwater.broker.deliveries import Claimed
from headwater.broker.flow import Flow, wait
from headwater.broker.handlers import Handler
from headwater.broker.publish import Outgoing, parts_of
from headwater.broker.transaction import OwnTransaction
from headwater.broker.verbs import LogVerbs
from headwater.errors import InvalidOptionError
from headwater.formats import error_text
from headwater.message import PublishOptions
from headwater.version import VERSION

LINKS_MAX = 128  # of one span
SEQ = "messaging.headwater.seq"

_W3C = TraceContextTextMapPropagator()


class Tracing:
    """Makes the spans of one log. The application's tracer provider exports them."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("headwater", VERSION)

    def of_log(self, core: LogVerbs) -> LogVerbs:
        return cast(LogVerbs, _TracedLog(core, self))

    def of_handler(self, handler: Handler, *, awaits: bool) -> Handler:
        """The handler inside a span; `awaits` if it may be a coroutine function."""

        def run(message: Any) -> Any:
            with self._processing(message):
                return handler(message)

        async def run_awaited(message: Any) -> Any:
            with self._processing(message):
                outcome = handler(message)
                return await outcome if isawaitable(outcome) else outcome

        traced = wraps(handler)(run_awaited if awaits else run)
        traced.__qualname__ = getattr(handler, "__qualname__", repr(handler))  # dead letters name it
        return traced

    @contextmanager
    def sending(self, topics: Iterable[Any], count: int | None, given: Iterable[Any]) -> Iterator[Span]:
        """A publish, of `count` messages if it is a batch; `given` are the traceparents that came with them."""
        name, attributes = _described("publish", "send", topics)
        if count is not None:
            attributes["messaging.batch.message_count"] = count
        span = self._tracer.start_span(name, kind=SpanKind.PRODUCER, attributes=attributes, links=links_to(given))
        with ending(span):  # and not the current one: a flow may be left halfway, in another context
            yield span

    @contextmanager
    def _processing(self, message: Any) -> Iterator[None]:
        name, attributes = _described("process", "process", [message.topic])
        attributes |= {
            "messaging.destination.subscription.name": message._subscription.id,
            "messaging.message.id": message.id,
            "messaging.message.body.size": message.size,
            SEQ: message.seq,
            "messaging.headwater.attempt": message.attempt,
        }
        parent = context_of(message.traceparent)
        span = self._tracer.start_span(name, parent, SpanKind.CONSUMER, attributes)
        with ending(span), trace.use_span(span, record_exception=False, set_status_on_exception=False):
            yield


class _Around:
    """A proxy: forwards every attribute that it does not define to `inner`."""

    def __init__(self, inner: Any, tracing: Tracing) -> None:
        self._inner = inner
        self._tracing = tracing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _TracedLog(_Around):
    def publish(self, topic: str, data: Any, options: PublishOptions) -> Flow[int]:
        with self._tracing.sending([topic], None, [options.get("traceparent")]) as span:
            traced = _with_traceparent(options, traceparent_of(span))
            seq: int = yield from wait(self._inner.publish(topic, data, traced))
            span.set_attribute(SEQ, seq)
            return seq

    def publish_many(self, messages: Iterable[Outgoing]) -> Flow[list[int]]:
        batch = list(messages)
        try:
            parts = [parts_of(message) for message in batch]
        except (InvalidOptionError, TypeError, ValueError):
            parts = []  # the log itself says what is wrong, and with which of them
        if not parts:
            refused: list[int] = yield from wait(self._inner.publish_many(batch))
            return refused
        given = [options.get("traceparent") for _, _, options in parts]
        with self._tracing.sending((topic for topic, _, _ in parts), len(parts), given) as span:
            traceparent = traceparent_of(span)
            sent = [(topic, data, _with_traceparent(options, traceparent)) for topic, data, options in parts]
            seqs: list[int] = yield from wait(self._inner.publish_many(sent))
            return seqs

    def transaction(self, consumer: Consumer | None = None, claimed: Claimed | None = None) -> OwnTransaction:
        return cast(OwnTransaction, _TracedTransaction(self._inner.transaction(consumer, claimed), self._tracing))


class _TracedTransaction(_Around):
    def publish(self, topic: str, data: Any, options: PublishOptions) -> int:
        with self._tracing.sending([topic], None, [options.get("traceparent")]) as span:
            seq: int = self._inner.publish(topic, data, _with_traceparent(options, traceparent_of(span)))
            span.set_attribute(SEQ, seq)
            return seq


@contextmanager
def ending(span: Span) -> Iterator[None]:
    """End the span with the block. A failure is recorded, also a SystemExit: for a handler it is one like any other."""
    try:
        yield
    except BaseException as exc:
        span.record_exception(exc)
        span.set_attribute("error.type", type(exc).__qualname__)
        span.set_status(StatusCode.ERROR, error_text(exc))
        raise
    finally:
        span.end()


def context_of(traceparent: str | None) -> Context:
    """The context of a traceparent, never the current one: without a traceparent, or with one that is none, a span
    begins a trace of its own."""
    return _W3C.extract({} if traceparent is None else {"traceparent": traceparent})


def links_to(traceparents: Iterable[object]) -> list[Link]:
    distinct = list(dict.fromkeys(each for each in traceparents if isinstance(each, str)))[:LINKS_MAX]
    contexts = [trace.get_current_span(context_of(each)).get_span_context() for each in distinct]
    return [Link(context) for context in contexts if context.is_valid]


def traceparent_of(span: Span) -> str | None:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier.get("traceparent")


def _with_traceparent(options: PublishOptions, traceparent: str | None) -> PublishOptions:
    if traceparent is None or options.get("traceparent") is not None:
        return options
    return {**options, "traceparent": traceparent}


def _described(operation: str, kind: str, topics: Iterable[object]) -> tuple[str, dict[str, Any]]:
    """The name of a span, and what is the same in all; a batch of several topics has no destination."""
    attributes = {
        "messaging.system": "headwater",
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
    }
    distinct = {str(topic) for topic in topics}
    if len(distinct) != 1:
        return operation, attributes
    topic = distinct.pop()
    return f"{operation} {topic}", {**attributes, "messaging.destination.name": topic}
