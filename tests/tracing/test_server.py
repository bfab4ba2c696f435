"""A server with `server.tracing` has a span for every call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.trace import SpanKind, StatusCode
from served import RunningServer
from span_witness import HAND_MADE, WAIT_S, Witness, attribute, current, named_by, names_of, span

import headwater
from headwater.errors import HeadwaterError, UnknownSubscriptionError


@pytest.fixture
def traced(tmp_path: Path, spans: Witness) -> Iterator[str]:
    """The url of a server with tracing."""
    server = RunningServer(tmp_path / "log.db", tracing=True)
    yield server.url
    server.stop()


def test_a_call_has_a_span(traced: str, spans: Witness) -> None:
    with headwater.open(traced) as log:
        log.last_seq()
    call = spans.one("rpc.last_seq")
    assert (call.kind, call.parent, call.status.status_code) == (SpanKind.SERVER, None, StatusCode.UNSET)
    assert call.attributes == {
        "rpc.system": "jsonrpc",
        "rpc.system.name": "jsonrpc",
        "rpc.method": "rpc.last_seq",
        "jsonrpc.protocol.version": "2.0",
    }


def test_by_default_a_call_has_none(url: str, spans: Witness) -> None:
    with headwater.open(url, tracing=True) as log:
        log.publish("a", 1)
    assert spans.of_kind(SpanKind.SERVER) == []


def test_publisher_server_and_consumer_are_one_trace(traced: str, spans: Witness) -> None:
    async def story() -> None:
        async with headwater.open_async(traced, tracing=True) as log:
            done = asyncio.Event()
            log.on("a", id="worker")(lambda message: done.set())
            await log.publish("a", 1)
            await log.start()
            await asyncio.wait_for(done.wait(), WAIT_S)

    with span("outer"):
        asyncio.run(story())
    producer = names_of(spans.one("publish a").context)
    assert names_of(spans.one("publish a").parent) == names_of(spans.one("outer").context)
    assert names_of(spans.one("rpc.publish").parent) == producer
    assert names_of(spans.one("process a").parent) == producer


def test_a_batch_links_to_what_its_messages_name(traced: str, spans: Witness) -> None:
    with headwater.open(traced, tracing=True) as log:
        log.publish_many([("a", 1), ("a", 2), ("a", 3, {"traceparent": HAND_MADE})])
    call = spans.one("rpc.publish.batch")
    assert call.parent is None
    linked = [names_of(link.context) for link in call.links]
    assert linked == [names_of(spans.one("publish a").context), named_by(HAND_MADE)]


@pytest.mark.parametrize(
    "params",
    [
        {"topic": "a", "data": {"traceparent": "no"}, "traceparent": HAND_MADE},
        {"topic": "a", "data": 1, "headers": {"traceparent": HAND_MADE}},
    ],
)
def test_any_client_may_say_where_a_message_comes_from(params: Any, traced: str, spans: Witness) -> None:
    with headwater.open(traced) as log:
        log.remote.call("rpc.publish", params)
    assert names_of(spans.one("rpc.publish").parent) == named_by(HAND_MADE)


@pytest.mark.parametrize(
    "params",
    [
        None,
        {"topic": "a", "data": 1, "traceparent": 7},
        {"topic": "a", "data": 1, "headers": "text"},
        ["a", {"traceparent": HAND_MADE}],
    ],
)
@pytest.mark.parametrize("method", ["rpc.publish", "rpc.publish.batch"])
def test_what_names_no_trace_begins_one(method: str, params: Any, traced: str, spans: Witness) -> None:
    with headwater.open(traced) as log:
        try:
            log.remote.call(method, params)
        except HeadwaterError:
            refused = True
        else:
            refused = False
    call = spans.one(method)
    assert (call.parent, list(call.links)) == (None, [])
    assert (call.status.status_code is StatusCode.ERROR) == refused


def test_a_refused_call_tells_its_code(traced: str, spans: Witness) -> None:
    with headwater.open(traced) as log, pytest.raises(UnknownSubscriptionError) as refused:
        log.subscription("nobody")
    call = spans.one("rpc.subscription")
    code = attribute(call, "rpc.response.status_code")
    assert call.status.status_code is StatusCode.ERROR
    assert (int(code) < 0, attribute(call, "error.type")) == (True, code)
    assert refused.value.why in (call.status.description or "")


def test_names_that_clients_make_up_are_no_names_of_spans(traced: str, spans: Witness) -> None:
    with headwater.open(traced) as log, pytest.raises(HeadwaterError):
        log.remote.call("made.up")
    call = spans.one("_OTHER")
    assert (attribute(call, "rpc.method"), attribute(call, "rpc.response.status_code")) == ("_OTHER", "-32601")


def serve_and_call(tmp_path: Path, story: Any) -> None:
    async def run() -> None:
        async with headwater.serve(tmp_path / "log.db", port=0, tracing=True) as server:
            await asyncio.wait_for(story(server), WAIT_S)

    asyncio.run(run())


def test_a_method_runs_inside_the_span_of_its_call(tmp_path: Path, spans: Witness) -> None:
    async def story(server: Any) -> None:
        @server.method("ask")
        async def ask() -> list[str]:
            await asyncio.sleep(0)
            return list(names_of(current().get_span_context()))

        async with headwater.open_async(server.url) as log:
            assert await log.remote.call("ask") == list(names_of(spans.named("ask")[0].context))
            await log.remote.call("ask")
        first, second = spans.named("ask")
        assert names_of(first.context).trace_id != names_of(second.context).trace_id

    serve_and_call(tmp_path, story)


def test_calls_do_not_belong_to_the_span_in_which_the_server_was_started(tmp_path: Path, spans: Witness) -> None:
    async def story(server: Any) -> None:
        async with headwater.open_async(server.url) as log:
            await log.last_seq()
            await log.publish("a", 1)
            await log.publish_many([("a", 2)])

    with span("starting"):
        serve_and_call(tmp_path, story)
    names = ("rpc.last_seq", "rpc.publish", "rpc.publish.batch")
    assert [spans.one(name).parent for name in names] == [None] * 3


def test_a_call_whose_client_leaves_has_an_end_all_the_same(tmp_path: Path, spans: Witness) -> None:
    async def story(server: Any) -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        @server.method("hang")
        async def hang() -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async with headwater.open_async(server.url) as log:
            calling = asyncio.create_task(log.remote.call("hang"))
            await begun.wait()
        await ended.wait()
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)

    serve_and_call(tmp_path, story)
    call = spans.one("hang")
    assert (call.status.status_code, attribute(call, "error.type")) == (StatusCode.ERROR, "-32603")
