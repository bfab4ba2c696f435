"""A handler runs inside a span whose parent is the publish of its message."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode
from span_witness import HAND_MADE, WAIT_S, Witness, attribute, current, named_by, names_of, span

import headwater
from headwater import Reject


def handle(url: str, handler: Any, *, times: int = 1, **options: Any) -> None:
    """Run a handler in a log of its own until it has run so many times."""
    left = threading.Semaphore(0)

    @functools.wraps(handler)
    def counted(message: Any) -> Any:
        try:
            return handler(message)
        finally:
            left.release()

    with headwater.open(url, tracing=True) as log:
        log.on(">", id="worker", **options)(counted)
        log.start()
        for _ in range(times):
            assert left.acquire(timeout=WAIT_S)


def publish(url: str, topic: str = "orders.new", data: Any = 1, **options: Any) -> int:
    with headwater.open(url, tracing=True) as log:
        return log.publish(topic, data, **options)


def test_a_handler_continues_the_trace_of_the_publish(url: str, spans: Witness) -> None:
    with span("checkout") as outer:
        seq = publish(url)
    handle(url, lambda message: None)
    producer, consumer = spans.one("publish orders.new"), spans.one("process orders.new")
    assert consumer.kind is SpanKind.CONSUMER
    assert names_of(consumer.parent) == names_of(producer.context)
    assert names_of(consumer.context).trace_id == names_of(outer.get_span_context()).trace_id
    assert consumer.status.status_code is StatusCode.UNSET
    reported = dict(consumer.attributes or {})
    assert reported.pop("messaging.message.id")
    assert reported == {
        "messaging.system": "headwater",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders.new",
        "messaging.destination.subscription.name": "worker",
        "messaging.message.body.size": 1,
        "messaging.headwater.seq": seq,
        "messaging.headwater.attempt": 1,
    }


def test_what_a_handler_does_belongs_to_its_span(url: str, spans: Witness) -> None:
    publish(url, "first")
    done = threading.Event()
    with headwater.open(url, tracing=True) as log:

        @log.on("first", id="first")
        def pass_on(message: Any) -> None:
            log.publish("second", message.data)

        @log.on("second", id="second")
        def end(message: Any) -> None:
            with span("own"):
                done.set()

        log.start()
        assert done.wait(WAIT_S)
    chain = [spans.one(name) for name in ("publish first", "process first", "publish second", "process second", "own")]
    assert [names_of(each.parent) for each in chain[1:]] == [names_of(each.context) for each in chain[:-1]]


def failures(consumers: list[ReadableSpan]) -> list[tuple[Any, Any, Any]]:
    return [
        (
            each.status.description,
            attribute(each, "error.type"),
            [(event.attributes or {}).get("exception.message") for event in each.events],
        )
        for each in consumers
    ]


@pytest.mark.parametrize("failure", [ValueError("no stock"), SystemExit("no stock")])
def test_a_failing_handler_is_reported_by_its_span_at_every_attempt(
    failure: BaseException, url: str, spans: Witness
) -> None:
    publish(url)

    def fail(message: Any) -> None:
        raise failure

    handle(url, fail, times=2, max_attempts=2, backoff=0)
    consumers = spans.named("process orders.new")
    name = type(failure).__name__
    assert failures(consumers) == [(f"{name}: no stock", name, ["no stock"])] * 2
    assert {each.status.status_code for each in consumers} == {StatusCode.ERROR}
    assert [attribute(each, "messaging.headwater.attempt") for each in consumers] == [1, 2]
    producer = names_of(spans.one("publish orders.new").context)
    assert [names_of(each.parent) for each in consumers] == [producer, producer]


def test_a_rejecting_handler_is_reported_too_and_the_letter_names_it(url: str, spans: Witness) -> None:
    publish(url)

    def refuse(message: Any) -> None:
        raise Reject("never")

    handle(url, refuse)
    assert failures(spans.named("process orders.new")) == [("Reject: never", "Reject", ["never"])]
    with headwater.open(url) as log:
        (letter,) = log.dead_letters.list()
    assert (letter.reason, letter.handler) == ("rejected", refuse.__qualname__)


class Nameless:
    def __init__(self) -> None:
        self.ran = threading.Event()

    def __call__(self, message: Any) -> None:
        self.ran.set()
        raise Reject("never")


def test_a_handler_without_a_name_is_named_as_it_is_without_tracing(url: str, spans: Witness) -> None:
    for at, tracing in enumerate((False, True)):
        handler = Nameless()
        with headwater.open(url, tracing=tracing) as log:
            log.publish("a", 1)
            log.on("a", id="worker")(handler)
            log.start()
            assert handler.ran.wait(WAIT_S)
        with headwater.open(url) as log:
            assert log.dead_letters.list()[at].handler == repr(handler)


@pytest.mark.parametrize("traceparent", [None, "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_message_that_names_no_trace_begins_one(traceparent: str | None, url: str, spans: Witness) -> None:
    with headwater.open(url) as log:  # without tracing
        log.publish("a", 1, traceparent=traceparent)

    async def story() -> None:
        done = asyncio.Event()
        async with headwater.open_async(url, tracing=True) as log:
            log.on("a", id="worker")(lambda message: done.set())
            with span("starting"):  # tasks inherit it, messages do not
                await log.start()
            await asyncio.wait_for(done.wait(), WAIT_S)

    asyncio.run(story())
    assert spans.one("process a").parent is None


def test_a_traceparent_given_by_hand_is_the_parent(url: str, spans: Witness) -> None:
    publish(url, "a", traceparent=HAND_MADE)
    handle(url, lambda message: None)
    assert names_of(spans.one("process a").parent) == named_by(HAND_MADE)


def test_coroutines_are_handled_alike(url: str, spans: Witness) -> None:
    async def story() -> None:
        done, failed = asyncio.Event(), asyncio.Event()
        async with headwater.open_async(url, tracing=True) as log:

            @log.on("slow", id="slow")
            async def slow(message: Any) -> None:
                await asyncio.sleep(0)
                with span("after the pause"):
                    done.set()

            @log.on("bad", id="bad", max_attempts=1)
            async def bad(message: Any) -> None:
                await asyncio.sleep(0)
                failed.set()
                raise ValueError("no")

            await log.start()
            await log.publish_many([("slow", 1), ("bad", 1)])
            await asyncio.wait_for(asyncio.gather(done.wait(), failed.wait()), WAIT_S)

    asyncio.run(story())
    producer = names_of(spans.one("publish").context)
    assert [names_of(spans.one(f"process {topic}").parent) for topic in ("slow", "bad")] == [producer, producer]
    assert names_of(spans.one("after the pause").parent) == names_of(spans.one("process slow").context)
    assert failures(spans.named("process bad")) == [("ValueError: no", "ValueError", ["no"])]


def test_a_plain_function_under_asyncio_is_handled_alike(url: str, spans: Witness) -> None:
    async def story() -> None:
        seen: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        async with headwater.open_async(url, tracing=True) as log:
            log.on("a", id="worker")(lambda message: seen.set_result(names_of(current().get_span_context())))
            await log.publish("a", 1)
            await log.start()
            within = await asyncio.wait_for(seen, WAIT_S)
        assert within == names_of(spans.one("process a").context)
        assert current().get_span_context().is_valid is False

    asyncio.run(story())
    assert names_of(spans.one("process a").parent) == names_of(spans.one("publish a").context)
