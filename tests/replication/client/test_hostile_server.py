"""Servers that lie, send one elsewhere, or never come to an end: each is an error of ours, and nothing here suffers."""

import asyncio
import json
import os
import socket
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from headwater.errors import ReplicationError, ReplicationFailedError, UnreachableError
from headwater.replication import connection as client_connection
from headwater.replication import pull as pulling
from headwater.replication.connection import ReplicaConnection
from headwater.replication.integrity import dbhash
from headwater.replication.names import Remote
from headwater.replication.outcome import TransferOptions
from headwater.replication.pull import pull
from headwater.replication.push import push
from headwater.replication.rsync import RsyncProcess
from headwater.replication.sync import new_client_id
from headwater.replication.sync_state import SyncRecord, SyncState

PUSH, PULL = TransferOptions(client_id="here:1", key="hwpush_x"), TransferOptions(client_id="here:1")
READY = {"replicaID": "r", "base": 0, "ready": True}
OFFER = {"replicaID": "r", "version": 1, "size": 409_600, "pageSize": 4096, "pages": 100, "dbhash": None}
PATIENCE_S = 20.0


async def test_a_server_that_points_elsewhere_is_not_followed(make: Any, misbehaving: Any, tmp_path: Path) -> None:
    """The database and the key are for this server."""
    database, visits = make(), list[str]()

    async def visited(connection: ServerConnection) -> None:
        visits.append(connection.request.path)  # type: ignore[union-attr]

    async with misbehaving(visited) as elsewhere:
        for location in (elsewhere.endpoint("push"), "ws://[x", "ws://host:99999999/", "/"):

            def point(connection: ServerConnection, request: Any, location: str = location) -> Any:
                response = connection.respond(HTTPStatus.FOUND, "")
                response.headers["Location"] = location
                return response

            async with misbehaving(visited, process_request=point) as remote:
                for work in (push(database.path, remote, PUSH), pull(remote, str(tmp_path / "copy.db"), PULL)):
                    with pytest.raises(UnreachableError, match=r"answered 302.*not followed"):
                        await asyncio.wait_for(work, PATIENCE_S)
    assert visits == []


@pytest.mark.parametrize(
    "output",
    [
        'CONFIG={"new":' + "[" * 100_000,
        f"CONFIG={json.dumps({**READY, **OFFER, 'replicaID': 'r' * 2_000_000})}",
        f"CONFIG={json.dumps({**READY, **OFFER, 'base': 10**30, 'version': 10**30})}",
        f"CONFIG={json.dumps({**READY, **OFFER, 'base': -1, 'version': -1})}",
    ],
    ids=["without end", "a long id", "a large number", "a negative number"],
)
async def test_what_no_server_means_is_refused_before_it_is_noted(
    make: Any, misbehaving: Any, tmp_path: Path, output: str
) -> None:
    database = make()

    async def answer(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(output)
        await connection.wait_closed()

    async with misbehaving(answer) as remote:
        for work in (push(database.path, remote, PUSH), pull(remote, str(tmp_path / "copy.db"), PULL)):
            with pytest.raises(ReplicationFailedError, match="not as expected"):
                await asyncio.wait_for(work, PATIENCE_S)
    assert os.listdir(tmp_path) == ["app.db"]


@pytest.mark.parametrize("newest", ["", "four", "-1", "9" * 30])
def test_a_conflict_with_no_version_does_not_make_one_forget_the_base(make: Any, misbehaving: Any, newest: str) -> None:
    database = make()
    known = SyncRecord(replica_id="r", base=3)

    async def answer(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(f"ABORT=VERSION_CONFLICT:{newest}")
        await connection.wait_closed()

    async def session() -> Remote:
        async with misbehaving(answer) as remote:
            with SyncState(database.path) as beside:
                beside.save(remote, known)
            with pytest.raises(ReplicationError):
                await asyncio.wait_for(push(database.path, remote, PUSH), PATIENCE_S)
            return remote

    remote = asyncio.run(session())
    assert SyncState(database.path).load(remote) == known


def test_a_server_that_never_says_good_bye_is_left(
    make: Any, misbehaving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "CLOSING_S_MAX", 0.2, raising=False)
    database, copy = make(), str(tmp_path / "copy.db")
    offer = {**OFFER, "dbhash": dbhash(database.path)}

    async def answer(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(f"CONFIG={json.dumps(offer)}")
        end = await RsyncProcess.origin(database.path)

        async def forth() -> None:
            while data := await end.read():
                await connection.send(data)

        speaking = asyncio.create_task(forth())
        try:
            async for frame in connection:
                if isinstance(frame, bytes):
                    await end.write(frame)
        except ConnectionClosed:
            pass
        finally:
            speaking.cancel()
            await end.gone()

    async def session() -> Remote:
        async with misbehaving(answer) as remote:
            with pytest.raises(ReplicationFailedError, match="did not close"):
                await asyncio.wait_for(pull(remote, copy, PULL), PATIENCE_S)
            return remote

    remote = asyncio.run(session())
    assert dbhash(copy) == offer["dbhash"]  # it has all come
    assert SyncState(copy).load(remote).base == 1


async def test_a_server_that_does_not_listen_is_left(misbehaving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_connection, "SILENCE_S_MAX", 0.2)

    async def deaf(connection: ServerConnection) -> None:
        connection.transport.pause_reading()
        await connection.wait_closed()

    async def say(remote: Remote) -> None:
        async with ReplicaConnection(remote.endpoint("push"), TransferOptions(client_id="here:1")) as opened:
            sending = asyncio.create_task(opened.send(bytes(50_000_000)))
            await asyncio.sleep(0)
            try:
                await opened.send_config({"complete": True})
            finally:
                sending.cancel()

    async with misbehaving(deaf, close_timeout=0.1) as remote:
        with pytest.raises(UnreachableError, match="has not read"):
            await asyncio.wait_for(say(remote), PATIENCE_S)


@pytest.mark.parametrize("name", ["日本", "jürgens rechner", "tab\tbed"])
def test_a_machine_may_have_any_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It goes into a header, where few letters may stand."""
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    host, _, number = new_client_id().partition(":")
    assert host.isascii()
    assert host.isprintable()
    assert " " not in host
    assert len(number) == 32
