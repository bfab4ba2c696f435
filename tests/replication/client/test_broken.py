"""Servers that refuse, abort, vanish or never answer: each has its own error, and nothing stays behind."""

import asyncio
import gc
import logging
import os
from http import HTTPStatus
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from headwater.errors import (
    CorruptError,
    DiskFullError,
    HeadwaterError,
    InvalidOptionError,
    OverloadedError,
    ReplicationFailedError,
    TooLargeError,
    UnauthorizedError,
    UnknownReplicaError,
    UnreachableError,
    VersionConflictError,
)
from headwater.replication import connection as client_connection
from headwater.replication import snapshot
from headwater.replication.connection import WHY_CHARS_MAX, ReplicaConnection, is_partial
from headwater.replication.names import place_of
from headwater.replication.outcome import TransferOptions
from headwater.replication.pull import pull
from headwater.replication.push import push
from headwater.replication.rsync import RsyncProcess
from headwater.replication.sync_state import SyncRecord, SyncState

PUSH, PULL = TransferOptions(client_id="here:1", key="hwpush_x"), TransferOptions(client_id="here:1")
READY = 'CONFIG={"replicaID":"r","replicaPath":"ns/app.db","base":0,"ready":true}'
OFFER = 'CONFIG={"replicaID":"r","version":1,"size":409600,"pageSize":4096,"pages":100,"dbhash":null}'
CUT_OFF_BYTES = 500_000


async def vanish(connection: ServerConnection) -> None:
    connection.transport.abort()


async def cut_off(connection: ServerConnection, end: RsyncProcess) -> None:
    """Move what the two ends say until a good part of the pages is over; then be gone."""
    moved = 0

    async def forth() -> None:
        nonlocal moved
        while data := await end.read():
            await connection.send(data)
            moved += len(data)
            if moved > CUT_OFF_BYTES:
                connection.transport.abort()

    speaking = asyncio.create_task(forth())
    try:
        async for frame in connection:
            moved += len(frame)
            await end.write(frame)  # type: ignore[arg-type]
            if moved > CUT_OFF_BYTES:
                connection.transport.abort()
    except ConnectionClosed:
        pass
    finally:
        speaking.cancel()
        await asyncio.gather(speaking, return_exceptions=True)
        await end.gone()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidOptionError),
        (401, UnauthorizedError),
        (403, UnauthorizedError),
        (404, UnknownReplicaError),
        (503, OverloadedError),
    ],
)
async def test_a_refusal_at_the_door(
    make: Any,
    misbehaving: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    status: int,
    kind: type[Exception],
) -> None:
    database = make()
    caplog.set_level(logging.INFO, "websockets.server")  # the one of this test, which hears the key
    caplog.set_level(logging.DEBUG)
    seen = []

    def refuse(connection: ServerConnection, request: Any) -> Any:
        seen.append(dict(request.headers))
        return connection.respond(HTTPStatus(status), "said why\n")

    async with misbehaving(vanish, process_request=refuse) as remote:
        with pytest.raises(kind, match="said why") as raised:
            await push(database.path, remote, PUSH)
        assert not is_partial(raised.value)
        assert "hwpush_x" not in str(raised.value)
        with pytest.raises(kind):
            await pull(remote, str(tmp_path / "copy.db"), PULL)
    assert seen[0]["authorization"] == "Bearer hwpush_x"
    assert "hwpush_x" not in caplog.text
    assert seen[0]["x-clientid"] == "here:1"
    assert os.listdir(tmp_path) == ["app.db"]


def test_no_server_listens(make: Any, tmp_path: Path) -> None:
    database = make()
    remote: Any = place_of("ws://127.0.0.1:9/ns/app.db")
    with pytest.raises(UnreachableError, match="connection refused"):
        asyncio.run(push(database.path, remote, PUSH))
    assert os.listdir(tmp_path) == ["app.db"]


@pytest.mark.parametrize(
    ("abort", "kind"),
    [
        ("VERSION_CONFLICT:4", VersionConflictError),
        ("TOO_LARGE:over 10 GiB", TooLargeError),
        ("DISK_FULL:no room", DiskFullError),
        ("CORRUPT:row 7", CorruptError),
        ("BUSY:8 pushes", OverloadedError),
        ("FAILED:an end said no", ReplicationFailedError),
    ],
)
@pytest.mark.parametrize("after_pages", [False, True])
async def test_an_abort(make: Any, misbehaving: Any, abort: str, kind: type[Exception], after_pages: bool) -> None:
    database = make()

    async def answer(connection: ServerConnection) -> None:
        await connection.recv()
        if after_pages:
            await connection.send(READY)
            await connection.recv()
        await connection.send(f"ABORT={abort}")

    async with misbehaving(answer) as remote:
        with pytest.raises(kind) as raised:
            await push(database.path, remote, PUSH)
        assert is_partial(raised.value) == after_pages
        assert getattr(raised.value, "newest", 4) == 4


@pytest.mark.parametrize("has_room", [True, False])
async def test_a_connection_cut_in_the_middle_of_a_push(
    make: Any, misbehaving: Any, children: Any, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    database = make(rows=20_000)
    if not has_room:  # so that it is pushed from the live file
        monkeypatch.setattr(snapshot, "_free_bytes", lambda directory: 0)

    async def answer(connection: ServerConnection) -> None:
        await connection.recv()
        end = await RsyncProcess.replica(database.path + "-scratch")
        await connection.send(READY)
        await cut_off(connection, end)

    async with misbehaving(answer) as remote:
        with pytest.raises(ReplicationFailedError, match="cut off in the middle") as raised:
            await push(database.path, remote, PUSH)
        assert is_partial(raised.value)
    assert not children()
    assert not database.beside
    assert sorted(os.listdir(database.path + "-headwater")) == ["lock", "state.json"]


async def test_a_push_that_can_neither_be_noted_nor_ended_tells_one_of_the_two(
    make: Any, misbehaving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = make()
    reported: list[dict[str, Any]] = []

    def full(beside: SyncState, remote: Any, noted: SyncRecord, *, durable: bool = True) -> None:
        raise DiskFullError("no room", where=beside.directory)

    async def answer(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(READY)
        await connection.recv()
        connection.transport.abort()

    monkeypatch.setattr(SyncState, "save", full)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    async with misbehaving(answer) as remote:
        with pytest.raises(ReplicationFailedError, match="cut off in the middle"):
            await push(database.path, remote, PUSH)
    gc.collect()
    assert not [context for context in reported if isinstance(context.get("exception"), DiskFullError)]


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_pull_cut_off_leaves_no_new_file_and_an_old_one_as_it_was(
    make: Any, misbehaving: Any, children: Any, tmp_path: Path, mode: str
) -> None:
    source, old = make(rows=20_000), make("old.db", rows=100, mode=mode)

    async def answer(connection: ServerConnection) -> None:
        await connection.recv()
        end = await RsyncProcess.origin(source.path)
        await connection.send(OFFER)
        await cut_off(connection, end)

    async def session(path: str) -> None:
        async with misbehaving(answer) as remote:
            with pytest.raises(ReplicationFailedError) as raised:
                await asyncio.wait_for(pull(remote, path, TransferOptions(client_id="here:1", overwrite=True)), 20)
            assert is_partial(raised.value)

    before = Path(old.path).read_bytes()
    asyncio.run(session(str(tmp_path / "new.db")))
    asyncio.run(session(old.path))
    assert not children()
    assert not old.beside
    assert old.run("pragma integrity_check") == [("ok",)]
    assert Path(old.path).read_bytes() == before
    assert not [name for name in os.listdir(tmp_path) if name.startswith("new.db") or name.endswith("-headwater")]


async def test_a_cancelled_push_leaves_no_process_and_no_file(make: Any, misbehaving: Any, children: Any) -> None:
    database = make(rows=20_000)

    moving = asyncio.Event()

    async def answer(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(READY)
        async for _ in connection:
            moving.set()

    async with misbehaving(answer) as remote:
        pushing = asyncio.create_task(push(database.path, remote, PUSH))
        await asyncio.wait_for(moving.wait(), 20)
        assert "sqlite3_rsync" in children()
        pushing.cancel()
        await asyncio.wait({pushing}, timeout=20)
        assert pushing.cancelled()
    assert not children()
    assert sorted(os.listdir(database.path + "-headwater")) == ["lock", "state.json"]


@pytest.mark.parametrize("abort", ["FAILED:boo\x1b]0;title\x07\nERROR: fake", "x" * 100_000, "\x1b[2J:"])
async def test_an_abort_with_an_odd_text_is_fit_for_a_terminal(make: Any, misbehaving: Any, abort: str) -> None:
    async def answer(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(f"ABORT={abort}")

    async with misbehaving(answer) as remote:
        with pytest.raises(ReplicationFailedError) as raised:
            await push(make().path, remote, PUSH)
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 2 * WHY_CHARS_MAX


async def test_an_answer_without_a_version_is_no_version(make: Any, misbehaving: Any) -> None:
    database = make()

    async def answer(connection: ServerConnection) -> None:
        await connection.recv()
        end = await RsyncProcess.replica(database.path + "-scratch")
        await connection.send(READY)
        async for frame in connection:
            if isinstance(frame, str):
                break
            await end.write(frame)
            if len(frame) < 100:  # the first words; it answers that it has nothing yet
                await connection.send(await end.read())
        await end.gone()
        await connection.send("CONFIG={}")

    async with misbehaving(answer) as remote:
        with pytest.raises(ReplicationFailedError, match="not as expected"):
            await asyncio.wait_for(push(database.path, remote, PUSH), 20)


@pytest.mark.parametrize("says", [None, READY])
async def test_a_server_that_says_nothing_is_given_up(
    make: Any, misbehaving: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str | None
) -> None:
    patience_s = client_connection.SILENCE_S_MAX if says else 0.2

    async def answer(connection: ServerConnection) -> None:
        await connection.recv()
        if says:
            await connection.send(OFFER if "/pull/" in connection.request.path else says)  # type: ignore[union-attr]
            monkeypatch.setattr(
                client_connection, "SILENCE_S_MAX", 0.2
            )  # not before: however late that comes, it is heard
        await connection.wait_closed()

    async with misbehaving(answer) as remote:
        for work in (push(make().path, remote, PUSH), pull(remote, str(tmp_path / "copy.db"), PULL)):
            monkeypatch.setattr(client_connection, "SILENCE_S_MAX", patience_s)
            with pytest.raises(HeadwaterError, match="sent nothing") as raised:
                await asyncio.wait_for(work, 20)
            assert is_partial(raised.value) == bool(says)
    assert not (tmp_path / "copy.db").exists()


@pytest.mark.parametrize("way", ["push", "pull"])
def test_what_a_server_sent_before_it_closed_is_reported_though_sending_failed_first(
    client: Any, make: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    database = make()
    client.push(database)
    database.write("more")
    is_cut = asyncio.Event()
    real, really_send = ReplicaConnection.next, ReplicaConnection.send

    async def send(link: ReplicaConnection, data: str | bytes) -> None:
        if isinstance(data, str):
            return await really_send(link, data)
        is_cut.set()
        raise UnreachableError("the server closed the connection: 1000", where=link.shown)

    async def next(link: ReplicaConnection) -> str | bytes | None:
        coming, cut = asyncio.ensure_future(real(link)), asyncio.ensure_future(is_cut.wait())
        await asyncio.wait({coming, cut}, return_when=asyncio.FIRST_COMPLETED)
        cut.cancel()
        if not is_cut.is_set():
            return await coming
        coming.cancel()
        await asyncio.sleep(0)  # later than the other heard of it
        return "ABORT=TOO_LARGE:so it said"

    monkeypatch.setattr(ReplicaConnection, "send", send)
    monkeypatch.setattr(ReplicaConnection, "next", next)
    with pytest.raises(TooLargeError, match="so it said"):
        client.push(database) if way == "push" else client.pull("ns/app.db@1", "copy.db")


async def test_a_connection_that_closes_while_a_frame_is_sent_is_a_broken_one() -> None:
    """asyncio's transport then fails with an AttributeError inside `websockets`."""
    session = ReplicaConnection("ws://127.0.0.1:1/sapi/push/ns/app.db", TransferOptions(client_id="here:1"))
    transport = Mock(is_closing=Mock(return_value=True), abort=Mock(side_effect=AttributeError("call_soon")))
    session._socket = Mock(send=AsyncMock(side_effect=AttributeError("call_soon")), transport=transport)
    with pytest.raises(UnreachableError, match="the connection broke"):
        await session.send(b"pages")
