"""A session holds a limited number of bytes in memory, in either direction, and no more."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from headwater.replication.host import session as session_module
from headwater.replication.host.session import FRAME_COST_BYTES, QUEUED_BYTES_MAX, Abort, Gone, ReplicaSession

FRAME = bytes(100_000)


class Wire:
    outbound_bytes_max = 1_000_000

    def __init__(self) -> None:
        self.unread = 0
        self.reads = True
        self.sent: list[bytes] = []
        self.closed: int | None = None

    def send_text(self, text: bytes) -> None:
        self.send_binary(text)

    def send_binary(self, data: bytes) -> None:
        self.sent.append(data)
        self.unread += len(data)

    def buffered_bytes(self) -> int:
        return self.unread

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def close(self, code: int, reason: str) -> None:
        self.closed = code


async def test_reading_pauses_when_enough_is_queued_and_goes_on_when_half_of_it_is_used() -> None:
    wire = Wire()
    session = ReplicaSession(wire, "a")
    count = 0
    while wire.reads and count < 100:
        session.receive_binary(FRAME)
        count += 1
    assert count == QUEUED_BYTES_MAX // (len(FRAME) + FRAME_COST_BYTES) + 1
    used = 0
    while not wire.reads:
        assert await session.next() == FRAME
        used += 1
    assert count // 2 <= used < count


async def test_frames_without_content_are_bounded_too() -> None:
    wire = Wire()
    session = ReplicaSession(wire, "a")
    for _ in range(QUEUED_BYTES_MAX // FRAME_COST_BYTES + 1):
        session.receive_binary(b"")
    assert not wire.reads


async def test_sending_waits_for_a_reader_and_ends_with_it() -> None:
    wire = Wire()
    session = ReplicaSession(wire, "a")
    for _ in range(10):
        await session.send_binary(FRAME)
    waiting = asyncio.create_task(session.send_binary(FRAME))
    await asyncio.sleep(0)
    assert not waiting.done()
    wire.unread = 0
    session.on_drained()
    await waiting
    wire.unread = 2_000_000
    waiting = asyncio.create_task(session.send_binary(FRAME))
    await asyncio.sleep(0)
    session.on_closed(vanished=True)
    with pytest.raises(Gone):
        await waiting
    assert await session.next() is None


async def test_a_client_that_reads_nothing_for_too_long_is_disconnected() -> None:
    wire = Wire()
    wire.unread = 2_000_000
    session = ReplicaSession(wire, "a")
    session.expect_pages(0.01)
    with pytest.raises(Abort, match="too slow"):
        await session.send_binary(FRAME)
    wire = Wire()
    wire.unread = 2_000_000
    session = ReplicaSession(wire, "a")
    session.queue_text("news")
    assert (wire.closed, wire.sent) == (1013, [])
    session.queue_text("more")
    session.abort(Abort("FAILED", "too late"))
    assert wire.sent == []


async def test_a_client_that_reads_on_a_thin_line_may_be_silent_as_long_as_it_takes() -> None:
    wire = Wire()
    session = ReplicaSession(wire, "a")
    session.expect_pages(0.1)
    for _ in range(10):
        await session.send_binary(FRAME)
    listening = asyncio.create_task(session.next())
    sending = asyncio.create_task(session.send_binary(FRAME))
    for _ in range(20):  # never enough for the wire to be drained
        wire.unread -= 1_000
        await asyncio.sleep(0.01)
    assert wire.closed is None
    assert not listening.done()
    assert not sending.done()
    with pytest.raises(Abort, match="too slow"):
        await listening
    with pytest.raises(Abort, match="too slow"):
        await sending


async def test_what_came_before_the_end_is_heard_and_why_is_one_line() -> None:
    wire = Wire()
    session = ReplicaSession(wire, "a")
    session.receive_text("ü".encode())
    session.on_closed(vanished=True)
    assert [await session.next(), await session.next()] == ["ü", None]
    session = ReplicaSession(wire, "a")
    session.abort(Abort("FAILED", "one\ntwo\x00" + "x" * 1000))
    assert wire.sent[0].startswith(b"ABORT=FAILED:one two x")
    assert len(wire.sent[0]) < 600
    assert wire.closed == 1000
    session.receive_binary(b"late")
    assert await session.next() is None


async def test_a_revoked_client_gets_the_decision_and_nothing_more() -> None:
    wire = Wire()
    session = ReplicaSession(wire, "a")
    listening = asyncio.create_task(session.next(None))
    wire.unread = 2_000_000
    sending = asyncio.create_task(session.send_binary(FRAME))
    await asyncio.sleep(0)
    session.receive_binary(b"late")
    session.revoke(Abort("UNAUTHORIZED", "no more"))
    session.revoke(Abort("FAILED", "something else"))
    for task in (listening, sending):
        with pytest.raises(Abort, match="no more"):
            await task
    with pytest.raises(Abort, match="no more"):
        await session.send_binary(FRAME)
    wire.unread = 0
    await session.send_text("it is a version")
    session.abort(Abort("UNAUTHORIZED", "no more"))
    assert wire.sent == [FRAME, b"it is a version", b"ABORT=UNAUTHORIZED:no more"]


async def test_a_client_that_is_too_slow_is_refused_in_either_direction() -> None:
    session = ReplicaSession(Wire(), "a")
    session.expect_pages(0.05)
    session.receive_binary(b"drop")
    assert await session.next() == b"drop"
    with pytest.raises(Abort, match="too slow"):
        await session.next()
    wire = Wire()
    wire.unread = 2_000_000
    session = ReplicaSession(wire, "a")
    session.expect_pages(0.05)
    sending = asyncio.create_task(session.send_binary(FRAME))
    await asyncio.sleep(0)
    wire.unread -= 100  # it takes some of it
    with pytest.raises(Abort, match="too slow"):
        await sending


async def test_what_moves_in_either_direction_keeps_our_patience_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1_000.0
    monkeypatch.setattr(session_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    wire = Wire()
    wire.unread = wire.outbound_bytes_max + 1
    session = ReplicaSession(wire, "a")
    session.expect_pages(900)
    assert session._pace is not None
    sending, listening = asyncio.create_task(session.send_binary(FRAME)), asyncio.create_task(session.next())
    await asyncio.sleep(0)
    now_s += 500
    assert session._pace.left_s(now_s) == 400
    wire.unread -= 400_000  # it has taken so much: 100 s worth of it
    session.on_drained()
    await sending
    assert session._pace.left_s(now_s) == 500
    now_s += 5_000  # our end was at work, for here is what it says
    await session.send_binary(b"")
    assert session._pace.left_s(now_s) == 500
    now_s += 50
    session.receive_binary(FRAME)
    assert await listening == FRAME
    now_s += 5_000  # our own work
    assert session._pace.left_s(now_s) == 475
