"""Looks at the spans that were ended."""

from __future__ import annotations

from typing import Any, NamedTuple

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Span, SpanContext, format_span_id, format_trace_id

WAIT_S = 30
SAMPLED = 0x01
HAND_MADE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Names(NamedTuple):
    """A span as a traceparent names it."""

    trace_id: str
    span_id: str


class Witness:
    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    @property
    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def of_kind(self, kind: trace.SpanKind) -> list[ReadableSpan]:
        return [span for span in self.all if span.kind is kind]

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        found = self.named(name)
        assert len(found) == 1, [span.name for span in self.all]
        return found[0]


def names_of(context: SpanContext | None) -> Names:
    assert context is not None
    return Names(format_trace_id(context.trace_id), format_span_id(context.span_id))


def named_by(traceparent: str | None) -> Names:
    assert traceparent is not None
    version, trace_id, span_id, flags = traceparent.split("-")
    assert (version, int(flags, 16) & SAMPLED) == ("00", SAMPLED)
    return Names(trace_id, span_id)


def span(name: str) -> Any:
    """A span of the application's own, the current one in its block."""
    return trace.get_tracer("application").start_as_current_span(name)


def current() -> Span:
    return trace.get_current_span()


def attribute(span: ReadableSpan, name: str) -> Any:
    assert span.attributes is not None
    return span.attributes.get(name)
