"""A publish has a span, and its message says which."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.trace import SpanKind, StatusCode
from span_witness import HAND_MADE, Witness, attribute, named_by, names_of, span

import headwater
from headwater.errors import InvalidOptionError, InvalidTopicError


def stored(url: str) -> list[str | None]:
    """The traceparents of all messages, as another log reads them."""
    with headwater.open(url) as log, log.subscribe("looking", ">") as subscription:
        return [message.traceparent for message in subscription.fetch()]


def test_a_publish_within_a_span_continues_its_trace(url: str, spans: Witness) -> None:
    with headwater.open(url, tracing=True) as log, span("checkout") as outer:
        seq = log.publish("orders.new", {"n": 1})
    producer = spans.one("publish orders.new")
    assert producer.kind is SpanKind.PRODUCER
    assert names_of(producer.parent) == names_of(outer.get_span_context())
    assert [named_by(each) for each in stored(url)] == [names_of(producer.context)]
    assert producer.attributes == {
        "messaging.system": "headwater",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders.new",
        "messaging.headwater.seq": seq,
    }


def test_a_publish_outside_of_spans_begins_a_trace(url: str, spans: Witness) -> None:
    with headwater.open(url, tracing=True) as log:
        log.publish("a", 1)
    producer = spans.one("publish a")
    assert producer.parent is None
    assert [named_by(each) for each in stored(url)] == [names_of(producer.context)]


def test_a_traceparent_given_by_hand_is_kept_and_linked(url: str, spans: Witness) -> None:
    with headwater.open(url, tracing=True) as log:
        log.publish("a", 1, traceparent=HAND_MADE)
    assert stored(url) == [HAND_MADE]
    assert [names_of(link.context) for link in spans.one("publish a").links] == [named_by(HAND_MADE)]


def test_other_options_of_a_publish_stay(url: str, spans: Witness) -> None:
    with headwater.open(url, tracing=True) as log:
        log.publish("a", 1, from_="till", headers={"lane": 3}, traceparent=None)
        with log.subscribe("s", ">") as subscription:
            (message,) = subscription.fetch()
    assert (message.from_, message.headers["lane"]) == ("till", 3)
    assert named_by(message.traceparent) == names_of(spans.one("publish a").context)


def test_a_batch_is_one_span_and_keeps_what_was_given(url: str, spans: Witness) -> None:
    batch = [("a", 1), ("a", 2, {"traceparent": HAND_MADE}), {"topic": "a", "data": 3, "from": "till"}]
    with headwater.open(url, tracing=True) as log:
        assert log.publish_many(batch) == [1, 2, 3]
    producer = spans.one("publish a")
    assert (producer.kind, attribute(producer, "messaging.batch.message_count")) == (SpanKind.PRODUCER, 3)
    assert [names_of(link.context) for link in producer.links] == [named_by(HAND_MADE)]
    own = names_of(producer.context)
    assert [named_by(each) for each in stored(url)] == [own, named_by(HAND_MADE), own]


def test_a_batch_of_several_topics_has_no_destination(url: str, spans: Witness) -> None:
    with headwater.open(url, tracing=True) as log:
        log.publish_many([("a", 1), ("b", 2)])
        log.publish_many([])
    (producer,) = spans.of_kind(SpanKind.PRODUCER)
    assert (producer.name, attribute(producer, "messaging.destination.name")) == ("publish", None)


def test_a_refused_publish_is_reported_by_its_span(url: str, spans: Witness) -> None:
    with headwater.open(url, tracing=True) as log, pytest.raises(InvalidTopicError) as refused:
        log.publish("a..b", 1)
    producer = spans.one("publish a..b")
    assert producer.status.status_code is StatusCode.ERROR
    assert producer.status.description == f"InvalidTopicError: {refused.value}"
    assert attribute(producer, "error.type") == "InvalidTopicError"
    assert [event.name for event in producer.events] == ["exception"]


@pytest.mark.parametrize("wrong", ["text", ("a",), ("a", 1, 2), {"topic": "a"}, ("a", 1, {"traceparent": 7})])
def test_a_wrong_batch_is_refused_as_it_is_without_tracing(wrong: Any, url: str, spans: Witness) -> None:
    output = []
    for tracing in (False, True):
        with headwater.open(url, tracing=tracing) as log, pytest.raises((InvalidOptionError, TypeError)) as refused:
            log.publish_many([("a", 1), wrong])
        output.append(str(refused.value))
    assert output[0] == output[1]
    assert stored(url) == []


async def publish_from_a_task(url: str) -> None:
    async with headwater.open_async(url, tracing=True) as log:
        with span("outer"):
            await asyncio.gather(log.publish("a", 1), log.publish_many([("b", 1), ("b", 2)]))


def test_tasks_publish_alike(url: str, spans: Witness) -> None:
    asyncio.run(publish_from_a_task(url))
    outer = names_of(spans.one("outer").context)
    assert [names_of(spans.one(f"publish {topic}").parent) for topic in "ab"] == [outer, outer]
    assert {named_by(each).trace_id for each in stored(url)} == {outer.trace_id}


def test_a_publish_inside_a_transaction_has_its_span(tmp_path: Path, spans: Witness) -> None:
    path = str(tmp_path / "log.db")
    with headwater.open(path, tracing=True) as log:
        with span("outer") as outer, log.transaction() as tx:
            tx.execute("CREATE TABLE mine (n)")
            seq = tx.publish("a", 1)
        with pytest.raises(ZeroDivisionError), log.transaction() as tx:
            raise ZeroDivisionError
    producer = spans.one("publish a")
    assert names_of(producer.parent) == names_of(outer.get_span_context())
    assert attribute(producer, "messaging.headwater.seq") == seq
    assert [named_by(each) for each in stored(path)] == [names_of(producer.context)]


async def publish_inside_a_transaction(path: str) -> None:
    async with headwater.open_async(path, tracing=True) as log, log.transaction() as tx:
        with span("within"):
            await tx.publish("a", 1)


def test_a_publish_inside_a_transaction_of_a_task_knows_its_span(tmp_path: Path, spans: Witness) -> None:
    path = str(tmp_path / "log.db")
    asyncio.run(publish_inside_a_transaction(path))
    assert names_of(spans.one("publish a").parent) == names_of(spans.one("within").context)
