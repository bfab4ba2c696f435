"""One contract, every transport. A new one joins with one line in CARRIERS."""

import asyncio
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psycopg
import pytest
import redis as redis_client
from redis_followers import Collected

import headwater
from headwater import ManualClock, Message
from headwater.errors import ClosedError, InvalidMessageError, PublishOnlyError
from headwater.ports.transport import Subscribable
from headwater.transports.base import BaseTransport, make_message
from headwater.transports.batching import BatchingTransport
from headwater.transports.breaker import BreakerTransport
from headwater.transports.file import FileTransport, StdoutTransport, from_line, read_lines
from headwater.transports.log import LogTransport
from headwater.transports.memory import MemoryTransport
from headwater.transports.multi import MultiTransport
from headwater.transports.open import open_transport
from headwater.transports.redis import RedisPubSub
from headwater.transports.redis_connection import from_doc

NAMED = ("from_", "to", "reply_to", "correlation_id", "type", "version", "content_type", "traceparent")
MAKE = Callable[..., Message]
REQUEST = pytest.FixtureRequest


class Carrier(NamedTuple):
    transport: BaseTransport
    arrived: Callable[[], list[Message]]
    """What its target holds, in order."""


def memory(request: REQUEST) -> Carrier:
    transport = MemoryTransport()
    return Carrier(transport, lambda: transport.messages)


def file(request: REQUEST) -> Carrier:
    path: Path = request.getfixturevalue("tmp_path") / "out.jsonl"
    return Carrier(FileTransport(path, clock=ManualClock()), lambda: list(read_lines(path)))


def stdout(request: REQUEST) -> Carrier:
    stream = io.StringIO()
    return Carrier(StdoutTransport(stream), lambda: list(map(from_line, stream.getvalue().encode().splitlines(True))))


def headwater_log(request: REQUEST) -> Carrier:
    log = headwater.open("memory:", maintenance_interval=None, clock=request.getfixturevalue("clock"))
    request.addfinalizer(log.close)

    def arrived() -> list[Message]:
        with log.subscribe("reader", ">") as reading:
            found = [received.message for received in reading.messages()]
        log.delete_subscription("reader")
        return found

    return Carrier(LogTransport("log", lambda: log), arrived)


def guarded(request: REQUEST) -> Carrier:
    transport, arrived = memory(request)
    return Carrier(BreakerTransport(transport, clock=ManualClock()), arrived)


def batching(request: REQUEST) -> Carrier:
    transport, arrived = memory(request)
    batches = BatchingTransport(transport, clock=ManualClock())

    def arrived_after_flush() -> list[Message]:
        batches.flush()
        return arrived()

    return Carrier(batches, arrived_after_flush)


def multi(request: REQUEST) -> Carrier:
    first, second = MemoryTransport(), MemoryTransport()

    def both() -> list[Message]:
        assert first.messages == second.messages
        return first.messages

    return Carrier(MultiTransport([first, second]), both)


def object_storage(request: REQUEST) -> Carrier:
    from headwater.transports.objects import read_archive

    url = request.getfixturevalue("bucket_url")
    return Carrier(open_transport(url, clock=ManualClock()), lambda: list(read_archive(url)))


def postgres_archive(request: REQUEST) -> Carrier:
    url: str = request.getfixturevalue("postgres_url")
    columns = "id, topic, data::text, headers::text, priority, deliver_at, expires_at, from_entity, to_entity, reply_to"

    def arrived() -> list[Message]:
        with psycopg.connect(url) as connection:
            if connection.execute("SELECT to_regclass('archive')").fetchone() == (None,):
                return []
            rows = connection.execute(
                f"SELECT {columns}, correlation_id, type, version, content_type, traceparent FROM archive ORDER BY ctid"
            ).fetchall()
        return [archived(*row) for row in rows]

    def archived(id: str, topic: str, data: str, headers: str | None, priority: int, *rest: Any) -> Message:
        deliver_ms, expires_ms = (None if at is None else round(at.timestamp() * 1000) for at in rest[:2])
        raw_headers = msgspec.Raw((headers or "null").encode())
        named = dict(zip(NAMED, rest[2:], strict=True))
        return Message(0, topic, msgspec.Raw(data.encode()), 0, len(data), id, priority, deliver_ms, expires_ms,
                       raw_headers=raw_headers, **named)  # fmt: skip

    return Carrier(open_transport(f"archive+{url}", clock=ManualClock()), arrived)


def redis_streams(request: REQUEST) -> Carrier:
    url: str = request.getfixturevalue("redis_url")
    client = redis_client.Redis.from_url(url, protocol=2)
    request.addfinalizer(client.close)
    return Carrier(
        open_transport(url, clock=ManualClock()),
        lambda: [from_doc(fields[b"doc"], "entry") for _, fields in client.xrange("headwater")],
    )


def redis_pubsub(request: REQUEST) -> Carrier:
    url = f"redis+pubsub{request.getfixturevalue('redis_url').removeprefix('redis')}"
    collected = Collected()
    listening, marking = (RedisPubSub.from_url(url) for _ in range(2))
    listening.subscribe(">", collected)
    request.addfinalizer(listening.close)
    request.addfinalizer(marking.close)

    def arrived() -> list[Message]:
        marking.publish(make_message("end.of.test", 0, 0))  # what came before it is here when it is
        collected.until(lambda messages: messages != [] and messages[-1].topic == "end.of.test")
        return collected.messages[:-1]

    return Carrier(open_transport(url, clock=ManualClock()), arrived)


CARRIERS: dict[str, Callable[[REQUEST], Carrier]] = {
    "memory": memory,
    "file": file,
    "stdout": stdout,
    "headwater": headwater_log,
    "guarded": guarded,
    "batching": batching,
    "multi": multi,
    "s3": object_storage,
    "archive": postgres_archive,
    "streams": redis_streams,
    "pubsub": redis_pubsub,
}


@pytest.fixture(params=CARRIERS)
def carrier(request: REQUEST) -> Iterator[Carrier]:
    carrier = CARRIERS[request.param](request)
    yield carrier
    carrier.transport.close()


def kept_fields(messages: list[Message]) -> list[tuple[Any, ...]]:
    """All that a copy keeps wherever it goes. Some targets add free headers, so those are looked at elsewhere."""
    same = ("id", "topic", "data_json", "priority", "deliver_ms", "expires_ms", *NAMED)
    return [tuple(getattr(message, name) for name in same) for message in messages]


def test_messages_arrive_in_their_order(carrier: Carrier, make: MAKE) -> None:
    given = [make(number) for number in range(30)]
    carrier.transport.publish(given[0])
    carrier.transport.publish_many(given[1:20])
    carrier.transport.publish_many(given[20:])
    assert kept_fields(carrier.arrived()) == kept_fields(given)
    assert carrier.transport.connected


async def fetched_async() -> list[headwater.AsyncReceivedMessage]:
    async with headwater.open_async("memory:", maintenance_interval=None) as log:
        await log.publish("b", 2)
        async with log.subscribe("s", ">") as subscription:
            return await subscription.fetch(10)


def test_what_was_fetched_from_a_log_is_published_as_it_is(carrier: Carrier, make: MAKE) -> None:
    with headwater.open("memory:", maintenance_interval=None) as log:
        log.publish("a", 1, headers={"tenant": "x"})
        with log.subscribe("s", ">") as subscription:
            [received] = subscription.fetch(10)
            [received_async] = asyncio.run(fetched_async())
            carrier.transport.publish(received)
            carrier.transport.publish_many(iter([received_async, make(3)]))
            arrived = carrier.arrived()
    assert [message.data for message in arrived] == [1, 2, 3]
    assert kept_fields(arrived[:2]) == kept_fields([received.message, received_async.message])


@pytest.mark.parametrize("other", [{"topic": "a", "data": 1}, "text", None, ("a", 1)], ids=repr)
def test_what_is_no_message_is_refused_by_name(carrier: Carrier, other: Any, make: MAKE) -> None:
    with pytest.raises(InvalidMessageError, match=f"expected a message, got {type(other).__name__}") as refused:
        carrier.transport.publish_many([make(1), other])
    assert refused.value.where == carrier.transport.name
    assert carrier.arrived() == []


def test_every_field_arrives(carrier: Carrier, make: MAKE, clock: ManualClock) -> None:
    whole = make(
        {"order": 17},
        id="order-17",
        headers={"tenant": "a", "note": None, "größe": [1, 2.5]},
        from_="shop",
        to="billing",
        reply_to="replies",
        correlation_id="c1",
        type="Order",
        version=2,
        content_type="application/json",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        priority=-7,
        ttl=3600,
        deliver_at=clock.now_ms() // 1000 - 60,
    )
    carrier.transport.publish(whole)
    arrived = carrier.arrived()
    assert kept_fields(arrived) == kept_fields([whole])
    assert arrived[0].headers.items() >= whole.headers.items()


def test_any_json_arrives_to_the_letter(carrier: Carrier, make: MAKE) -> None:
    deep: Any = "bottom"
    for _ in range(200):
        deep = [{"down": deep}]
    payloads = [
        deep,
        'ünïcödé 🌊 \u2028 \x7f "\\\n\r\t',
        "",
        0,
        -1.5,
        True,
        None,
        {},
        [],
        {"": None},
        2**63,
        "x" * 1_000_000,
    ]
    given = [make(payload, f"topics.für.{at}") for at, payload in enumerate(payloads)]
    carrier.transport.publish_many(given)
    assert kept_fields(carrier.arrived()) == kept_fields(given)


def test_to_publish_nothing_is_fine(carrier: Carrier) -> None:
    carrier.transport.publish_many([])
    assert carrier.arrived() == []


def test_what_is_given_twice_is_there_once_if_the_target_recognises_ids(carrier: Carrier, make: MAKE) -> None:
    given = [make(number) for number in range(3)]
    carrier.transport.publish_many(given)
    carrier.transport.publish_many([*given, make(3)])
    expected = [0, 1, 2, 3] if carrier.transport.recognises_ids else [0, 1, 2, 0, 1, 2, 3]
    assert [message.data for message in carrier.arrived()] == expected


def test_an_id_on_another_topic_is_another_message(carrier: Carrier, make: MAKE) -> None:
    """A publisher of one topic must not be able to keep messages of another one from arriving."""
    given = [make(number, topic, id="order-17") for number, topic in enumerate(["a.x", "orders.new"])]
    carrier.transport.publish(given[0])
    carrier.transport.publish_many([given[1], given[0]] if carrier.transport.recognises_ids else [given[1]])
    assert sorted(message.data for message in carrier.arrived()) == [0, 1]


def test_one_that_carries_nothing_back_says_so(carrier: Carrier) -> None:
    transport = carrier.transport
    assert isinstance(transport, Subscribable)
    refused: PublishOnlyError | None = None
    try:
        transport.subscribe(">", print).stop()
    except PublishOnlyError as exc:
        refused = exc
    if refused is not None:
        assert refused.why == f"{type(transport).__name__} is publish-only: it carries no messages back"
        assert (refused.where, refused.next) == (transport.name, transport.read_instead)


def test_closing_twice_is_harmless_and_then_nothing_goes_out(carrier: Carrier, make: MAKE) -> None:
    carrier.transport.publish(make(1))
    carrier.transport.close()
    carrier.transport.close()
    with pytest.raises(ClosedError):
        carrier.transport.publish(make(2))
    with pytest.raises(ClosedError):
        carrier.transport.publish_many([make(2)])
    assert not carrier.transport.connected


def test_a_name_tells_no_password(carrier: Carrier) -> None:
    assert carrier.transport.name
    assert "secret" not in carrier.transport.name.lower()
