"""Redis Pub/Sub: live, to everybody who listens, and honest about what is lost."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis as redis_client
from redis_followers import PATIENCE_S, Collected
from redis_server import RedisServer

from headwater import Message
from headwater.errors import Closed, InvalidOption, InvalidPattern, TransportFailed
from headwater.transports.redis_pubsub import RedisPubSub

MAKE = Callable[..., Message]


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


def test_to_nobody_is_a_success_and_late_listeners_get_nothing_of_it(transport: RedisPubSub, make: MAKE) -> None:
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
    odd = RedisPubSub.from_url(redis_url, {"prefix": "a*"})
    other = RedisPubSub.from_url(redis_url, {"prefix": "ab"})
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
        with until_somebody_subscribes(client):
            assert client.client_kill_filter(_type="pubsub", skipme=True) == 1
        transport.publish(make(2))
        collected.until(lambda messages: messages[-1].data == 2)
        transport.close()
    assert collected.data == [1, 2]
    assert "lost" in caplog.text


@contextlib.contextmanager
def until_somebody_subscribes(client: Any) -> Iterator[None]:
    """Begins to watch, and at the end waits until somebody has subscribed since."""
    with client.monitor() as monitor:
        yield
        if client.pubsub_numpat() == 0:
            next(seen for seen in monitor.listen() if seen["command"].startswith("PSUBSCRIBE"))


def test_a_server_that_is_away_is_told_to_publishers_and_new_listeners(make: MAKE) -> None:
    with RedisServer() as server:
        transport = RedisPubSub.from_url(server.url)
        collected = Collected()
        transport.subscribe(">", collected)
        transport.publish(make(1))
        server.stop()
        with pytest.raises(TransportFailed):
            transport.publish(make(2))
        with pytest.raises(TransportFailed):
            transport.subscribe(">", print)
        assert not transport.connected
        server.start()
        with server.client(socket_timeout=PATIENCE_S) as client, until_somebody_subscribes(client):
            pass
        transport.publish(make(3))
        collected.until(lambda messages: messages[-1].data == 3)
        assert collected.data == [1, 3]
        transport.close()


def test_there_are_no_groups_and_patterns_are_checked(transport: RedisPubSub) -> None:
    with pytest.raises(InvalidOption, match="Streams"):
        transport.subscribe(">", print, group="workers")
    with pytest.raises(InvalidPattern):
        transport.subscribe("orders.>.new", print)
    transport.close()
    with pytest.raises(Closed):
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
