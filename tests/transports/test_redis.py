"""Publishing to Redis Streams: every message once, in order, whatever becomes of the server meanwhile."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis as redis_client
from redis_followers import PATIENCE_S, Collected
from redis_server import RedisServer

from headwater import Message
from headwater.errors import (
    ClosedError,
    InvalidOptionError,
    InvalidPatternError,
    InvalidTopicError,
    TransportFailedError,
)
from headwater.transports.redis import RedisPubSub, RedisStreams
from headwater.transports.redis_connection import BATCH_MESSAGES_MAX, from_doc

MAKE = Callable[..., Message]


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with redis_client.Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.fixture
def own() -> Iterator[RedisServer]:
    """A server to stop and kill."""
    with RedisServer() as server:
        yield server


def data_in(client: Any, stream: str = "headwater") -> list[Any]:
    return [from_doc(fields[b"doc"], "entry").data for _, fields in client.xrange(stream)]


def test_other_consumers_find_plain_fields_beside_the_document(redis_url: str, client: Any, make: MAKE) -> None:
    with_type, without = make({"n": 1}, "orders.new", id="a", type="Order"), make(2, "orders.old", id="b")
    transport = RedisStreams.from_url(redis_url, stream="s")
    transport.publish_many([with_type, without])
    first, second = (fields for _, fields in client.xrange("s"))
    assert [first[name] for name in (b"id", b"topic", b"type")] == [b"a", b"orders.new", b"Order"]
    assert [second[name] for name in (b"id", b"topic", b"type")] == [b"b", b"orders.old", b""]
    assert from_doc(first[b"doc"], "entry") == with_type
    transport.close()


def test_of_a_batch_that_is_half_known_the_other_half_is_added(redis_url: str, client: Any, make: MAKE) -> None:
    transport = RedisStreams.from_url(redis_url)
    messages = [make(number) for number in range(20)]
    transport.publish_many(messages[:10:2])
    transport.publish_many([*messages[:10], messages[3], *messages])
    assert data_in(client) == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9, *range(10, 20)]
    transport.close()


def test_an_id_is_forgotten_after_its_window_and_kept_until_then(redis_url: str, client: Any, make: MAKE) -> None:
    transport = RedisStreams.from_url(redis_url, dedupe=3600)
    transport.publish(make(1, id="a"))
    key = "{headwater}#id:orders.new#a"
    assert 3_590_000 < client.pttl(key) <= 3_600_000
    client.delete(key)  # as its end would
    transport.publish(make(1, id="a"))
    assert data_in(client) == [1, 1]
    transport.close()


def test_without_a_window_nothing_is_recognised_and_it_says_so(redis_url: str, client: Any, make: MAKE) -> None:
    transport = RedisStreams.from_url(redis_url, dedupe=0)
    message = make(1)
    transport.publish(message)
    transport.publish_many([message, message])
    assert not transport.recognises_ids
    assert data_in(client) == [1, 1, 1]
    assert client.keys() == [b"headwater"]
    transport.close()


def test_what_redis_refused_does_not_count_as_there(redis_url: str, client: Any, make: MAKE) -> None:
    client.set("headwater", "something else")
    transport = RedisStreams.from_url(redis_url)
    message = make(1)
    with pytest.raises(TransportFailedError, match="WRONGTYPE"):
        transport.publish(message)
    assert not transport.connected
    client.delete("headwater")
    transport.publish(message)
    assert data_in(client) == [1]
    assert transport.connected
    transport.close()


def test_a_large_publish_goes_in_several_batches_in_order(redis_url: str, client: Any, make: MAKE) -> None:
    count = BATCH_MESSAGES_MAX * 2 + 7
    transport = RedisStreams.from_url(redis_url)
    client.config_resetstat()
    transport.publish_many([make(number) for number in range(count)])
    assert data_in(client) == list(range(count))
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] <= 4  # three batches, and one that loads the script
    transport.close()


def test_a_stream_is_trimmed_to_about_its_length(redis_url: str, client: Any, make: MAKE) -> None:
    transport = RedisStreams.from_url(redis_url, maxlen=100)
    transport.publish_many([make(number) for number in range(1_000)])
    assert 100 <= client.xlen("headwater") < 300
    assert data_in(client)[-1] == 999
    transport.close()


def test_each_topic_can_have_a_stream_of_its_own(redis_url: str, client: Any, make: MAKE) -> None:
    transport = RedisStreams.from_url(redis_url, stream_per_topic="1", stream="s")
    count = BATCH_MESSAGES_MAX + 10
    messages = [make(number, f"orders.{number % 3}") for number in range(count * 3)]
    transport.publish_many(messages[:100])
    transport.publish_many(messages)
    for kind in range(3):
        assert data_in(client, f"s:orders.{kind}") == list(range(kind, count * 3, 3))
    with pytest.raises(InvalidTopicError):
        transport.publish(make(1, "orders:dead"))
    transport.close()


def test_a_wrong_password_is_reported_and_not_shown(redis_url: str, make: MAKE) -> None:
    transport = RedisStreams.from_url(redis_url.replace("redis://", "redis://somebody:s3cret@"))
    with pytest.raises(TransportFailedError, match="password") as failed:
        transport.publish(make(1))
    assert "s3cret" not in f"{failed.value} {failed.value.__cause__} {transport.name}"
    with pytest.raises(TransportFailedError, match="subscribing"):
        transport.subscribe(">", print)
    transport.close()


def test_a_consumer_without_a_group_is_refused(redis_url: str) -> None:
    transport = RedisStreams.from_url(redis_url)
    with pytest.raises(InvalidOptionError):
        transport.subscribe(">", print, consumer="me")
    with pytest.raises(InvalidOptionError):
        transport.subscribe(">", print, group="")
    transport.close()


def test_a_server_killed_in_the_middle_has_each_message_once_after_they_are_given_again(
    own: RedisServer, make: MAKE
) -> None:
    transport = RedisStreams.from_url(own.url)
    before = [make(number) for number in range(100)]
    transport.publish_many(before)
    messages = [make(number) for number in range(100, 20_000)]
    outcome: list[Exception] = []

    def publish() -> None:
        try:
            transport.publish_many(messages)
        except TransportFailedError as failed:
            outcome.append(failed)

    with own.client() as client:
        last = client.xrevrange("headwater", count=1)[0][0]
        publishing = threading.Thread(target=publish)
        publishing.start()
        client.xread({"headwater": last}, block=int(PATIENCE_S * 1000))  # some have arrived
    own.kill()
    publishing.join(PATIENCE_S)
    assert len(outcome) == 1
    assert not transport.connected

    own.start()
    with own.client() as client:
        there = data_in(client)
        assert 100 < len(there) < 20_000
        assert there == list(range(len(there)))  # nothing confirmed is lost, and there are no holes
        transport.publish_many(messages)
        assert data_in(client) == list(range(20_000))
    transport.close()


def test_an_unreachable_server_is_reported_and_works_again_when_it_is_back(own: RedisServer, make: MAKE) -> None:
    transport = RedisStreams.from_url(own.url)
    messages = [make(number) for number in range(50)]
    transport.publish_many(messages[:10])
    own.stop()
    with pytest.raises(TransportFailedError) as failed:
        transport.publish_many(messages)
    assert isinstance(failed.value.__cause__, redis_client.ConnectionError)
    own.start()
    transport.publish_many(messages)
    with own.client() as client:
        assert data_in(client) == list(range(50))
    transport.close()


def test_when_only_the_answer_is_lost_the_messages_are_not_there_twice(own: RedisServer, make: MAKE) -> None:
    transport = RedisStreams.from_url(f"{own.url}?socket_timeout=0.2")
    messages = [make(number) for number in range(50)]
    transport.publish(messages[0])
    own.freeze()
    with pytest.raises(TransportFailedError, match=r"publishing 50 messages failed: .*may have arrived$"):
        transport.publish_many(messages)
    own.thaw()  # and it now does what it was asked to
    transport.publish_many(messages)
    with own.client() as client:
        assert data_in(client) == list(range(50))
    transport.close()


@pytest.fixture
def transport(redis_url: str) -> Iterator[RedisPubSub]:
    transport = RedisPubSub.from_url(redis_url.replace("redis://", "redis+pubsub://"))
    yield transport
    transport.close()


def test_every_listener_gets_every_message_that_matches(transport: RedisPubSub, make: MAKE) -> None:
    everything, again, orders, exact = Collected(), Collected(), Collected(), Collected()
    for pattern, collected in ((">", everything), (">", again), ("orders.*", orders), ("orders.new", exact)):
        transport.subscribe(pattern, collected)
    topics = ["orders.new", "orders", "orders.new.fast", "orders.old", "other.new", "orders.newer", "orders.new"]
    transport.publish_many([make(at, topic) for at, topic in enumerate(topics)])
    everything.until_count(7)
    again.until_count(7)
    orders.until_count(4)
    exact.until_count(2)
    transport.close()
    assert everything.data == again.data == list(range(7))
    assert (orders.data, exact.data) == ([0, 3, 5, 6], [0, 6])


def test_publishing_without_subscribers_succeeds_and_late_ones_get_nothing(transport: RedisPubSub, make: MAKE) -> None:
    transport.publish(make(1))
    assert transport.connected
    collected = Collected()
    transport.subscribe(">", collected)
    transport.publish(make(2))
    collected.until_count(1)
    assert collected.data == [2]


def test_neither_failing_handlers_nor_foreign_messages_disturb(
    transport: RedisPubSub, redis_url: str, make: MAKE, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(message: Message) -> None:
        raise SystemExit("no") if message.data == 1 else ValueError("no")

    failing, calm = Collected(fail), Collected()
    transport.subscribe(">", failing)
    transport.subscribe(">", calm)
    with redis_client.Redis.from_url(redis_url) as client:
        client.publish("headwater:orders.new", b"\xff")
    transport.publish_many([make(1), make(2)])
    failing.until_count(2)
    calm.until_count(2)
    transport.close()
    assert failing.data == calm.data == [1, 2]
    assert "no message" in caplog.text
    assert "the handler failed" in caplog.text


def test_a_prefix_keeps_others_apart(redis_url: str, make: MAKE) -> None:
    odd = RedisPubSub.from_url(redis_url, prefix="a*")
    other = RedisPubSub.from_url(redis_url, prefix="ab")
    collected = Collected()
    odd.subscribe(">", collected)
    other.publish(make(1))
    odd.publish(make(2))
    collected.until_count(1)
    assert collected.data == [2]
    odd.close()
    other.close()


def test_a_listener_comes_back_and_says_that_messages_are_lost(
    transport: RedisPubSub, redis_url: str, make: MAKE, caplog: pytest.LogCaptureFixture
) -> None:
    collected = Collected()
    transport.subscribe("orders.>", collected)
    transport.publish(make(1))
    collected.until_count(1)
    with caplog.at_level(logging.WARNING, "headwater"), redis_client.Redis.from_url(redis_url, protocol=2) as client:
        with until_a_new_subscription(client):
            assert client.client_kill_filter(_type="pubsub", skipme=True) == 1
        transport.publish(make(2))
        collected.until(lambda messages: messages[-1].data == 2)
        transport.close()
    assert collected.data == [1, 2]
    assert "lost" in caplog.text


@contextlib.contextmanager
def until_a_new_subscription(client: Any) -> Iterator[None]:
    """Begins to watch, and at the end waits for a new subscription."""
    with client.monitor() as monitor:
        yield
        if client.pubsub_numpat() == 0:
            next(seen for seen in monitor.listen() if seen["command"].startswith("PSUBSCRIBE"))


def test_an_unreachable_server_fails_publishers_and_new_subscribers(make: MAKE) -> None:
    with RedisServer() as server:
        transport = RedisPubSub.from_url(server.url)
        collected = Collected()
        transport.subscribe(">", collected)
        transport.publish(make(1))
        server.stop()
        with pytest.raises(TransportFailedError):
            transport.publish(make(2))
        with pytest.raises(TransportFailedError):
            transport.subscribe(">", print)
        assert not transport.connected
        server.start()
        with server.client(socket_timeout=PATIENCE_S) as client, until_a_new_subscription(client):
            pass
        transport.publish(make(3))
        collected.until(lambda messages: messages[-1].data == 3)
        assert collected.data == [1, 3]
        transport.close()


def test_there_are_no_groups_and_patterns_are_checked(transport: RedisPubSub) -> None:
    with pytest.raises(InvalidOptionError, match="Streams"):
        transport.subscribe(">", print, group="workers")
    with pytest.raises(InvalidPatternError):
        transport.subscribe("orders.>.new", print)
    transport.close()
    with pytest.raises(ClosedError):
        transport.subscribe(">", print)


def test_stopping_is_quick_and_may_come_from_the_handler(transport: RedisPubSub, make: MAKE) -> None:
    collected = Collected(lambda message: following.stop())
    following = transport.subscribe(">", collected)
    transport.publish_many([make(1), make(2)])
    collected.until_count(1)
    following.stop()
    following.stop()
    transport.publish(make(3))
    assert collected.data == [1]
    assert not transport.recognises_ids
