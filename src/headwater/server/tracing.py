"""An OpenTelemetry span for every call, if the setting `server.tracing` is on.

The span of `rpc.publish` is the child of its message's traceparent; that of `rpc.publish.batch` links to those of its
messages. All other calls begin a trace of their own.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind, StatusCode

from headwater.broker.tracing import context_of, links_to
from headwater.server.registry import CallContext, Middleware, Outcome
from headwater.version import VERSION

UNKNOWN_METHOD = "_OTHER"  # as the conventions name it: unknown names of clients must not become names of spans
_BEGUN = "headwater.tracing"  # in a call's metadata: its span, until that has ended


class _Headers(msgspec.Struct):
    traceparent: str | None = None


class _Message(_Headers):
    headers: _Headers | None = None


class _Batch(msgspec.Struct):
    messages: list[_Message] = []


class CallTracing(Middleware):
    """`knows`: whether there is a method of this name."""

    def __init__(self, knows: Callable[[str], bool]) -> None:
        self._tracer = trace.get_tracer("headwater.server", VERSION)
        self._knows = knows

    async def before(self, call: CallContext) -> None:
        method = call.method if self._knows(call.method) else UNKNOWN_METHOD
        parent, links = _origin(call)
        attributes = {
            "rpc.system": "jsonrpc",
            "rpc.system.name": "jsonrpc",  # its name in the newer conventions
            "rpc.method": method,
            "jsonrpc.protocol.version": "2.0",
        }
        span = self._tracer.start_span(method, parent, SpanKind.SERVER, attributes, links)
        call.metadata[_BEGUN] = span
        context.attach(trace.set_span_in_context(span))  # never detached: the task ends with the call

    async def after(self, call: CallContext, outcome: Outcome) -> None:
        span = call.metadata.pop(_BEGUN)
        if outcome.fault is not None:
            code = str(outcome.fault.code)
            span.set_attribute("rpc.response.status_code", code)
            span.set_attribute("error.type", code)
            span.set_status(StatusCode.ERROR, outcome.fault.message)
        span.end()


def _origin(call: CallContext) -> tuple[Context, list[Link]]:
    """The parent of a call's span, and its links."""
    params: Any = call._call.params
    try:
        if call.method == "rpc.publish":
            return context_of(_traceparent(_message.decode(params))), []
        if call.method == "rpc.publish.batch":
            return Context(), links_to(map(_traceparent, _batch.decode(params).messages))
    except (msgspec.DecodeError, TypeError, RecursionError):
        pass  # the method itself reports invalid params
    return Context(), []


_message = msgspec.json.Decoder(_Message)
_batch = msgspec.json.Decoder(_Batch)


def _traceparent(message: _Message) -> str | None:
    return message.traceparent or (message.headers.traceparent if message.headers is not None else None)
