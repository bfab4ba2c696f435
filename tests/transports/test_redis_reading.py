"""What readers of Redis Streams get: by pattern, from where they begin, and of topics that turn up later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis_followers import Collected

from headwater import Message
from headwater.transports import redis_reading
from headwater.transports.redis_streams import RedisStreams

MAKE = Callable[..., Message]


def leave(message: Message) -> None:
    raise SystemExit(f"no {message.data}") if message.data == 1 else ValueError(f"no {message.data}")


def test_another_group_gets_everything_too_and_topics_that_do_not_match_are_acked_unseen(
    open_streams: Callable[..., RedisStreams], client: Any, make: MAKE
) -> None:
    transport = open_streams()
    transport.publish_many([make(number, f"orders.{'even' if number % 2 == 0 else 'odd'}") for number in range(10)])
    evens, all_of_them = Collected(), Collected()
    following = transport.subscribe("orders.even", evens, group="evens")
    transport.subscribe("orders.>", all_of_them, group="all")
    evens.until_count(5)
    all_of_them.until_count(10)
    transport.publish(make(11, "orders.odd"))
    transport.publish(make(12, "orders.even"))
    evens.until_count(6)
    following.stop()
    assert evens.data == [0, 2, 4, 6, 8, 12]
    assert client.xpending("headwater", "evens|orders.even")["pending"] == 0


def test_consumers_of_a_group_with_other_patterns_do_not_take_each_others_messages(
    open_streams: Callable[..., RedisStreams], make: MAKE
) -> None:
    transport = open_streams()
    new, paid = Collected(), Collected()
    transport.subscribe("orders.new", new, group="workers")
    transport.subscribe("orders.paid", paid, group="workers")
    transport.publish_many([make(number, "orders.paid" if number % 2 else "orders.new") for number in range(40)])
    new.until_count(20)
    paid.until_count(20)
    assert (new.data, paid.data) == (list(range(0, 40, 2)), list(range(1, 40, 2)))


def test_a_group_can_begin_with_what_comes_from_now_on(open_streams: Callable[..., RedisStreams], make: MAKE) -> None:
    transport = open_streams(start="new")
    transport.publish(make(1))
    collected = Collected()
    transport.subscribe(">", collected, group="workers")
    transport.publish(make(2))
    collected.until_count(1)
    assert collected.data == [2]


def test_a_group_that_began_so_gets_a_topic_from_its_first_that_turned_up_while_it_was_away(
    open_streams: Callable[..., RedisStreams], make: MAKE
) -> None:
    transport = open_streams(start="new", stream_per_topic=1)
    transport.publish(make(1, "orders.new"))
    transport.subscribe(">", Collected(), group="workers").stop()
    transport.publish(make(2, "orders.paid"))
    transport.publish(make(3, "orders.new"))
    collected = Collected()
    transport.subscribe(">", collected, group="workers")
    collected.until_count(2)
    assert sorted(collected.data) == [2, 3]


def test_streams_of_new_topics_are_found(
    open_streams: Callable[..., RedisStreams], make: MAKE, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_reading, "DISCOVER_S", 0.02)
    monkeypatch.setattr(redis_reading, "BLOCK_MS", 20)
    transport = open_streams(stream_per_topic=1)
    transport.publish_many([make(1, "orders.a"), make(2, "other.a")])
    in_group, live, exact = Collected(), Collected(), Collected()
    transport.subscribe("orders.*", in_group, group="workers")
    transport.subscribe("orders.*", live)
    transport.subscribe("orders.b", exact, group="only b")
    transport.publish_many([make(3, "orders.b"), make(4, "orders.a"), make(5, "other.b")])
    in_group.until_count(3)
    live.until_count(2)
    exact.until_count(1)
    assert (sorted(in_group.data), sorted(live.data), exact.data) == ([1, 3, 4], [3, 4], [3])


def test_live_readers_get_everything_from_now_on_whatever_their_handlers_do(
    open_streams: Callable[..., RedisStreams], client: Any, make: MAKE
) -> None:
    transport = open_streams()
    transport.publish(make(0))
    first, second = Collected(leave), Collected()
    following = transport.subscribe(">", first)
    transport.subscribe("orders.old", second)
    client.xadd("headwater", {"no": "message"})
    transport.publish_many([make(1), make(2, "orders.old"), make(3)])
    first.until_count(3)
    second.until_count(1)
    following.stop()
    transport.publish(make(4, "orders.old"))
    second.until_count(2)
    assert (first.data, second.data) == ([1, 2, 3], [2, 4])
