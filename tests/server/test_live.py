"""Live subscriptions: connected clients get messages, and no position is kept."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
from foreign_client import PATIENCE_S, Serve, connect, gone, turn

import headwater
from headwater import ManualClock
from headwater.broker.deliveries import Claimed
from headwater.message import Message, readable
from headwater.server import live, shapes
from headwater.server.connection import OUTGOING_BYTES_MAX
from headwater.stores.sql import SqlReader

DEEPEST_ROW = "[" * 1_000 + "]" * 1_000  # SQLite's JSON nests no deeper


async def test_a_notification_has_topic_data_and_pattern(serve: Serve) -> None:
    clock = ManualClock(1_700_000_000_123)
    async with serve(clock=clock) as server, connect(server) as client, connect(server) as other:
        await client.call("rpc.subscribe", {"topic": "a.>"})
        await other.publish("a.b", {"x": [1, None]}, headers={"from": "shop", "mine": 1}, id="given")
        note = await client.note("rpc.notification")
        assert (note["topic"], note["data"], note["pattern"]) == ("a.b", {"x": [1, None]}, "a.>")
        assert (note["sequence_id"], note["id"], note["timestamp"]) == (1, "given", "2023-11-14T22:13:20.123Z")
        assert note["headers"] == {"from": "shop", "mine": 1}


async def test_only_what_comes_after_is_heard_and_only_while_it_is_wanted(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.publish("a", "before")
        await client.call("rpc.subscribe", {"topic": "a"})
        await client.publish("a", "during")
        assert (await client.note("rpc.notification"))["data"] == "during"
        for _ in range(20):  # the shared reader of the log may be behind, which must not show
            await client.call("rpc.unsubscribe", {"topic": "a"})
            await client.publish("a", "unheard")
            await client.call("rpc.subscribe", {"topic": "a"})
            await client.publish("a", "again")
            assert (await client.note("rpc.notification"))["data"] == "again"


async def test_all_listeners_get_it_each_by_its_own_patterns(serve: Serve) -> None:
    patterns = {"orders.new": 1, "orders.*": 2, "orders.>": 3, ">": 4, "orders.#": 4, "events.>": 0}
    topics = ["orders", "orders.new", "orders.shipped", "orders.new.fast"]
    async with serve() as server, connect(server) as publisher, connect(server) as client:
        for pattern in patterns:
            await client.call("rpc.subscribe", {"topic": pattern})
        for topic in topics:
            await publisher.publish(topic)
        heard = [await client.note("rpc.notification") for _ in range(sum(patterns.values()))]
        assert {p: sum(each["pattern"] == p for each in heard) for p in patterns} == patterns
        assert await client.has_nothing_to_read()


async def test_subscribing_twice_to_one_pattern_is_once(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        for _ in range(2):
            await client.call("rpc.subscribe", {"topic": "a"})
        await client.publish("a", 1)
        await client.publish("a", 2)
        assert [(await client.note("rpc.notification"))["data"] for _ in range(2)] == [1, 2]
        assert await client.has_nothing_to_read()


async def test_nothing_is_left_of_a_client_that_has_gone(serve: Serve) -> None:
    async with serve() as server:
        hub = server._context.live  # type: ignore[union-attr]
        async with connect(server) as client:
            await client.call("rpc.subscribe.batch", {"topics": ["a", "b.*"]})
            assert len(hub) == 2
        await gone(server)
        assert len(hub) == 0
        assert not hub._subscriptions
        assert [*hub._trie.match("a"), *hub._trie.match("b.c")] == []


async def test_what_another_process_writes_is_heard_too(serve: Serve) -> None:
    async with serve() as server, connect(server) as client:
        await client.call("rpc.subscribe", {"topic": "a"})
        async with headwater.open_async("log.db") as log:  # not through the server
            await log.publish("a", "by another log object")
        assert (await client.note("rpc.notification"))["data"] == "by another log object"


async def test_what_another_process_wrote_long_before_is_not_heard(serve: Serve) -> None:
    """No consumer waited, so that the server has not noticed it."""
    clock = ManualClock()
    async with serve(clock=clock) as server, connect(server) as client:
        async with headwater.open_async("log.db", clock=clock) as log:  # not through the server
            await log.publish_many([("a", "before")] * 3)
        clock.advance(60)
        await client.call("rpc.subscribe", {"topic": "a"})
        await client.publish("a", "after")
        assert (await client.note("rpc.notification"))["data"] == "after"


async def test_a_message_too_large_for_the_frames_of_clients_stops_no_other_client(serve: Serve) -> None:
    async with serve(limits_frame_bytes=4_096) as server, connect(server) as client:
        await client.call("rpc.subscribe", {"topic": "a"})
        await client.subscribe("s", "a")
        async with headwater.open_async("log.db") as log:
            await log.publish("a", "x" * 1_000_000)
            await log.publish("a", "small")
        got = {"rpc.notification": 0, "rpc.notification.persistent": 0}
        while min(got.values()) < 2:
            frame = await client.frame()
            got[frame["method"]] += 1


async def test_a_message_too_large_for_any_frame_stops_no_other_client(serve: Serve, tmp_path: Path) -> None:
    """It cannot be published, but it can be inserted."""
    async with serve() as server, connect(server) as client:
        await client.call("rpc.subscribe", {"topic": "a"})
        await client.subscribe("pushed", "a")
        await client.subscribe("fetched", "a", deliver="fetch")
        by_hand = apsw.Connection(str(tmp_path / "log.db"))
        by_hand.execute("INSERT INTO messages (topic, data) VALUES ('a', ?)", (f'"{"x" * OUTGOING_BYTES_MAX}"',))
        by_hand.close()
        last = await client.publish("a", "small")
        heard = {note["method"]: note["params"]["data"] for note in await client.notes(2)}
        assert heard == {"rpc.notification": "small", "rpc.notification.persistent": "small"}
        await client.call("rpc.fetch", {"subscription_id": "fetched", "wait": 10})
        fetched = await client.call("rpc.fetch", {"subscription_id": "fetched", "wait": 10})
        assert [message[0] for message, _, _ in fetched["messages"]] == [last]
        counts = await client.call("rpc.dead_letters.stats")
        assert counts["by_subscription"] == {"pushed": 1, "fetched": 1}
        assert counts["by_reason"] == {"processing_error": 2}


@pytest.mark.parametrize(
    ("data", "headers", "seen"),
    [
        ("1e999", None, ("1e999", {})),
        ('"\\ud800"', None, ('"\\ud800"', {})),
        (DEEPEST_ROW, None, (DEEPEST_ROW, {})),
        ("1", '{"x": 1e999}', (1, {"type": "t"})),
        ("1", '{"x": "\\ud800"}', (1, {"type": "t"})),
        ("1", f'{{"x": {DEEPEST_ROW[1:-1]}}}', (1, {"type": "t"})),
    ],
    ids=["infinite data", "half a character", "deep data", "infinite header", "half a header", "deep header"],
)
async def test_a_row_that_could_not_be_published_reaches_its_readers_and_stops_none(
    serve: Serve, tmp_path: Path, data: str, headers: str | None, seen: tuple[Any, Any]
) -> None:
    """SQLite's check of an INSERT takes JSON that no client can send."""
    async with serve() as server, connect(server) as client:
        await client.call("rpc.subscribe", {"topic": "a"})
        await client.subscribe("pushed", "a")
        await client.subscribe("fetched", "a", deliver="fetch", max_attempts=1)
        by_hand = apsw.Connection(str(tmp_path / "log.db"))
        type_ = None if headers is None else "t"
        by_hand.execute(
            "INSERT INTO messages (topic, data, headers, type) VALUES ('a', ?, ?, ?)", (data, headers, type_)
        )
        by_hand.close()
        await client.publish("a", "sound")
        heard = await client.notes(4)
        for method in ("rpc.notification", "rpc.notification.persistent"):
            found = [note["params"] for note in heard if note["method"] == method]
            assert [(each["data"], each["headers"]) for each in found] == [seen, ("sound", {})]
        params = {"subscription_id": "fetched"}
        fetched = await client.call("rpc.fetch", params)
        assert [message[0] for message, _, _ in fetched["messages"]] == [1, 2]
        await client.call("rpc.reject", {**params, "sequence_id": 1})
        assert (await client.call("rpc.dead_letters.stats"))["total"] == 1


def test_a_payload_nested_almost_as_deeply_as_this_process_reads_is_sent_as_text() -> None:
    """In a frame it is nested deeper, and the stack of its reader may be higher."""

    def nested(depth: int) -> Message:
        return Message(1, "a", msgspec.Raw(b"[" * depth + b"]" * depth), 0, 2 * depth, 0)

    deepest = next(depth for depth in range(1_000, 0, -1) if readable(nested(depth).raw))
    for less in range(shapes.ENVELOPE_DEPTH - 4):
        assert shapes.fetched([Claimed(nested(deepest - less), 1, 1)]).unreadable == [0]
    assert not shapes.fetched([Claimed(nested(deepest // 2), 1, 1)]).unreadable


def test_a_payload_that_is_json_only_inside_an_array_is_sent_as_text() -> None:
    """Such a row cannot be inserted without a `checked` that is not true; in a frame it would end its own field."""
    broken = b'"%b"],["b"' % (b"a" * 2_000)
    assert bytes(shapes._json_data(Message(1, "a", msgspec.Raw(broken), 0, len(broken), 0))) == msgspec.json.encode(
        broken.decode()
    )


async def test_an_error_of_ours_while_sending_ends_neither_the_live_feed_nor_a_subscription_silently(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "RETRY_S", 0)
    json_data = shapes._json_data

    def fails_for_bad(message: Message) -> msgspec.Raw:
        if message.data == "bad":
            raise RuntimeError("made up")
        return json_data(message)

    monkeypatch.setattr(shapes, "_json_data", fails_for_bad)
    async with serve() as server, connect(server) as listener, connect(server) as consumer:
        await listener.call("rpc.subscribe", {"topic": "a"})
        await consumer.subscribe("s", "a")
        await listener.publish("a", "bad")
        assert await consumer.note("rpc.lost") == {"subscription_id": "s", "why": "internal error"}
        async with asyncio.timeout(PATIENCE_S):
            while "the live feed goes on" not in caplog.text:  # without what it reads together with the bad one
                await turn()
        await listener.publish("a", "good")
        assert (await listener.note("rpc.notification"))["data"] == "good"


async def test_an_error_of_ours_at_the_beginning_does_not_end_the_live_feed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "RETRY_S", 0)
    seq_before, failures = SqlReader.seq_before, iter([RuntimeError("made up")])

    def fails_once(reader: SqlReader, at_ms: int) -> int:
        for failure in failures:
            raise failure
        return seq_before(reader, at_ms)

    monkeypatch.setattr(SqlReader, "seq_before", fails_once)
    async with serve() as server, connect(server) as client:
        await client.call("rpc.subscribe", {"topic": "a"})
        await client.publish("a", 1)
        assert (await client.note("rpc.notification"))["data"] == 1


async def test_what_listeners_do_not_read_is_bounded(serve: Serve) -> None:
    """The rest is missed by the clients that do not read; the others get it all."""
    total_bytes, count = 4_000_000, 30
    async with serve(limits_outbound_total_bytes=total_bytes) as server, AsyncExitStack() as connections:
        silent = [await connections.enter_async_context(connect(server)) for _ in range(count)]
        for client in silent:
            await client.call("rpc.subscribe", {"topic": "a"})
            client.stop_reading()
        async with connect(server) as publisher, connect(server) as reading:
            await reading.call("rpc.subscribe", {"topic": "b"})
            for _ in range(12):
                await publisher.publish("a", "x" * 900_000)
            await publisher.publish("b", 1)
            assert (await reading.note("rpc.notification"))["data"] == 1
            assert total_bytes < server.outbound.total_bytes < 3 * total_bytes
        for client in silent:
            client.vanish()
