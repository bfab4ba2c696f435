"""Groups on Redis Streams: shared, passed on after failure and death, dead after too many tries."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from redis_followers import PATIENCE_S, Collected
from redis_server import RedisServer

from headwater import Message
from headwater.transports import redis_consumer
from headwater.transports.redis import RedisStreams

MAKE = Callable[..., Message]
SOON = {"reclaim_idle": 0.2}
WORKER = """
import sys, threading
from headwater.transports.redis import RedisStreams

def handle(message):
    print(message.data, flush=True)
    threading.Event().wait()

RedisStreams.from_url(sys.argv[1], reclaim_idle=0.2).subscribe(">", handle, group="workers")
threading.Event().wait()
"""


def pending(client: Any, stream: str = "headwater", group: str = "workers") -> int:
    found: int = client.xpending(stream, group)["pending"]
    return found


def fail(message: Message) -> None:
    raise ValueError(f"no {message.data}")


def test_consumers_of_a_group_share_and_none_comes_twice(
    open_streams: Callable[..., RedisStreams], client: Any, make: MAKE
) -> None:
    transport = open_streams()
    transport.publish_many([make(number) for number in range(300)])  # before there is a group
    both_have_one = threading.Barrier(2)
    met: set[int] = set()
    done = threading.Semaphore(0)

    def meet(message: Message) -> None:
        if threading.get_ident() not in met:
            met.add(threading.get_ident())
            both_have_one.wait(PATIENCE_S)
        done.release()

    first, second = Collected(meet), Collected(meet)
    followings = [transport.subscribe(">", each, group="workers") for each in (first, second)]
    for _ in range(300):
        assert done.acquire(timeout=PATIENCE_S)
    for following in followings:
        following.stop()
    assert sorted(first.data + second.data) == list(range(300))
    assert first.data == sorted(first.data)
    assert pending(client) == 0


def test_what_a_handler_failed_at_comes_again_later_and_the_others_do_not_wait(
    open_streams: Callable[..., RedisStreams], client: Any, make: MAKE
) -> None:
    transport = open_streams(**SOON)

    def fail_once(message: Message) -> None:
        if message.data == 1 and fails_once.data.count(1) == 1:
            fail(message)
        if message.data == 2 and fails_once.data.count(2) == 1:
            sys.exit("a handler that wants to exit has failed like any other")

    fails_once = Collected(fail_once)
    transport.publish_many([make(number) for number in range(4)])
    following = transport.subscribe(">", fails_once, group="workers")
    fails_once.until_count(6)
    following.stop()
    assert fails_once.data == [0, 1, 2, 3, 1, 2]
    assert pending(client) == 0


def test_what_always_fails_ends_in_the_dead_stream_with_the_count(
    open_streams: Callable[..., RedisStreams], client: Any, make: MAKE
) -> None:
    transport = open_streams(reclaim_idle=0.05, max_deliveries=3)
    poison = make({"n": 1}, id="poison", type="Order")
    transport.publish_many([poison, make(2)])
    collected = Collected(lambda message: fail(message) if message.id == "poison" else None)
    following = transport.subscribe(">", collected, group="workers", consumer="me")
    (_, [(_, dead)]), *_ = client.xread({"headwater:dead": "0"}, block=int(PATIENCE_S * 1000))
    following.stop()
    assert [message.id for message in collected.messages].count("poison") == 3
    assert [dead[name] for name in (b"dead_reason", b"dead_error", b"dead_deliveries", b"dead_group", b"id")] == [
        b"failed",
        b"ValueError: no {'n': 1}",
        b"3",
        b"workers",
        b"poison",
    ]
    assert dead[b"doc"] == client.xrange("headwater", count=1)[0][1][b"doc"]
    assert pending(client) == 0


def test_an_entry_that_is_no_message_goes_to_the_dead_stream_at_once(
    open_streams: Callable[..., RedisStreams], client: Any, make: MAKE
) -> None:
    wrong: list[dict[str, Any]] = [{"other": b"\xff"}, {"doc": "{}"}, {"doc": '{"seq":'}, {"doc": b"\xff\xfe"}]
    for fields in wrong:
        client.xadd("headwater", fields)
    transport, collected = open_streams(), Collected()
    transport.publish(make(1))
    transport.subscribe(">", collected, group="workers")
    collected.until_count(1)
    dead = [fields for _, fields in client.xrange("headwater:dead")]
    assert [fields[b"dead_reason"] for fields in dead] == [b"unreadable"] * 4
    assert dead[0][b"other"] == b"\xff"


def test_a_consumer_killed_in_its_handler_passes_its_entries_on(
    open_streams: Callable[..., RedisStreams], redis_url: str, client: Any, make: MAKE
) -> None:
    transport = open_streams(**SOON)
    transport.publish_many([make(number) for number in range(5)])
    child = subprocess.Popen([sys.executable, "-c", WORKER, redis_url], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "0\n"
        assert pending(client) == 5
    finally:
        child.kill()
        child.wait(PATIENCE_S)
    collected = Collected()
    following = transport.subscribe(">", collected, group="workers")
    collected.until_count(5)
    following.stop()
    assert sorted(collected.data) == list(range(5))
    assert pending(client) == 0


def test_what_kills_its_consumers_ends_in_the_dead_stream_unseen(
    open_streams: Callable[..., RedisStreams], client: Any, make: MAKE
) -> None:
    transport = open_streams(reclaim_idle=0.05, max_deliveries=2)
    transport.publish_many([make(1, id="killer"), make(2)])
    client.xgroup_create("headwater", "workers", "0")
    [[_, [(entry, _)]]] = client.xreadgroup("workers", "killed", {"headwater": ">"}, count=1)
    client.xclaim("headwater", "workers", "killed too", 0, [entry])
    collected = Collected()
    transport.subscribe(">", collected, group="workers")
    (_, [(_, dead)]), *_ = client.xread({"headwater:dead": "0"}, block=int(PATIENCE_S * 1000))
    assert (dead[b"dead_reason"], dead[b"dead_deliveries"], dead[b"id"]) == (b"abandoned", b"3", b"killer")
    collected.until_count(1)
    assert collected.data == [2]


@pytest.mark.parametrize("group", [None, "workers"])
def test_a_handler_that_wants_to_exit_has_failed_like_any_other(
    open_streams: Callable[..., RedisStreams], make: MAKE, group: str | None
) -> None:
    transport = open_streams()
    collected = Collected(lambda message: sys.exit(1) if message.data == 1 else None)
    transport.subscribe(">", collected, group=group)
    transport.publish_many([make(1), make(2)])
    collected.until_count(2)
    assert collected.data == [1, 2]


def test_a_handler_may_take_longer_than_entries_take_to_be_reclaimed(
    open_streams: Callable[..., RedisStreams], client: Any, make: MAKE
) -> None:
    transport = open_streams(reclaim_idle=0.6, max_deliveries=100)
    release = threading.Event()
    slow = Collected(lambda message: release.wait(PATIENCE_S))
    transport.publish_many([make(number) for number in range(3)])
    held = transport.subscribe(">", slow, group="workers")
    slow.until_count(1)
    fails = Collected(lambda message: fail(message) if fails.data.count("failing") < 3 else None)
    other = transport.subscribe(">", fails, group="workers")
    transport.publish(make("failing"))
    fails.until_count(3)  # it was reclaimed twice, so the time has passed twice
    assert fails.data == ["failing"] * 3
    release.set()
    slow.until_count(3)
    held.stop()
    other.stop()
    assert slow.data == [0, 1, 2]
    assert pending(client) == 0


def test_stopping_waits_for_the_handler_and_gives_the_rest_back_uncounted(
    open_streams: Callable[..., RedisStreams], client: Any, make: MAKE
) -> None:
    transport = open_streams(reclaim_idle=60)
    release = threading.Event()
    first = Collected(lambda message: release.wait(PATIENCE_S))
    transport.publish_many([make(number) for number in range(5)])
    following = transport.subscribe(">", first, group="workers")
    first.until_count(1)
    stopping = threading.Thread(target=following.stop)
    stopping.start()
    following._stopping.wait(PATIENCE_S)
    assert stopping.is_alive()
    release.set()
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()
    following.stop()

    counts: list[int] = []
    second = Collected(
        lambda message: counts.append(client.xpending_range("headwater", "workers", "-", "+", 1)[0]["times_delivered"])
    )
    taking_over = transport.subscribe(">", second, group="workers")
    second.until_count(4)
    taking_over.stop()
    assert (first.data, second.data) == ([0], [1, 2, 3, 4])
    assert counts == [1] * 4


def test_a_handler_may_stop_its_own_subscription(open_streams: Callable[..., RedisStreams], make: MAKE) -> None:
    transport = open_streams()
    collected = Collected(lambda message: following.stop())
    following = transport.subscribe(">", collected, group="workers")
    transport.publish_many([make(1), make(2)])
    collected.until_count(1)
    following.stop()
    assert collected.data == [1]


def test_consumers_without_a_name_leave_none_behind_and_forgotten_ones_are_removed(
    open_streams: Callable[..., RedisStreams], client: Any, make: MAKE
) -> None:
    def names() -> set[bytes]:
        return {consumer["name"] for consumer in client.xinfo_consumers("headwater", "workers")}

    transport, collected = open_streams(), Collected()
    transport.publish(make(1))
    named = transport.subscribe(">", collected, group="workers", consumer="named")
    collected.until_count(1)
    named.stop()
    client.xadd("headwater", {"doc": "x"})
    client.xreadgroup("workers", "holding", {"headwater": ">"})
    nameless = transport.subscribe(">", collected, group="workers")
    transport.publish(make(2))
    collected.until_count(2)
    nameless.stop()
    assert names() == {b"named", b"holding"}  # no time is over yet

    tidy = open_streams(forget_consumers=0)
    following = tidy.subscribe(">", collected, group="workers", consumer="tidy")
    transport.publish(make(3))
    collected.until_count(3)
    following.stop()
    assert names() == {b"tidy", b"holding"}  # what holds an entry stays


def test_entries_deleted_before_they_were_handled_are_logged_and_acked(
    open_streams: Callable[..., RedisStreams], client: Any, make: MAKE, caplog: pytest.LogCaptureFixture
) -> None:
    transport = open_streams(reclaim_idle=0.05)
    transport.publish_many([make(1), make(2), make(3)])
    client.xgroup_create("headwater", "workers", "0")
    [[_, entries]] = client.xreadgroup("workers", "gone", {"headwater": ">"})
    client.xdel("headwater", entries[1][0])
    collected = Collected()
    with caplog.at_level(logging.WARNING, "headwater"):
        following = transport.subscribe(">", collected, group="workers")
        collected.until_count(2)
        following.stop()
    assert collected.data == [1, 3]
    assert "1 entries of headwater were deleted" in caplog.text
    assert pending(client) == 0


def test_after_a_flush_the_group_is_made_again_and_says_so(
    open_streams: Callable[..., RedisStreams], client: Any, make: MAKE, caplog: pytest.LogCaptureFixture
) -> None:
    transport, collected = open_streams(), Collected()
    transport.subscribe(">", collected, group="workers")
    transport.publish(make(1))
    collected.until_count(1)
    client.flushall()
    transport.publish(make(2))
    collected.until_count(2)
    assert collected.data == [1, 2]
    assert "is gone" in caplog.text


def test_readers_come_back_after_the_server_was_killed_and_nothing_is_lost_or_handled_twice(
    open_streams: Callable[..., RedisStreams], make: MAKE
) -> None:
    with RedisServer() as server:
        transport = open_streams(server.url)
        in_handler, go_on = threading.Event(), threading.Event()

        def hold_the_second(message: Message) -> None:
            if message.data == 1:
                in_handler.set()
                go_on.wait(PATIENCE_S)

        worker, live = Collected(hold_the_second), Collected()
        transport.subscribe(">", worker, group="workers")
        transport.subscribe(">", live)
        transport.publish_many([make(number) for number in range(4)])
        assert in_handler.wait(PATIENCE_S)
        live.until_count(4)
        server.kill()
        go_on.set()  # its ack finds no server
        server.start()
        transport.publish_many([make(number) for number in range(4, 8)])
        worker.until_count(8)
        live.until_count(8)
        transport.close()
        assert worker.data == live.data == list(range(8))
        with server.client() as client:
            assert pending(client) == 0


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
    monkeypatch.setattr(redis_consumer, "DISCOVER_S", 0.02)
    monkeypatch.setattr(redis_consumer, "BLOCK_MS", 20)
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
