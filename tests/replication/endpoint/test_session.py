"""A visit holds so many bytes in memory, in either direction, and no more."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from headwater.replication.host import session as visiting
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
    visit = ReplicaSession(wire, "a")
    count = 0
    while wire.reads and count < 100:
        visit.receive_binary(FRAME)
        count += 1
    assert count == QUEUED_BYTES_MAX // (len(FRAME) + FRAME_COST_BYTES) + 1
    used = 0
    while not wire.reads:
        assert await visit.next() == FRAME
        used += 1
    assert count // 2 <= used < count


async def test_frames_without_content_are_bounded_too() -> None:
    wire = Wire()
    visit = ReplicaSession(wire, "a")
    for _ in range(QUEUED_BYTES_MAX // FRAME_COST_BYTES + 1):
        visit.receive_binary(b"")
    assert not wire.reads


async def test_sending_waits_for_a_reader_and_ends_with_it() -> None:
    wire = Wire()
    visit = ReplicaSession(wire, "a")
    for _ in range(10):
        await visit.send_binary(FRAME)
    waiting = asyncio.create_task(visit.send_binary(FRAME))
    await asyncio.sleep(0)
    assert not waiting.done()
    wire.unread = 0
    visit.on_drained()
    await waiting
    wire.unread = 2_000_000
    waiting = asyncio.create_task(visit.send_binary(FRAME))
    await asyncio.sleep(0)
    visit.on_closed(vanished=True)
    with pytest.raises(Gone):
        await waiting
    assert await visit.next() is None


async def test_who_reads_nothing_for_too_long_is_let_go() -> None:
    wire = Wire()
    wire.unread = 2_000_000
    visit = ReplicaSession(wire, "a")
    visit.expect_pages(0.01)
    with pytest.raises(Abort, match="too slow"):
        await visit.send_binary(FRAME)
    wire = Wire()
    wire.unread = 2_000_000
    visit = ReplicaSession(wire, "a")
    visit.queue_text("news")
    assert (wire.closed, wire.sent) == (1013, [])
    visit.queue_text("more")
    visit.abort(Abort("FAILED", "too late"))
    assert wire.sent == []


async def test_a_client_that_reads_on_a_thin_line_may_be_silent_as_long_as_it_takes() -> None:
    wire = Wire()
    visit = ReplicaSession(wire, "a")
    visit.expect_pages(0.1)
    for _ in range(10):
        await visit.send_binary(FRAME)
    listening = asyncio.create_task(visit.next())
    sending = asyncio.create_task(visit.send_binary(FRAME))
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
    visit = ReplicaSession(wire, "a")
    visit.receive_text("ü".encode())
    visit.on_closed(vanished=True)
    assert [await visit.next(), await visit.next()] == ["ü", None]
    visit = ReplicaSession(wire, "a")
    visit.abort(Abort("FAILED", "one\ntwo\x00" + "x" * 1000))
    assert wire.sent[0].startswith(b"ABORT=FAILED:one two x")
    assert len(wire.sent[0]) < 600
    assert wire.closed == 1000
    visit.receive_binary(b"late")
    assert await visit.next() is None


async def test_who_is_withdrawn_hears_what_was_decided_and_nothing_more() -> None:
    wire = Wire()
    visit = ReplicaSession(wire, "a")
    listening = asyncio.create_task(visit.next(None))
    wire.unread = 2_000_000
    sending = asyncio.create_task(visit.send_binary(FRAME))
    await asyncio.sleep(0)
    visit.receive_binary(b"late")
    visit.revoke(Abort("UNAUTHORIZED", "no more"))
    visit.revoke(Abort("FAILED", "something else"))
    for task in (listening, sending):
        with pytest.raises(Abort, match="no more"):
            await task
    with pytest.raises(Abort, match="no more"):
        await visit.send_binary(FRAME)
    wire.unread = 0
    await visit.send_text("it is a version")
    visit.abort(Abort("UNAUTHORIZED", "no more"))
    assert wire.sent == [FRAME, b"it is a version", b"ABORT=UNAUTHORIZED:no more"]


async def test_who_lets_bytes_drip_is_told_so_in_either_direction() -> None:
    visit = ReplicaSession(Wire(), "a")
    visit.expect_pages(0.05)
    visit.receive_binary(b"drop")
    assert await visit.next() == b"drop"
    with pytest.raises(Abort, match="too slow"):
        await visit.next()
    wire = Wire()
    wire.unread = 2_000_000
    visit = ReplicaSession(wire, "a")
    visit.expect_pages(0.05)
    sending = asyncio.create_task(visit.send_binary(FRAME))
    await asyncio.sleep(0)
    wire.unread -= 100  # it takes some of it
    with pytest.raises(Abort, match="too slow"):
        await sending


async def test_what_moves_in_either_direction_keeps_our_patience_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1_000.0
    monkeypatch.setattr(visiting, "time", SimpleNamespace(monotonic=lambda: now_s))
    wire = Wire()
    wire.unread = wire.outbound_bytes_max + 1
    visit = ReplicaSession(wire, "a")
    visit.expect_pages(900)
    assert visit._pace is not None
    sending, listening = asyncio.create_task(visit.send_binary(FRAME)), asyncio.create_task(visit.next())
    await asyncio.sleep(0)
    now_s += 500
    assert visit._pace.left_s(now_s) == 400
    wire.unread -= 400_000  # it has taken so much: 100 s worth of it
    visit.on_drained()
    await sending
    assert visit._pace.left_s(now_s) == 500
    now_s += 5_000  # our end was at work, for here is what it says
    await visit.send_binary(b"")
    assert visit._pace.left_s(now_s) == 500
    now_s += 50
    visit.receive_binary(FRAME)
    assert await listening == FRAME
    now_s += 5_000  # our own work
    assert visit._pace.left_s(now_s) == 475
